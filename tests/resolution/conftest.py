from collections.abc import Mapping

import pytest

from kvferry.checkpoint import ModelSpec
from kvferry.dispatcher import resolve
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.types import ManagerKind, Plan, RuntimeSupport, TransceiverRuntime, TransferBackend


class Declarations:
    """A plugin that declares what a test says."""

    def __init__(self, name: str, *, backends=(), runtimes=(), managers=()) -> None:
        self.name = name
        self.backends, self.runtimes, self.managers = backends, runtimes, managers

    @hookimpl
    def transfer_backends(self):
        return self.backends

    @hookimpl
    def transceiver_runtimes(self):
        return self.runtimes

    @hookimpl
    def kv_cache_managers(self):
        return self.managers


@pytest.fixture
def declare():
    return Declarations


@pytest.fixture
def backend():
    def make(name: str, runtimes: Mapping[str, RuntimeSupport], **fields) -> TransferBackend:
        return TransferBackend(name=name, runtimes=runtimes, probe="acme:probe", **fields)

    return make


@pytest.fixture
def runtime():
    def make(name: str, **fields) -> TransceiverRuntime:
        return TransceiverRuntime(name=name, class_name=f"Acme{name}", **fields)

    return make


@pytest.fixture
def manager():
    def make(name: str, **fields) -> ManagerKind:
        return ManagerKind(name=name, class_name=f"Acme{name}", **fields)

    return make


@pytest.fixture
def planned():
    """Resolve a configuration with some plugins."""

    def plan(config, *plugins, architecture="AcmeForCausalLM", environ=None, registry=None, execution=None) -> Plan:
        return resolve(
            config,
            model=ModelSpec(architecture, {"architectures": [architecture]}) if architecture else None,
            registry=registry or isolated_registry(*plugins),
            environ=environ or {},
            execution_architecture=execution,
        )

    return plan
