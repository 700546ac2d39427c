from dataclasses import replace

import pytest

from kvferry.registry.answers import Rank
from kvferry.registry.comparison import compare_records
from kvferry.registry.records import Origin, PluginRecord, State, plain_record

HERE = PluginRecord("acme", "acme-kvferry", "1.0", "acme_kvferry", Origin.EXTERNAL, Rank.EXTERNAL, State.DISCOVERED)
ACTIVE = replace(HERE, state=State.ACTIVE, hooks=("model_defaults",), import_seconds=0.1)


def differences(here, there):
    (compared,) = compare_records([here] if here else [], [plain_record(there)] if there else [])
    return compared.differences


@pytest.mark.parametrize("state", [State.ACTIVE, State.UNAVAILABLE])
def test_what_is_on_here_and_in_the_worker_is_the_same(state):
    assert differences(HERE, replace(ACTIVE, state=state)) == ()


def test_what_is_off_on_both_sides_is_the_same_whoever_decided():
    off = replace(HERE, state=State.DISABLED, reason="by a")
    assert differences(off, replace(off, reason="by b")) == ()


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        (HERE, replace(ACTIVE, version="0.9"), "version 1.0 here, 0.9 in the worker"),
        (HERE, replace(ACTIVE, entry_point="old"), "entry point acme_kvferry here, old in the worker"),
        (HERE, replace(ACTIVE, rank=Rank.INJECTED), "ranks as external here, as injected in the worker"),
        (HERE, replace(HERE, state=State.DISABLED, reason="by X"), "on here, disabled in the worker by X"),
        (replace(HERE, state=State.DISABLED, reason="by X"), ACTIVE, "disabled here by X, active in the worker"),
        (HERE, replace(HERE, state=State.FAILED, stage="import", reason="it broke"), "failed in the worker: it broke"),
        (HERE, None, "the worker does not know it"),
        (None, ACTIVE, "not here"),
    ],
)
def test_a_difference_says_what_each_side_has(here, there, told):
    assert differences(here, there) == (told,)
