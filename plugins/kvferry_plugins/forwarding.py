"""Finds what a wrapper forgot to hand on: the contract's defaults would answer in the wrapped object's place.

A transceiver, transfer agent or manager that holds another of its kind hands calls on to it. Whatever the contract
gives a default for (``unusable``, ``library``, ``route``, ``set_active``, ``memory_in_use``, ``suspend``, …) works in
the wrapper without being written there, and says the wrong thing. So kvferry looks at what a maker returns, and refuses
a wrapper that leaves to the contract what the wrapped object says for itself.

What an object wraps is what its attribute ``wraps`` names: one object, or several. Without it (None) it is every
attribute of the object that is of the same contract, or a list, tuple or mapping of such. ``wraps = ()`` says that it
hands nothing on, whatever it holds.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import BlockTransferAgent, KvCacheTransceiver, TransferAgent

CONTRACTS = (KvCacheTransceiver, BlockTransferAgent, TransferAgent, KVCacheManager)
"""The classes whose members are looked at."""

_NOT_HANDED_ON = frozenset({"wraps"})


def contract_of(thing: object) -> type | None:
    """The root of the contract that an object fulfils; None if it fulfils none."""
    roots = (KvCacheTransceiver, TransferAgent, KVCacheManager)
    return next((root for root in roots if isinstance(thing, root)), None)


def wrapped_by(wrapper: object) -> tuple[object, ...]:
    """What an object hands its calls on to, without itself; see this module's docstring."""
    contract = contract_of(wrapper)
    if contract is None:
        return ()
    named = getattr(wrapper, "wraps", None)
    held = _attributes(wrapper) if named is None else [named]
    found = (each for value in held for each in _members(value) if isinstance(each, contract) and each is not wrapper)
    return tuple({id(each): each for each in found}.values())


def forgotten(wrapper: object, wrapped: object) -> tuple[str, ...]:
    """Members of the contract that ``wrapped`` answers itself, and ``wrapper`` leaves to the contract; sorted."""
    return tuple(sorted(name for name in contract_members(wrapped) if _own(wrapped, name) and not _own(wrapper, name)))


def forwarding_fault(wrapper: object) -> str | None:
    """Say what a wrapper forgot to hand on, and what to do; None for a faithful one, and for what wraps nothing."""
    for wrapped in wrapped_by(wrapper):
        names = forgotten(wrapper, wrapped)
        if names:
            ours, theirs = type(wrapper).__name__, type(wrapped).__name__
            return (
                f"{ours}, which wraps {theirs} and does not hand on {', '.join(names)}: the contract's default would "
                f"answer instead of {theirs} (define each in {ours}, or set its attribute `wraps` to () if it hands "
                "nothing on)"
            )
    return None


def contract_members(thing: object) -> frozenset[str]:
    """Public names, methods and attributes alike, of every contract class that an object's class is derived from."""
    classes = [each for each in type(thing).__mro__ if each in CONTRACTS]
    names = (name for each in classes for name in (*vars(each), *inspect.get_annotations(each)))
    return frozenset(name for name in names if not name.startswith("_")) - _NOT_HANDED_ON


def _own(thing: object, name: str) -> bool:
    """Whether an object, or a class of it that is not the contract's, has this member."""
    if name in getattr(thing, "__dict__", {}):
        return True
    return any(name in vars(each) for each in type(thing).__mro__ if each not in CONTRACTS)


def _attributes(thing: object) -> Iterator[object]:
    yield from list(getattr(thing, "__dict__", {}).values())
    for each in type(thing).__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(thing, name):
                yield getattr(thing, name)


def _members(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield from value
    else:
        yield value
