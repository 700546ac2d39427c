import pytest

from kvferry.cli.output import paragraph, print_warnings
from kvferry_plugins.errors import ConfigError


@pytest.mark.parametrize("said", ["a\x1b[2Jb", "a\rb", "a\x07b", "a\ud800b", "a\x00b"], ids=ascii)
def test_what_strangers_say_moves_no_cursor(capsys, said):
    print_warnings([said, "wörter … stay"])
    told = capsys.readouterr().err
    assert told.replace("[2J", "") == "warning: a b\nwarning: wörter … stay\n"
    assert paragraph(ConfigError(said)).replace("[2J", "") == "kvferry: a b"
    assert "a b" in paragraph(RuntimeError(said)).replace("[2J", "")


def test_an_error_of_several_lines_keeps_them():
    assert paragraph(ConfigError("one\ntwo")) == "kvferry: one\ntwo"
