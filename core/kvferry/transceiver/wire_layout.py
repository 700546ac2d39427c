"""``KvLayout`` to and from the wire, with the checks that a stranger's numbers need."""

from kvferry.transceiver.wire import MalformedMessageError, WireGroup, WireLayout, WirePool, WireView
from kvferry_plugins.layout import KvLayout, LayerGroup, Pool, RoleView

MAX_ROWS = 1 << 20
"""Rows (layer, role, head, token) of one block that are listed one by one to compare two layouts."""


def to_wire(layout: KvLayout) -> WireLayout:
    """Pack a layout, addresses and all."""
    return WireLayout(
        dtype=layout.dtype,
        groups=[
            WireGroup(
                layers=list(group.layers),
                pools=list(group.pools),
                tokens_per_block=group.tokens_per_block,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                window=group.window,
                kind=group.kind,
                head_start=group.head_start,
                total_heads=group.total_heads,
            )
            for group in layout.groups
        ],
        pools=[
            WirePool(
                base=pool.base,
                block_stride=pool.block_stride,
                num_blocks=pool.num_blocks,
                views=[_view_to_wire(view) for view in pool.views],
                device=pool.device,
            )
            for pool in layout.pools
        ],
    )


def from_wire(wire: WireLayout) -> KvLayout:
    """Unpack a layout. Raises MalformedMessageError where its parts contradict each other."""
    for group in wire.groups:
        if not group.pools or any(pool >= len(wire.pools) for pool in group.pools):
            raise MalformedMessageError(f"a layer group names pools {group.pools} of {len(wire.pools)}")
    for pool in wire.pools:
        if sum(view.heads * view.tokens for view in pool.views) > MAX_ROWS:
            raise MalformedMessageError(f"a pool's blocks have more than {MAX_ROWS} rows")
        for view in pool.views:
            end = view.offset + (view.heads - 1) * view.head_stride + (view.tokens - 1) * view.token_stride
            if end + view.row_bytes > pool.block_stride:
                raise MalformedMessageError(f"layer {view.layer} {view.role} ends outside its block")
    return KvLayout(
        dtype=wire.dtype,
        groups=tuple(
            LayerGroup(
                layers=tuple(group.layers),
                pools=tuple(group.pools),
                tokens_per_block=group.tokens_per_block,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                window=group.window,
                kind=group.kind,
                head_start=group.head_start,
                total_heads=group.total_heads,
            )
            for group in wire.groups
        ),
        pools=tuple(
            Pool(
                base=pool.base,
                block_stride=pool.block_stride,
                num_blocks=pool.num_blocks,
                views=tuple(_view_from_wire(view) for view in pool.views),
                device=pool.device,
            )
            for pool in wire.pools
        ),
    )


def _view_to_wire(view: RoleView) -> WireView:
    return WireView(*(getattr(view, name) for name in WireView.__struct_fields__))


def _view_from_wire(view: WireView) -> RoleView:
    return RoleView(*(getattr(view, name) for name in WireView.__struct_fields__))
