"""``kvferry bench idle``: what two connected workers cost while nothing is to be done."""

import time
from collections.abc import Mapping

from kvferry.bench.pair import Pair, workers
from kvferry.bench.pairings import Pairing

_BLOCKS = 64
_BLOCK_BYTES = 64 << 10


def measure(pairing: Pairing, seconds: float) -> dict[str, float]:
    """Connect two workers by one hand-off, leave them alone, and take their CPU time.

    Returns:
        Share of one core by role: 0.01 = 1 %.
    """
    with workers(pairing, blocks=_BLOCKS, block_bytes=_BLOCK_BYTES) as sides:
        Pair(sides).hand_off(_BLOCKS)
        before = {role: side.ask("cpu_seconds") for role, side in sides.by_role.items()}
        time.sleep(seconds)
        after = {role: side.ask("cpu_seconds") for role, side in sides.by_role.items()}
    return {role: _share(before[role], after[role]) for role in before}


def _share(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return (after["cpu"] - before["cpu"]) / (after["at"] - before["at"])
