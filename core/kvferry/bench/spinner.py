"""A thread that takes a core, and the GIL whenever it is to be had; run as ``python -m kvferry.bench.spinner``."""

import hashlib
import json
import sys
import threading


class Spinner:
    """A thread of this process that spins while it is on, in Python or, as a control, in C that lets go of the GIL."""

    def __init__(self) -> None:
        self._on = threading.Event()
        self._thread: threading.Thread | None = None

    def turn(self, on: bool, *, locked: bool = True) -> None:
        """Spin, or rest; returns once the thread does so. ``locked``: it wants the GIL all the time."""
        if on == self._on.is_set():
            return
        if on:
            self._on.set()
            self._thread = threading.Thread(target=self._spin if locked else self._compute, daemon=True)
            self._thread.start()
        elif self._thread is not None:
            self._on.clear()
            self._thread.join()

    def _spin(self) -> None:
        while self._on.is_set():
            pass

    def _compute(self) -> None:
        while self._on.is_set():
            hashlib.pbkdf2_hmac("sha256", b"kv", b"ferry", 10_000)  # milliseconds each


def main() -> None:
    """Turn as each line says, until the input ends."""
    spinner = Spinner()
    for line in sys.stdin:
        command = json.loads(line)
        spinner.turn(command["on"], locked=command["locked"])
        sys.stdout.write("{}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
