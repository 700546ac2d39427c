"""What the checks of a transfer agent share: the declarations, the sides, and a pair that know each other."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import ArrayLike

from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import Addresses
from kvferry_plugins.testing.conformance.agent_calls import Progress, pattern
from kvferry_plugins.testing.conformance.agent_process import ForeignError, Launcher, Origin, RemoteSide, SideProcesses
from kvferry_plugins.testing.conformance.agent_side import AgentSide
from kvferry_plugins.transceiver import Completion, PeerId, TransferAgent, TransferId

Side = Any
"""An ``AgentSide``, here or in another process."""

MIB = 1 << 20
SEED = 7


@dataclass
class Pair:
    """A writer whose memory holds a pattern and a target whose memory is zero."""

    writer: Side
    target: Side
    peer: PeerId
    """The target, as the writer knows it."""
    back: PeerId
    """The writer, as the target knows it."""
    ours: int
    """Where the writer's memory begins."""
    theirs: int
    """Where the target's does: asked once, since a target may die or stop."""
    nbytes: int
    patience: float

    def write(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> TransferId:
        """Submit segments by their offsets in the two memories."""
        return self.submitting("submit", src, dst, nbytes)  # type: ignore[no-any-return]

    def submitting(self, how: str, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Any:
        """Call one of the side's ways to submit."""
        rows = (column(src) + self.ours, column(dst) + self.theirs, column(nbytes))
        return getattr(self.writer, how)(self.peer, *rows)

    def write_all(self) -> TransferId:
        """Submit the whole memory as one segment."""
        return self.write([0], [0], [self.nbytes])

    def write_repeatedly(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike, times: int) -> None:
        """Write the same so many times, one after the other."""
        if isinstance(self.writer, RemoteSide):
            rows = (column(src) + self.ours, column(dst) + self.theirs, column(nbytes))
            well = self.writer.write_repeatedly(self.peer, *rows, times)
            assert well == times, f"of {times} transfers that are in order {times - well} failed"
        else:
            for _ in range(times):
                self.arrives(self.write(src, dst, nbytes))

    def outcome(self, transfer: TransferId) -> Completion:
        """Wait for a transfer's first completion, both sides making progress."""
        found = self.outcome_within(transfer, self.patience)
        assert found is not None, (
            f"a transfer was submitted and its completion has not come after {self.patience:g} s: poll must report "
            "each submitted transfer, once"
        )
        return found

    def outcome_within(self, transfer: TransferId, seconds: float) -> Completion | None:
        """The same, but None after so long."""
        deadline = time.monotonic() + seconds
        while True:
            found: Completion | None = self.writer.completion_of(transfer)
            if found is not None or time.monotonic() > deadline:
                return found
            for side in (self.writer, self.target):
                side.step()

    def arrives(self, transfer: TransferId) -> None:
        """Require that a transfer completes well."""
        completion = self.outcome(transfer)
        assert completion.ok, f"a transfer that is in order failed: {completion.error}"

    def step_for(self, seconds: float) -> None:
        """Have both sides make progress for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for side in (self.writer, self.target):
                side.step()

    def expect(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike, *, what: str) -> None:
        """Require that the target's memory holds these segments and is zero elsewhere."""
        source, expected = pattern(SEED, self.nbytes), np.zeros(self.nbytes, dtype=np.uint8)
        for here, there, size in zip(column(src), column(dst), column(nbytes), strict=True):
            expected[there : there + size] = source[here : here + size]
        got = np.frombuffer(self.target.read(), dtype=np.uint8)
        wrong = np.flatnonzero(got != expected)
        assert not len(wrong), (
            f"{what}: the completion said ok, but {len(wrong)} of {self.nbytes} bytes of the target's memory are "
            f"wrong, the first at offset {wrong[0]}"
        )

    def still_works(self) -> None:
        """Require that a transfer that is in order arrives."""
        self.target.fill(value=0)
        self.arrives(self.write_all())
        self.expect([0], [0], [self.nbytes], what="the next transfer")


class Workers:
    """The sides of one class of tests; processes outlive a test, agents do not, unless they have to."""

    def __init__(self, suite: "AgentSuite") -> None:
        self.suite = suite
        self._groups: list[SideProcesses] = []
        self._sides: dict[str, Side] = {}

    def sides(self, *names: str) -> list[Side]:
        """Give these sides; what has ended is started again."""
        if self.suite.in_process:
            return [AgentSide(self.suite.make_agent, name) for name in names]
        missing = [name for name in names if name not in self._sides or not self._sides[name].alive()]
        if self.suite.one_world and missing:
            self.close()
            self._start(names, self.suite.launch)
        elif missing:
            for name in missing:
                self._start([name], None)
        return [self._sides[name] for name in names]

    def _start(self, names: Sequence[str], launcher: Launcher | None) -> None:
        suite = self.suite
        group = SideProcesses(
            Origin.of(type(suite)),
            names,
            environment=suite.environment,
            launcher=launcher,
            seconds=suite.patience,
        )
        self._groups.append(group)
        self._sides.update(group.sides)

    def stdout(self) -> bytes:
        """What the sides' processes have printed so far."""
        return b"".join(group.stdout() for group in self._groups)

    def descriptor_of_another_process(self) -> bytes:
        """Make an agent elsewhere, for a moment."""
        group = SideProcesses(Origin.of(type(self.suite)), ["kit-target"], environment=self.suite.environment)
        try:
            side: Side = group.sides["kit-target"]
            side.begin(self.suite.memory_bytes)
            body: bytes = side.descriptor()
            return body
        finally:
            group.close()

    def close(self) -> list[int]:
        """End all processes, and return their exit statuses."""
        groups, self._groups, self._sides = self._groups, [], {}
        return [status for group in groups for status in group.close()]


_WORKERS: dict[pytest.Class, Workers] = {}


class AgentSuite:
    """What an agent declares, and what the checks are run on.

    Attributes:
        in_process: both agents live in the test's own process: for a debugger, or where agents reach no other process.
        one_world: the sides' processes are started together by ``launch``, and replaced together.
        environment: variables for the sides' processes.
        has_wakeup: whether ``wakeup_fd`` is a descriptor; False = it must be None.
        several_peers: whether an agent may have more than one peer; False = a third process must be refused.
        lasting_agents: keep agents from one check to the next, where it takes long to make one.
        agents_come_and_go: whether a process may close its agent and make another; False = a second must be refused.
        names_library: whether ``library`` names the transport's library with its version.
        reconnects: whether a peer can be written to again after the connection broke, or after its process was
            replaced; False = ``unusable`` must say what to do.
        patience: seconds after which something has not happened.
        big_bytes: of the largest transfer.
    """

    in_process: ClassVar[bool] = False
    one_world: ClassVar[bool] = False
    environment: ClassVar[Mapping[str, str]] = {}
    has_wakeup: ClassVar[bool] = True
    several_peers: ClassVar[bool] = True
    lasting_agents: ClassVar[bool] = False
    agents_come_and_go: ClassVar[bool] = True
    names_library: ClassVar[bool] = True
    reconnects: ClassVar[bool] = True
    patience: ClassVar[float] = 20.0
    big_bytes: ClassVar[int] = 32 * MIB

    memory_bytes: ClassVar[int] = MIB

    def make_agent(self, name: str) -> TransferAgent:
        """Make an agent of this name; the one thing that a subclass must say."""
        raise NotImplementedError(f"{type(self).__name__} must define make_agent(self, name) -> TransferAgent")

    def launch(self, commands: Sequence[Sequence[str]]) -> Sequence[str]:
        """Give the one command line that starts all sides, as ``TransferBackend.launcher``, for ``one_world``."""
        raise NotImplementedError(f"{type(self).__name__} declares one_world = True and must define launch(commands)")

    @pytest.fixture
    def workers(self, request: pytest.FixtureRequest) -> Workers:
        """The class's sides, which end with it."""
        node = request.node.getparent(pytest.Class)
        if node not in _WORKERS:
            _WORKERS[node] = Workers(self)
            node.addfinalizer(lambda: _WORKERS.pop(node).close())
        return _WORKERS[node]

    @pytest.fixture
    def pair(self, workers: Workers) -> Iterator[Pair]:
        """A writer and a target that know each other."""
        with self.joined(workers) as pair:
            yield pair

    @contextlib.contextmanager
    def joined(
        self, workers: Workers, *, nbytes: int | None = None, regions: int = 1, lasting: bool | None = None
    ) -> Iterator[Pair]:
        """Have a pair with so much memory; whoever fails within leaves nothing to the next."""
        names = ("kit-writer", "kit-target")
        with self.begun(workers, *names, nbytes=nbytes, regions=regions, lasting=lasting) as (writer, target):
            pair = self.meet(writer, target, nbytes or self.memory_bytes)
            yield pair
            if self.is_up(writer) and self.is_up(target):
                assert writer.guards_are_whole(), "memory beside the writer's registered regions was written to"
                assert target.guards_are_whole(), "memory beside the target's registered regions was written to"

    def meet(self, writer: Side, target: Side, nbytes: int) -> Pair:
        """Have two sides know each other."""
        writer.fill(seed=SEED)
        peer, back = writer.connect(target.descriptor()), target.connect(writer.descriptor())
        return Pair(writer, target, peer, back, writer.base(), target.base(), nbytes, self.patience)

    @contextlib.contextmanager
    def begun(
        self, workers: Workers, *names: str, nbytes: int | None = None, regions: int = 1, lasting: bool | None = None
    ) -> Iterator[Sequence[Side]]:
        """Have sides with memory, whose agents end with this context unless they are to last."""
        if lasting is None:
            lasting = self.lasting_agents or not self.agents_come_and_go
        sides = workers.sides(*names)
        try:
            together(sides, "begin", nbytes or self.memory_bytes, regions)
            yield sides
            together([side for side in sides if self.is_up(side)], "end", lasting)
        except BaseException:
            workers.close()
            raise

    @staticmethod
    def is_up(side: Side) -> bool:
        """Whether a side can still be asked."""
        return not isinstance(side, RemoteSide) or side.alive()


def together(sides: Sequence[Side], method: str, *arguments: Any) -> None:
    """Call a method of each; at once where they are in processes of their own, which may wait for each other."""
    remote = [side for side in sides if isinstance(side, RemoteSide)]
    for side in sides:
        if isinstance(side, RemoteSide):
            side.tell(method, *arguments)
        else:
            getattr(side, method)(*arguments)
    for side in remote:
        side.answer(method)


def column(values: ArrayLike) -> Addresses:
    """Offsets or sizes, int64[n]."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def refusal(call: Callable[[], object], what: str) -> str:
    """Require that a call raises a TransferError, and return its message."""
    try:
        answer = call()
    except TransferError as error:
        return str(error)
    except ForeignError as error:
        pytest.fail(f"{what} must be refused with a TransferError, which reaches the operator; it raised {error}")
    except (ValueError, TypeError, LookupError, RuntimeError, OSError, MemoryError) as error:
        pytest.fail(f"{what} must be refused with a TransferError, which reaches the operator; it raised {error!r}")
    pytest.fail(f"{what} must be refused with a TransferError; it was accepted, with the answer {answer!r}")


def submitted(call: Callable[[], TransferId]) -> TransferId | None:
    """Submit what may be refused at once, or fail later."""
    try:
        return call()
    except TransferError:
        return None
    except ForeignError as error:
        pytest.fail(f"submit refuses with a TransferError, which reaches the operator; it raised {error}")


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.01)


__all__ = [
    "MIB",
    "SEED",
    "AgentSuite",
    "Pair",
    "Progress",
    "Side",
    "Workers",
    "column",
    "refusal",
    "submitted",
    "together",
    "until",
]
