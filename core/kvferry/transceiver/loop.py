"""The one thread that owns a transceiver's sockets, agent and sessions; asleep on descriptors when idle."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator

import zmq

from kvferry.transceiver.channel import Address, Broken
from kvferry.transceiver.context_side import ContextSide
from kvferry.transceiver.council import Council
from kvferry.transceiver.generation_side import GenerationSide
from kvferry.transceiver.links import Links
from kvferry.transceiver.pulse import Pulse
from kvferry.transceiver.ranks import Ranks
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.switching import switch_interval
from kvferry.transceiver.wire import (
    AnyMessage,
    Cancel,
    Cancelled,
    ChunkDone,
    Done,
    Ended,
    Failed,
    Gathered,
    Hello,
    Join,
    Lost,
    MalformedMessageError,
    Ping,
    Posting,
    Refuse,
    Table,
    Verdict,
    decode,
)
from kvferry_plugins.errors import PeerLostError
from kvferry_plugins.types import RankSpec

logger = logging.getLogger("kvferry.transceiver")

EARLY_HELLOS = 256
"""Greetings that wait for this instance to be complete."""
TICK_UNSETTLED = 0.05
"""Seconds between looks at the clocks while a session is under way or in quarantine."""
TICK_LINKED = 0.5
"""The same with peers, but nothing to do for them: their ends are to be seen, since an agent holds memory of theirs."""
TARGET_PATIENCE_MS = 1
"""A passive target progresses so often, and on every message. Spinning would take a core from the writer and from
ZeroMQ's threads: measured, it was slower over shared memory and no faster over TCP (docs/performance.md)."""


class Loop:
    """Runs sessions until ``stop``."""

    def __init__(self, shared: Shared, ranks: RankSpec | None = None) -> None:
        self._shared = shared
        self._early_hellos: deque[tuple[Address, Hello]] = deque(maxlen=EARLY_HELLOS)
        self.links = Links(shared)
        self.ranks = Ranks(shared, ranks, self._world_complete, self._rank_lost)
        self.council = Council(shared, self.ranks)
        self.context = ContextSide(shared, self.links, self.council)
        self.generation = GenerationSide(shared, self.links, self.council)
        self.links.listeners = [self.context, self.generation]
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._closed = False
        self._closing = threading.Lock()
        self._next_tick = 0.0
        self._active = False
        self._hurried = False
        self._hurrying = threading.Lock()
        poller = shared.channel.poller
        poller.register(self._wake_fd, zmq.POLLIN)
        self._agent_fd = shared.agent.wakeup_fd()
        if self._agent_fd is not None:
            poller.register(self._agent_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)
        self.pulse = Pulse("transfer loop", self._thread)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self.ranks.watched:
            self.call(self.ranks.start)

    def call(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the loop's thread, soon; from any thread. Nothing happens once the loop is stopped."""
        with self._closing:  # a closed descriptor's number may be somebody else's by now
            if not self._closed:
                self._hurry(True)
                self._commands.append(command)
                os.eventfd_write(self._wake_fd, 1)

    def ask(self, command: Callable[[], None], timeout: float) -> bool:
        """Run ``command`` on the loop's thread and wait for its end; False when the time is over."""
        done = threading.Event()

        def run() -> None:
            try:
                command()
            finally:
                done.set()

        self.call(run)
        return not self._closed and done.wait(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """End the thread; False if it did not end in time."""
        self._stopping = True
        self.call(lambda: None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        with self._closing:
            self._closed = True
            os.close(self._wake_fd)
        return True

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Exception:
                self.pulse.begin()  # what raises at every step does not move
                logger.exception("internal error in the transfer loop")
                self._shared.counters["internal_errors"] += 1
                time.sleep(0.01)
        self._hurry(False)  # here: stop() does not wait for ever

    def _step(self) -> None:
        busy = self.context.busy or self.generation.busy
        ready = dict(self._shared.channel.poller.poll(self._patience_ms()))
        self.pulse.begin()
        if ready.pop(self._wake_fd, None):
            self._drain_wake()
            self._run_commands()
            busy = True  # what a command posted is to be progressed at once
        if ready:
            self._receive(ready)
        if busy or ready:
            self._progress()
        if self._shared.now() >= self._next_tick:
            self._tick()
        self._tell_activity()
        self._hurry(self.context.hurried or self.generation.busy or bool(self._commands))
        self.pulse.rest()

    def _hurry(self, hurried: bool) -> None:
        with self._hurrying:
            if hurried is not self._hurried:
                self._hurried = hurried
                (switch_interval.shorten if hurried else switch_interval.restore)()

    def _tell_activity(self) -> None:
        """An agent with threads of its own progresses as a target while somebody may be writing."""
        if self.generation.busy is not self._active:
            self._active = self.generation.busy
            self._shared.agent.set_active(self._active)

    def _patience_ms(self) -> int | None:
        """How long to sleep unless a descriptor turns ready; None = for ever."""
        if (self._agent_fd is None and self.context.eager) or not self.pulse.resting:
            return 0
        if self._agent_fd is None and (self.context.busy or self.generation.busy):
            return TARGET_PATIENCE_MS
        interval = self._tick_interval()
        if interval is None:
            return None
        now = self._shared.now()
        self._next_tick = min(self._next_tick, now + interval)
        return max(0, round((self._next_tick - now) * 1000))

    def _tick_interval(self) -> float | None:
        """Seconds between looks at the clocks; None = there is nothing that a clock could change."""
        if self.context.unsettled or self.generation.unsettled or self._shared.world is None:
            return TICK_UNSETTLED
        return TICK_LINKED if self.links.watched or self.ranks.watched else None

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _run_commands(self) -> None:
        while self._commands:
            with self._contained("a command"):
                self._commands.popleft()()

    @contextlib.contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Log and count what one message or session with a bug behind it raises: it must not end the others."""
        try:
            yield
        except Exception:
            logger.exception("internal error in the transfer loop: %s", what)
            self._shared.counters["internal_errors"] += 1

    def _receive(self, ready: Container[object]) -> None:
        for item in self._shared.channel.receive(ready):
            if isinstance(item, Broken):
                if not self.ranks.broken(item.address, item.reason):
                    self.links.broken(item.address, item.reason)
            elif not self.links.ignores(item.sender):
                try:
                    message = decode(item.body)
                except MalformedMessageError as error:
                    self.links.ignore(item.sender, str(error))
                    continue
                self.links.hear(item.sender)
                self.ranks.hear(item.sender)
                self._run_commands()  # what the engine did before the peer could write this, its TABLE builds on
                with self._contained("a message"):
                    self._dispatch(item.sender, message)

    def _dispatch(self, sender: Address, message: AnyMessage) -> None:
        match message:
            case Posting():
                self.generation.on_posting(sender, message)
            case ChunkDone():
                self.generation.on_chunk_done(sender, message)
            case Done():
                self._side_of(message.key.instance).on_done(sender, message)
            case Table():
                self.context.on_table(sender, message)
            case Cancel():
                self._side_of(message.key.instance).on_cancel(sender, message)
            case Cancelled():
                self.generation.on_cancelled(sender, message)
            case Failed():
                self._side_of(message.key.instance).on_failed(sender, message)
            case Ping():
                self.links.on_ping(sender, message)
            case Hello():
                self._on_hello(sender, message)
            case Refuse(key=None):
                if not self.ranks.on_refuse(sender, message):
                    self.links.on_refuse(sender, message)
            case Refuse():
                self.generation.on_refuse(sender, message)
            case Verdict():
                self.council.on_verdict(sender, message)
            case Ended():
                self.council.on_ended(sender, message)
            case Join():
                self.ranks.on_join(sender, message)
            case Gathered():
                self.ranks.on_gathered(sender, message)
            case Lost():
                self.ranks.on_told_lost(sender, message)

    def _on_hello(self, sender: Address, hello: Hello) -> None:
        """A peer may know of this instance before this rank has heard that it is complete."""
        if self._shared.world is None:
            self._early_hellos.append((sender, hello))
        else:
            self.links.on_hello(sender, hello)

    def _world_complete(self) -> None:
        while self._early_hellos:
            self.links.on_hello(*self._early_hellos.popleft())

    def _rank_lost(self, error: PeerLostError) -> None:
        """Nothing can be handed over without that rank."""
        self.council.lose(error)
        self.context.shutdown(error)
        self.generation.shutdown(error)

    def _side_of(self, instance: str) -> ContextSide | GenerationSide:
        """DONE, FAILED and CANCEL go both ways: about our own request we are the context side."""
        world = self._shared.world
        return self.context if world is not None and instance == world.name[0] else self.generation

    def _progress(self) -> None:
        """Let the agent progress; the clocks run on if it raises."""
        try:
            completions = self._shared.agent.poll()
        except Exception:
            self._shared.counters["agent_errors"] += 1
            if self._shared.counters["agent_errors"] == 1:
                logger.exception("the transfer agent raised in poll; further failures of it are only counted")
            time.sleep(0.01)
            return
        for completion in completions:
            with self._contained("a completion"):
                self.context.on_completion(completion)

    def _tick(self) -> None:
        if self.links.watched:
            self._progress()  # a fenced writer's last bytes land by our own progress
        for part in (self.ranks, self.links, self.council, self.context, self.generation):
            with self._contained("the clocks"):
                part.tick()
        self._next_tick = self._shared.now() + (self._tick_interval() or TICK_LINKED)
