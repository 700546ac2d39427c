"""Load a model and its tokenizer from what the user named."""

import inspect
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry.integrations.checkpoints import Progress, find_checkpoint, no_progress
from kvferry.integrations.model_identity import model_identity
from kvferry.integrations.transformers.agreement import require_same_layers
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import ModelGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.integrations.transformers.state_layers import StateShapes


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model, ready to run."""

    model: Any
    """The ``transformers`` model, in evaluation mode."""
    tokenizer: Any
    path: Path
    """Of the checkpoint's folder, after any conversion."""
    geometry: ModelGeometry
    """In the dtype that it was loaded with."""
    device: str

    @cached_property
    def identity(self) -> dict[str, str]:
        """What two workers compare: ``architecture``, ``config`` and ``weights``."""
        return model_identity(self.path)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        found = self.model.generation_config.eos_token_id
        return frozenset([found] if isinstance(found, int) else found or ())

    @cached_property
    def vocabulary_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @cached_property
    def max_tokens(self) -> int | None:
        """Positions that the model was made for, or None if it does not say."""
        found = getattr(self.model.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @cached_property
    def state_shapes(self) -> "Mapping[int, StateShapes]":
        """Layer → how its state looks, for the layers that keep one. Raises ConfigError."""
        shapes = {layer: self.geometry.shape(layer) for layer in range(self.geometry.num_layers)}
        states = {layer: shape for layer, shape in shapes.items() if shape.kind == "state"}
        if not states:
            return {}
        from kvferry.integrations.transformers.state_layers import find_state_shapes

        return find_state_shapes(self.model, self.cache_argument, states)

    @cached_property
    def cache_argument(self) -> str:
        """What ``forward`` calls its cache: ``cache`` in 5.24, ``past_key_values`` in releases before the renaming."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"


def load_model(
    model: str | os.PathLike[str],
    dtype: str = "float32",
    *,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> LoadedModel:
    """Load a model; never from the network.

    Args:
        model: a folder with safetensors, a ``.gguf`` file, or a name such as ``smollm2``.
        dtype: torch's name without the module, or ``auto`` = the checkpoint's.
        device: ``cpu`` or ``cuda:N``.
        progress: told while a file is converted or loaded.

    Raises:
        ConfigError: not there, not installed, damaged, or not loadable by transformers.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _require_transformers()
    folder = find_checkpoint(model, progress)
    spec = load_model_spec(folder)
    geometry = model_geometry(spec.pretrained_config or {}, dtype)
    progress("loading the model", None)
    network = _load_network(folder, geometry.dtype, device)
    require_same_layers(network, geometry, folder)
    return LoadedModel(network, _load_tokenizer(folder), folder, geometry, device)


def _require_transformers() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "serving a model needs transformers, which is not installed here; pip install 'kvferry[serve]'",
            setting="model",
        ) from error
    transformers.utils.logging.disable_progress_bar()


def _load_network(folder: Path, dtype: str, device: str) -> Any:
    import torch
    import transformers

    try:
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
        network.to(device)
    except Exception as error:
        raise ConfigError(f"transformers cannot load the checkpoint {folder}: {error}", setting="model") from error
    if report["missing_keys"]:
        raise ConfigError(f"the checkpoint {folder} lacks weights: {sorted(report['missing_keys'])}", setting="model")
    return network.eval()


def _load_tokenizer(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ConfigError(f"transformers cannot load the tokenizer of {folder}: {error}", setting="model") from error
