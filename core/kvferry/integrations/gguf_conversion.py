"""A GGUF file → a folder with safetensors, converted once and kept."""

import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.integrations.checkpoints import Progress
from kvferry_plugins.errors import ConfigError

_FORMAT = 1
"""Grows when a conversion would come out differently."""
_SAMPLE = 1 << 20


def convert_once(parts: Sequence[Path], file_name: str, folder: Path, progress: Progress) -> Path:
    """Convert a GGUF file, given whole or in parts, unless that was done before; float32, since that loses nothing.

    Of several processes one converts and the others wait; a conversion that dies leaves nothing that counts.

    Args:
        parts: the file's parts, in order.
        file_name: what the assembled file is called.
        folder: where converted models are kept.
        progress: told what is going on.

    Raises:
        ConfigError: the file is no model that transformers can read, or ``folder`` cannot be written.
    """
    target = converted_folder(parts, file_name, folder)
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock"), progress):
            if not target.is_dir():
                _convert_into(target, parts, file_name, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot convert {file_name} into {folder}: {error}; set XDG_CACHE_HOME to a folder with room",
            setting="model",
        ) from error
    return target


def converted_folder(parts: Sequence[Path], file_name: str, folder: Path) -> Path:
    """Where ``convert_once`` puts the result, whether or not it is there yet."""
    return folder / f"{Path(file_name).stem}-{_digest(parts)}"


def _digest(parts: Sequence[Path]) -> str:
    """Digest of sizes and samples: enough to tell two models apart, quick enough to be asked at every start."""
    digest = hashlib.sha256(f"{_FORMAT}".encode())
    for part in parts:
        size = part.stat().st_size
        digest.update(str(size).encode())
        with part.open("rb") as file:
            for offset in (0, size // 3, 2 * size // 3, max(0, size - _SAMPLE)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts this model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path, parts: Sequence[Path], file_name: str, progress: Progress) -> None:
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with _assembled(parts, unfinished.with_suffix(".gguf"), progress) as gguf_file:
            _convert(gguf_file, unfinished, file_name, progress)
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _assembled(parts: Sequence[Path], whole: Path, progress: Progress) -> Iterator[Path]:
    if len(parts) == 1:
        yield parts[0]
        return
    try:
        with whole.open("wb") as out:
            for number, part in enumerate(parts):
                progress("assembling the model file", number / len(parts))
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        yield whole
    finally:
        whole.unlink(missing_ok=True)


def _convert(gguf_file: Path, folder: Path, file_name: str, progress: Progress) -> None:
    try:
        with _one_reader():
            model_config, tokenizer = _read_description(gguf_file, progress)
            tensors = _read_tensors(gguf_file, model_config, progress)
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{file_name} is no GGUF model that transformers can read: {error or type(error).__name__}", setting="model"
        ) from error
    progress("writing safetensors", None)
    _write(folder, model_config, tokenizer, tensors)


@contextmanager
def _one_reader() -> Iterator[None]:
    """Have a file parsed once, not for each of configuration, tokenizer and weights: Gemma's vocabulary takes 15 s."""
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(original)
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _read_description(gguf_file: Path, progress: Progress) -> tuple[Any, Any]:
    import transformers

    progress("reading the model's configuration", None)
    config = transformers.AutoConfig.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    progress("reading the tokenizer", None)
    return config, transformers.AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)


def _read_tensors(gguf_file: Path, config: Any, progress: Progress) -> dict[str, Any]:
    # `from_pretrained(gguf_file=…)` would do this too, but insists on accelerate, which it does not use here.
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader

    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(skeleton).__name__]
    config.dtype = "float32"
    progress("reading the weights", None)
    with _progress_bar_replaced(reader, progress):
        read = reader.load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=skeleton)
    return {name: tensor.contiguous() for name, tensor in read["tensors"].items()}


@contextmanager
def _progress_bar_replaced(reader: Any, progress: Progress) -> Iterator[None]:
    """Have transformers report to us, instead of drawing a bar into a worker's log."""

    def report(tensors: Sequence[Any], **_: object) -> Iterable[Any]:
        for number, tensor in enumerate(tensors):
            progress("converting the weights", number / len(tensors))
            yield tensor

    original = getattr(reader, "tqdm", None)
    reader.tqdm = report
    try:
        yield
    finally:
        reader.tqdm = original


def _write(folder: Path, config: Any, tokenizer: Any, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
