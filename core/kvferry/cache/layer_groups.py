"""Which layers share a life cycle, and what a block of such a group looks like."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvferry.cache.item_bytes import item_bytes
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import LayerGroup, RoleView
from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape

_BLOCKS_PER_WINDOW = 4
"""A window spans at least so many blocks, so that the two it touches in part waste at most half a window."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A layer group and its blocks, before there is memory."""

    group: LayerGroup
    views: tuple[RoleView, ...]
    """One a layer and role, layer by layer."""
    block_stride: int
    """Bytes from one block to the next: without a gap, except where roles of unequal item size must be aligned."""
    dtypes: Mapping[str, str] = field(compare=False)
    """Role → torch's name of its dtype."""

    def describe(self) -> str:
        """``group of 15 layers with a window of 512``, for logs and errors."""
        group = self.group
        kind = {"attention": "full attention", "latent": "latents", "state": "states"}[group.kind]
        if group.window is not None:
            kind = f"a window of {group.window}"
        return f"{len(group.layers)} layers with {kind}"


def group_shapes(geometry: ModelGeometry, tokens_per_block: int) -> tuple[GroupShape, ...]:
    """Put layers of one kind, window, roles and heads together, in the order of their first layers.

    Raises:
        ConfigError: an unknown dtype, or a window of less than one token.
    """
    members: dict[LayerShape, list[int]] = {}
    for position in range(geometry.num_layers):
        members.setdefault(_life_cycle(geometry.shape(position)), []).append(geometry.first_layer + position)
    return tuple(
        _group_shape(shape, tuple(layers), index, tokens_per_block, geometry.dtype)
        for index, (shape, layers) in enumerate(members.items())
    )


def _life_cycle(shape: LayerShape) -> LayerShape:
    if shape.window is not None and shape.window < 1:
        raise ConfigError(
            f"a sliding window must be at least 1 token, not {shape.window}",
            setting="kv_cache_config.max_attention_window",
        )
    if shape.kind != "state":
        return shape
    return LayerShape(shape.roles, "state", None, shape.head_start, shape.total_heads)


def _group_shape(
    shape: LayerShape, layers: tuple[int, ...], pool: int, tokens_per_block: int, dtype: str
) -> GroupShape:
    group = LayerGroup(
        layers=layers,
        pools=(pool,),
        tokens_per_block=_block_tokens(shape.window, tokens_per_block),
        kv_heads=shape.roles[0].heads,
        head_dim=shape.roles[0].width,
        window=shape.window,
        kind=shape.kind,
        head_start=shape.head_start,
        total_heads=shape.total_heads,
    )
    views, end = _dense_views(shape.roles, layers, 1 if shape.kind == "state" else group.tokens_per_block, dtype)
    widest = max(_item_bytes(role, dtype) for role in shape.roles)
    return GroupShape(group, views, _aligned(end, widest), {role.name: role.dtype or dtype for role in shape.roles})


def _block_tokens(window: int | None, tokens_per_block: int) -> int:
    """Cut windows into enough blocks; every size divides ``tokens_per_block``, so that prefixes meet."""
    if window is None:
        return tokens_per_block
    limit = max(1, window // _BLOCKS_PER_WINDOW)
    return next(tokens for tokens in _divisors_downwards(tokens_per_block) if tokens <= limit)


def _divisors_downwards(number: int) -> Iterator[int]:
    return (divisor for divisor in range(number, 0, -1) if number % divisor == 0)


def _dense_views(
    roles: tuple[RoleShape, ...], layers: tuple[int, ...], tokens: int, dtype: str
) -> tuple[tuple[RoleView, ...], int]:
    """Lay out ``[layer][role][head][token][width]``; the views, and where the block's last byte ends."""
    views: list[RoleView] = []
    end = 0
    for layer in layers:
        for role in roles:
            item = _item_bytes(role, dtype)
            offset, row = _aligned(end, item), role.width * item
            views.append(RoleView(layer, role.name, offset, role.heads, tokens * row, tokens, row, row))
            end = offset + role.heads * tokens * row
    return tuple(views), end


def _item_bytes(role: RoleShape, dtype: str) -> int:
    return item_bytes(role.dtype or dtype)


def _aligned(offset: int, nbytes: int) -> int:
    return -(-offset // nbytes) * nbytes
