import pytest

from kvferry.cache.prefix_index import PrefixIndex


def test_the_longest_known_prefix_is_found():
    index = PrefixIndex(2)
    assert index.insert([1, 2, 3, 4, 5], [10, 11]) == 2
    assert index.match([1, 2, 3, 4, 9, 9], 9) == [10, 11]
    assert index.match([1, 2, 9, 9], 9) == [10]
    assert index.match([3, 4], 9) == []
    assert index.match([1, 2, 3, 4], 1) == [10]


def test_only_full_blocks_are_known():
    index = PrefixIndex(4)
    assert index.insert([1, 2, 3], [10]) == 0
    assert index.match([1, 2, 3], 9) == []


def test_equal_tokens_behind_another_prefix_are_another_block():
    index = PrefixIndex(1)
    index.insert([1, 7], [10, 11])
    index.insert([2, 7], [20, 21])
    assert index.match([1, 7], 9) == [10, 11]
    assert index.match([2, 7], 9) == [20, 21]


def test_what_is_known_stays_when_it_is_offered_again():
    index = PrefixIndex(1)
    index.insert([1, 2], [10, 11])
    assert index.insert([1, 2, 3], [20, 21, 22]) == 3
    assert index.match([1, 2, 3], 9) == [10, 11, 22]
    assert 20 not in index


def test_a_block_cannot_hold_two_contents():
    index = PrefixIndex(1)
    index.insert([1, 2], [10, 11])
    with pytest.raises(ValueError, match="block 11 was committed with other tokens"):
        index.insert([1, 3], [10, 11])
    assert index.match([1, 2], 9) == [10, 11]
    assert index.match([1, 3], 9) == [10]


def test_removing_a_block_takes_what_can_no_longer_be_reached():
    index = PrefixIndex(1)
    index.insert([1, 2, 3], [10, 11, 12])
    index.insert([1, 5], [10, 15])
    assert sorted(index.remove(11)) == [11, 12]
    assert index.match([1, 2, 3], 9) == [10]
    assert index.match([1, 5], 9) == [10, 15]
    assert sorted(index.remove(10)) == [10, 15]
    assert len(index) == 0


@pytest.mark.parametrize("digest", [lambda data: b"", lambda data: data[-8:]], ids=["constant", "ignores the prefix"])
def test_a_colliding_digest_never_serves_another_prompt(digest):
    index = PrefixIndex(1, digest)
    index.insert([1, 7], [10, 11])
    assert index.match([2, 7], 9) == []
    index.insert([2, 7], [20, 21])
    matched = index.match([2, 7], 9)
    assert matched == [20, 21][: len(matched)]
    assert index.match([1, 7], 9) in ([10], [10, 11])


def test_a_parent_that_came_back_does_not_adopt_old_followers_of_a_colliding_one():
    index = PrefixIndex(1, lambda data: data[-8:-7])
    index.insert([1, 7], [10, 11])
    index.remove(10)
    index.insert([257], [20])
    assert index.match([257, 7], 9) == [20]
