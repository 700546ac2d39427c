"""Which token comes next: a pure function of logits, parameters and a counter."""

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen."""

    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability, 0 < top_p ≤ 1."""
    seed: int = 0
    """Any 64-bit integer."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, not {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, not {self.seed!r}")


GREEDY = SamplingParams()


def sample(logits: "torch.Tensor", params: SamplingParams, counter: int) -> int:
    """Choose a token.

    Nothing else has a say, so a request that moves to another worker with its seed and counter goes on as it would
    have here.

    Args:
        logits: ``[vocabulary]``, any float dtype and device.
        params: how.
        counter: tokens that this request has sampled before.
    """
    if params.temperature == 0.0:
        return int(logits.float().argmax())
    probabilities = (logits.double().cpu() / params.temperature).softmax(-1)
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    cumulative = ordered.cumsum(-1)
    kept = int((cumulative - ordered < params.top_p).sum())
    point = uniform(params.seed, counter) * float(cumulative[kept - 1])
    chosen = int((cumulative[:kept] <= point).sum())
    return int(tokens[min(chosen, kept - 1)])


def uniform(seed: int, counter: int) -> float:
    """The number in [0, 1) that belongs to a seed and a counter, on every machine."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, counter), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
