"""``kvferry bench idle``: what two connected workers cost while nothing is to be done."""

import time

from kvferry.bench.transfer import Pair, Plan, workers


def measure(backend: str, runtime: str, seconds: float) -> dict[str, float]:
    """Connect two workers by one hand-off, leave them alone, and take their CPU time.

    Returns:
        Share of one core by role: 0.01 = 1 %.
    """
    plan = Plan(backend, runtime, nbytes=64 << 16, blocks=64, rounds=1, seed=0)
    with workers(plan) as (context, generation):
        Pair(plan, context, generation).hand_off(64)
        sides = {"context": context, "generation": generation}
        before = {role: side.ask("cpu_seconds") for role, side in sides.items()}
        time.sleep(seconds)
        after = {role: side.ask("cpu_seconds") for role, side in sides.items()}
    return {
        role: (after[role]["cpu"] - before[role]["cpu"]) / (after[role]["at"] - before[role]["at"]) for role in sides
    }
