"""A Python thread that holds the GIL whenever it is to be had; run as ``python -m kvferry.bench.spinner``."""

import json
import sys
import threading


class Spinner:
    """A thread of this process that spins while it is on."""

    def __init__(self) -> None:
        self._on = threading.Event()
        self._thread: threading.Thread | None = None

    def turn(self, on: bool) -> None:
        """Spin, or rest; returns once the thread does so."""
        if on == self._on.is_set():
            return
        if on:
            self._on.set()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        elif self._thread is not None:
            self._on.clear()
            self._thread.join()

    def _run(self) -> None:
        while self._on.is_set():
            pass


def main() -> None:
    """Turn as each line says, until the input ends."""
    spinner = Spinner()
    for line in sys.stdin:
        spinner.turn(json.loads(line)["on"])
        sys.stdout.write("{}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
