import json
import signal
import threading
import time

import psutil
import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.demo.processes import WorkerFailedError
from kvferry.demo.router import ask


def ended(worker, seconds):
    return worker.process._process.wait(seconds)


def signalled(worker, number):
    worker.process._process.send_signal(number)


def offered(worker):
    """A hand-off that nobody fetches: it holds blocks until its lease ends."""
    answer = worker.complete(prompt="Held back", disaggregated_params={"request_type": "context_only"})
    assert answer.status_code == 200, answer.text


def test_a_drained_worker_refuses_what_is_new_finishes_what_it_has_and_ends_with_0(start_worker, small_model):
    body = {"prompt": "Long", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with start_worker("context", small_model, kv_transfer_admission_timeout_ms=1500) as worker:
        assert worker.http.get("/readyz").status_code == 200
        offered(worker)
        with worker.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            signalled(worker, signal.SIGTERM)
            deadline = time.monotonic() + 1
            while worker.http.get("/readyz").status_code == 200 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert worker.http.get("/readyz").status_code == 503
            assert worker.http.get("/healthz").status_code == 200
            refused = worker.complete(prompt="Too late", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert worker.status()["draining"] is True
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert ended(worker, 10) == 0


def test_a_worker_that_cannot_drain_in_time_ends_with_1_and_says_what_is_left(start_worker, small_model):
    body = {"prompt": "Long", "max_tokens": 4000, "ignore_eos": True}
    with start_worker("context", small_model, "--drain-seconds", "0.5") as worker:
        offered(worker)
        with worker.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            signalled(worker, signal.SIGTERM)
            assert '"code": "shutting_down"' in [line for line in lines if line][-2]
        assert ended(worker, 10) == 1
        said = "\n".join(worker.process._last_lines)
        assert "stopped before everything was drained" in said
        assert "'transferring': 1" in said


def test_sigusr1_tells_the_status_and_all_stacks(pair, monkeypatch):
    heard = []
    monkeypatch.setattr(pair.context.process, "_last_lines", heard)
    signalled(pair.context, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while not any("outcomes" in line for line in heard) and time.monotonic() < deadline:
        time.sleep(0.02)
    said = "\n".join(heard)
    assert "most recent call first" in said
    assert "engine_loop.py" in said
    assert '"plan"' in said
    assert '"ledger"' in said
    assert pair.context.complete(prompt="Still here", max_tokens=1).status_code == 200


def test_a_worker_with_another_model_is_refused_naming_what_differs(running_pair, start_worker, small_model):
    with start_worker("context", small_model) as stranger:
        answer = stranger.complete(prompt="Hi", disaggregated_params={"request_type": "context_only"}).json()
        params = {**answer["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
        body = {"prompt": answer["prompt_token_ids"], "disaggregated_params": params}
        refused = running_pair.generation.complete(**body)
        assert refused.status_code == 502, refused.text
        assert refused.json()["error"]["code"] == "handshake_refused", refused.text
        assert "model.weights" in refused.json()["error"]["message"]
        assert not running_pair.generation.unsettled


def test_a_context_worker_that_was_killed_is_a_502_and_costs_nothing(start_worker, small_model):
    with start_worker("context", small_model) as context, start_worker("generation", small_model) as generation:
        answer = context.complete(prompt="Hi", disaggregated_params={"request_type": "context_only"}).json()
        params = {**answer["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
        body = {"prompt": answer["prompt_token_ids"], "max_tokens": 2, "disaggregated_params": params}
        context.process._process.kill()
        context.process._process.wait()
        lost = generation.complete(**body)
        assert (lost.status_code, lost.json()["error"]["code"]) == (502, "peer_lost"), lost.text
        with pytest.raises(WorkerFailedError, match=r"context worker gave no answer .*ended with signal SIGKILL"):
            ask(context.process, generation.process, "Hi", 2, lambda text: None)
        assert generation.complete(prompt="Alone", max_tokens=2).status_code == 200
        generation.require_settled(seconds=5)


def test_two_connected_workers_that_idle_use_no_cpu(pair):
    pair.ask(prompt="Get to know each other", max_tokens=2)
    time.sleep(1.5)
    processes = [psutil.Process(worker.process.pid) for worker in (pair.context, pair.generation)]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(5)
    used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
    assert max(used) <= 0.02 * 5 + 0.02, used  # the kernel counts in hundredths


def test_status_holds_the_plan_the_plugins_and_the_figures(pair):
    status = pair.context.status()
    assert status["role"] == "context"
    assert status["plan"]["transceiver"] == {
        "enabled": True,
        "runtime": "PYTHON",
        "backend": "NIXL",
        "provider": "runtime_python",
    }
    assert "nixl" in status["plugins"]
    assert [each["state"] for each in status["plugin_records"] if each["name"] == "nixl"] == ["active"]
    assert status["manager"]["groups"][0]["total"] == 192
    assert status["transceiver"]["role"] == "context"


def test_status_answers_while_the_engine_computes(pair):
    body = {"prompt": [(number * 31) % 40000 + 100 for number in range(1500)], "max_tokens": 1}
    computing = threading.Thread(target=pair.context.complete, kwargs=body)
    computing.start()
    seconds = []
    while computing.is_alive():
        started = time.monotonic()
        pair.context.status()
        seconds.append(time.monotonic() - started)
    assert len(seconds) > 3
    assert max(seconds) < 1.0


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/status", "/v1/models"])
def test_the_small_endpoints_answer_json(pair, path):
    answer = pair.generation.http.get(path)
    assert answer.status_code == 200
    assert answer.json()


def test_explain_asks_a_running_worker(pair):
    said = CliRunner().invoke(main, ["explain", "--worker", pair.context.process.http]).output
    assert "PYTHON on NIXL" in said
    assert "worker       context, ready" in said
    result = CliRunner().invoke(main, ["explain", "--json", "--worker", pair.generation.process.http])
    answer = json.loads(result.output)
    assert answer["ok"] is True
    assert answer["transceiver"]["runtime"] == "PYTHON"
    assert answer["worker"]["transceiver"]["loop_alive"] is True


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1:1", 1), ("tcp://127.0.0.1:1", 2)])
def test_explain_says_that_no_worker_is_there(address, status):
    result = CliRunner().invoke(main, ["explain", "--worker", address])
    assert result.exit_code == status
    assert "127.0.0.1:1" in result.output


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_running_out_of_blocks_half_way_is_said_and_costs_nothing(start_worker, small_model, stream):
    with start_worker("generation", small_model, memory={"max_tokens": 64}) as worker:
        body = {"prompt": [7] * 40, "max_tokens": 200, "ignore_eos": True}
        if stream:
            *pieces, last = worker.stream(**body)
            assert len(pieces) == 25  # the prompt's blocks have room for 24 tokens behind it, and one needs none
            error = last["error"]
        else:
            answer = worker.complete(**body)
            assert answer.status_code == 503
            error = answer.json()["error"]
        assert error["code"] == "cache_full"
        worker.require_settled(seconds=2)
        assert worker.complete(prompt=[7] * 40, max_tokens=20, ignore_eos=True).status_code == 200
