"""Imports one plugin in a process of its own, asks its hooks, and says what that did beside answering.

Run as ``python -m kvferry_plugins.testing.conformance.import_probe REFERENCE QUESTIONS REPORT``: where the plugin is,
its questions as JSON, and the file that gets the report as JSON: of each stage, aspect → what was found.
"""

import contextlib
import importlib
import json
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

HEAVY: Final = frozenset(
    {
        "cupy",
        "jax",
        "mooncake",
        "mpi4py",
        "nixl",
        "sglang",
        "tensorflow",
        "torch",
        "transformers",
        "ucp",
        "ucxx",
        "vllm",
    }
)
"""Libraries that no plugin may import before it makes something."""

STAGES: Final = ("importing", "asking")
ASPECTS: Final = (
    "heavy libraries",
    "output",
    "environment",
    "processes",
    "threads",
    "files",
    "network",
    "settings of the process",
)

_PROCESSES = frozenset(
    {"os.fork", "os.forkpty", "subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "os.spawn", "pty.spawn"}
)
_NETWORK = frozenset({"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"})
_WRITING = frozenset("wax+")


class Watch:
    """Notes what Python's audit events tell, and compares what was before with what is after."""

    def __init__(self) -> None:
        self._noted: dict[str, list[str]] = {}
        self._on = False
        self._asking = False
        sys.addaudithook(self._hear)
        _hear_of_reads(self._read)
        # A child would go on as a second probe.
        os.register_at_fork(after_in_child=lambda: os._exit(0))

    def stage(self, function: Any, *, asking: bool = False) -> dict[str, list[str]]:
        """Run a function, and return what it did beside, aspect by aspect; while it is asked, reading counts, too."""
        self._noted, before = {}, _state()
        self._on, self._asking = True, asking
        try:
            function()
        finally:
            self._on = False
            after = _state()
        for aspect, changes in _changes(before, after):
            self._noted.setdefault(aspect, []).append(changes)
        return self._noted

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in _PROCESSES:
            self._note("processes", f"started a process ({event} {_short(arguments)})")
        elif event in _NETWORK:
            self._note("network", f"used the network ({event} {_short(arguments)})")
        elif event in ("os.putenv", "os.unsetenv"):  # the value may be there already: whoever asks imported it, too
            self._note("environment", f"changed the environment: {os.fsdecode(arguments[0])}")
        elif event == "os.chdir":
            self._note("settings of the process", f"changed the working folder to {arguments[0]!r}")
        elif event == "open" and _writes(arguments):
            self._note("files", f"opened a file to write: {arguments[0]}")

    def _read(self, name: object) -> None:
        what = f"answers by the environment: it reads {name}"
        if self._on and self._asking and what not in self._noted.get("environment", ()) and not _is_importing():
            self._note("environment", what)

    def _note(self, aspect: str, what: str) -> None:
        self._noted.setdefault(aspect, []).append(what)


def _hear_of_reads(hear: Callable[[object], None]) -> None:
    kind: Any = type(os.environ)
    plain = kind.__getitem__

    def getitem(self: Any, name: Any) -> Any:
        hear(name)
        return plain(self, name)

    kind.__getitem__ = getitem


def _is_importing() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


def _writes(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if not isinstance(path, str) or "__pycache__" in path or path == os.devnull:
        return False
    if isinstance(mode, str):
        return bool(_WRITING & set(mode))
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _state() -> dict[str, Any]:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return {
        "heavy libraries": {name for name in HEAVY if name in sys.modules},
        "output": tuple(os.fstat(number).st_size for number in (1, 2)),
        "threads": _threads(),
        "settings of the process": {
            "sys.path": list(sys.path),
            "signal handlers": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
            "warnings filters": [str(each) for each in warnings.filters],
            "root logger": (logging.root.level, [repr(each) for each in logging.root.handlers]),
            "locale": locale.setlocale(locale.LC_ALL),
            "umask": _umask(),
            "sys.excepthook": repr(sys.excepthook),
            "switch interval": sys.getswitchinterval(),
            "recursion limit": sys.getrecursionlimit(),
        },
    }


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if heavy := after["heavy libraries"] - before["heavy libraries"]:
        found.append(("heavy libraries", f"imported {', '.join(sorted(heavy))}"))
    for number, name in enumerate(("standard output", "standard error")):
        if (nbytes := after["output"][number] - before["output"][number]) > 0:
            found.append(("output", f"wrote {nbytes} bytes to {name}"))
    if threads := after["threads"] - before["threads"]:
        found.append(("threads", f"started a thread: {', '.join(sorted(threads))}"))
    settings = "settings of the process"
    if changed := _differing(before[settings], after[settings]):
        found.append((settings, f"changed {', '.join(changed)}"))
    return found


def _threads() -> set[str]:
    python = {f"{thread.name} ({thread.native_id})" for thread in threading.enumerate()}
    known = {str(thread.native_id) for thread in threading.enumerate()}
    folder = Path("/proc/self/task")
    native = {each.name for each in folder.iterdir()} if folder.is_dir() else known
    return python | {f"native thread {number}" for number in native - known}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _short(arguments: tuple[Any, ...]) -> str:
    text = repr(arguments)
    return text if len(text) <= 120 else text[:117] + "…"


def _ask(plugin: Any, questions: list[list[Any]]) -> None:
    from kvferry_plugins.testing.conformance.questions import frozen, hooks_of

    hooks = hooks_of(plugin)
    for hook, arguments in questions:
        if hook in hooks:
            with contextlib.suppress(Exception, SystemExit):  # what it raises, the suite's other checks tell
                hooks[hook](frozen(arguments))


def main() -> None:
    """Probe, and write the report."""
    reference, questions, report = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    import kvferry_plugins.testing.conformance.questions  # noqa: F401 -- what every plugin needs is no news

    watch, found = Watch(), {}
    module, _, attribute = reference.partition(":")
    found[STAGES[0]] = watch.stage(lambda: importlib.import_module(module))
    plugin: Any = sys.modules[module]
    for name in attribute.split(".") if attribute else ():
        plugin = getattr(plugin, name)
    found[STAGES[1]] = watch.stage(lambda: _ask(plugin, questions), asking=True)
    report.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
