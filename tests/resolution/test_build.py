import logging
import threading

import pytest

from kvferry.dispatcher import build, missing_libraries
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import BackendUnavailableError, ConfigError, HookError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    ManagerKind,
    ModelGeometry,
    RankSpec,
    Role,
    RuntimeSupport,
    Topology,
    TransceiverRuntime,
    TransferBackend,
    TransferEvent,
)

GEOMETRY = ModelGeometry(num_layers=2, kv_heads=2, head_dim=8, dtype="float32", windows=(None, None))
ON = {"cache_transceiver_config": {"backend": "WARP"}, "device": "cpu"}
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
EVENT = TransferEvent(1, Role.CONTEXT, "completed", "peer", 0, 0, 0.0, 0.0)


def make_part(kind: type, log: list[str], name: str):
    """Make an instance of an abstract class that only notes its shutdown."""
    methods = dict.fromkeys(kind.__abstractmethods__, lambda *_: None)
    methods["shutdown"] = lambda _: log.append(f"shut {name} down")
    return type(f"Noted{kind.__name__}", (kind,), methods)()


class Engine:
    """Brings a backend, a runtime and a manager, and remembers what was asked of it."""

    def __init__(self, *, fails=None, requires=(), install="", name="engine"):
        self.fails, self.requires, self.install, self.name = fails, requires, install, name
        self.log, self.specs = [], {}
        self.told = threading.Event()

    @hookimpl
    def transfer_backends(self):
        support = {"CPP": RuntimeSupport()}
        return [
            TransferBackend(
                "WARP", support, "x:y", deprecated="it is slow", requires=self.requires, install=self.install
            )
        ]

    @hookimpl
    def transceiver_runtimes(self):
        return [TransceiverRuntime("CPP", "WarpTransceiver")]

    @hookimpl
    def kv_cache_managers(self):
        return [ManagerKind("V1", "WarpManager")]

    def _make(self, what, kind, spec):
        self.log.append(f"make {what}")
        self.specs[what] = spec
        if self.fails == what:
            raise RuntimeError("out of luck")
        return make_part(kind, self.log, what)

    @hookimpl
    def create_kv_cache_manager(self, spec):
        return self._make("manager", KVCacheManager, spec)

    @hookimpl
    def create_transceiver(self, spec):
        return self._make("transceiver", KvCacheTransceiver, spec)

    @hookimpl
    def create_transfer_agent(self, spec):
        return self._make("agent", TransferAgent, spec)

    @hookimpl
    def plan_resolved(self, plan):
        self.log.append("told the plan")

    @hookimpl
    def transfer_finished(self, event):
        self.told.set()


@pytest.fixture
def built(planned):
    def make(config, *plugins, **arguments):
        registry = isolated_registry(*plugins)
        plan = planned(config, registry=registry)
        fields = {"role": Role.CONTEXT, "geometry": GEOMETRY, "model_identity": {"config": "c"}, **arguments}
        try:
            return build(plan, registry=registry, **fields)
        finally:
            assert registry.drain_observers()

    return make


def test_the_manager_is_made_before_the_transceiver_and_shut_down_after_it(built):
    engine = Engine()
    parts = built(ON, engine)
    parts.shutdown()
    made = [line for line in engine.log if line != "told the plan"]
    assert made == ["make manager", "make transceiver", "shut transceiver down", "shut manager down"]
    assert parts.manager is engine.specs["transceiver"].manager


def test_the_observers_are_told_the_plan_once(built):
    engine = Engine()
    built(ON, engine)
    assert engine.log.count("told the plan") == 1


def test_the_makers_are_handed_the_effective_configuration(built):
    engine = Engine()
    config = {
        **ON,
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 64, "enable_block_reuse": False},
        "peers": [{"endpoint": "tcp://10.0.0.1:1", "public_key": KEY}],
    }
    built(config, engine, bind="tcp://127.0.0.1:7")
    manager, transceiver = engine.specs["manager"], engine.specs["transceiver"]
    assert (manager.kind, manager.geometry, manager.device) == ("V1", GEOMETRY, "cpu")
    assert (manager.tokens_per_block, manager.max_tokens, manager.enable_block_reuse) == (16, 64, False)
    assert manager.free_memory_fraction == 0.9
    assert (transceiver.role, transceiver.runtime, transceiver.backend) == (Role.CONTEXT, "CPP", "WARP")
    assert transceiver.config["backend"] == "WARP"
    assert transceiver.peers[0].public_key == KEY
    assert (transceiver.bind, transceiver.device, transceiver.model) == ("tcp://127.0.0.1:7", "cpu", {"config": "c"})
    assert transceiver.plugins["engine"] == "(injected)"
    assert "cache_manager_v1" not in transceiver.plugins


def test_a_rank_gets_its_part_of_the_model_and_is_told_which_it_is(built):
    engine = Engine()
    ranks = RankSpec(3, Topology(2, 2), "tcp://127.0.0.1:7")
    built({**ON, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, engine, ranks=ranks)
    geometry = engine.specs["manager"].geometry
    assert (geometry.first_layer, geometry.num_layers, geometry.head_start, geometry.kv_heads) == (1, 1, 1, 1)
    assert engine.specs["transceiver"].ranks == ranks


@pytest.mark.parametrize("ranks", [None, RankSpec(0, Topology(4), "tcp://127.0.0.1:7")])
def test_a_rank_of_another_topology_than_the_plans_is_refused(built, ranks):
    with pytest.raises(ConfigError, match="one rank of") as caught:
        built({**ON, "tensor_parallel_size": 2}, Engine(), ranks=ranks)
    assert caught.value.setting == "tensor_parallel_size"


def test_the_transceiver_reaches_the_plans_backend_and_no_other(built):
    engine = Engine()
    built(ON, engine)
    spec = AgentSpec("WARP", "name", "cpu")
    engine.specs["transceiver"].create_agent(spec)
    assert engine.specs["agent"] is spec


def test_the_end_of_a_transfer_is_told_to_observers_and_to_whoever_asked(built):
    engine, heard = Engine(), []
    built(ON, engine, on_event=heard.append)
    engine.specs["transceiver"].on_event(EVENT)
    assert heard == [EVENT]
    assert engine.told.wait(5)


def test_a_transceiver_that_is_off_is_not_made(built):
    engine = Engine()
    parts = built({"device": "cpu"}, engine)
    assert parts.transceiver is None
    assert "make transceiver" not in engine.log
    parts.shutdown()


def test_what_was_made_is_shut_down_when_a_later_step_fails(built):
    engine = Engine(fails="transceiver")
    with pytest.raises(HookError, match="out of luck") as raised:
        built(ON, engine)
    assert raised.value.plugin == "engine"
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert [line for line in engine.log if "shut" in line] == ["shut manager down"]


def test_a_manager_that_fails_leaves_nothing(built):
    engine = Engine(fails="manager")
    with pytest.raises(HookError, match="out of luck"):
        built(ON, engine)
    assert not [line for line in engine.log if "shut" in line or "transceiver" in line]


def test_the_log_says_what_was_resolved_once_each(built, caplog):
    caplog.set_level(logging.INFO, "kvferry")
    built(ON, Engine())
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line for line in lines if "transceiver_runtime='auto' to None for AcmeForCausalLM." in line] == lines[:1]
    assert lines[1:] == [
        "Resolved use_kv_cache_manager_v2='auto' to False for AcmeForCausalLM.",
        "Using WarpTransceiver",
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["backend WARP is deprecated: it is slow"]


def test_a_library_that_is_not_installed_ends_the_build_before_anything_is_made(built):
    engine = Engine(requires=("kvferry_no_such_library",), install="pip install warp")
    with pytest.raises(BackendUnavailableError, match=r"backend WARP needs kvferry_no_such_library.*pip install warp"):
        built(ON, engine)
    assert "make manager" not in engine.log


def test_only_the_parts_of_the_plan_are_looked_for(planned):
    engine = Engine(requires=("kvferry_no_such_library",))
    registry = isolated_registry(engine)
    assert set(missing_libraries(planned(ON, registry=registry), registry)) == {"backend"}
    assert missing_libraries(planned({}, registry=registry), registry) == {}


class Segments:
    """Brings a backend whose agent takes segments only."""

    name = "segments"

    @hookimpl
    def transfer_backends(self):
        return [TransferBackend("WARP", {"CPP": RuntimeSupport()}, "x:y")]

    @hookimpl
    def create_transfer_agent(self, spec):
        return ScriptedAgent(spec.name)


def test_the_cpp_runtime_says_which_agent_it_cannot_drive_and_what_to_set(built):
    with pytest.raises(BackendUnavailableError, match=r"WARP: its ScriptedAgent .*transceiver_runtime to PYTHON"):
        built({**ON, "kv_cache_config": {"max_tokens": 64}}, Segments())


def test_manager_v2_is_built_where_it_is_asked_for(built):
    limits = {"max_tokens": 64, "use_kv_cache_manager_v2": True}
    parts = built({"kv_cache_config": limits, "device": "cpu"})
    assert parts.manager.kind == "V2"
    assert parts.manager.statistics().total == 2
    parts.shutdown()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_our_own_manager_is_built_on_the_device_that_is_there(built, device):
    import torch

    parts = built({"kv_cache_config": {"max_tokens": 64}, "device": device})
    expected = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
    assert parts.manager.layout.pools[0].device.startswith(expected)
    assert parts.manager.statistics().total == 2
    parts.shutdown()
    parts.shutdown()
