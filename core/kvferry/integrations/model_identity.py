"""Whether two workers run the same model: digests of its configuration and of its weights."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvferry.checkpoint import load_model_spec
from kvferry.integrations.checkpoints import cache_folder, weight_files
from kvferry_plugins.errors import ConfigError

_IGNORED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash"})
"""What differs between two copies of one model: paths, versions, and the dtype that it is loaded with."""
_SAMPLES, _SAMPLE_BYTES = 8, 1024


def model_identity(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Identify a checkpoint: a fine-tune is another model, a copied or re-sharded folder is not.

    The weights' digest covers every tensor's name, dtype, shape and samples of its bytes. It is kept in
    ``$XDG_CACHE_HOME/kvferry/identities`` for as long as the files' names, sizes and times stay.

    Returns:
        ``architecture``, ``config`` and ``weights``, the latter two as hexadecimal digests.

    Raises:
        ConfigError: the folder is no checkpoint with safetensors, or they are damaged.
    """
    spec = load_model_spec(folder)
    return {
        "architecture": spec.architecture or "",
        "config": config_digest(spec.pretrained_config or {}),
        "weights": _cached_weights_digest(Path(folder)),
    }


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest a ``config.json``, without paths, versions and load dtype."""
    return hashlib.sha256(json.dumps(_relevant(config), sort_keys=True).encode()).hexdigest()


def _relevant(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _relevant(item) for key, item in value.items() if key not in _IGNORED}
    if isinstance(value, list | tuple):
        return [_relevant(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def weights_digest(folder: Path) -> str:
    """Digest the weights of a checkpoint, whatever files they are spread over. Raises ConfigError."""
    digest = hashlib.sha256()
    tensors = sorted((tensor for file in weight_files(folder) for tensor in _tensors(file)), key=lambda t: t.name)
    files: dict[Path, BinaryIO] = {}
    try:
        for tensor in tensors:
            digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.nbytes}\0".encode())
            if tensor.file not in files:
                files[tensor.file] = tensor.file.open("rb")
            for sample in _samples(files[tensor.file], tensor):
                digest.update(sample)
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


def _tensors(file: Path) -> Iterator[_Tensor]:
    """Read a safetensors header: 8 bytes of length, then JSON. Raises ConfigError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > size:
                raise _damaged(file, f"its header should have {length} bytes, but the whole file has {size}")
            header = json.loads(stream.read(length))
        tensors = [_tensor(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise _damaged(file, "its header is not UTF-8") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"{type(error).__name__}: {str(error)[:200]}") from error
    end = max((tensor.start + tensor.nbytes for tensor in tensors), default=0)
    if end > size:
        raise _damaged(file, f"its tensors should end at byte {end}, but it has {size}")
    yield from tensors


def _tensor(file: Path, name: str, entry: Mapping[str, Any], data: int) -> _Tensor:
    start, end = entry["data_offsets"]
    return _Tensor(name, entry["dtype"], tuple(entry["shape"]), file, data + start, end - start)


def _damaged(file: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{file} is no safetensors file, or damaged: {reason}; copy or download it again", setting="model"
    )


def _samples(stream: BinaryIO, tensor: _Tensor) -> Iterator[bytes]:
    """Samples spread evenly over a tensor; all of a small one."""
    if tensor.nbytes <= _SAMPLES * _SAMPLE_BYTES:
        stream.seek(tensor.start)
        yield stream.read(tensor.nbytes)
        return
    for number in range(_SAMPLES):
        stream.seek(tensor.start + number * (tensor.nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
        yield stream.read(_SAMPLE_BYTES)


def _cached_weights_digest(folder: Path) -> str:
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weight_files(folder)]
    place = cache_folder() / "identities" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        kept = json.loads(place.read_text())
        if kept["stamp"] == stamp:
            return str(kept["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = weights_digest(folder)
    _keep(place, {"stamp": stamp, "weights": digest})
    return digest


def _keep(place: Path, value: dict[str, Any]) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(value))
        os.replace(unfinished, place)
    except OSError:  # nothing but time is lost
        return
