from hypothesis import given
from hypothesis import strategies as st

from kvferry.config.nested import get_leaf, leaves, thaw, with_leaves, without_empty_sections

names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.dictionaries(names, st.integers(), max_size=3),
    lambda inner: st.dictionaries(names, st.integers() | inner, max_size=3),
    max_leaves=8,
)


@given(trees)
def test_a_mapping_is_its_leaves(tree):
    assert with_leaves({}, dict(leaves(tree))) == without_empty_sections(tree)


@given(trees)
def test_every_leaf_is_found_at_its_key(tree):
    assert all(get_leaf(tree, key) == value for key, value in leaves(tree))


@given(trees, st.integers())
def test_changing_a_leaf_changes_that_leaf_alone_and_never_the_original(tree, value):
    before = thaw(tree)
    for key, _ in list(leaves(tree)):
        changed = with_leaves(tree, {key: value})
        assert dict(leaves(changed)) == {**dict(leaves(tree)), key: value}
    assert tree == before


@given(trees)
def test_pruning_twice_prunes_no_more(tree):
    assert without_empty_sections(without_empty_sections(tree)) == without_empty_sections(tree)
