import numpy as np
import pytest

from kvferry.cache.prefix_match import longest_match
from kvferry.cache.prefix_tree import PrefixTree
from kvferry.cache.tier_blocks import Place, StoredBlock
from kvferry_plugins.layout import LayerGroup

FULL = LayerGroup((0,), (0,), 4, 1, 1)
WINDOW = LayerGroup((1,), (1,), 2, 1, 1, window=5)
PROMPT = list(range(12))


def ids(*numbers: int):
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def tree():
    """Chunks of 4 tokens: one block of the full group, two of the window's."""
    return PrefixTree(4, [4, 2])


def stored(serial: int) -> StoredBlock:
    return StoredBlock(serial, 0, 8, False)


def matched(tree, tokens, history=0):
    return longest_match(tree.walk(tokens, len(tokens) // 4), 4, (FULL, WINDOW), history)


def blocks(match):
    return [[entry.block for entry in entries] for entries in match.entries]


def test_only_full_chunks_are_known_and_the_longest_prefix_is_found(tree):
    assert tree.insert(PROMPT[:11], [ids(0, 1, 2), ids(10, 11, 12, 13, 14, 15)]) == 2
    match = matched(tree, [*PROMPT[:8], 99, 99, 99, 99])
    assert (match.tokens, match.first) == (8, (0, 2))
    assert blocks(match) == [[0, 1], [12, 13]]
    assert matched(tree, [*PROMPT[:4], 99, 99, 99, 99]).tokens == 4
    assert matched(tree, [99, *PROMPT[1:]]).tokens == 0
    assert set(tree.known[0]) == {0, 1}


def test_a_window_needs_only_what_the_next_token_sees(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(-1, -1, -1, -1, 14, 15)])
    assert blocks(matched(tree, PROMPT)) == [[0, 1, 2], [14, 15]]
    assert matched(tree, PROMPT[:8]).tokens == 0
    assert matched(tree, PROMPT[:8], history=12).tokens == 8


def test_a_gap_of_the_full_group_ends_the_prefix(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(10, 11, 12, 13, 14, 15)])
    tree.evict(0, 1, None)
    assert matched(tree, PROMPT).tokens == 4
    tree.insert(PROMPT, [ids(0, 9, 8), ids(-1, -1, -1, -1, -1, -1)])
    assert blocks(matched(tree, PROMPT))[0] == [0, 9, 2]


def test_what_is_known_stays_when_it_is_offered_again(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(10, 11, 12, 13, 14, 15)])
    tree.insert(PROMPT, [ids(5, 6, 7), ids(20, 21, 22, 23, 24, 25)])
    assert blocks(matched(tree, PROMPT)) == [[0, 1, 2], [14, 15]]
    assert 5 not in tree.known[0]


def test_a_block_cannot_hold_two_contents(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(10, 11, 12, 13, 14, 15)])
    for table in (ids(3, 1, 2), ids(1, 4, 5)):
        with pytest.raises(ValueError, match="of group 0 was committed with other tokens before"):
            tree.insert([50, *PROMPT[1:]], [table, ids(*[-1] * 6)])
    assert matched(tree, [50, *PROMPT[1:]]).tokens == 0
    assert not tree.walk([50, *PROMPT[1:]], 3)


def test_a_stored_block_is_known_until_the_tiers_drop_it(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(10, 11, 12, 13, 14, 15)])
    below = stored(1)
    tree.evict(0, 1, below)
    match = matched(tree, PROMPT)
    assert match.tokens == 12
    assert [entry.is_on_device for entry in match.entries[0]] == [True, False, True]
    below.place = Place.DROPPED
    assert matched(tree, PROMPT).tokens == 4


def test_a_restored_block_is_known_under_its_new_id(tree):
    tree.insert(PROMPT[:4], [ids(0), ids(10, 11)])
    tree.evict(0, 0, stored(1))
    (entry,) = matched(tree, PROMPT).entries[0]
    tree.restore(0, entry, 7)
    assert blocks(matched(tree, PROMPT))[0] == [7]
    assert set(tree.known[0]) == {7}


def test_a_chunk_that_was_emptied_while_its_block_came_back_is_found_again(tree):
    tree.insert(PROMPT[:8], [ids(0, 1), ids(-1, -1, -1, -1)])
    entry = tree.walk(PROMPT, 1)[0].entries[0][0]
    tree.evict(0, 0, None)
    tree.evict(0, 1, None)
    assert not tree.walk(PROMPT, 2)
    tree.restore(0, entry, 5)
    assert [node.entries[0][0].block for node in tree.walk(PROMPT, 2)] == [5]


def test_chunks_that_lead_nowhere_are_removed(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(*[-1] * 6)])
    tree.evict(0, 1, None)
    assert len(tree.walk(PROMPT, 3)) == 3
    tree.evict(0, 2, None)
    assert len(tree.walk(PROMPT, 3)) == 1
    tree.evict(0, 0, None)
    assert not tree.walk(PROMPT, 3)


def test_a_commit_of_which_nothing_is_left_leaves_no_chunk(tree):
    assert tree.insert(PROMPT, [ids(-1, -1, -1), ids(*[-1] * 6)]) == 3
    assert not tree.walk(PROMPT, 3)


def test_what_the_tiers_dropped_leaves_the_tree_as_others_are_stored(tree):
    for start in range(0, 400, 4):
        prompt = list(range(start, start + 4))
        tree.insert(prompt, [ids(start), ids(-1, -1)])
        block = stored(start)
        tree.evict(0, start, block)
        block.place = Place.DROPPED
    known = sum(bool(tree.walk(list(range(start, start + 4)), 1)) for start in range(0, 400, 4))
    assert known <= 2


def test_a_block_that_goes_back_and_forth_is_watched_once(tree):
    tree.insert(PROMPT, [ids(0, 1, 2), ids(*[-1] * 6)])
    tree.evict(0, 1, stored(1))
    tree.evict(0, 2, stored(2))
    for serial in range(50):
        tree.evict(0, 0, stored(serial))
        tree.restore(0, tree.walk(PROMPT, 1)[0].entries[0][0], 0)
    assert len(tree._watched) <= 3
