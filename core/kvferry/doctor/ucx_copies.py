"""Which copies of UCX are on this machine, found without loading any: two in one process crash it at exit."""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.doctor.findings import Area, Finding, Severity

_LIBRARY = re.compile(r"libuc[pst][-.\w]*\.so[.\d]*")
_PATTERNS = ("*.libs/libucp*.so*", "*/libucp*.so*", "*/lib/libucp*.so*", "*/lib64/libucp*.so*")
_SYSTEM = "the system"
_LDCONFIG = ("ldconfig", "/sbin/ldconfig")
_LDCONFIG_SECONDS = 5
RAPIDS = frozenset({"ucxx", "ucp", "libucxx"})
"""Top-level modules of RAPIDS that load a UCX as they are imported."""
NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")


@dataclass(frozen=True, slots=True)
class Copy:
    """One UCX."""

    owner: str
    """``nixl_cu12``, ``libucx``, ``the system``: what brings it."""
    folder: str
    is_in_a_wheel: bool = False


def find_copies(paths: Iterable[str], environ: Mapping[str, str]) -> list[Copy]:
    """Find them in wheels on the path, in ``LD_LIBRARY_PATH``, and where the system's loader looks."""
    wheels = (file for path in dict.fromkeys(paths) for file in _files_in(Path(path or ".")))
    named = (Path(folder) for folder in _folders(environ) if _has_ucx(Path(folder)))
    copies = [
        *(Copy(_owner(file), str(file.parent), is_in_a_wheel=True) for file in wheels),
        *(Copy("LD_LIBRARY_PATH", str(folder)) for folder in named),
        *(Copy(_SYSTEM, str(Path(file).parent)) for file in _known_to_the_loader()),
    ]
    return list({copy.folder: copy for copy in reversed(copies)}.values())[::-1]


def loaded_copies(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the file of every libucp that this process has mapped."""
    with suppress(OSError):
        files = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/libucp" in line}
        return sorted(file for file in files if _LIBRARY.fullmatch(os.path.basename(file)))
    return []


def copies_findings(
    copies: Sequence[Copy], environ: Mapping[str, str], imported_by: Mapping[str, frozenset[str]]
) -> Iterator[Finding]:
    """Say where a process would get two.

    Args:
        copies: from ``find_copies``.
        environ: the environment.
        imported_by: plugin → the top-level modules that its import brings in.
    """
    yield from _preloaded(environ)
    named = [copy.folder for copy in copies if copy.owner == "LD_LIBRARY_PATH"]
    if named:
        yield _finding(
            Severity.WARNING,
            "LD_LIBRARY_PATH",
            f"holds another UCX: {', '.join(named)}",
            cause="a wheel's libucp then gets the other one's libuct and libucs, or a process gets both",
            fix="take it out for kvferry's processes: the wheels bring their own",
        )
    for plugin, modules in sorted(imported_by.items()):
        if brought := sorted(modules & RAPIDS):
            yield _imported(plugin, brought)
    if len(copies) > 1:
        listed = ", ".join(copy.owner if copy.is_in_a_wheel else f"{copy.owner} ({copy.folder})" for copy in copies)
        yield _finding(
            Severity.INFO,
            "UCX",
            f"is here {len(copies)} times: {listed}",
            cause="by design: a process loads one transport's library, and that library's own UCX",
        )


def version_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the versions of NIXL's distributions: the first names one of the others, by the GPU that is here."""
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield _finding(
            Severity.WARNING,
            "nixl",
            f"is installed in versions that differ: {listed}",
            cause="which of them runs depends on the CUDA that torch has",
            fix=f"pip install --upgrade {' '.join(versions)}",
        )


def nixl_versions() -> dict[str, str]:
    """Return NIXL's distributions that are installed, with their versions."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in NIXL_DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _imported(plugin: str, modules: Sequence[str]) -> Finding:
    return Finding(
        Area.LIBRARIES,
        Severity.WARNING,
        plugin,
        f"imports {', '.join(modules)}, and with it a UCX, when it is imported",
        cause="every process that loads plugins has that UCX, and a backend's own beside it: it crashes at exit",
        fix=f"import inside the hook that needs it; until then: kvferry plugins disable {plugin}",
        plugin=plugin,
    )


def _preloaded(environ: Mapping[str, str]) -> Iterator[Finding]:
    entries = re.split(r"[ :]+", environ.get("LD_PRELOAD", ""))
    preloaded = [entry for entry in entries if _LIBRARY.fullmatch(os.path.basename(entry))]
    if preloaded:
        yield _finding(
            Severity.WARNING,
            "LD_PRELOAD",
            f"loads {', '.join(preloaded)} into every process",
            cause="a backend loads its own UCX beside it: two in one process crash it at exit",
            fix="unset it for kvferry's processes",
        )


def _files_in(path: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (file for pattern in _PATTERNS for file in path.glob(pattern))


def _owner(file: Path) -> str:
    folder = file.parent if file.parent.name not in ("lib", "lib64") else file.parent.parent
    return folder.name.removesuffix(".libs")


def _folders(environ: Mapping[str, str]) -> list[str]:
    return [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _has_ucx(folder: Path) -> bool:
    try:
        return any(_LIBRARY.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def _known_to_the_loader() -> list[str]:
    for command in _LDCONFIG:
        with suppress(OSError, subprocess.SubprocessError):
            listing = subprocess.run(
                [command, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_SECONDS, check=True
            ).stdout
            return [line.partition(" => ")[2].strip() for line in listing.splitlines() if "libucp.so" in line]
    return []


def _finding(severity: Severity, subject: str, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(Area.LIBRARIES, severity, subject, what, cause, fix)
