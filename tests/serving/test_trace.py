"""A worker's own process: its trace, its metrics port, and its metrics while it drains."""

import json
import signal
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

BODY = {"prompt": [7] * 70, "max_tokens": 4, "ignore_eos": True}


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def metric(text, name, **labels):
    samples = (sample for family in read_text(text) for sample in family.samples)
    return sum(
        each.value for each in samples if each.name == f"kvferry_{name}" and labels.items() <= each.labels.items()
    )


def end(worker, number=signal.SIGTERM):
    worker.process._process.send_signal(number)
    return worker.process._process.wait(60)


def names(events, phase="b"):
    return [event["name"] for event in events if event["ph"] == phase]


@pytest.fixture(scope="module")
def traced(tmp_path_factory, small_model, start_worker):
    """Two workers that trace, after one hand-off: their traces on SIGUSR2 and at the end, and all that was asked."""
    folder = tmp_path_factory.mktemp("traces")
    paths = {role: folder / f"{role}.json" for role in ("context", "generation")}
    chunk, port = ("--prefill-chunk", "32"), ("--metrics-port", "0")
    told = {}
    with (
        start_worker("context", small_model, "--trace", str(paths["context"]), *chunk) as context,
        start_worker("generation", small_model, "--trace", str(paths["generation"]), *port) as generation,
    ):
        asked = {**BODY, "disaggregated_params": {"request_type": "context_only"}}
        prefilled = context.complete(**asked).json()
        params = {**prefilled["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
        assert generation.complete(**BODY, disaggregated_params=params).status_code == 200
        for worker in (context, generation):
            worker.require_settled()
        context.process._process.send_signal(signal.SIGUSR2)
        until(lambda: paths["context"].stat().st_size)
        told["early"] = json.loads(paths["context"].read_text())
        assert context.http.get("/healthz").status_code == 200
        told["metrics"] = httpx.get(generation.process.metrics, trust_env=False, timeout=60).text
        exits = {"context": end(context), "generation": end(generation)}
    return paths, told, exits


def test_a_trace_holds_the_request_from_queue_to_end_on_both_sides(traced, read_trace):
    paths, _, exits = traced
    assert exits == {"context": 0, "generation": 0}
    context, generation = read_trace(paths["context"]), read_trace(paths["generation"])
    assert names(context, "X") == ["prefill"] * 3
    assert names(generation, "X") == ["decode"] * 3
    assert names(context, "n") == ["offer"]
    for events in (context, generation):
        assert names(events).count("request") == names(events).count("transfer") == names(events).count("ready") == 1
        assert {"queue", "control", "wire"} <= set(names(events))
    assert "attach" in names(generation)


def test_both_sides_tell_of_one_hand_off_on_one_clock(traced, read_trace):
    paths, _, _ = traced
    wires = {}
    for role, path in paths.items():
        wires[role] = [e["ts"] for e in read_trace(path) if e["name"] == "wire" and e["cat"] == "transfer"]
    begins, ends = zip(*wires.values(), strict=True)
    assert abs(begins[0] - begins[1]) < 60e6
    assert max(begins) <= min(ends)


def test_a_request_names_the_one_it_continues(traced, read_trace):
    paths, _, _ = traced
    (context,) = [e for e in read_trace(paths["context"]) if e["name"] == "request" and e["ph"] == "b"]
    (generation,) = [e for e in read_trace(paths["generation"]) if e["name"] == "request" and e["ph"] == "b"]
    assert generation["args"]["ctx_request_id"] == context["args"]["request"]
    assert (generation["args"]["type"], generation["args"]["ended"]) == ("generation_only", "completed")
    assert generation["args"]["prompt_tokens"] == 70


def test_sigusr2_writes_the_trace_so_far_and_the_worker_goes_on(traced, read_trace):
    paths, told, _ = traced
    early = [event for event in told["early"]["traceEvents"] if event["ph"] != "M"]
    assert {event["name"] for event in early} == {event["name"] for event in read_trace(paths["context"])}


def test_the_port_of_its_own_tells_the_same(traced):
    _, told, _ = traced
    assert metric(told["metrics"], "transfers_total", role="generation", outcome="completed") == 1


def test_metrics_answer_while_a_worker_drains_and_a_taken_port_is_benign(start_worker, small_model):
    body = {"prompt": "Long", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with start_worker("generation", small_model, "--metrics-port", port) as worker:
            said = [line for line in worker.process._last_lines if "--metrics-port" in line]
            assert len(said) == 1
            assert metric(worker.http.get("/metrics").text, "ready") == 1
            with worker.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                worker.process._process.send_signal(signal.SIGUSR2)  # without --trace: a warning, and no more
                worker.process._process.send_signal(signal.SIGTERM)
                until(lambda: worker.http.get("/readyz").status_code == 503)
                text = worker.http.get("/metrics").text
                assert (metric(text, "ready"), metric(text, "draining")) == (0, 1)
                assert worker.complete(prompt="Too late", max_tokens=1).status_code == 503
                assert metric(worker.http.get("/metrics").text, "request_errors_total", code="draining") == 1
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert worker.process._process.wait(60) == 0
            assert any("--trace FILE" in line for line in worker.process._last_lines)
