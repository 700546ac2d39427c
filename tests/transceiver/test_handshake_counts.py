import pytest

from kvferry.testing.worker_pair import SHORT_CLOCKS, WorkerPair, running_worker
from kvferry.transceiver.fingerprint import Severity
from kvferry.transceiver.handshakes import OTHER, RECENT, Handshakes, Result
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import Role


def counts(worker):
    return worker.transceiver.status_dump()["handshakes"]


@pytest.fixture
def other_model():
    """A pair that serves two models."""
    hub = ScriptedHub()
    model = {"architecture": "FakeForCausalLM", "config": "another", "weights": "w0"}
    with (
        running_worker(Role.CONTEXT, ScriptedAgent("context", hub=hub), dict(SHORT_CLOCKS)) as context,
        running_worker(
            Role.GENERATION, ScriptedAgent("generation", hub=hub), dict(SHORT_CLOCKS), model=model
        ) as generation,
    ):
        yield WorkerPair(context, generation)


def fetch(pair, kit):
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))


def test_a_handshake_that_succeeds_is_counted_on_both_sides(run_pair, kit):
    pair = run_pair()
    fetch(pair, kit)
    for worker in (pair.context, pair.generation):
        found = counts(worker)
        assert found["results"] == {"ready": 1}
        (recent,) = found["recent"]
        assert recent["ended"] >= recent["started"] > 0
        assert recent["result"] == "ready"


def test_a_refusal_is_counted_with_its_fields_by_whoever_refused_and_whoever_was(other_model, kit):
    with pytest.raises(KvferryError, match="model"):
        fetch(other_model, kit)
    found = [counts(worker) for worker in (other_model.context, other_model.generation)]
    assert [each["results"] for each in found] == [{"refused here": 1}, {"refused there": 1}]
    for each in found:
        assert each["differences"]["fatal"] == {"model.config": 1}
        assert each["recent"][0]["fields"] == ["model.config"]


def test_an_instance_that_nobody_answers_for_is_counted(run_pair, kit):
    pair = run_pair(clean=False)
    request = pair.prefill(1, kit.PROMPT)
    wanted = pair.admit(request, 11)
    pair.context.transceiver.shutdown()
    with pytest.raises(KvferryError):
        pair.generation.transceiver.request_and_receive_sync(wanted)
    assert set(counts(pair.generation)["results"]) <= {"unanswered", "broken"}
    assert sum(counts(pair.generation)["results"].values()) == 1


def test_names_that_only_the_peer_knows_are_one_field_and_the_list_is_bounded():
    handshakes = Handshakes()
    for number in range(RECENT + 10):
        handshakes.ended("peer", 0.0, 1.0, Result.REFUSED_THERE, (f"made up {number}", "dtype"))
    found = handshakes.dump()
    assert found["differences"] == {"fatal": {OTHER: RECENT + 10, "dtype": RECENT + 10}}
    assert len(found["recent"]) == RECENT


def test_warnings_are_counted_beside_what_is_fatal():
    handshakes = Handshakes()
    handshakes.differs(Severity.WARNING, ["libraries"])
    assert handshakes.dump()["differences"] == {"warning": {"libraries": 1}}
