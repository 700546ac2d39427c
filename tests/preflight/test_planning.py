"""A manager's plugin says what its memory will look like, and is named where that goes wrong."""

import pytest

from kvferry_plugins import hookimpl
from kvferry_plugins.errors import HookError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerKind


def none(spec):
    return None


def broken(spec):
    raise ZeroDivisionError("no such layout")


class Planner:
    name = "planner"

    def __init__(self, layout: str) -> None:
        self.layout = layout

    @hookimpl
    def kv_cache_managers(self):
        return (ManagerKind("V1", "PlannedManager", layout=self.layout),)

    @hookimpl
    def create_kv_cache_manager(self, spec) -> KVCacheManager:
        raise AssertionError("nothing is built")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (f"{__name__}:none", "returned NoneType, which is no KvLayout"),
        (f"{__name__}:broken", "raised ZeroDivisionError: no such layout"),
        (f"{__name__}:missing", "raised AttributeError"),
        ("no_such_module_at_all:layout", "raised ModuleNotFoundError"),
        ("", None),
    ],
    ids=["no layout", "raises", "no such function", "no such module", "declares none"],
)
def test_a_declared_layout_that_cannot_be_planned_names_its_plugin(kit, monkeypatch, layout, words):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[none.__module__])
    if words is None:
        assert kit.side("context", plugins=[Planner(layout)]).layouts is None
        return
    with pytest.raises(HookError, match=words) as caught:
        kit.side("context", plugins=[Planner(layout)])
    assert caught.value.plugin == "planner"
    assert "-p no:planner" in str(caught.value)


def test_a_checkpoint_that_tells_no_shape_leaves_it_unknown(kit):
    side = kit.side("context", pretrained={"architectures": ["FakeForCausalLM"]})
    assert side.layouts is None
    assert "does not tell the cache's shape" in side.fact("layers").doubt
