"""The demo's result, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.demo.router import Answered
from kvferry_plugins.types import Plan, ScheduleStyle


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's answer beside aggregated decoding's."""

    answered: Answered
    aggregated_token_ids: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether both are the same, token for token."""
        return self.answered.output_token_ids == self.aggregated_token_ids

    @property
    def gigabytes_per_second(self) -> float | None:
        """Bytes over the whole hand-off; None where nothing travelled, or the prefill's time is in it."""
        answered = self.answered
        if not answered.nbytes or answered.beside_prefill:
            return None
        return answered.nbytes / answered.handoff_seconds / 1e9


def plain_results(results: Sequence[Compared]) -> list[dict[str, Any]]:
    """Describe the results for ``--json``."""
    return [
        {
            "prompt": result.answered.prompt,
            "text": result.answered.text,
            "prompt_tokens": len(result.answered.prompt_token_ids),
            "output_tokens": len(result.answered.output_token_ids),
            "output_token_ids": list(result.answered.output_token_ids),
            "aggregated_token_ids": list(result.aggregated_token_ids),
            "cached_tokens": result.answered.cached_tokens,
            "bytes": result.answered.nbytes,
            "blocks": result.answered.blocks,
            "handoff_ms": result.answered.handoff_seconds * 1000,
            "gigabytes_per_second": result.gigabytes_per_second,
            "time_to_first_token_ms": result.answered.seconds_to_first_token * 1000,
            "equal": result.equal,
        }
        for result in results
    ]


def used(plan: Plan, style: ScheduleStyle) -> dict[str, Any]:
    """What the results were made with, beyond the model."""
    cache, transceiver = plan.effective["kv_cache_config"], plan.effective["cache_transceiver_config"]
    return {
        "kv_cache_manager": plan.manager,
        "runtime": plan.runtime,
        "backend": plan.backend,
        "enable_block_reuse": cache["enable_block_reuse"],
        "schedule_style": style.value,
        "enable_pipelined_transfer": transceiver["enable_pipelined_transfer"],
    }


def used_line(model: str, plan: Plan, style: ScheduleStyle) -> str:
    """The same in one line."""
    how = used(plan, style)
    reuse = "on" if how["enable_block_reuse"] else "off"
    pipelined = "pipelined" if how["enable_pipelined_transfer"] else "not pipelined"
    transceiver = f"{how['runtime']} on {how['backend']}"
    schedule = how["schedule_style"].replace("_", "-")
    return f"{model} · manager {plan.manager} · {transceiver} · block reuse {reuse} · {schedule} · {pipelined}"


HEADINGS = ("", "prompt", "reused", "output", "bytes", "hand-off ms", "GB/s", "first token ms", "equal")
"""Prompt, reused and output count tokens; reused are those that the generation worker had already."""


def print_results(results: Sequence[Compared]) -> None:
    """Print one line a prompt."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for number, result in enumerate(results, 1):
        table.add_row(str(number), *_cells(result))
    Console(soft_wrap=False).print(table)


def _cells(result: Compared) -> tuple[str, ...]:
    answered, rate = result.answered, result.gigabytes_per_second
    return (
        f"{len(answered.prompt_token_ids):,}",
        f"{answered.cached_tokens:,}",
        f"{len(answered.output_token_ids):,}",
        f"{answered.nbytes:,}",
        f"{answered.handoff_seconds * 1000:.1f}",
        f"{rate:.2f}" if rate is not None else "–",
        f"{answered.seconds_to_first_token * 1000:.0f}",
        "yes" if result.equal else "NO",
    )
