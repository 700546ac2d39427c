"""Which files a distribution with plugins consists of, and one digest of what is in them; nothing is imported."""

import csv
import hashlib
import json
import os
import stat
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from importlib_metadata import Distribution

from kvferry.registry.module_files import ModuleFiles, find_module
from kvferry_plugins import PROJECT_NAME

_OF_THE_INSTALLER = {
    *("INSTALLER", "RECORD", "RECORD.jws", "RECORD.p7s", "REQUESTED", "direct_url.json"),
    *("uv_build.json", "uv_cache.json"),
}
"""In the metadata's folder: how and from where it was installed, not what."""
_COMPILED = (".pyc", ".pyo")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PluginFiles:
    """What is on disk of one distribution, or of one module that no distribution brought."""

    digest: str
    """``sha256:`` and 64 hexadecimal digits, of names and contents."""
    count: int
    editable: bool = False
    """Whether there are sources that its metadata does not record: an editable install, or one without a RECORD."""
    altered: tuple[str, ...] = ()
    """Recorded, and not as the record says: changed since the installation."""
    missing: tuple[str, ...] = ()
    """Recorded, or named by an entry point, and not there or not readable."""


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    """Under the library's folder, with slashes; what lies beside that folder without the leading ``../``."""
    path: Path
    recorded: str = ""
    """``sha256=…``, as the record spells it."""
    is_script: bool = False


def files_of_distribution(distribution: Distribution) -> PluginFiles:
    """Read every file that the distribution records, and the packages of its entry points where it does not."""
    rows = _rows(distribution)
    editable = rows is None or _is_editable(distribution)
    recorded = [each for each in _recorded(distribution, rows or ()) if not (editable and _is_link(each.name))]
    known = {_real(each.path) for each in recorded}
    folders = [str(distribution.locate_file("")), *_linked_folders(distribution, rows or ())]
    # Whatever a wheel has is in its record; sources that no record has are found by all that they are entered by.
    points = [point for point in distribution.entry_points if editable or point.group == PROJECT_NAME]
    found = {module: find_module(module, folders) for module in sorted({module_of(point.value) for point in points})}
    lost = [f"module {module}" for module, where in found.items() if where is None]
    sources = [each for where in found.values() if where is not None for each in _sources(where, known)]
    if rows is None:
        sources += list(_metadata(distribution))
    return _read([*recorded, *sources], lost, editable=editable or bool(sources))


def module_of(entry_point: str) -> str:
    """Take the module's name out of ``module:attribute [extras]``."""
    return entry_point.partition(":")[0].partition("[")[0].strip()


def files_of_module(module: str) -> PluginFiles | None:
    """Read the package of a module that no distribution brought; None where there is none on the path."""
    where = find_module(module, ())
    return None if where is None else _read(_sources(where, frozenset()), (), editable=True)


# --- which ----------------------------------------------------------------------------------------------------------


def _rows(distribution: Distribution) -> list[list[str]] | None:
    """The record's lines, or None where there is none that can be read."""
    with suppress(OSError, ValueError, csv.Error):
        text = distribution.read_text("RECORD")
        if text is not None:
            return [row for row in csv.reader(text.splitlines()) if row and row[0]]
    return None


def _is_editable(distribution: Distribution) -> bool:
    with suppress(OSError, ValueError, AttributeError):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    return False


def _recorded(distribution: Distribution, rows: Iterable[list[str]]) -> Iterator[_File]:
    commands = {point.name for point in distribution.entry_points if point.group in ("console_scripts", "gui_scripts")}
    for row in rows:
        path = PurePosixPath(row[0])
        outside = path.parts[:1] == ("..",)
        # A command is written by the installer, with its own interpreter's path in it.
        if _is_the_installers(path) or (outside and path.name.removesuffix(".exe") in commands):
            continue
        name = "/".join(part for part in path.parts if part != "..")
        where = Path(os.path.abspath(str(distribution.locate_file(row[0]))))
        yield _File(name, where, row[1] if len(row) > 1 else "", is_script=outside)


def _is_the_installers(path: PurePosixPath) -> bool:
    in_metadata = path.parent.name.endswith((".dist-info", ".egg-info"))
    return (in_metadata and path.name in _OF_THE_INSTALLER) or _is_compiled(path)


def _is_compiled(path: PurePosixPath) -> bool:
    return path.suffix in _COMPILED or "__pycache__" in path.parts


def _is_link(name: str) -> bool:
    """Whether a file of an editable install says where the sources are: they count, and not where they are."""
    return "/" not in name and (name.endswith(".pth") or name.startswith("__editable__"))


def _linked_folders(distribution: Distribution, rows: Iterable[list[str]]) -> Iterator[str]:
    for row in rows:
        if "/" not in row[0] and row[0].endswith(".pth"):
            with suppress(OSError, ValueError):
                lines = Path(str(distribution.locate_file(row[0]))).read_text(encoding="utf-8").splitlines()
                yield from (line.strip() for line in lines if os.path.isabs(line.strip()))


def _metadata(distribution: Distribution) -> Iterator[_File]:
    folder = getattr(distribution, "_path", None)
    for name in ("METADATA", "PKG-INFO", "entry_points.txt"):
        if folder is not None and Path(str(folder), name).is_file():
            yield _File(f"{Path(str(folder)).name}/{name}", Path(str(folder), name))


def _sources(where: ModuleFiles, known: AbstractSet[str]) -> Iterator[_File]:
    """The files of a package where an import runs one of which the record knows nothing."""
    run = [where.origin] if where.origin is not None else where.files
    if not any(_real(path) in known for path in run):
        yield from (_File(path.relative_to(where.folder).as_posix(), path) for path in where.files)


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a strange record's strange name
        return str(path)


# --- what is in them ------------------------------------------------------------------------------------------------


def _read(files: Iterable[_File], lost: Iterable[str], *, editable: bool) -> PluginFiles:
    by_name = {each.name: each for each in files}
    digests = {name: _digest(each) for name, each in sorted(by_name.items())}
    whole = hashlib.sha256()
    for name, digest in [*digests.items(), *((name, None) for name in lost)]:
        whole.update(f"{name}\0{digest.hex() if digest else 'missing'}\n".encode(errors="surrogateescape"))
    return PluginFiles(
        f"sha256:{whole.hexdigest()}",
        len(digests),
        editable,
        altered=tuple(name for name, digest in digests.items() if digest and _differs(by_name[name], digest)),
        missing=(*(name for name, digest in digests.items() if digest is None), *lost),
    )


def _digest(file: _File) -> bytes | None:
    """A file's contents, without the line of a script that names an interpreter; None = there is no such file."""
    try:
        if not stat.S_ISREG(file.path.stat().st_mode):
            return None
        digest = hashlib.sha256()
        with file.path.open("rb") as opened:
            if file.is_script and opened.read(2) == b"#!":
                opened.readline()
            else:
                opened.seek(0)
            while data := opened.read(_CHUNK):
                digest.update(data)
    except (OSError, ValueError):
        return None
    return digest.digest()


def _differs(file: _File, digest: bytes) -> bool:
    if file.is_script or not file.recorded.startswith("sha256="):
        return False
    return urlsafe_b64encode(digest).rstrip(b"=").decode() != file.recorded.removeprefix("sha256=")
