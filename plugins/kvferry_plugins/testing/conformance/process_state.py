"""What this process has open: what is there at the end that was not at the start is a leak."""

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Threads and descriptors, by name; native threads, which have none, by their number alone."""

    threads: tuple[str, ...]
    native_threads: int
    descriptors: tuple[str, ...]

    def left_behind(self, later: "ProcessState") -> list[str]:
        """Say what is there later and is not here."""
        found = [f"thread {name}" for name in _surplus(self.threads, later.threads)]
        if not found and later.native_threads > self.native_threads:
            found.append(f"{later.native_threads - self.native_threads} native threads")
        if len(later.descriptors) > len(self.descriptors):
            surplus = _surplus(self.descriptors, later.descriptors)
            found.append(f"{len(later.descriptors) - len(self.descriptors)} descriptors ({', '.join(surplus)})")
        return found


def process_state() -> ProcessState:
    """Look now; what only waits for the garbage collector is collected."""
    gc.collect()
    tasks = Path("/proc/self/task")
    return ProcessState(
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        native_threads=len(list(tasks.iterdir())) if tasks.is_dir() else 0,
        descriptors=tuple(sorted(_descriptors())),
    )


def left_behind(before: ProcessState, patience: float) -> list[str]:
    """Say what is left that was not there before; threads on their way out get so many seconds."""
    deadline = time.monotonic() + patience
    while (found := before.left_behind(process_state())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def within(patience: float, function: Callable[[], object]) -> bool:
    """Run a function on a thread of its own; False if it has not returned after so many seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(patience)
    return not thread.is_alive()


def _descriptors() -> list[str]:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return []
    found = []
    for each in folder.iterdir():
        try:
            found.append(os.readlink(each).split(":")[0])
        except OSError:  # the one that reads this folder
            continue
    return found


def _surplus(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    rest = list(after)
    for name in before:
        if name in rest:
            rest.remove(name)
    return rest
