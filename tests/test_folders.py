import os
from pathlib import Path

import pytest

from kvferry.integrations.checkpoints import cache_folder
from kvferry.registry.state_file import state_file
from kvferry.registry.toggle_files import user_file
from kvferry.transceiver.keys import KEY_FILE_VARIABLE, key_path

PLACES = {
    "toggles": ("XDG_CONFIG_HOME", ".config", lambda: user_file(os.environ), "kvferry.toml"),
    "states": ("XDG_STATE_HOME", ".local/state", lambda: state_file(os.environ), "plugins.json"),
    "key": ("XDG_STATE_HOME", ".local/state", key_path, "curve.key"),
    "cache": ("XDG_CACHE_HOME", ".cache", cache_folder, ""),
}


@pytest.mark.parametrize(("variable", "default", "place", "name"), PLACES.values(), ids=list(PLACES))
def test_an_absolute_base_folder_counts_and_a_relative_one_is_ignored(
    variable, default, place, name, tmp_path, monkeypatch
):
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, "/somewhere")
    assert place() == Path("/somewhere/kvferry", name)
    for ignored in ("relative/folder", "~/folder", ""):
        monkeypatch.setenv(variable, ignored)
        assert place() == tmp_path / default / "kvferry" / name
