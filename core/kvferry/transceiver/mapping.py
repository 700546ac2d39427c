"""Which source rank gives which heads of which layers to which destination rank.

Pure, and from the layouts of both worlds alone, so that every rank computes the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvferry.topology import local_geometry
from kvferry.transceiver.overlap import GroupPair, MissingBlocksError, Overlap, wanted_ordinals
from kvferry.transceiver.pool_copies import HeadRange, PoolPair
from kvferry_plugins.layout import KvLayout, LayerGroup, RoleView

__all__ = ["GeometryError", "MissingBlocksError", "Overlap", "local_geometry", "share", "wanted_ordinals"]


class GeometryError(ValueError):
    """Two layouts between which nothing can be handed over.

    Attributes:
        field: what is to blame, as the handshake calls it.
        values: of the source and of the destination.
    """

    def __init__(self, field: str, message: str, values: tuple[object, object] = (None, None)) -> None:
        super().__init__(message)
        self.field = field
        self.values = values


@dataclass(frozen=True, slots=True)
class _Holding:
    """One rank's (layer, role): where it is, and which of the model's heads."""

    rank: int
    group_index: int
    group: LayerGroup
    pool: int
    view: RoleView
    first_head: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.view.heads)

    @property
    def total_heads(self) -> int:
        """Of this role, over all ranks of its world."""
        group = self.group
        return (group.total_heads or group.kv_heads) * self.view.heads // group.kv_heads


_Held = Mapping[tuple[int, str], Sequence[_Holding]]


def share(sources: Sequence[KvLayout], destinations: Sequence[KvLayout]) -> Mapping[tuple[int, int], Overlap]:
    """Decide who writes what to whom, by the layouts of all ranks on both sides.

    Where several sources hold one head (fewer heads than ranks; MLA's only one), they take turns over the destinations.

    Returns:
        (source rank, destination rank) → what goes there; pairs that exchange nothing are missing.

    Raises:
        GeometryError: naming the field, where a destination would be left without something.
    """
    _require_one_dtype(sources, destinations)
    held, wanting = _index(sources), _index(destinations)
    ranges: dict[tuple[int, int], dict[tuple[int, int], dict[tuple[int, int], list[HeadRange]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for name, wanted in wanting.items():
        for there in wanted:
            for here, first, heads in _assign(name, held.get(name, ()), there, wanted):
                _require_alike(here, there)
                part = HeadRange(here.view, first - here.first_head, there.view, first - there.first_head, heads)
                ranks, groups = (here.rank, there.rank), (here.group_index, there.group_index)
                ranges[ranks][groups][here.pool, there.pool].append(part)
    return {
        ranks: _overlap(sources[ranks[0]], destinations[ranks[1]], of_groups) for ranks, of_groups in ranges.items()
    }


def _overlap(
    source: KvLayout,
    destination: KvLayout,
    of_groups: Mapping[tuple[int, int], Mapping[tuple[int, int], Sequence[HeadRange]]],
) -> Overlap:
    pairs = [
        GroupPair(
            src_index=src,
            src=source.groups[src],
            dst_index=dst,
            dst=destination.groups[dst],
            pools=tuple(
                PoolPair(source.pools[here], destination.pools[there], tuple(of_pools[here, there]))
                for here, there in sorted(of_pools)
            ),
        )
        for (src, dst), of_pools in sorted(of_groups.items())
    ]
    return Overlap(tuple(pairs), destination.groups)


def _index(layouts: Sequence[KvLayout]) -> dict[tuple[int, str], list[_Holding]]:
    """Each (layer, role), and the ranks that hold heads of it."""
    found: dict[tuple[int, str], list[_Holding]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for holding in _holdings(rank, layout):
            found[holding.view.layer, holding.view.role].append(holding)
    return found


def _holdings(rank: int, layout: KvLayout) -> Iterator[_Holding]:
    for index, group in enumerate(layout.groups):
        layers = frozenset(group.layers)
        for pool in group.pools:
            for view in layout.pools[pool].views:
                if view.layer in layers:
                    yield _Holding(rank, index, group, pool, view, _first_head(group, view))


def _first_head(group: LayerGroup, view: RoleView) -> int:
    """A role with other heads than its group's (of a state, say) is split over ranks in the same proportion."""
    first, remainder = divmod(group.head_start * view.heads, group.kv_heads)
    if remainder:
        raise GeometryError(
            "kv_heads",
            f"layer {view.layer}'s {view.role} has {view.heads} heads on a rank whose heads begin with "
            f"{group.head_start} and are {group.kv_heads}",
        )
    return first


def _assign(
    name: tuple[int, str], held: Sequence[_Holding], there: _Holding, wanted: Sequence[_Holding]
) -> Iterator[tuple[_Holding, int, int]]:
    """Cut a destination's heads by the source that gives them: (source, first head, heads)."""
    layer, role = name
    if not held:
        raise GeometryError("layers", f"no context rank holds layer {layer}'s {role}")
    _require_as_many_heads(held, there)
    elected = [(head, _elect(head, held, there, wanted)) for head in there.heads]
    for index, heads in groupby(elected, key=lambda pair: pair[1]):
        numbers = [head for head, _ in heads]
        if index is None:
            raise GeometryError("kv_heads", f"no context rank holds head {numbers[0]} of layer {layer}'s {role}")
        yield held[index], numbers[0], len(numbers)


def _elect(head: int, held: Sequence[_Holding], there: _Holding, wanted: Sequence[_Holding]) -> int | None:
    """Which of the sources gives a head: its holders take turns over the destinations that want it."""
    candidates = [index for index, holding in enumerate(held) if head in holding.heads]
    if not candidates:
        return None
    turn = sum(1 for other in wanted if other.rank < there.rank and head in other.heads)
    return candidates[turn % len(candidates)]


# --- what cannot be mapped ---------------------------------------------------------------------------------------


def _require_one_dtype(sources: Sequence[KvLayout], destinations: Sequence[KvLayout]) -> None:
    dtypes = {layout.dtype for layout in (*sources, *destinations)}
    if len(dtypes) > 1:
        raise GeometryError("dtype", f"the ranks hold {' and '.join(sorted(dtypes))}")


def _require_as_many_heads(held: Sequence[_Holding], there: _Holding) -> None:
    """Before heads are counted one by one: a stranger may say any number."""
    what = f"layer {there.view.layer}'s {there.view.role}"
    for holding in (*held, there):
        if holding.heads.stop > holding.total_heads:
            message = f"{what}: heads {holding.heads.start} … {holding.heads.stop - 1} of {holding.total_heads}"
            raise GeometryError("kv_heads", message)
        if holding.total_heads != there.total_heads:
            raise GeometryError(
                "kv_heads",
                f"{what} has {holding.total_heads} heads at the context worker, {there.total_heads} at the generation "
                "worker",
                (holding.total_heads, there.total_heads),
            )


def _require_alike(here: _Holding, there: _Holding) -> None:
    what = f"layer {there.view.layer}'s {there.view.role}"
    ours, theirs = here.group, there.group
    problems: Sequence[tuple[str, bool, object, object]] = (
        ("kinds", ours.kind == theirs.kind, ours.kind, theirs.kind),
        ("roles", here.view.row_bytes == there.view.row_bytes, here.view.row_bytes, there.view.row_bytes),
        ("windows", window_serves(ours.window, theirs.window), ours.window, theirs.window),
        ("tokens_per_block", _blocks_fit(here, there), ours.tokens_per_block, theirs.tokens_per_block),
    )
    for name, fits, first, second in problems:
        if not fits:
            message = f"{name} of {what}: {first} at the context worker, {second} at the generation worker"
            raise GeometryError(name, message, (first, second))


def window_serves(source: int | None, destination: int | None) -> bool:
    """Whether a source that keeps so many tokens (None = all) has what such a destination wants."""
    return source is None or (destination is not None and destination <= source)


def blocks_fit(source: int, destination: int) -> bool:
    """Whether blocks of so many tokens can be cut into one another."""
    return source % destination == 0 or destination % source == 0


def _blocks_fit(here: _Holding, there: _Holding) -> bool:
    for holding in (here, there):
        tokens = 1 if holding.group.kind == "state" else holding.group.tokens_per_block
        if holding.view.tokens != tokens:
            raise GeometryError(
                "tokens_per_block",
                f"layer {holding.view.layer}'s {holding.view.role} has {holding.view.tokens} tokens in a block of "
                f"{tokens}",
            )
    if here.group.kind == "state":
        return True
    return blocks_fit(here.group.tokens_per_block, there.group.tokens_per_block)
