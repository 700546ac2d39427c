"""A transformers cache whose keys, values, latents and states lie in a KV-cache manager's blocks.

Import this module only where transformers is wanted: a subclass needs its base.
"""

from collections.abc import Iterator

from transformers.cache_utils import Cache  # noqa: TID253

from kvferry.integrations.transformers.block_slots import BlockSlots, RequestBlocks
from kvferry.integrations.transformers.latent_attention import LatentLayer
from kvferry.integrations.transformers.loading import LoadedModel
from kvferry.integrations.transformers.state_layers import StateLayer
from kvferry.integrations.transformers.token_layers import PagedLayer, TokenLayer
from kvferry_plugins.kv_cache import KVCacheManager


class PagedCache(Cache):  # type: ignore[misc]
    """The cache of one request, batch size 1, over the blocks that the manager gave it.

    Args:
        manager: has the request's blocks.
        request_id: the request.
        loaded: the model: its own windows are what attention sees, whatever the manager keeps.
        cached_tokens: leading tokens whose KV is in the blocks already.
    """

    def __init__(
        self, manager: KVCacheManager, request_id: int, loaded: LoadedModel, *, cached_tokens: int = 0
    ) -> None:
        self._blocks = RequestBlocks(manager, request_id)
        layers = list(_layers(manager, self._blocks, loaded, cached_tokens))
        self._counting = [layer for layer in layers if isinstance(layer, TokenLayer)]
        self._states = [layer for layer in layers if isinstance(layer, StateLayer)]
        super().__init__(layers=layers)

    @property
    def computed_tokens(self) -> int:
        """Leading tokens whose KV is complete in every layer."""
        return min(layer.length for layer in self._counting)

    def prepare(self, stop: int) -> None:
        """Make room for the tokens before ``stop``, before a step writes any. Raises CacheFullError."""
        self._blocks.prepare(stop)
        for layer in self._states:
            layer.attach()


def _layers(
    manager: KVCacheManager, blocks: RequestBlocks, loaded: LoadedModel, length: int
) -> Iterator[TokenLayer | StateLayer]:
    layout, geometry = manager.layout, loaded.geometry
    shared: dict[tuple[int, int | None], BlockSlots] = {}
    for position in range(geometry.num_layers):
        layer, shape = geometry.first_layer + position, geometry.shape(position)
        views, index = manager.role_views(layer), layout.group_of(layer)
        if shape.kind == "state":
            yield StateLayer(views, loaded.state_shapes[position], blocks, index, started=length > 0)
            continue
        group = layout.groups[index]
        if (index, shape.window) not in shared:
            device = layout.pools[group.pools[0]].device
            shared[index, shape.window] = BlockSlots(blocks, index, group, device, shape.window)
        slots = shared[index, shape.window]
        if shape.kind == "latent":
            yield LatentLayer(views["latent"], slots, length)
        else:
            yield PagedLayer(views["key"], views["value"], slots, length)
