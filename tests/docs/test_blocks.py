import re

import pytest
from docs.blocks import Block, read_blocks
from docs.console import commands, matches
from docs.page import BlockFailed, run_page
from docs.pages import all_pages, name_of, pages_of


def page(tmp_path, monkeypatch, text):
    """Run a page of this text, alone."""
    monkeypatch.setattr("docs.page.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(text)
    return run_page(path, tmp_path, dict)


def console(text, short=None):
    return commands(Block("page.md", 1, "console", text, short))


def test_no_page_is_left_out():
    files = [pages_of(file) for file in ("start", "extend", "operate", "reference")]
    assert sorted(path for file in files for path in file) == all_pages()


@pytest.mark.parametrize("path", all_pages(), ids=name_of)
def test_every_fence_of_a_page_is_one_block(path):
    fences = re.findall(r"^\s*```", path.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(read_blocks(path, path.name))


def test_blocks_share_files_variables_the_folder_and_a_namespace(tmp_path, monkeypatch):
    text = """
```yaml
# engine.yaml
max_batch_size: 4
```
```console
$ mkdir -p below && cd below && export WHO=me
$ echo "$WHO in ${PWD##*/}: $(cat ../engine.yaml | tail -1)"
me in below: …batch_size: 4
```
```python
from pathlib import Path
lines = Path("engine.yaml").read_text().splitlines()
```
```python
assert len(lines) == 2
```
"""
    ran = page(tmp_path, monkeypatch, text)
    assert [line.split()[1] for line in ran] == ["yaml", "console", "python", "python"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```console\n$ false\n```", r"page.md:2: \$ false\n\nexit status 1, not 0"),
        ("```console\n$ true  # exit status 2\n```", "exit status 0, not 2"),
        ("```console\n$ echo one\ntwo\n```", "is not what the page shows"),
        ("```python\nraise KeyError('gone')\n```", r"page.md\", line 2.*\n.*KeyError: 'gone'"),
        ("```yaml\nmax_batch_size: none\n```", "max_batch_size"),
        ("```ruby\nputs 1\n```", "'ruby' is no language of a block here"),
        ("a\n\n    $ indented\n", "page.md:3: an indented block"),
        ("```console\nls\n```", "begins with"),
        ("```text\n$ ls\n```", "a command is a console block"),
    ],
)
def test_a_block_that_is_not_true_fails_with_its_line(tmp_path, monkeypatch, text, said):
    with pytest.raises((BlockFailed, ValueError)) as caught:
        page(tmp_path, monkeypatch, text)
    assert re.search(said, str(caught.value), re.DOTALL), caught.value


def test_a_command_goes_on_after_a_backslash_and_a_remark_is_none_of_it():
    first, second = console("$ one \\\n  two  # remark\nout\n$ three  # exit status 2\n")
    assert (first.text, first.shown, first.status) == ("one \\\n  two", ("out",), 0)
    assert (second.text, second.shown, second.status) == ("three", (), 2)


def test_a_short_form_takes_the_place_of_one_command():
    (command,) = console("$ kvferry bench transfer\n", "kvferry --version")
    assert command.text == "kvferry --version"
    with pytest.raises(ValueError, match="one command, and here are 2"):
        console("$ one\n$ two\n", "kvferry --version")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["a", "…", "d"], "a\nb\nc\nd\n", True),
        (["a", "…", "b"], "a\nb\n", True),
        (["took … ms"], "took 17 ms", True),
        (["a"], "a\nb\n", False),
        (["a.c"], "abc", False),
        (["name   state"], "name     state  ", True),
        (["  name"], "name", False),
    ],
)
def test_three_dots_are_anything(shown, printed, same):
    assert matches(tuple(shown), printed) is same


def test_what_runs_in_the_background_ends_with_the_page(tmp_path, monkeypatch):
    text = """
```console
$ bash -c 'echo ready; exec sleep 1000' &
ready
$ kill -0 %1
```
"""
    assert page(tmp_path, monkeypatch, text)
