"""What our managers do with a model of equal layers that all keep all tokens, beyond the conformance suite."""

import threading
import time

import numpy as np
import pytest
import torch

from kvferry.cache import memory
from kvferry_plugins.errors import CacheFullError, ConfigError

ids = lambda *numbers: np.array(numbers, dtype=np.int32)  # noqa: E731


@pytest.fixture(params=["V1", "V2"])
def kind(request):
    return request.param


def test_the_memory_is_one_page_aligned_dense_pool(manager):
    (pool,) = manager.layout.pools
    assert pool.base % 4096 == 0
    assert pool.runs == ((0, pool.block_stride),)
    assert pool.block_stride == 3 * 2 * 2 * 4 * 8 * 4
    assert manager.layout.num_blocks(0) == 8


def test_a_layer_view_is_where_the_layout_says(manager):
    (pool,) = manager.layout.pools
    for view in pool.views:
        tensor = manager.layer_views(view.layer)[("key", "value").index(view.role)]
        assert tensor.shape == (8, 2, 4, 8)
        at = pool.base + 5 * pool.block_stride + view.offset + view.head_stride + 3 * view.token_stride
        assert tensor[5, 1, 3].data_ptr() == at


def test_bytes_written_through_a_view_are_the_pools(manager):
    key, value = manager.layer_views(1)
    key[2] = 1.5
    value[2] = -2.5
    again = manager.layer_views(1)
    assert torch.equal(again[0][2], torch.full((2, 4, 8), 1.5))
    assert not manager.layer_views(0)[0].any()
    assert not manager.layer_views(2)[1].any()


def test_a_request_gets_whole_blocks_and_gives_them_back(manager, counts):
    assert manager.allocate(1, 9) == 0
    assert manager.block_table(1)[0].tolist() == [0, 1, 2]
    assert counts(manager) == (5, 0, 3)
    manager.free(1)
    assert counts(manager) == (8, 0, 0)
    with pytest.raises(KeyError, match="request 1"):
        manager.block_table(1)


def test_running_out_gives_the_figures_and_changes_nothing(manager, counts):
    manager.allocate(1, 20)
    with pytest.raises(CacheFullError, match=r"4 blocks of 4 tokens.* are needed, 3 of 8 can be had") as caught:
        manager.allocate(2, 16)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (4, 3, 8)
    with pytest.raises(CacheFullError):
        manager.extend(1, 36)
    assert counts(manager) == (3, 0, 5)
    assert len(manager.block_table(1)[0]) == 5
    with pytest.raises(KeyError):
        manager.free(2)


def test_a_request_grows_next_to_its_last_block(manager):
    manager.allocate(1, 4)
    manager.extend(1, 3)
    assert manager.block_table(1)[0].tolist() == [0]
    manager.extend(1, 12)
    assert manager.block_table(1)[0].tolist() == [0, 1, 2]


def test_a_committed_prefix_is_shared_by_running_requests(manager, counts):
    prompt = list(range(10))
    manager.allocate(1, 10, prompt)
    assert manager.commit(1, prompt) == 8
    assert manager.allocate(2, 12, prompt) == 8
    first, second = manager.block_table(1)[0], manager.block_table(2)[0]
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    assert counts(manager) == (4, 0, 4)
    assert manager.statistics().reused_tokens == 8
    manager.free(1)
    assert counts(manager) == (5, 0, 3)
    manager.free(2)
    assert counts(manager) == (6, 2, 0)


def test_nothing_is_shared_beyond_the_requests_capacity(manager):
    prompt = list(range(8))
    manager.allocate(1, 8, prompt)
    manager.commit(1, prompt)
    assert manager.allocate(2, 4, prompt) == 4
    assert len(manager.block_table(2)[0]) == 1


def test_nothing_is_shared_before_it_is_committed_or_with_reuse_off(manager, make_manager, counts):
    prompt = list(range(8))
    manager.allocate(1, 8, prompt)
    assert manager.allocate(2, 8, prompt) == 0
    without = make_manager(reuse=False)
    without.allocate(1, 8, prompt)
    assert without.commit(1, prompt) == 0
    without.free(1)
    assert without.allocate(2, 8, prompt) == 0
    assert counts(without) == (6, 0, 2)


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end(manager, counts):
    for request, start in ((1, 100), (2, 200)):
        prompt = list(range(start, start + 12))
        manager.allocate(request, 12, prompt)
        manager.commit(request, prompt)
        manager.free(request)
    manager.allocate(3, 12, list(range(100, 112)))
    manager.free(3)
    assert counts(manager) == (2, 6, 0)
    manager.allocate(4, 16)
    assert manager.statistics().evicted == 2
    assert manager.allocate(5, 8, list(range(200, 212))) == 4
    assert manager.statistics().evicted == 3


def test_reused_blocks_are_not_counted_as_room(make_manager, counts):
    manager = make_manager(blocks=4)
    prompt = list(range(8))
    manager.allocate(1, 8, prompt)
    manager.commit(1, prompt)
    manager.free(1)
    with pytest.raises(CacheFullError) as caught:
        manager.allocate(2, 20, prompt)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert counts(manager) == (2, 2, 0)
    assert manager.allocate(2, 16, prompt) == 8


def test_only_what_is_in_use_can_be_held_and_only_what_is_held_released(manager, counts):
    manager.allocate(1, 4)
    with pytest.raises(ValueError, match=r"blocks \[5\] are not in use"):
        manager.hold([ids(0, 5)])
    with pytest.raises(ValueError, match="outside the pool"):
        manager.hold([ids(8)])
    with pytest.raises(ValueError, match=r"blocks \[0\] are not held"):
        manager.release([ids(0)])
    manager.hold([ids(0)])
    with pytest.raises(ValueError, match="not held"):
        manager.release([ids(0, 0)])
    with pytest.raises(ValueError, match="exactly one"):
        manager.hold([ids(0), ids(0)])
    manager.release([ids(0)])
    manager.free(1)
    assert counts(manager) == (8, 0, 0)


def test_committing_again_is_harmless_and_other_tokens_are_refused(manager, counts):
    manager.allocate(1, 8)
    assert manager.commit(1, [1, 2, 3, 4, 5]) == 4
    assert manager.commit(1, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert manager.commit(1, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    with pytest.raises(ValueError, match="other tokens"):
        manager.commit(1, [9, 2, 3, 4])
    with pytest.raises(ValueError, match="2 blocks; 3 full ones"):
        manager.commit(1, range(12))
    manager.free(1)
    assert counts(manager) == (6, 2, 0)


def test_max_tokens_is_rounded_up_to_whole_blocks(make_manager):
    assert make_manager(max_tokens=9).layout.num_blocks(0) == 3


def test_the_machine_says_what_it_has_free():
    assert memory.available_memory("cpu") > 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float99"}, "'float99' is not a torch dtype"),
        ({"dtype": "nn"}, "'nn' is not a torch dtype"),
        ({"blocks": None, "free_memory_fraction": 0.0}, "would get no block"),
        ({"max_tokens": 1 << 50}, "cannot give the KV pool"),
    ],
    ids=["unknown dtype", "no dtype", "no room", "too big"],
)
def test_an_impossible_pool_is_a_config_error(make_manager, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_manager(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_a_device_that_is_not_here_is_a_config_error(make_manager):
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        make_manager(device="cuda:0")


def test_half_precision_blocks_are_half_as_big(make_manager):
    manager = make_manager(dtype="bfloat16")
    assert manager.layout.pools[0].block_stride == 768
    assert manager.layer_views(0)[0].dtype == torch.bfloat16


def test_shutdown_is_idempotent_and_final(manager, counts):
    manager.allocate(1, 4)
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        manager.layer_views(0)
    with pytest.raises(RuntimeError, match="shut down"):
        manager.allocate(2, 4)
    manager.free(1)
    assert counts(manager) == (8, 0, 0)


def test_layers_and_groups_outside_the_model_are_refused(manager):
    with pytest.raises(IndexError, match=r"layer 3 is outside 0 … 2"):
        manager.layer_views(3)
    with pytest.raises(IndexError, match="group 1 does not exist"):
        manager.statistics(1)


def test_many_threads_lose_no_block(make_manager, counts):
    manager = make_manager(blocks=64)
    prompt = list(range(12))
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for request in range(first, first + 60):
                manager.allocate(request, 12, prompt)
                manager.commit(request, prompt)
                table = manager.block_table(request)
                manager.hold(table)
                manager.free(request)
                manager.release(table)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counts(manager) == (61, 3, 0)


def test_four_thousand_blocks_are_allocated_in_one_run_within_milliseconds(make_manager):
    manager = make_manager(blocks=8192)
    seconds = []
    for request in range(5):
        start = time.perf_counter()
        manager.allocate(request, 4096 * 4)
        seconds.append(time.perf_counter() - start)
        assert (np.diff(manager.block_table(request)[0]) == 1).all()
        manager.free(request)
    assert min(seconds) < 0.005
