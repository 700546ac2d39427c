"""The one typed door through which every hook is asked; nothing else touches pluggy's hook relay."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import pluggy

from kvferry.registry.answers import Answer
from kvferry.registry.freezing import freeze
from kvferry.registry.guard import Guard
from kvferry.registry.observers import Observer, ObserverCounts
from kvferry.registry.plain_answers import plain
from kvferry.registry.quoting import message_of, quote
from kvferry.registry.records import PluginRecord, describe_inactive
from kvferry.registry.registration import taken_arguments
from kvferry.registry.time_limits import TimeIsUpError
from kvferry_plugins.errors import HookError, KvferryError, PluginLoadError
from kvferry_plugins.forwarding import forwarding_fault
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    ManagerKind,
    ManagerSpec,
    Plan,
    TransceiverRuntime,
    TransceiverSpec,
    TransferBackend,
    TransferEvent,
)

T = TypeVar("T")

MODEL_HOOKS = ("model_defaults", "preferred_transceiver_runtime")
BACKEND_HOOK = "transfer_backends"
MOST_DECLARED = 1000
"""What one plugin may declare of a kind; a generator may have no end."""

Declaration = TransferBackend | TransceiverRuntime | ManagerKind
_DECLARED: tuple[tuple[str, type[Declaration]], ...] = (
    ("transfer_backends", TransferBackend),
    ("transceiver_runtimes", TransceiverRuntime),
    ("kv_cache_managers", ManagerKind),
)


@dataclass(frozen=True, slots=True)
class _Implementation:
    plugin: str
    function: Callable[..., Any]
    takes: tuple[str, ...]


class Registry:
    """Which plugins there are, and their answers, sorted by plugin name.

    Attributes:
        prefer: architecture or backend → plugin, from all layers of toggles.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        records: Iterable[PluginRecord],
        *,
        prefer: Mapping[str, str] | None = None,
        warnings: Sequence[str] = (),
        guard: Guard | None = None,
    ) -> None:
        self._implementations = _implementations(manager)
        self._records = {record.name: record for record in sorted(records, key=lambda record: record.name)}
        self._observers: dict[str, Observer] = {}
        self.prefer: Mapping[str, str] = MappingProxyType(dict(prefer or {}))
        self._warnings = tuple(warnings)
        self._guard = guard

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong without stopping anything, one line each; what hooks did when they were asked, too."""
        return (*self._warnings, *(self._guard.notes if self._guard else ()))

    def records(self) -> tuple[PluginRecord, ...]:
        """All plugins, whatever their state, sorted by name."""
        return tuple(self._records.values())

    def record(self, name: str) -> PluginRecord | None:
        """The plugin of that name, or None."""
        return self._records.get(name)

    def inactive(self) -> tuple[str, ...]:
        """Quote every plugin that is not active, with why, for an error that misses something."""
        return describe_inactive(self.records())

    def plugin_set(self) -> dict[str, str]:
        """Active plugins that decide about models or bring backends: name → distribution and version."""
        deciding = {*MODEL_HOOKS, BACKEND_HOOK}
        return {
            record.name: record.printed_distribution
            for record in self.records()
            if record.is_active and deciding.intersection(record.hooks)
        }

    # --- facts about models ---------------------------------------------------------------------------------

    def preferred_transceiver_runtime(
        self, architecture: str, pretrained_config: Mapping[str, Any] | None
    ) -> list[Answer[Any]]:
        """Every opinion about the runtime; the values are not checked. Raises HookError."""
        return self._opinions(
            "preferred_transceiver_runtime", architecture=architecture, pretrained_config=freeze(pretrained_config)
        )

    def model_defaults(
        self,
        architecture: str,
        pretrained_config: Mapping[str, Any] | None,
        engine_args: Mapping[str, Any] | None,
    ) -> list[Answer[Any]]:
        """Every model's defaults; the values are not checked. Raises HookError."""
        return self._opinions(
            "model_defaults",
            architecture=architecture,
            pretrained_config=freeze(pretrained_config),
            engine_args=freeze(engine_args),
        )

    # --- declarations ---------------------------------------------------------------------------------------

    def transfer_backends(self) -> list[Answer[TransferBackend]]:
        """Every declared backend. Raises HookError."""
        return self._declared("transfer_backends", TransferBackend)

    def transceiver_runtimes(self) -> list[Answer[TransceiverRuntime]]:
        """Every declared runtime. Raises HookError."""
        return self._declared("transceiver_runtimes", TransceiverRuntime)

    def kv_cache_managers(self) -> list[Answer[ManagerKind]]:
        """Every declared kind of manager. Raises HookError."""
        return self._declared("kv_cache_managers", ManagerKind)

    def declarations_of(self, plugin: str) -> tuple[Declaration, ...]:
        """What one plugin declares; a hook that raises declares nothing here (it is a HookError when asked)."""
        return tuple(value for hook, kind in _DECLARED for value in self._quietly(hook, kind, plugin))

    def broken_declarations(self, plugin: str) -> tuple[str, ...]:
        """Say which of one plugin's declarations are errors as soon as they are asked for."""
        problems: list[str] = []
        for hook, kind in _DECLARED:
            for each in self._of(plugin, hook):
                try:
                    self._declared_by(each, hook, kind)
                except HookError as error:
                    problems.append(str(error))
        return tuple(problems)

    # --- makers ---------------------------------------------------------------------------------------------

    def create_transceiver(self, plugin: str, spec: TransceiverSpec) -> KvCacheTransceiver:
        """Ask that one plugin. Raises HookError, or the KvferryError that it raised."""
        return self._make("create_transceiver", plugin, spec, KvCacheTransceiver)  # type: ignore[type-abstract]

    def create_transfer_agent(self, plugin: str, spec: AgentSpec) -> TransferAgent:
        """Ask that one plugin. Raises HookError, or the KvferryError that it raised."""
        return self._make("create_transfer_agent", plugin, spec, TransferAgent)  # type: ignore[type-abstract]

    def create_kv_cache_manager(self, plugin: str, spec: ManagerSpec) -> KVCacheManager:
        """Ask that one plugin. Raises HookError, or the KvferryError that it raised."""
        return self._make("create_kv_cache_manager", plugin, spec, KVCacheManager)  # type: ignore[type-abstract]

    # --- observers ------------------------------------------------------------------------------------------

    def plan_resolved(self, plan: Plan) -> None:
        """Tell every observer, on threads of their own; returns at once."""
        self._tell("plan_resolved", plan=plan)

    def transfer_finished(self, event: TransferEvent) -> None:
        """Tell every observer, on threads of their own; returns at once."""
        self._tell("transfer_finished", event=event)

    def observer_counts(self) -> dict[str, ObserverCounts]:
        """What became of the news, a plugin."""
        return {name: observer.counts for name, observer in sorted(self._observers.items())}

    def drain_observers(self, timeout: float = 1.0) -> bool:
        """Wait at most ``timeout`` seconds until observers were told everything; False if one is behind."""
        deadline = time.monotonic() + timeout
        return all(observer.drain(deadline) for observer in list(self._observers.values()))

    # --- the relay ------------------------------------------------------------------------------------------

    def _opinions(self, hook: str, **arguments: Any) -> list[Answer[Any]]:
        with self._watching():
            answers = [(each, self._ask(each, hook, arguments, plain)) for each in self._implementations[hook]]
        return [self._answer(implementation, value) for implementation, value in answers if value is not None]

    def _declared(self, hook: str, kind: type[T]) -> list[Answer[T]]:
        with self._watching():
            return [answer for each in self._implementations[hook] for answer in self._declared_by(each, hook, kind)]

    def _declared_by(self, implementation: _Implementation, hook: str, kind: type[T]) -> list[Answer[T]]:
        values = self._ask(implementation, hook, {}, collect=_as_tuple)
        for value in values:
            if not isinstance(value, kind):
                raise self._error(hook, implementation.plugin, f"answered {quote(value)}, which is no {kind.__name__}")
        return [self._answer(implementation, value) for value in values]

    def _watching(self) -> AbstractContextManager[None]:
        return self._guard.watching() if self._guard else nullcontext()

    def _quietly(self, hook: str, kind: type[T], plugin: str) -> list[T]:
        try:
            return [answer.value for each in self._of(plugin, hook) for answer in self._declared_by(each, hook, kind)]
        except HookError:
            return []

    def _of(self, plugin: str, hook: str) -> list[_Implementation]:
        return [each for each in self._implementations[hook] if each.plugin == plugin]

    def _ask(
        self,
        implementation: _Implementation,
        hook: str,
        arguments: Mapping[str, Any],
        collect: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        record = self._records[implementation.plugin]
        try:
            if self._guard is None:
                return collect(_call(implementation, arguments))
            return self._guard.ask(record, hook, lambda: collect(_call(implementation, arguments)))
        except TimeIsUpError as error:
            raise self._error(hook, record.name, str(error)) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._error(hook, record.name, self._raised(record, hook, error)) from error

    def _raised(self, record: PluginRecord, hook: str, error: BaseException) -> str:
        """Say what a hook raised; the text of an error is its code too."""
        name = type(error).__name__
        try:
            text = (
                message_of(error) if self._guard is None else self._guard.ask(record, hook, lambda: message_of(error))
            )
        except TimeIsUpError:
            text = "<its text does not end>"
        return f"raised {name}: {text}"

    def _answer(self, implementation: _Implementation, value: T) -> Answer[T]:
        record = self._records[implementation.plugin]
        return Answer(record.name, record.printed_distribution, record.rank, value)

    def _make(self, hook: str, plugin: str, spec: object, kind: type[T]) -> T:
        implementation = self._maker(hook, plugin)
        try:
            made = _call(implementation, {"spec": spec})
        except KvferryError:
            raise
        except (Exception, SystemExit) as error:
            raise self._error(hook, plugin, f"raised {type(error).__name__}: {message_of(error)}") from error
        if made is None:
            raise self._error(hook, plugin, "returned None, though the plan names this plugin for it")
        if not isinstance(made, kind):
            raise self._error(hook, plugin, f"returned {quote(made)}, which is no {kind.__name__}")
        if (fault := forwarding_fault(made)) is not None:
            _discard(made)
            raise self._error(hook, plugin, f"returned {fault}")
        return made

    def _maker(self, hook: str, plugin: str) -> _Implementation:
        record = self._records.get(plugin)
        if record is None:
            raise PluginLoadError(f"plugin {plugin!r}, asked for {hook}, is not in this registry", plugin=plugin)
        if not record.is_active:
            raise PluginLoadError(
                f"plugin {plugin!r} is asked for {hook}, but {record.describe()}",
                plugin=plugin,
                distribution=record.printed_distribution,
            )
        for implementation in self._of(plugin, hook):
            return implementation
        raise self._error(hook, plugin, "is not implemented, though the plan names this plugin for it")

    def _tell(self, hook: str, **arguments: Any) -> None:
        for implementation in self._implementations[hook]:
            record = self._records[implementation.plugin]
            observer = self._observers.setdefault(record.name, Observer(record.name, record.printed_distribution))
            observer.tell(lambda implementation=implementation: _call(implementation, arguments))  # type: ignore[misc]

    def _error(self, hook: str, plugin: str, what: str) -> HookError:
        distribution = self._records[plugin].printed_distribution
        message = (
            f"plugin {plugin!r} ({distribution}): its hook {hook} {what}; "
            f"mend the plugin, or leave it out with -p no:{plugin}"
        )
        return HookError(message, hook=hook, plugin=plugin, distribution=distribution)


def _implementations(manager: pluggy.PluginManager) -> dict[str, list[_Implementation]]:
    found: dict[str, list[_Implementation]] = {}
    for caller in vars(manager.hook).values():
        if isinstance(caller, pluggy.HookCaller) and caller.has_spec():
            implementations = sorted(caller.get_hookimpls(), key=lambda each: each.plugin_name)
            found[caller.name] = [
                _Implementation(each.plugin_name, each.function, taken_arguments(each.function))
                for each in implementations
            ]
    return found


def _call(implementation: _Implementation, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(**{name: arguments[name] for name in implementation.takes})


def _discard(made: object) -> None:
    """End what was made and is refused; what it says to that is no news."""
    end = made.close if isinstance(made, TransferAgent) else getattr(made, "shutdown", None)
    with contextlib.suppress(Exception):
        if end is not None:
            end()


def _as_tuple(value: Iterable[T] | None) -> tuple[T, ...]:
    declared = () if value is None else tuple(islice(value, MOST_DECLARED + 1))
    if len(declared) > MOST_DECLARED:
        raise ValueError(f"declares more than {MOST_DECLARED} things, or without end")
    return declared
