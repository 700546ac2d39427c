"""A stand-in for any object of the contract, which notes how it is called and answers with values of its own."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvferry_plugins.forwarding import CONTRACTS
from kvferry_plugins.transceiver import Capability

if TYPE_CHECKING:
    from kvferry_plugins.errors import TransferError

LASTING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "library": "recorded 1.0",
        "kind": "RECORDED",
        "kv_transfer_timeout_ms": 12_345,
        "capabilities": frozenset({Capability.TIMING}),
    }
)
"""Attributes that stay what they are for an object's life."""


class Given:
    """An argument, or an answer, that is like no other."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<{self.what}>"


class Recording:
    """What a recording object noted, and what it does next."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        """What each attribute is, and each method returns."""
        self.error: TransferError | None = None
        """What its methods raise."""


def members_of(contract: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(methods, attributes) of a contract class, public, sorted."""
    classes = [each for each in contract.__mro__ if each in CONTRACTS]
    names = {name for each in classes for name in (*vars(each), *inspect.get_annotations(each))}
    public = sorted(name for name in names if not name.startswith("_") and name != "wraps")
    methods = tuple(name for name in public if inspect.isfunction(inspect.getattr_static(contract, name, None)))
    return methods, tuple(name for name in public if name not in methods)


def arguments_of(contract: type, method: str, *, optional: bool) -> tuple[list[Any], dict[str, Any]]:
    """Arguments to call a method with, like no others: (by position, by name); without ``optional`` only the needed."""
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for parameter in list(inspect.signature(getattr(contract, method)).parameters.values())[1:]:
        if optional or parameter.default is parameter.empty:
            given = Given(f"argument {parameter.name}")
            if parameter.kind is parameter.KEYWORD_ONLY:
                by_name[parameter.name] = given
            else:
                positional.append(given)
    return positional, by_name


def received(contract: type, method: str, positional: list[Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Each parameter's value for a call, defaults too."""
    bound = inspect.signature(getattr(contract, method)).bind(None, *positional, **by_name)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def recording_object(contract: type) -> tuple[Any, Recording]:
    """Make an object of a contract class, every member of which is its own."""
    recording = Recording()
    methods, attributes = members_of(contract)
    recording.answers = {name: LASTING.get(name, Given(f"answer of {name}")) for name in (*methods, *attributes)}
    namespace: dict[str, Any] = {name: _method(contract, name, recording) for name in methods}
    namespace |= {name: _attribute(name, recording) for name in attributes}
    return type(f"Recording{contract.__name__}", (contract,), namespace)(), recording


def returns_nothing(contract: type, method: str) -> bool:
    """Whether a method's value is always None."""
    return inspect.signature(getattr(contract, method)).return_annotation in (None, "None")


def _method(contract: type, name: str, recording: Recording) -> Callable[..., Any]:
    def method(self: object, *positional: Any, **by_name: Any) -> Any:
        recording.calls.append((name, received(contract, name, list(positional), by_name)))
        if recording.error is not None:
            raise recording.error
        return None if returns_nothing(contract, name) else recording.answers[name]

    return method


def _attribute(name: str, recording: Recording) -> property:
    return property(lambda self: recording.answers[name])
