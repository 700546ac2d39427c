import logging
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from transceiver.native import running_native_worker

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.metrics.collector import WorkerCollector, metrics_registry, worker_parts
from kvferry.metrics.families import gauge
from kvferry.metrics.figures import TransferFigures
from kvferry.metrics.port import metrics_port
from kvferry.testing.worker_pair import WorkerPair, worker_pair
from kvferry.testing.world_pair import Side, world_pair
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.testing.faults import FailPost
from kvferry_plugins.types import Role, Topology

PROMPT = tuple(range(100, 130))
TOKEN_BYTES = 256
"""Of the small geometry."""


def registry_of(worker):
    """The metrics of a pair's worker, with figures that its transceiver feeds from now on."""
    figures = TransferFigures()
    worker.transceiver._shared.on_event = figures.count
    parts = worker_parts(manager=worker.manager, figures=figures)
    return metrics_registry(WorkerCollector(parts, lambda: worker.transceiver.status_dump()))


def fine(dump):
    return [gauge("fine", "help", (), {(): 1})]


@pytest.fixture
def scrape(read_metrics):
    """Read a registry's metrics now."""
    return lambda registry: read_metrics(generate_latest(registry).decode())


def hand_over(pair, number):
    request = pair.prefill(number, tuple(token + 1000 * number for token in PROMPT))
    pair.context.transceiver.respond_and_send_async(request)
    pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 10 + number))
    while not pair.context.transceiver.check_context_transfer_status(1).completed:
        pass


def test_the_sums_are_what_was_moved(scrape):
    with worker_pair() as pair:
        registries = registry_of(pair.context), registry_of(pair.generation)
        for number in range(1, 4):
            hand_over(pair, number)
        moved = pair.context.agent.counters.nbytes
        for registry, role in zip(registries, ("context", "generation"), strict=True):
            found = scrape(registry)
            assert found("transfers_total") == found("transfers_total", role=role, outcome="completed") == 3
            assert found("transfer_bytes_total", role=role) == moved > 0
            assert found("transfer_blocks_total", role=role) == 3 * 8
            assert found("transfer_seconds_count") == found("transfer_admission_seconds_count") == 3
            assert found("transfer_seconds_bucket", le="+Inf") == 3
            assert found("handshakes_total", result="ready") == 1
            assert found("blocks_in_flight") == 0
            assert found("blocks_reclaimed_total", reason="completed") == 3 * 8
            assert found("cache_blocks", state="in_use") == 3 * 8
            assert found("cache_blocks") == 256
            assert found("scrape_errors_total") == 0
            assert len(found.rows("fingerprint_info")) == 1
        assert {"process_cpu_seconds", "process_resident_memory_bytes"} <= scrape(registries[0]).families.keys()


def test_the_sums_of_the_native_runtime_are_what_was_moved(scrape):
    with (
        running_native_worker(Role.CONTEXT, config={}, agent={}, manager=KVCacheManagerV1) as context,
        running_native_worker(Role.GENERATION, config={}, agent={}, manager=KVCacheManagerV1) as generation,
    ):
        registries = registry_of(context), registry_of(generation)
        for number in (1, 2):
            hand_over(WorkerPair(context, generation), number)
        found = [scrape(registry) for registry in registries]
        assert [each("transfers_total", outcome="completed") for each in found] == [2, 2]
        assert found[0]("transfer_bytes_total") == found[1]("transfer_bytes_total") == 2 * len(PROMPT) * TOKEN_BYTES
        assert [each("transfer_blocks_total") for each in found] == [16, 16]
        assert [each("blocks_in_flight") + each("scrape_errors_total") for each in found] == [0, 0]


def test_equal_fingerprints_have_one_digest(scrape):
    with worker_pair() as pair, worker_pair(generation_config={"kv_transfer_checksum": True}) as other:
        workers = (pair.context, pair.generation, other.generation)
        digests = [scrape(registry_of(each)).labels("fingerprint_info", "sha256") for each in workers]
        assert digests[0] == digests[1] != digests[2]


def test_a_prefix_that_is_all_there_moves_no_byte_and_is_counted_as_that(scrape):
    with worker_pair() as pair:
        registry = registry_of(pair.generation)
        request = pair.prefill(1, PROMPT[:28])
        pair.context.transceiver.respond_and_send_async(request)
        wanted = pair.admit(request, 11)
        pair.generation.transceiver.request_and_receive_sync(wanted)
        pair.generation.transceiver.commit_blocks_for_reuse(wanted)
        again = pair.prefill(2, PROMPT[:28])
        pair.context.transceiver.respond_and_send_async(again)
        pair.generation.transceiver.request_and_receive_sync(pair.admit(again, 12))
        found = scrape(registry)
        assert found("transfers_total", outcome="completed") == 2
        assert found("zero_byte_transfers_total", role="generation", outcome="completed") == 1
        assert found("cache_reused_tokens_total") == 28


def test_failures_are_counted_by_cause_and_what_is_under_way_by_state(scrape):
    agent = ScriptedAgent("context", [FailPost()])
    with worker_pair(context_agent=agent, config={"kv_transfer_admission_timeout_ms": 300}) as pair:
        context, generation = registry_of(pair.context), registry_of(pair.generation)
        request = pair.prefill(1, PROMPT)
        pair.context.transceiver.respond_and_send_async(request)
        while not scrape(context)("transfers_in_flight"):
            pass
        assert scrape(context)("transfers_in_flight", role="context", state="waiting") == 1
        assert scrape(context)("blocks_in_flight", owner="source") == 8
        assert scrape(context)("blocks_in_flight_oldest_seconds", owner="source") >= 0
        with pytest.raises(Exception, match="request"):
            pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))
        while not pair.context.transceiver.check_context_transfer_status(1).failed:
            pass
        for registry, role in ((context, "context"), (generation, "generation")):
            found = scrape(registry)
            assert found("transfer_failures_total", role=role) == found("transfers_total", outcome="failed") == 1
            assert found("transfers_in_flight") == 0


def test_every_rank_tells_of_itself(scrape):
    two = Topology(tensor=2)
    with world_pair(Side(two), Side(two)) as pair:
        ranks = (*pair.context, *pair.generation)
        registries = [registry_of(rank) for rank in ranks]
        request = pair.prefill(1, PROMPT)
        pair.respond(request)
        wanted = pair.admit(request, 11)
        pair.receive(wanted)
        for rank in pair.generation:
            while not rank.transceiver.check_gen_transfer_status(1).completed:
                pass
        for rank in pair.context:
            while not rank.transceiver.check_context_transfer_status(1).completed:
                pass
        found = [scrape(registry) for registry in registries]
        assert [each("transfers_total", outcome="completed") for each in found] == [1] * 4
        assert [each("verdicts_total", outcome="completed") for each in found] == [1] * 4
        moved = [each("transfer_bytes_total") for each in found]
        assert sum(moved[:2]) == sum(moved[2:]) == sum(rank.agent.counters.nbytes for rank in pair.context) > 0


def test_openmetrics_is_well_formed_too(read_metrics):
    with worker_pair() as pair:
        registry = registry_of(pair.generation)
        hand_over(pair, 1)
        encode, content_type = choose_encoder("application/openmetrics-text; version=1.0.0")
        assert "openmetrics" in content_type
        assert read_metrics(encode(registry).decode(), openmetrics=True)("transfers_total") == 1


def test_what_is_counted_as_events_is_no_amount_of_bytes(scrape):
    with worker_pair() as pair:
        registry = registry_of(pair.context)
        hand_over(pair, 1)
        found = scrape(registry)
    assert not [event for event in found.labels("protocol_events_total", "event") if "bytes" in event]


def test_names_carry_units_and_our_prefix(scrape):
    with worker_pair() as pair:
        registry = registry_of(pair.context)
        hand_over(pair, 1)
        ours = {name for name in scrape(registry).families if not name.startswith("process_")}
        assert all(name.startswith("kvferry_") for name in ours)
        assert not [name for name in ours if "seconds" in name and not name.endswith(("seconds", "seconds_total"))]


def test_labels_hold_no_request_and_no_peer(scrape):
    with worker_pair() as pair:
        registry = registry_of(pair.context)
        before = {(each.name, *sorted(each.labels.items())) for each in scrape(registry).samples}
        hand_over(pair, 1)
        once = {(each.name, *sorted(each.labels.items())) for each in scrape(registry).samples}
        for number in range(2, 6):
            hand_over(pair, number)
        assert {(each.name, *sorted(each.labels.items())) for each in scrape(registry).samples} == once > before


def test_a_part_that_raises_is_left_out_counted_and_logged_once(scrape, caplog):
    def broken(dump):
        raise RuntimeError("a bug")

    registry = CollectorRegistry()
    registry.register(WorkerCollector({"broken": broken, "fine": fine}, dict))
    scrape(registry)
    found = scrape(registry)
    assert found("fine") == 1
    assert found("scrape_errors_total", part="broken") >= 2
    assert found("scrape_errors_total", part="fine") == 0
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_a_transceiver_that_says_little_is_read_for_what_it_says(scrape):
    with worker_pair() as pair:
        pair.context.transceiver.status_dump = lambda: {"peers": []}  # a plugin's
        found = scrape(registry_of(pair.context))
        assert found("scrape_errors_total") == 0
        assert found("cache_blocks") == 256


def test_a_status_that_cannot_be_had_costs_the_rest_nothing(scrape):
    with worker_pair() as pair:
        registry = registry_of(pair.context)
        hand_over(pair, 1)
        pair.context.transceiver.status_dump = lambda: 1 / 0  # a plugin's
        found = scrape(registry)
        assert found("scrape_errors_total", part="status_dump") == 1
        assert found("transfers_total") == 1


def test_the_status_is_asked_once_a_scrape(scrape):
    with worker_pair() as pair:
        registry, asked = registry_of(pair.context), []
        status_dump = pair.context.transceiver.status_dump
        pair.context.transceiver.status_dump = lambda: asked.append(1) or status_dump()
        scrape(registry)
        assert asked == [1]


def test_a_port_of_its_own_serves_the_same(scrape, read_metrics):
    registry = CollectorRegistry()
    registry.register(WorkerCollector({"fine": fine}, dict))
    with metrics_port(0, registry) as url:
        assert url.startswith("http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=60) as answer:
            assert read_metrics(answer.read().decode())("fine") == 1
    with pytest.raises(urllib.error.URLError):
        opener.open(url, timeout=60)


def test_a_port_that_is_taken_is_one_warning(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with metrics_port(port, CollectorRegistry()) as url:
            assert url is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"--metrics-port {port} cannot be had" in record.getMessage()
