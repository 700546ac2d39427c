"""What a worker tells Prometheus and its orchestrator: sums that are what was moved, and whether it makes progress."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from kvferry.serving.aside import MOST_AT_A_TIME, Aside
from kvferry.serving.failures import RequestError
from kvferry.serving.trace_file import TraceFile

PROMPTS = [[number + 40] * 50 for number in range(4)]
STALL = {"stall_seconds": 0.2}


class Scraped:
    def __init__(self, worker):
        answer = worker.http.get("/metrics")
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=")
        self.samples = [sample for family in read_text(answer.text) for sample in family.samples]

    def __call__(self, name, **labels):
        found = [
            each for each in self.samples if each.name == f"kvferry_{name}" and labels.items() <= each.labels.items()
        ]
        return sum(each.value for each in found)


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def readiness(worker):
    answer = worker.http.get("/readyz")
    return answer.status_code, answer.json()["status"]


def test_what_is_scraped_during_hand_offs_only_grows_and_ends_as_what_was_moved(local_pair):
    pair = local_pair()
    seen, over = [], threading.Event()

    def scrape_on():
        while not over.is_set():
            seen.append(Scraped(pair.generation)("transfer_bytes_total"))

    with ThreadPoolExecutor(5) as pool:
        scraping = pool.submit(scrape_on)
        answers = list(pool.map(lambda prompt: pair.ask(prompt=prompt, max_tokens=3), PROMPTS))
        over.set()
        scraping.result(60)
    moved = sum(answer["kvferry"]["handoff"]["bytes"] for answer in answers)
    assert moved > 0
    assert seen == sorted(seen)
    pair.context.require_settled()
    for worker, role in ((pair.context, "context"), (pair.generation, "generation")):
        found = until(lambda worker=worker: (s := Scraped(worker))("transfers_total") == len(PROMPTS) and s)
        assert found("transfer_bytes_total", role=role, outcome="completed") == moved
        assert found("handshakes_total", result="ready") == 1
        assert found("blocks_in_flight") == 0
        assert found("scrape_errors_total") == 0
        assert found("requests_total", result="completed") == len(PROMPTS)
        assert found("ready") == 1
        assert found("draining") == 0
        assert found("resolution_info", setting="cache_transceiver_config.transceiver_runtime", value="PYTHON") == 1
        assert found("plugin_info", plugin="runtime_python", state="active") == 1
        assert found("worker_info", role=role, backend="SCRIPTED", manager="V1") == 1


def test_answers_that_are_errors_are_counted_by_code_and_kept_requests_by_state(local_pair):
    worker = local_pair().generation
    gate = worker.gate()
    assert worker.complete(prompt="x", model="another").status_code == 404
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.complete, prompt="x", max_tokens=2)
        until(lambda: Scraped(worker)("requests_in_progress", state="computing") == 1)
        gate.let()
        assert answer.result(60).status_code == 200
    found = Scraped(worker)
    assert found("request_errors_total", status="404", code="model_not_found") == 1
    assert found("requests_total", type="context_and_generation", result="completed") == 1


def test_suspensions_are_counted_and_drawn(local_pair, tmp_path, read_trace):
    room = {"max_tokens": 128, "enable_block_reuse": False, "use_kv_cache_manager_v2": True, "host_cache_size": 1 << 24}
    worker = local_pair(memory=room, options={"trace": tmp_path / "trace.json"}).generation
    bodies = [{"prompt": [number + 11] * 17, "max_tokens": 60, "ignore_eos": True} for number in range(4)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert [answer.status_code for answer in pool.map(lambda body: worker.complete(**body), bodies)] == [200] * 4
    found = until(lambda: (s := Scraped(worker))("requests_total", result="completed") == len(bodies) and s)
    assert found("suspensions_total") >= 1
    assert found("cache_tier_moved_blocks_total", tier="host", move="stored") >= 1
    assert found("cache_blocks", tier="host", state="kept") == 0
    TraceFile(worker.service, tmp_path / "trace.json").write_at_end()
    names = [event["name"] for event in read_trace(tmp_path / "trace.json") if event["ph"] == "b"]
    assert names.count("suspended") == found("suspensions_total")
    assert names.count("request") == len(bodies)


def test_openmetrics_is_served_to_whoever_accepts_it(local_pair):
    worker = local_pair().context
    answer = worker.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0,*/*;q=0.1"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {"kvferry_ready", "kvferry_worker"} <= {family.name for family in read_openmetrics(answer.text)}


# --- making progress -------------------------------------------------------------------------------------------------


def test_an_engine_step_that_hangs_is_not_ready_says_where_and_recovers(local_pair):
    worker = local_pair(options=STALL).generation
    gate = worker.gate()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.complete, prompt="x", max_tokens=2)
        until(lambda: readiness(worker)[0] == 503)
        assert "the engine has work and has not moved for" in readiness(worker)[1]
        assert "conftest.py" in readiness(worker)[1]  # the gate's
        assert worker.http.get("/healthz").status_code == 200
        assert Scraped(worker)("ready") == 0
        assert Scraped(worker)("seconds_since_progress", thread="engine") >= 0.2
        assert worker.status()["engine"]["progress"]["seconds_since_progress"] >= 0.2
        gate.let()
        assert answer.result(60).status_code == 200
    until(lambda: readiness(worker) == (200, "ready"))
    assert Scraped(worker)("seconds_since_progress") < 60


def test_a_transfer_agent_that_hangs_is_not_ready_says_where_and_recovers(local_pair):
    pair = local_pair(options=STALL)
    agent, gate = pair.context.service.transceiver._shared.agent, threading.Event()
    poll = agent.poll

    def wedged_poll():
        assert gate.wait(120)
        return poll()

    agent.poll = wedged_poll
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.ask, prompt="Wedged", max_tokens=2)
        until(lambda: readiness(pair.context)[0] == 503)
        told = readiness(pair.context)[1]
        assert "the transfer loop has work and has not moved for" in told
        assert "wedged_poll (test_metrics.py:" in told
        assert pair.context.http.get("/healthz").status_code == 200
        until(lambda: readiness(pair.generation) == (200, "ready"))
        gate.set()
        assert answer.result(60)["choices"][0]["finish_reason"]
    until(lambda: readiness(pair.context) == (200, "ready"))


def test_a_worker_with_nothing_to_do_stays_ready(local_pair):
    worker = local_pair(options={"stall_seconds": 0.05}).context
    time.sleep(0.2)
    assert readiness(worker) == (200, "ready")


def test_a_lock_that_nobody_gives_back_stops_neither_healthz_nor_readyz(local_pair, monkeypatch):
    monkeypatch.setattr("kvferry.serving.app.ANSWER_SECONDS", 0.2)
    worker = local_pair().context
    stuck = threading.Event()
    statistics = worker.service.parts.manager.statistics

    def hanging(group=0):
        assert stuck.wait(120)
        return statistics(group)

    worker.service.parts.manager.statistics = hanging
    try:
        for path in ("/metrics", "/status"):
            answer = worker.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stalled")
        assert worker.http.get("/healthz").status_code == 200
        assert readiness(worker) == (200, "ready")
    finally:
        stuck.set()
    until(lambda: worker.http.get("/metrics").status_code == 200)


@pytest.mark.parametrize("asked", [MOST_AT_A_TIME + 3])
def test_so_many_may_hang_in_one_question_and_no_more(asked):
    import asyncio

    gate, began = threading.Event(), []

    def ask():
        began.append(1)
        assert gate.wait(120)
        return "told"

    async def run():
        aside = Aside("something", ask, seconds=100)
        tasks = [asyncio.ensure_future(aside()) for _ in range(asked)]
        while sum(task.done() for task in tasks) < 3 or len(began) < MOST_AT_A_TIME:
            await asyncio.sleep(0.005)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(run())
    assert answers.count("told") == MOST_AT_A_TIME == len(began)
    assert sum(isinstance(answer, RequestError) for answer in answers) == 3


def test_the_documentation_lists_every_metric_and_no_other(local_pair):
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    names = (re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows)
    documented = {name for found in names for name in found if not name.startswith("/")}
    text = local_pair().context.http.get("/metrics").text
    told = {family.name for family in read_text(text) if family.name.startswith("kvferry_")}
    assert {f"kvferry_{name}" for name in documented} == told | {"kvferry_trace_dropped_entries"}
