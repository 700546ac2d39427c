"""``kvferry bench transfer --chart``: GB/s over block counts, a panel for each pairing."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvferry.bench.measurement import Measurement, Series
from kvferry.registry.availability import missing_modules
from kvferry_plugins.errors import ConfigError, KvferryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'kvferry[bench]'"

FORMATS = (".png", ".svg")

_COLUMNS = 3
_PANEL = (5.6, 5.2)
"""Inches."""
_TITLE = 56
"""Characters of the title that fit over a panel."""

_OURS = {"kvferry, in order": "tab:blue", "kvferry, shuffled": "tab:orange"}
_RAW = ("tab:green", "tab:olive", "tab:cyan", "tab:purple", "tab:brown", "tab:pink")


def require_chart(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn or written.

    Raises:
        ConfigError: the file's format or folder is none.
        KvferryError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{str(path)!r} is no chart's name; write FILE.png or FILE.svg", setting="--chart")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {str(path.absolute().parent)!r} for the chart", setting="--chart")
    if missing_modules(("matplotlib",)):
        raise KvferryError(f"--chart needs matplotlib, not installed here; {INSTALL}")


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """Write the chart, ``.png`` or ``.svg``."""
    from matplotlib.figure import Figure

    panels = [list(group) for _, group in groupby(measurements, key=lambda found: found.plan.pairing)]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    figure.suptitle(fill(_title(measurements[0]), _TITLE * columns))
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    axes[0, 0].set_ylim(bottom=0)  # of all, and only now that every line is there
    for unused in axes.flat[len(panels) :]:
        unused.remove()
    figure.savefig(path, dpi=150)


def _title(found: Measurement) -> str:
    plan = found.plan
    size = f"{plan.nbytes / (1 << 20):g} MiB"
    return f"One hand-off of {size} between two processes (raw tools: one contiguous write), medians of {plan.rounds}"


def _draw_panel(axis: "Axes", panel: Sequence[Measurement]) -> None:
    for label, color in _OURS.items():
        _line(axis, panel, [_ours(found, label) for found in panel], label, color=color, marker="o", linewidth=2)
    names: list[tuple[str | None, str]] = [(None, way) for way in panel[0].raw]
    names += [(name, way) for name, ways in panel[0].against.items() for way in ways]
    for (name, way), color in zip(names, _RAW * len(names), strict=False):
        chosen = [(found.raw if name is None else found.against[name])[way] for found in panel]
        label = f"raw{f' {name}' if name else ''}, {way}"
        _line(axis, panel, chosen, label, color=color, marker=".", linestyle="--")
    _line(axis, panel, [found.memcpy for found in panel], "memcpy", color="black", marker=".", linestyle=":")
    pieces = [found.memcpy_of_pieces for found in panel]
    _line(axis, panel, pieces, "memcpy, shuffled", color="dimgray", marker=".", linestyle="-.")
    _finish(axis, panel)


def _ours(found: Measurement, label: str) -> Series:
    return found.in_order if label.endswith("in order") else found.shuffled


def _line(axis: "Axes", panel: Sequence[Measurement], chosen: Sequence[Series], label: str, **style: Any) -> None:
    points = sorted((found.plan.blocks, found.rate(series)) for found, series in zip(panel, chosen, strict=True))
    counts, rates = zip(*points, strict=True)
    axis.plot(counts, rates, label=label, **style)


def _finish(axis: "Axes", panel: Sequence[Measurement]) -> None:
    counts = sorted({found.plan.blocks for found in panel})
    axis.set_title(str(panel[0].plan.pairing))
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("blocks")
    axis.set_ylabel("GB/s (10⁹ bytes a second)")
    axis.grid(alpha=0.3)
    axis.tick_params(labelleft=True)
    axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
