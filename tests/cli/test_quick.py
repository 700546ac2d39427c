import gc
import os

import pytest

from kvferry.cli.quick import quick

VARIABLE = "PYDANTIC_DISABLE_PLUGINS"


@quick
def verb(fails: bool) -> tuple[bool, str]:
    if fails:
        raise ValueError("no")
    return gc.isenabled(), os.environ[VARIABLE]


@pytest.mark.parametrize("before", [None, "acme"])
def test_a_quick_verb_leaves_everything_as_it_was(monkeypatch, before):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(VARIABLE, before)
    assert verb(False) == (False, "__all__")
    with pytest.raises(ValueError, match="no"):
        verb(True)
    assert gc.isenabled()
    assert os.environ.get(VARIABLE) == before
