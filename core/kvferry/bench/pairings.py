"""Which runtime over which backend is to be measured, and whether that can be done here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.dispatcher import missing_libraries, resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles
from kvferry_plugins.errors import BackendUnavailableError, ConfigError
from kvferry_plugins.types import TransferBackend


@dataclass(frozen=True, slots=True)
class Pairing:
    """A runtime over a backend."""

    runtime: str
    backend: str
    shared_memory: bool = True
    """False: every byte goes by the backend, although the workers share a host."""

    def __str__(self) -> str:
        return f"{self.runtime} over {self.backend}{'' if self.shared_memory else ' alone'}"


def asked_pairings(backends: Sequence[str], runtimes: Sequence[str]) -> list[Pairing]:
    """Combine what was asked for: each backend under those of the runtimes that it declares.

    No runtime = the first that the backend declares. Where a backend declares none of them, the first is taken, so that
    resolution says what is wrong.

    Raises:
        ConfigError: no plugin declares such a backend.
    """
    pairings = []
    for backend in dict.fromkeys(backends):
        declared = list(declared_backend(backend).runtimes)
        wanted = [runtime for runtime in runtimes if runtime in declared] or list(runtimes)[:1] or declared[:1]
        pairings += [Pairing(runtime, backend) for runtime in dict.fromkeys(wanted)]
    return pairings


def every_pairing() -> list[Pairing]:
    """Every runtime × backend pair that a plugin declares and whose libraries are installed here."""
    declared = [Pairing(runtime, each.name) for each in _backends().values() for runtime in each.runtimes]
    return [pairing for pairing in declared if not missing(pairing)]


def require_usable(pairings: Iterable[Pairing]) -> None:
    """Refuse before any process starts what the workers could not build.

    Raises:
        BackendUnavailableError: a library is missing; the message says what to install.
        ConfigError: a pair is impossible.
    """
    for pairing in pairings:
        if lacking := missing(pairing):
            raise BackendUnavailableError(f"nothing can be measured here: {'; '.join(lacking.values())}")


def missing(pairing: Pairing) -> Mapping[str, str]:
    """Part → what is missing and what to install. Raises ConfigError for a pair that is impossible."""
    registry = load_registry(toggles=Toggles())
    section = {"backend": pairing.backend, "transceiver_runtime": pairing.runtime}
    plan = resolve({"cache_transceiver_config": section}, model=None, registry=registry, environ={})
    return missing_libraries(plan, registry)


def declared_backend(name: str) -> TransferBackend:
    """A backend's declaration. Raises ConfigError for one that no plugin declares."""
    declared = _backends()
    if name not in declared:
        raise ConfigError(f"no plugin declares backend {name!r}; there are {', '.join(declared)}", setting="--backend")
    return declared[name]


def _backends() -> dict[str, TransferBackend]:
    answers = load_registry(toggles=Toggles()).transfer_backends()
    return {each.name: each for each in sorted((answer.value for answer in answers), key=lambda value: value.name)}
