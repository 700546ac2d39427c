import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from kvferry.config import parse_engine_args
from kvferry.demo.processes import WorkerProcess
from kvferry.integrations.transformers.loading import LoadedModel, load_model
from kvferry.serving.app import make_app
from kvferry.serving.http_server import HttpServer, bind_http
from kvferry.serving.service import Service
from kvferry.serving.worker import WorkerOptions, running_service
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import Role, RuntimeSupport, TransferBackend

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BLOCK_TOKENS = 32
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # layers, key and value, KV heads, head dimension, float32
LEASE_SECONDS = 8
SETTLE_SECONDS = LEASE_SECONDS + 10

CONFIG: dict[str, Any] = {
    "cache_transceiver_config": {
        "backend": "NIXL",
        "transceiver_runtime": "PYTHON",
        "kv_transfer_timeout_ms": 8000,
        "kv_transfer_admission_timeout_ms": LEASE_SECONDS * 1000,
    },
    "kv_cache_config": {"dtype": "float32", "max_tokens": 6144, "tokens_per_block": BLOCK_TOKENS},
    "device": "cpu",
}


@dataclass(frozen=True)
class Worker:
    """One worker process, as a client sees it."""

    process: WorkerProcess
    http: httpx.Client

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return list(events(answer))

    def status(self) -> dict[str, Any]:
        return self.http.get("/status").json()

    @property
    def unsettled(self) -> dict[str, Any]:
        """What is left over: jobs, blocks and ledger entries; empty when everything came free."""
        status = self.status()
        found = {
            **{name: status["engine"][name] for name in ("waiting", "computing", "transferring", "suspended")},
            "in_use": sum(group["in_use"] for group in status["manager"]["groups"]),
            "ledger": status["transceiver"]["ledger"]["entries"],
        }
        return {name: value for name, value in found.items() if value}

    def require_settled(self, seconds: float = SETTLE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.unsettled) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        yield json.loads(line.removeprefix("data: "))


@dataclass(frozen=True)
class Pair:
    context: Worker
    generation: Worker
    block_tokens: int = BLOCK_TOKENS
    token_bytes: int = TOKEN_BYTES

    def prefill(self, **body: Any) -> dict[str, Any]:
        """The body for the generation worker, as a router makes it from the context worker's answer."""
        answer = self.context.complete(**body, disaggregated_params={"request_type": "context_only"})
        assert answer.status_code == 200, answer.text
        prefilled = answer.json()
        params = prefilled["choices"][0]["disaggregated_params"]
        return {
            **body,
            "prompt": prefilled["prompt_token_ids"],
            "disaggregated_params": {**params, "request_type": "generation_only"},
        }

    def announce(self, **body: Any) -> dict[str, Any]:
        """As ``prefill``, but generation-first: the context worker answers before it has computed."""
        wanted = {"request_type": "context_only", "schedule_style": "generation_first"}
        answer = self.context.complete(**body, disaggregated_params=wanted)
        assert answer.status_code == 200, answer.text
        announced = answer.json()
        params = announced["choices"][0]["disaggregated_params"]
        return {
            **body,
            "prompt": announced["prompt_token_ids"],
            "disaggregated_params": {**params, "request_type": "generation_only"},
        }

    def ask(self, **body: Any) -> dict[str, Any]:
        answer = self.generation.complete(**self.prefill(**body))
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextlib.contextmanager
def running_worker(factory, role: str, model: str, config: dict[str, Any], *arguments: str) -> Iterator[Worker]:
    folder = factory.mktemp(role)
    path = folder / f"{role}.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = ("--role", role, "--model", model, "--config", str(path), *arguments)
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # all workers are one user's: they share the key of its settings
            for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
                patch.setenv(variable, str(factory.getbasetemp() / "settings"))
            process = stack.enter_context(WorkerProcess(role, arguments, lambda text: None))
        process.wait_ready()
        with httpx.Client(base_url=process.http, timeout=120, trust_env=False) as http:
            yield Worker(process, http)


@pytest.fixture(scope="session")
def running_pair(tmp_path_factory) -> Iterator[Pair]:
    with (
        running_worker(tmp_path_factory, "context", "smollm2", CONFIG) as context,
        running_worker(tmp_path_factory, "generation", "smollm2", CONFIG) as generation,
    ):
        yield Pair(context, generation)


@pytest.fixture
def pair(running_pair) -> Iterator[Pair]:
    """Two workers over NIXL with the real SmolLM2; whatever a test does, nothing may be left behind."""
    yield running_pair
    running_pair.context.require_settled()
    running_pair.generation.require_settled()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    """A checkpoint of a few hundred kilobytes, quick to start, with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from kvferry.integrations.checkpoints import find_checkpoint

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small-model")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_checkpoint("smollm2")).save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def stopped():
    """Keep a process from running for a while: ``with stopped(pid): …``."""
    return stopped_process


@pytest.fixture(scope="session")
def start_worker(tmp_path_factory):
    """A worker of a test's own: ``with start_worker(role, model, *arguments) as worker: …``."""

    def start(role: str, model: str, *arguments: str, memory: dict[str, Any] | None = None, **transceiver: Any):
        config = {
            **CONFIG,
            "cache_transceiver_config": {**CONFIG["cache_transceiver_config"], **transceiver},
            "kv_cache_config": {**CONFIG["kv_cache_config"], **(memory or {})},
        }
        return running_worker(tmp_path_factory, role, model, config, *arguments)

    return start


# --- two workers in the test's own process, over memcpy ---------------------------------------------------------------


class ScriptedBackend:
    """A backend whose agents copy memory within the process."""

    name = "scripted"

    def __init__(self) -> None:
        self._hub = ScriptedHub()

    @hookimpl
    def transfer_backends(self) -> tuple[TransferBackend, ...]:
        return (TransferBackend("SCRIPTED", {"PYTHON": RuntimeSupport()}, probe="none:none"),)

    @hookimpl
    def create_transfer_agent(self, spec) -> ScriptedAgent:
        return ScriptedAgent(spec.name, hub=self._hub)


@dataclass
class Gate:
    """Lets the steps of an engine's prefills through, so many as a test says."""

    engine: Any
    passed: int = 0
    fault: Exception | None = None
    _open: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        step = self.engine.prefill_step

        def gated(running):
            assert self._open.acquire(timeout=60)
            if self.fault is not None:
                raise self.fault
            self.passed += 1
            return step(running)

        self.engine.prefill_step = gated

    def let(self, steps: int = 1000) -> None:
        self._open.release(steps)

    def break_with(self, fault: Exception) -> None:
        self.fault = fault
        self.let(1)


@dataclass(frozen=True)
class LocalWorker(Worker):
    """A worker of the test's own process."""

    service: Service

    def gate(self) -> Gate:
        """From now on prefills wait at a gate."""
        return Gate(self.service.engine)

    def wait(self, condition, seconds: float = 30) -> None:
        """Wait until ``condition(status)``."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.01)


@functools.cache
def load_once(folder: str, dtype: str) -> LoadedModel:
    return load_model(folder, dtype)


@contextlib.contextmanager
def local_worker(
    role: Role, model: str, config: dict[str, Any], registry, chunk: int | None, **options: Any
) -> Iterator[LocalWorker]:
    def load(folder, dtype, *, device, progress) -> LoadedModel:
        return load_once(str(folder), dtype)

    options = WorkerOptions(role, model, prefill_chunk=chunk, threads=1, **options)
    with contextlib.ExitStack() as stack:
        args = parse_engine_args(config)
        service = stack.enter_context(
            running_service(options, args, registry, progress=lambda stage, fraction: None, load=load)
        )
        server = HttpServer(make_app(service), stack.enter_context(bind_http("127.0.0.1", 0)))
        server.start()
        stack.callback(server.stop)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=120, trust_env=False))
        yield LocalWorker(SimpleNamespace(http=server.url), http, service)


@pytest.fixture
def local_pair(small_model, request):
    """Two workers in this process: ``local_pair(**cache_transceiver_config)``; at the end nothing may be left."""
    import torch

    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:

        def start(
            *, memory=None, generation_memory=None, chunk=32, plugins=(), lease=20_000, options=None, **transceiver
        ) -> Pair:
            registry = isolated_registry(ScriptedBackend(), *plugins)
            times = {"kv_transfer_timeout_ms": 20_000, "kv_transfer_admission_timeout_ms": lease}
            memory = {"dtype": "float32", "max_tokens": 2048, "tokens_per_block": 16, **(memory or {})}
            chosen = {"backend": "SCRIPTED", "transceiver_runtime": "PYTHON", **times, **transceiver}
            config = {"cache_transceiver_config": chosen, "kv_cache_config": memory, "device": "cpu"}
            other = {**config, "kv_cache_config": {**memory, **(generation_memory or {})}}
            pair = Pair(
                stack.enter_context(
                    local_worker(Role.CONTEXT, small_model, config, registry, chunk, **(options or {}))
                ),
                stack.enter_context(
                    local_worker(Role.GENERATION, small_model, other, registry, chunk, **(options or {}))
                ),
                block_tokens=16,
                token_bytes=2 * 2 * 16 * 4,  # layers, key and value, head dimension, float32
            )
            stack.callback(pair.generation.require_settled)
            stack.callback(pair.context.require_settled)
            return pair

        yield start
    torch.set_num_threads(threads)
