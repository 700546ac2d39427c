import pytest

from kvferry.registry.answers import Rank
from kvferry.registry.load import register_all
from kvferry.registry.lock_file import make_lock
from kvferry.registry.locking import require_loaded
from kvferry.registry.plugin_set import KnownPlugin
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.registry.selection import Selection
from kvferry_plugins.errors import PluginLoadError


def test_a_locked_plugin_that_fails_while_it_is_loaded_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "locked_and_broken.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = PluginRecord(
        "acme", "acme-kvferry", "1.0", "locked_and_broken", Origin.EXTERNAL, Rank.EXTERNAL, State.DISCOVERED
    )
    registry = register_all(Selection((record,)), {})
    lock = make_lock([KnownPlugin("acme", "acme-kvferry", "1.0", "locked_and_broken", "sha256:0")])
    with pytest.raises(PluginLoadError) as caught:
        require_loaded(tmp_path / "kvferry.lock", lock, registry)
    assert caught.value.plugin == "acme"
    assert "the import of locked_and_broken raised RuntimeError: no; mend or reinstall it, or lock again" in str(
        caught.value
    )
    require_loaded(tmp_path / "kvferry.lock", make_lock([]), registry)
