"""Where a module's package lies, told without importing it or anything above it."""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModuleFiles:
    """A package, or a module that is one file."""

    folder: Path
    """What its files are named under."""
    files: tuple[Path, ...]
    """Sorted; without what Python compiles and what is hidden."""
    origin: Path | None
    """What an import runs first; None = a folder without ``__init__``."""


def find_module(module: str, folders: Iterable[str]) -> ModuleFiles | None:
    """Find the outermost package of a module that is no namespace, where an import would; else in these folders."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    spec = _on_the_path(parts[0]) or PathFinder.find_spec(parts[0], list(folders))
    for number in range(2, len(parts) + 1):
        if spec is None or not _is_namespace(spec):
            break
        spec = PathFinder.find_spec(".".join(parts[:number]), spec.submodule_search_locations)
    return _files(spec) if spec is not None else None


def _on_the_path(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except Exception:  # finders are strangers' code
        return None


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None and not spec.has_location


def _files(spec: ModuleSpec) -> ModuleFiles | None:
    origin = None
    if _is_namespace(spec):  # to the very end: the module itself is a folder without __init__
        roots = [Path(os.path.abspath(each)) for each in spec.submodule_search_locations or ()]
    elif not spec.has_location or not spec.origin:
        return None
    else:
        origin = Path(os.path.abspath(spec.origin))
        roots = [origin.parent] if spec.submodule_search_locations is not None else [origin]
    if not roots:
        return None
    base = roots[0]
    for _ in spec.name.split("."):
        base = base.parent
    found = (path for root in roots for path in _below(root) if path.is_relative_to(base))
    return ModuleFiles(base, tuple(sorted(found)), origin)


def _below(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        yield from (Path(folder, name) for name in names if not _is_noise(name))


def _is_noise(name: str) -> bool:
    return name.startswith(".") or name.endswith((".pyc", ".pyo", "~"))
