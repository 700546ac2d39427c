import pytest

from kvferry.cache import memory
from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ManagerSpec, ModelGeometry, RoleShape


@pytest.fixture
def kind():
    return "V1"


def test_a_running_follower_of_an_evicted_prefix_just_leaves_the_index(make_manager, counts):
    manager = make_manager(blocks=4)
    prompt = list(range(8))
    manager.allocate(1, 4, prompt)
    manager.allocate(2, 8, prompt)
    manager.commit(1, prompt[:4])
    manager.commit(2, prompt)
    manager.free(1)
    assert counts(manager) == (1, 1, 2)
    manager.allocate(3, 8)
    assert counts(manager) == (0, 0, 4)
    manager.free(2)
    assert counts(manager) == (2, 0, 2)
    assert manager.allocate(4, 8, prompt) == 0


def test_a_fraction_of_free_memory_sizes_the_pool_within_the_limit(make_manager, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 1 << 20)
    small = make_manager(blocks=None, free_memory_fraction=0.5)
    assert small.layout.pools[0].nbytes == (1 << 19) // 1536 * 1536
    assert "0.5 of the 1 MiB that cpu has free" in str(small.pool_size)
    monkeypatch.setattr(memory, "available_memory", lambda device: 1 << 40)
    monkeypatch.setattr(memory, "CPU_POOL_LIMIT", 1 << 21)
    capped = make_manager(blocks=None)
    assert capped.layout.pools[0].nbytes <= 1 << 21
    assert "limited to 2 MiB" in str(capped.pool_size)


def test_layers_and_heads_are_numbered_as_the_whole_model_does(make_manager):
    geometry = ModelGeometry(2, 1, 8, "float32", (None,) * 2, first_layer=4, head_start=3, total_heads=4)
    manager = make_manager(geometry=geometry)
    (group,) = manager.layout.groups
    assert (group.layers, group.head_start, group.total_heads) == ((4, 5), 3, 4)
    assert manager.role_views(5)["value"].data_ptr() == manager.layout.pools[0].base + 3 * 4 * 8 * 4
    with pytest.raises(IndexError, match=r"layer 1 is outside 4 … 5"):
        manager.role_views(1)


def test_what_is_not_keys_and_values_of_equal_layers_needs_v2(make_manager):
    latent = LayerShape((RoleShape("latent", 1, 12),), "latent")
    usual = LayerShape((RoleShape("key", 2, 8), RoleShape("value", 2, 8)))
    make_manager(geometry=ModelGeometry(2, 2, 8, "float32", (None,) * 2, (usual, usual)))
    with pytest.raises(ConfigError, match=r"layer 1 keeps latent \(latent\); set .*use_kv_cache_manager_v2: true"):
        make_manager(geometry=ModelGeometry(2, 2, 8, "float32", (None,) * 2, (usual, latent)))


def test_a_configured_window_has_no_effect_and_says_so(caplog):
    geometry = ModelGeometry(2, 1, 8, "float32", (4, 4))
    options = {"max_attention_window": (4,)}
    KVCacheManagerV1(ManagerSpec("V1", geometry, 8, 64, 0.9, True, "cpu", options=options))
    assert "max_attention_window has no effect" in caplog.text
