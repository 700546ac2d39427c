import pytest

from kvferry.transceiver.fingerprint import (
    ADVICE,
    PLUGIN_FIELDS,
    SEVERITY,
    Fingerprint,
    Severity,
    compare,
    make_fingerprint,
    refusal,
)
from kvferry_plugins.layout import KvLayout, LayerGroup, dense_pool
from kvferry_plugins.types import Role


def layout(layers=(0, 1, 2, 3), *, heads=2, total=0, start=0, tokens_per_block=4, windows=(None,)):
    """One group a window, the layers dealt out in turn."""
    groups, pools = [], []
    for number, window in enumerate(windows):
        own = layers[number :: len(windows)]
        pools.append(
            dense_pool(
                layers=own, kv_heads=heads, head_dim=8, tokens_per_block=tokens_per_block, item_bytes=2, num_blocks=4
            )
        )
        groups.append(
            LayerGroup(own, (number,), tokens_per_block, heads, 8, window, head_start=start, total_heads=total)
        )
    return KvLayout("bfloat16", tuple(groups), tuple(pools))


def fingerprint(of, *, is_stage=False):
    return make_fingerprint(
        backend="NIXL",
        runtime="PYTHON",
        layout=of,
        model={},
        checksum=False,
        libraries={},
        plugins={},
        is_stage=is_stage,
    )


def differing(context, generation):
    """As both sides see it: field → (context's value, generation's)."""
    as_context = compare(context, generation.fields, Role.CONTEXT)
    as_generation = compare(generation, context.fields, Role.GENERATION)
    found = {each.field: (each.ours, each.theirs) for each in as_context}
    assert found == {each.field: (each.theirs, each.ours) for each in as_generation}
    return found


@pytest.mark.parametrize(
    ("context", "generation"),
    [
        (fingerprint(layout()), fingerprint(layout())),
        (fingerprint(layout(heads=4)), fingerprint(layout(heads=1, total=4, start=3))),
        (fingerprint(layout()), fingerprint(layout((2, 3)), is_stage=True)),
        (fingerprint(layout((0, 1)), is_stage=True), fingerprint(layout((2, 3)), is_stage=True)),
        (fingerprint(layout(tokens_per_block=16)), fingerprint(layout(tokens_per_block=4))),
        (fingerprint(layout(tokens_per_block=4)), fingerprint(layout(tokens_per_block=16))),
        (fingerprint(layout()), fingerprint(layout(windows=(None, 512)))),
    ],
    ids=["equal", "another part", "a stage", "other stages", "larger blocks", "smaller blocks", "windows there"],
)
def test_ranks_of_any_topology_and_managers_that_keep_enough_agree(context, generation):
    assert differing(context, generation) == {}


@pytest.mark.parametrize(
    ("context", "generation", "expected"),
    [
        (layout(heads=2), layout(heads=4), {"kv_heads": (2, 4)}),
        (layout(tokens_per_block=4), layout(tokens_per_block=6), {"tokens_per_block": (4, 6)}),
        (layout((0, 1)), layout((0, 1, 2)), {"layers": ([[0, 1]], [[0, 2]])}),
        (layout(windows=(512,)), layout(), {"windows": (512, None)}),
        (
            layout(windows=(512, None, 256, None)),
            layout(),
            {"windows": ([[0, 0, 512], [2, 2, 256]], None)},
        ),
        (layout(windows=(512,)), layout(windows=(512,), tokens_per_block=7), {"tokens_per_block": (4, 7)}),
    ],
)
def test_what_cannot_be_mapped_differs_in_the_layers_that_are_to_blame(context, generation, expected):
    assert differing(fingerprint(context), fingerprint(generation)) == expected


@pytest.mark.parametrize(
    "value",
    [None, 7, "text", [], [1], [[0]], [["a", 3, 4]], [[0, 3, "four"]], [[0, 3, -4]], {"a": 1}],
    ids=str,
)
@pytest.mark.parametrize("field", ["tokens_per_block", "windows", "kv_heads"])
def test_nonsense_of_a_peer_is_a_fatal_difference(field, value):
    theirs = {**fingerprint(layout(windows=(5,))).fields, field: value}
    found = compare(fingerprint(layout(windows=(8,))), theirs, Role.CONTEXT)
    assert {(each.field, each.severity) for each in found} == {(field, Severity.FATAL)}


def test_layers_without_end_are_not_counted_out():
    theirs = {**fingerprint(layout()).fields, "kv_heads": [[0, 1 << 60, 2]]}
    assert compare(fingerprint(layout()), theirs) == []


def test_a_field_that_one_side_lacks_differs():
    assert {each.field for each in compare(Fingerprint({}), fingerprint(layout()).fields)} >= {"dtype", "kinds"}


def test_every_fatal_field_that_a_setting_decides_has_advice():
    settings = {"backend", "dtype", "windows", "tokens_per_block", "checksum", "model.config", "model.weights"}
    assert settings | {"protocol", *PLUGIN_FIELDS} == set(ADVICE)
    assert {field for field in SEVERITY if SEVERITY[field] is Severity.FATAL} >= settings


def with_plugins(plugins, digests=None, **options):
    return make_fingerprint(
        backend="SCRIPTED",
        runtime="PYTHON",
        layout=layout(),
        model={},
        checksum=False,
        libraries={},
        plugins=plugins,
        plugin_digests=digests or {},
        **options,
    )


ACME, APEX = {"acme": "acme-kvferry 1.0"}, {"apex": "apex-kvferry 2.0"}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ((ACME | APEX, {}), (APEX, {}), "plugins: {'acme': 'acme-kvferry 1.0'} here, {} there"),
        ((APEX, {}), (ACME | APEX, {}), "plugins: {} here, {'acme': 'acme-kvferry 1.0'} there"),
        (
            (ACME, {"acme": "sha256:1"}),
            ({"acme": "acme-kvferry 1.1"}, {"acme": "sha256:2"}),
            "plugins: {'acme': 'acme-kvferry 1.0'} here, {'acme': 'acme-kvferry 1.1'} there",
        ),
        (
            (ACME | APEX, {"acme": "sha256:1", "apex": "sha256:3"}),
            (ACME | APEX, {"acme": "sha256:2", "apex": "sha256:3"}),
            "plugins.digest: {'acme': 'sha256:1'} here, {'acme': 'sha256:2'} there (the same versions, but other files"
            ")",
        ),
        (
            (ACME, {"acme": "sha256:1"}),
            (ACME, {}),
            "plugins.digest: {'acme': 'sha256:1'} here, {} there (the same versions, but other files)",
        ),
    ],
    ids=["missing", "added", "version", "files", "no digest"],
)
def test_plugins_that_differ_are_named_alone_and_are_fatal_for_a_locked_worker(ours, theirs, said):
    peer = with_plugins(*theirs).fields
    for locked, severity in ((False, Severity.WARNING), (True, Severity.FATAL)):
        (difference,) = compare(with_plugins(*ours, locked=locked), peer)
        assert (str(difference), difference.severity) == (said, severity)
    assert said in str(refusal([difference], "peer"))
    assert "start without --locked" in str(refusal([difference], "peer"))


def test_a_peer_that_says_nothing_of_files_differs_from_a_locked_worker():
    peer = {name: value for name, value in with_plugins(ACME).fields.items() if name != "plugins.digest"}
    (difference,) = compare(with_plugins(ACME, {"acme": "sha256:1"}, locked=True), peer)
    assert (difference.field, difference.theirs, difference.severity) == ("plugins.digest", None, Severity.FATAL)


@pytest.mark.parametrize("value", [None, 3, "acme", ["acme"], {3: 4}, {"acme": None}, {b"acme": {}}], ids=repr)
@pytest.mark.parametrize("field", PLUGIN_FIELDS)
def test_what_a_peer_calls_its_plugins_is_compared_whatever_it_is(field, value):
    ours = with_plugins(ACME, {"acme": "sha256:1"}, locked=True)
    found = compare(ours, {**ours.fields, field: value})
    assert {difference.field for difference in found} in ({field}, set(PLUGIN_FIELDS))
