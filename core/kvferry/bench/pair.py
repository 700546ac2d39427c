"""A context and a generation worker in processes of their own, and the hand-offs between them."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvferry.bench.pairings import Pairing
from kvferry.bench.processes import Child, ChildError, ChildOrder, start_together
from kvferry.launch.together import launcher_of
from kvferry.registry.inheritance import announce_plugin_set
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles


@dataclass(frozen=True, slots=True)
class Workers:
    """The two processes of ``kvferry.bench.peer``."""

    context: Child
    generation: Child

    @property
    def by_role(self) -> dict[str, Child]:
        """Each, by its role."""
        return {"context": self.context, "generation": self.generation}


@contextmanager
def workers(pairing: Pairing, *, blocks: int, block_bytes: int) -> Iterator[Workers]:
    """Start a context and a generation worker, each with a pool of so many blocks.

    A ChildError, of theirs or of whoever takes turns with them, is told with the pairing's name.
    """
    config = {
        "backend": pairing.backend,
        "transceiver_runtime": pairing.runtime,
        "kv_transfer_poll_interval_ms": 30_000,
        "kv_transfer_shared_memory": pairing.shared_memory,
    }
    options = {"blocks": blocks, "block_bytes": block_bytes, "config": config}
    registry, environ = load_registry(toggles=Toggles()), dict(os.environ)
    announce_plugin_set(registry, environ)
    launcher = launcher_of(pairing.backend, registry)
    orders = [_worker(role, options) for role in ("context", "generation")]
    try:
        with start_together(launcher, orders, environ=environ) as sides:
            for worker in sides:
                _require_our_plugins(worker.answer(timeout=120))
            yield Workers(*sides)
    except ChildError as error:
        raise ChildError(f"{pairing}: {error}") from error


def _require_our_plugins(ready: Mapping[str, Any]) -> None:
    """Refuse to measure a worker that loaded other plugins than this process."""
    parent = ready["parent"]
    if parent is not None and parent["plugins"] != "same":
        raise ChildError(f"it has other plugins than the process that started it: {parent['plugins']}")


def _worker(role: str, options: dict[str, Any]) -> ChildOrder:
    return ChildOrder("kvferry.bench.peer", [json.dumps({"role": role, **options})], f"{role} worker")


class Pair:
    """Hand-offs between two workers, one at a time."""

    def __init__(self, sides: Workers) -> None:
        self._context = sides.context
        self._generation = sides.generation
        self._requests = 0

    def hand_off(self, blocks: int) -> tuple[float, dict[str, float | None]]:
        """One hand-off, checked by value.

        Returns:
            Seconds from ``respond_and_send_async`` to the generation side's completion, and their parts. Planning is
            None where the native engine does it, as part of the wire's time.

        Raises:
            ChildError: it failed, or the bytes that arrived are not the bytes that were sent.
        """
        request = self.allocate(blocks)
        self.fill(request)
        self._generation.ask("receive", request=request, **self._context.ask("params", request=request))
        planning = self._context.ask("planning_seconds", request=request)["seconds"]
        self._context.ask("parts")
        self._generation.tell("wait", at_least=1)
        begun = self._context.ask("respond", request=request)["begun"]
        seconds = completed(self._generation.answer(), self._generation) - begun
        completed(self._context.ask("wait", at_least=1), self._context)
        self.compare(request, blocks)
        parts = self._context.ask("parts")
        self.free(request)
        control = max(0.0, seconds - (planning or 0.0) - parts["wire"])
        return seconds, {"planning": planning, **parts, "control": control}

    def allocate(self, blocks: int) -> int:
        """Give a new request its blocks at both ends."""
        self._requests += 1
        for side in (self._context, self._generation):
            side.ask("allocate", request=self._requests, blocks=blocks)
        return self._requests

    def share(self, request: int) -> int:
        """Give a new request the blocks of another one at both ends, and tell the generation worker of it."""
        self._requests += 1
        for side in (self._context, self._generation):
            side.ask("share", request=self._requests, of=request)
        params = self._context.ask("params", request=self._requests)
        self._generation.ask("introduce", request=self._requests, **params)
        return self._requests

    def fill(self, request: int) -> None:
        """Write a request's pattern at the source, and spoil the destination."""
        self._context.ask("fill", request=request, seed=request)
        self._generation.ask("poison", request=request)

    def compare(self, request: int, blocks: int) -> None:
        """Raise ChildError unless the destination holds what ``fill`` wrote."""
        wrong = self._generation.ask("wrong_blocks", request=request, seed=request)
        if wrong["wrong"]:
            raise ChildError(f"{wrong['wrong']} of {blocks} blocks arrived wrong, the first at {wrong['first']}")

    def free(self, request: int) -> None:
        """Give a request's blocks back at both ends."""
        for side in (self._context, self._generation):
            side.ask("free", request=request)

    def permute(self, seed: int | None) -> None:
        """Shuffle both workers' tables, each its own way; None = in order again."""
        self._context.ask("permute", seed=seed)
        self._generation.ask("permute", seed=None if seed is None else seed + 1)


def completed(answer: Any, child: Child, expected: int = 1) -> float:
    """The moment at which a ``wait`` saw so many completions. Raises ChildError for any other end."""
    events = answer["events"]
    if len(events) < expected:
        raise ChildError(f"{child.name} saw no end of the hand-off: {child.ask('status')}")
    for event in events:
        if event["outcome"] != "completed":
            raise ChildError(f"{child.name}: the hand-off {event['outcome']}: {event['message']}")
    return float(answer["at"])
