"""The GPU check: KV blocks from one process's device memory to another's over CUDA IPC, by value and in GB/s.

    python benchmarks/gpu_check.py    # says so plainly where there is no GPU
    python benchmarks/gpu_check.py --device cpu --blocks 256 --big-mib 64    # a rehearsal: the same code on CPU memory

NIXL is driven as by the PYTHON runtime, UCX as by CPP. Blocks that are not consecutive go both ways: each as a write of
its own (scattered), and by a gather kernel, one write and a scatter kernel (gathered). Exit status 0 = all bytes right,
or there is no GPU; 1 = wrong bytes, or a transport that does not work; 2 = what was asked for cannot be had.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry_plugins.errors import TransferError
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 64 << 10
WORDS = BLOCK_BYTES // 4
POISON = -1
"""No word of a pattern is negative."""
CHUNK = 1024
"""Blocks that are filled or compared at once."""
RUNTIMES = {"NIXL": "PYTHON", "UCX": "CPP"}
LIMIT_MIB = 2048
"""A pool is at most twice that, or the words of the pattern would not tell all blocks apart."""
WAYS = ("copy", "consecutive", "scattered", "gathered")
Ids = np.ndarray


class _Side:
    """One process: a pool of blocks, a staging buffer, an agent. A time, in seconds, ends when the device is idle."""

    def __init__(self, transport: str, name: str, device: str, pool: int, staging: int) -> None:
        import torch

        if device == "cpu":
            torch.set_num_threads(1)  # a small copy must not wait for threads that share a core
        else:
            torch.cuda.set_device(device)
        self.torch, self.device = torch, device
        self.pool, self.staging = (
            torch.full((blocks, WORDS), POISON, dtype=torch.int32, device=device) for blocks in (pool, staging)
        )
        self.synchronize()
        # The engine's; a copy within a device gains nothing from being cut into pieces.
        options = {"piece_bytes": 256 << 20} if RUNTIMES[transport] == "CPP" else {}
        spec = AgentSpec(transport, name, device, {LOOPBACK_ONLY: True, **options}, RUNTIMES[transport])
        self.agent = importlib.import_module(f"kvferry_backends.{transport.lower()}").create_transfer_agent(spec)
        self.agent.register([Region(each.data_ptr(), each.nbytes, device) for each in (self.pool, self.staging)])
        self.peer: Any = None

    def describe(self) -> tuple[str, bytes, tuple[int, int]]:
        return self.agent.library, self.agent.local_descriptor(), (self.pool.data_ptr(), self.staging.data_ptr())

    def connect(self, descriptor: bytes, there: tuple[int, int]) -> None:
        self.peer, self.there = self.agent.connect(descriptor), there

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def timed(self, action: Callable[[], object]) -> float:
        self.synchronize()
        begun = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - begun

    def tensor(self, ids: Ids) -> "torch.Tensor":
        return self.torch.from_numpy(ids).to(self.device)

    def pattern(self, ids: Ids) -> "torch.Tensor":
        """What blocks hold, int32[blocks, WORDS]: words that are nowhere else."""
        words = self.torch.arange(WORDS, dtype=self.torch.int32, device=self.device)
        return self.tensor(ids).to(self.torch.int32)[:, None] * WORDS + words

    def fill(self) -> None:
        for ids in np.array_split(np.arange(len(self.pool)), -(-len(self.pool) // CHUNK)):
            self.pool[ids[0] : ids[-1] + 1] = self.pattern(ids)

    def poison(self) -> None:
        for memory in (self.pool, self.staging):
            memory.fill_(POISON)
        self.synchronize()

    def wrong(self, src: Ids, dst: Ids) -> int:
        """Count, on the device, the blocks that are not as sent and those that were not to be written."""
        parts = [slice(first, first + CHUNK) for first in range(0, len(self.pool), CHUNK)]
        differ = sum(int((self.pool[self.tensor(dst[at])] != self.pattern(src[at])).any(1).sum()) for at in parts)
        written = sum(int((self.pool[at] != POISON).any(1).sum()) for at in parts)
        return differ + max(0, written - len(dst))

    def copy(self, blocks: int) -> float:
        """Copy so many blocks within this process's device memory."""
        source = self.pool[:blocks]
        target = self.torch.empty_like(source)
        return statistics.median(self.timed(lambda: target.copy_(source)) for _ in range(5))

    def direct(self, src: Ids, dst: Ids) -> float:
        """From block to block; neighbours on both sides are one segment."""

        def write_all() -> None:
            first = np.concatenate([[0], np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1])
            here, there = self.pool.data_ptr() + src[first] * BLOCK_BYTES, self.there[0] + dst[first] * BLOCK_BYTES
            self.write(here, there, np.diff(first, append=len(src)) * BLOCK_BYTES)

        return self.timed(write_all)

    def gathered(self, src: Ids) -> float:
        """By a gather kernel to the staging buffer, and one write from there to the peer's."""
        staging = self.staging[: len(src)]

        def gather_and_write() -> None:
            self.torch.index_select(self.pool, 0, self.tensor(src), out=staging)
            self.synchronize()  # the transport does not wait for our stream
            self.write(*(np.array([number]) for number in (staging.data_ptr(), self.there[1], staging.nbytes)))

        return self.timed(gather_and_write)

    def scatter(self, dst: Ids) -> float:
        """By a scatter kernel from the staging buffer to the blocks."""
        return self.timed(lambda: self.pool.index_copy_(0, self.tensor(dst), self.staging[: len(dst)]))

    def write(self, src: Ids, dst: Ids, nbytes: Ids) -> None:
        """Post, and wait until all is in the peer's memory."""
        self.agent.submit(self.peer, src, dst, nbytes)
        wakeup, deadline = self.agent.wakeup_fd(), time.monotonic() + 60
        while not (ended := self.agent.poll()):
            if time.monotonic() > deadline:
                raise TransferError("a write did not end within 60 s")
            if wakeup is not None:
                select.select([wakeup], [], [], 0.1)
        if not ended[0].ok:
            raise TransferError(ended[0].error or "a write failed")


def serve(pipe: Connection, *arguments: Any) -> None:
    """Run one side until its pipe ends."""
    side: _Side | None = None
    while True:
        while side and side.peer is not None and not pipe.poll(0.0001):
            side.agent.poll()  # a passive target of NIXL moves only while it polls
        try:
            command, *values = pipe.recv()
        except EOFError:
            break
        try:
            side = side or _Side(*arguments)
            pipe.send((getattr(side, command)(*values), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
    if side:
        side.agent.close()


class _Pair:
    """A writer and a target, each in a process of its own that loads one transport."""

    def __init__(self, writer: Connection, target: Connection) -> None:
        self.pipes = {"writer": writer, "target": target}
        described = {name: self.ask(name, "describe") for name in self.pipes}
        self.library: str = described["writer"][0]
        for name, other in (("writer", "target"), ("target", "writer")):
            self.ask(name, "connect", *described[other][1:])
        self.ask("writer", "fill")

    def ask(self, name: str, *command: Any) -> Any:
        try:
            self.pipes[name].send(command)
            if not self.pipes[name].poll(300):
                raise TransferError(f"the {name} did not answer {command[0]!r} within 300 s")
            answer, error = self.pipes[name].recv()
        except (EOFError, OSError) as ended:
            raise TransferError(f"the {name}'s process ended during {command[0]!r}; stderr has what it said") from ended
        if error:
            raise TransferError(f"the {name}: {error}")
        return answer


@contextmanager
def running_pair(*arguments: Any) -> Iterator[_Pair]:
    """Start both processes, and end them."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for name in ("writer", "target"):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(theirs, arguments[0], name, *arguments[1:])))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield _Pair(*pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def measure(pair: _Pair, blocks: int, pool: int, rounds: int, *, shuffled: bool) -> dict[str, Any]:
    """Warm up once, then take the median of the rounds; every round is compared by value."""
    generator = np.random.default_rng(blocks)
    runs = (np.arange(blocks), np.arange(pool - blocks, pool))
    tables = (generator.permutation(pool)[:blocks], generator.permutation(pool)[:blocks])

    def direct(src: Ids, dst: Ids) -> float:
        return float(pair.ask("writer", "direct", src, dst))

    def by_kernels(src: Ids, dst: Ids) -> float:
        return float(pair.ask("writer", "gathered", src) + pair.ask("target", "scatter", dst))

    def median(move: Callable[[Ids, Ids], float], src: Ids, dst: Ids) -> float:
        seconds = []
        for _ in range(rounds + 1):
            pair.ask("target", "poison")
            seconds.append(move(src, dst))
            row["wrong_blocks"] += pair.ask("target", "wrong", src, dst)
        return statistics.median(seconds[1:])

    row: dict[str, Any] = {"blocks": blocks, "wrong_blocks": 0, "taken": None}
    seconds = {"copy": pair.ask("writer", "copy", blocks), "consecutive": median(direct, *runs)}
    if shuffled:
        seconds |= {"scattered": median(direct, *tables), "gathered": median(by_kernels, *tables)}
        row["taken"] = min(("scattered", "gathered"), key=seconds.__getitem__)
    rates = {way: blocks * BLOCK_BYTES / each / 1e9 for way, each in seconds.items()}
    return {**row, "seconds": seconds, "gigabytes_per_second": rates}


def check(transport: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one transport; that it does not work is a finding."""
    counts = [4**power for power in range(11) if 4**power < options.blocks] + [options.blocks]
    big = max(1, (options.big_mib << 20) // BLOCK_BYTES)
    pool = max(2 * options.blocks, 2 * big)
    found: dict[str, Any] = {"transport": transport, "runtime": RUNTIMES[transport], "rows": [], "error": None}
    try:
        with running_pair(transport, device, pool, options.blocks) as pair:
            found["library"] = pair.library
            found["rows"] += [measure(pair, count, pool, options.rounds, shuffled=True) for count in counts]
            found["rows"].append(measure(pair, big, pool, options.rounds, shuffled=False))
    except TransferError as error:
        found["error"] = str(error)
    return found


def why_no_gpu() -> str | None:
    """Say why torch reaches no GPU; None if it does."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error})"
    if torch.cuda.is_available():
        return None
    there = "there is /dev/nvidia0, but " if Path("/dev/nvidia0").exists() else ""
    if torch.version.cuda is None:
        return f"{there}torch {torch.__version__} was built without CUDA"
    return f"{there}torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device; see what nvidia-smi says"


def obstacles(environ: Mapping[str, str]) -> Iterator[str]:
    """Say what in the environment keeps UCX, also NIXL's, from device memory."""
    names = environ.get("UCX_TLS", "all")
    has_cuda = "cuda" in names
    if has_cuda if names.startswith("^") else not (has_cuda or "all" in names):
        yield f"UCX_TLS={names!r} leaves out cuda_copy and cuda_ipc: unset it, or add them"
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(variable, "").lower():
            yield f"{variable} asks for expandable segments, which CUDA IPC cannot export: leave that out"


def report(found: dict[str, Any]) -> None:
    """Print one transport's table."""
    print(f"\n{found['transport']} under {found['runtime']} ({found.get('library', 'not started')}), GB/s:")
    print(f"{'blocks':>8}{'MiB':>9}", *(f"{way:>12}" for way in WAYS), "  taken, wrong blocks")
    for row in found["rows"]:
        rates = [row["gigabytes_per_second"].get(way) for way in WAYS]
        cells = (f"{rate:12.2f}" if rate is not None else f"{'':12}" for rate in rates)
        print(f"{row['blocks']:8}{row['blocks'] / 16:9.2f}", *cells, f"  {row['taken'] or '':9} {row['wrong_blocks']}")
    if found["error"]:
        print(f"FAILED: {found['error']}")


def slow(found: dict[str, Any]) -> str | None:
    """Say if the bytes seem to take another way than device to device."""
    rates = found["rows"][-1]["gigabytes_per_second"] if found["rows"] and not found["error"] else None
    if rates is None or rates["consecutive"] > 0.1 * rates["copy"]:
        return None
    share = rates["consecutive"] / rates["copy"]
    return f"{found['transport']} moves at {share:.3f} of a copy: not by CUDA IPC? UCX_PROTO_INFO=y shows the way taken"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="auto (a GPU, if there is one), cuda:N, or cpu to rehearse")
    parser.add_argument("--transport", action="append", choices=RUNTIMES, help="repeatable; both if not given")
    parser.add_argument("--blocks", type=int, default=4096, help="the most blocks, of 64 KiB (4096)")
    parser.add_argument("--big-mib", type=int, default=1024, help="one contiguous write of so many MiB (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (5)")
    parser.add_argument("--json", action="store_true", help="one object, and nothing else, on stdout")
    options = parser.parse_args()
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", options.device):
        parser.error(f"--device {options.device!r} is none of auto, cpu, cuda, cuda:N")
    if (
        min(options.blocks, options.big_mib, options.rounds) < 1
        or max(options.blocks // 16, options.big_mib) > LIMIT_MIB
    ):
        parser.error(f"--blocks, --big-mib and --rounds start at 1; {LIMIT_MIB} MiB is the most")
    return options


def conclude(outcome: dict[str, Any]) -> None:
    """Print what it comes to."""
    verdict = "all bytes right" if outcome["ok"] else "NOT right: see above"
    lines = outcome["errors"] or [*outcome["warnings"], outcome["skipped"] or verdict]
    print(*lines, sep="\n", file=sys.stderr if outcome["errors"] else sys.stdout)


def main() -> int:
    """Run the check; returns the exit status."""
    options = parse()
    reason = why_no_gpu() if options.device != "cpu" else None
    device = "cuda:0" if options.device in ("auto", "cuda") else options.device
    errors = list(obstacles(os.environ)) if device != "cpu" and not reason else []
    if reason and options.device != "auto":
        errors = [f"--device {device} cannot be had: {reason}"]
    results = []
    for transport in () if reason or errors else options.transport or RUNTIMES:
        results.append(check(transport, device, options))
        if not options.json:
            report(results[-1])
    fine = [not each["error"] and not any(row["wrong_blocks"] for row in each["rows"]) for each in results]
    outcome = {
        "schema": 1,
        "ok": all(fine) and not errors,
        "device": device,
        "skipped": f"no GPU here: {reason}" if reason else None,
        "transports": results,
        "warnings": [said for said in map(slow, results) if said and device != "cpu"],
        "errors": errors,
    }
    print(json.dumps(outcome)) if options.json else conclude(outcome)
    return 2 if errors else int(not outcome["ok"])


if __name__ == "__main__":
    sys.exit(main())
