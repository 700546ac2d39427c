import os
import stat
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.registry.lock_file import make_lock, read_lock, render_lock, write_lock
from kvferry.registry.plugin_set import KnownPlugin
from kvferry_plugins.errors import ConfigError

ACME = KnownPlugin("acme", "acme-kvferry", "1.0", "acme_kvferry", "sha256:1")
APEX = KnownPlugin("apex", "apex-kvferry", "2.0", "apex_kvferry:plugin", "sha256:2", editable=True)
INJECTED = KnownPlugin("lone", "(injected)", "", "lone", "")

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
plugins = st.builds(KnownPlugin, texts, texts, texts, texts, texts, st.booleans())
sets = st.lists(plugins, max_size=5, unique_by=lambda plugin: plugin.name)


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    write_lock(path, make_lock([ACME]))

    assert os.read(reader, 1 << 16).decode() == render_lock(make_lock([ACME]))
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_lock(tmp_path, make_lock([ACME]))


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "kvferry.lock"
    write_lock(path, make_lock([APEX, ACME, INJECTED]))
    return path


def read_or_refusal(path):
    try:
        return read_lock(path)
    except ConfigError as error:
        return "refused" if "kvferry plugins lock" in str(error) else str(error)


@given(sets, st.randoms(use_true_random=False))
def test_the_same_plugins_are_the_same_text_in_any_order_and_are_read_back(tmp_path_factory, found, random):
    path = tmp_path_factory.mktemp("locks") / "kvferry.lock"
    lock = make_lock(found)
    write_lock(path, lock)

    shuffled = list(found)
    random.shuffle(shuffled)

    assert render_lock(make_lock(shuffled)).encode() == path.read_bytes()
    assert read_lock(path) == lock


def test_what_is_written_already_is_left_alone(written):
    before = written.stat().st_mtime_ns
    assert not write_lock(written, make_lock([ACME, INJECTED, APEX]))
    assert written.stat().st_mtime_ns == before
    assert write_lock(written, make_lock([ACME]))


def test_comments_and_line_ends_are_nobodys_business(written):
    expected = read_lock(written)
    text = "# ours\r\n" + written.read_text().replace("\n", "\r\n")
    written.write_text(text, newline="")
    assert read_lock(written) == expected


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no/kvferry\.lock cannot be written: No such file.*--output"):
        write_lock(tmp_path / "no" / "kvferry.lock", make_lock([]))


def test_a_lock_that_was_cut_anywhere_is_refused(written):
    text = written.read_text()
    for end in range(len(text.rstrip())):
        written.write_text(text[:end])
        assert read_or_refusal(written) == "refused", end


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"1.0"', '"1.1"'),
        ("sha256:1", "sha256:3"),
        ("acme_kvferry", "acme_other"),
        ("editable = true", "editable = false"),
        ('name = "acme"', 'name = "acmé"'),
        ('digest = "sha256:', 'digest = "sha256:0'),
    ],
)
def test_a_lock_that_was_edited_is_refused(written, old, new):
    written.write_text(written.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"was edited or cut: its digest is .*; write it again"):
        read_lock(written)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("version = 1\n", "version = 2\n", 1), "is a lock of version 2, .* reads version 1"),
        (lambda text: text.replace("version = 1\n", "version = true\n", 1), "is a lock of version True"),
        (lambda text: text.replace("version = 1\n", "", 1), "has no version"),
        (lambda text: "[package]\n" + text.replace("version = 1\n", "", 1), "has no version"),
        (lambda text: text + "[plugins]\n", "unknown key 'plugins'"),
        (lambda text: text + '[[plugin]]\nname = "x"\n', "entry 4 of .* has 'distribution' wrong or lacking"),
        (lambda text: text.replace('"1.0"', "1.0", 1), "entry 1 of .* has 'version' wrong"),
        (lambda text: text.replace("editable = true", 'editable = "true"', 1), "entry 2 of .* has 'editable' wrong"),
        (lambda text: text.replace("editable", "edit", 1), "entry 2 of .* has 'edit' wrong"),
        (lambda text: text.replace('name = "apex"', 'name = "acme"', 1), "names the plugin 'acme' more than once"),
        (lambda text: "version = 1\nplugin = 3\n", "plugin must be a list"),
        (lambda text: "version = 1\nplugin = [3]\n", "entry 1 of .* has 'name' wrong"),
        (lambda text: "version = 1\nversion = 1\n", "cannot be read as TOML"),
        (lambda text: "{}", "cannot be read as TOML"),
        (lambda text: "", "has no version"),
        (lambda text: "a = " + "[" * 5000, "cannot be read as TOML"),
    ],
)
def test_what_is_no_lock_of_this_version_is_one_clear_error(written, change, says):
    written.write_text(change(written.read_text()))
    with pytest.raises(ConfigError, match=f"(?s){says}.*write it again with `kvferry plugins lock`"):
        read_lock(written)


def test_bytes_that_are_no_text_are_no_lock(written):
    written.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_lock(written)


def test_a_lock_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no lock .*/kvferry\.lock; write one with"):
        read_lock(tmp_path / "kvferry.lock")
    with pytest.raises(ConfigError, match=r"cannot be read as TOML: .*Is a directory"):
        read_lock(tmp_path)


def test_a_lock_is_toml_that_others_can_read(written):
    document = tomllib.loads(written.read_text())
    assert [plugin["name"] for plugin in document["plugin"]] == ["acme", "apex", "lone"]
