"""The suite for a wrapper: a transceiver, transfer agent or manager that hands its calls on to another.

kvferry refuses a wrapper that leaves a member to the contract's default (``kvferry_plugins.forwarding``). This suite
goes further: that each call arrives with the arguments that it was made with, that the answer comes back, and an error.
"""

from typing import Any, ClassVar

import pytest

from kvferry_plugins.errors import TransferError
from kvferry_plugins.forwarding import contract_members, forgotten, wrapped_by
from kvferry_plugins.testing.conformance.raising import raised_by
from kvferry_plugins.testing.conformance.recording import (
    LASTING,
    Given,
    Recording,
    arguments_of,
    members_of,
    received,
    recording_object,
    returns_nothing,
)


def check_forwards(wrapper: object, wrapped: object) -> None:
    """Fail, naming each, if the wrapper leaves to the contract what the wrapped object answers itself."""
    names = forgotten(wrapper, wrapped)
    ours, theirs = type(wrapper).__name__, type(wrapped).__name__
    assert not names, f"{ours} wraps {theirs} and does not hand on {', '.join(names)}: the contract's default answers"


class ForwardingConformance:
    """Subclass it, name the contract, and say how your wrapper is made.

    ::

        class TestTimedAgent(ForwardingConformance):
            contract = TransferAgent

            def wrap(self, wrapped):
                return TimedAgent(wrapped)

    Attributes:
        contract: the contract's class that is wrapped.
        changes: members with which the wrapper does more than handing on; only that it has them is checked.
    """

    contract: ClassVar[type]
    changes: ClassVar[frozenset[str]] = frozenset()

    def wrap(self, wrapped: Any) -> Any:
        """Return the wrapper of an object."""
        raise NotImplementedError(f"{type(self).__name__} needs a method wrap(wrapped) that returns your wrapper")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        methods, attributes = members_of(self.contract)
        for argument, names in (("method", methods), ("attribute", attributes)):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, [name for name in names if name not in self.changes])

    def test_kvferry_finds_what_it_wraps_and_misses_nothing(self) -> None:
        wrapped, _ = recording_object(self.contract)
        wrapper = self.wrap(wrapped)
        name = type(wrapper).__name__
        assert any(each is wrapped for each in wrapped_by(wrapper)), (
            f"{name} wraps an object that none of its attributes is: name it by the attribute `wraps`"
        )
        assert contract_members(wrapper) >= contract_members(wrapped), (
            f"{name} is no {self.contract.__name__}, and wraps one"
        )
        check_forwards(wrapper, wrapped)

    @pytest.mark.parametrize("optional", [True, False], ids=["all arguments", "needed arguments"])
    def test_a_call_is_handed_on_as_it_was_made(self, method: str, optional: bool) -> None:
        wrapped, recording = recording_object(self.contract)
        wrapper = self.wrap(wrapped)
        recording.calls.clear()
        positional, by_name = arguments_of(self.contract, method, optional=optional)
        answer = getattr(wrapper, method)(*positional, **by_name)
        made = received(self.contract, method, positional, by_name)
        self._require_call(type(wrapper).__name__, method, recording, made)
        expected = None if returns_nothing(self.contract, method) else recording.answers[method]
        assert answer is expected, (
            f"{type(wrapper).__name__}.{method} returned {answer!r} instead of the wrapped object's {expected!r}"
        )

    def test_an_error_comes_through(self, method: str) -> None:
        wrapped, recording = recording_object(self.contract)
        wrapper = self.wrap(wrapped)
        recording.error = TransferError(f"the wrapped object refuses {method}")
        positional, by_name = arguments_of(self.contract, method, optional=True)
        found = raised_by(getattr(wrapper, method), *positional, **by_name)
        assert found is recording.error, (
            f"{type(wrapper).__name__}.{method} raised {found!r} where the wrapped object raised {recording.error!r}"
        )

    def test_an_attribute_is_the_wrapped_objects(self, attribute: str) -> None:
        wrapped, recording = recording_object(self.contract)
        wrapper = self.wrap(wrapped)
        if attribute not in LASTING:
            recording.answers[attribute] = Given(f"{attribute}, changed since")
        found, expected = getattr(wrapper, attribute), recording.answers[attribute]
        assert found == expected, (
            f"{type(wrapper).__name__}.{attribute} is {found!r}, and the wrapped object's is {expected!r}"
        )

    @staticmethod
    def _require_call(name: str, method: str, recording: Recording, made: dict[str, Any]) -> None:
        calls = [arguments for called, arguments in recording.calls if called == method]
        assert len(calls) == 1, f"{name}.{method} called the wrapped object's {method} {len(calls)} times, not once"
        for argument, value in made.items():
            assert calls[0][argument] is value or calls[0][argument] == value, (
                f"{name}.{method} handed on {argument}={calls[0][argument]!r} instead of {value!r}"
            )
