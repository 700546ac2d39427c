"""Both workers of the matrix's cells that have one runtime, in one process that loads each model once.

Reads a cell a line from standard input, as JSON, and writes a result a line to standard output.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import DynamicCache

from kvferry.config import parse_engine_args
from kvferry.integrations.checkpoints import find_checkpoint
from kvferry.integrations.transformers.loading import LoadedModel, load_model
from kvferry.registry.door import Registry
from kvferry.serving.app import make_app
from kvferry.serving.http_server import HttpServer, bind_http
from kvferry.serving.service import Service
from kvferry.serving.worker import WorkerOptions, running_service
from kvferry.testing import isolated_registry
from kvferry.testing.tiny_checkpoints import write_tiny_checkpoint
from kvferry_plugins.types import Role

NEW_TOKENS = 6
CHUNK = 256
PROMPT_TOKENS = {"gemma3": 600, "smollm2": 150}
"""Gemma's windows are 512 tokens."""
TINY_PROMPT_TOKENS = 400
DIARY = " ".join(f"On day {day} the ferry took {day * 7 % 13} cars across the river." for day in range(1, 90))
REST = " In short, what the ferry brought over the river was"


@functools.cache
def loaded(folder: str) -> LoadedModel:
    return load_model(folder, "float32")


def load(folder: Any, dtype: str, *, device: str, progress: Any) -> LoadedModel:
    assert (dtype, device) == ("float32", "cpu")
    return loaded(str(folder))


@functools.cache
def folder_of(name: str) -> Path:
    """A model's folder; ``tiny:NAME`` is one of ``TINY_MODELS``, written anew."""
    if not name.startswith("tiny:"):
        return find_checkpoint(name)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-matrix-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_tiny_checkpoint(name.removeprefix("tiny:"), folder / "model")


@functools.cache
def prompts(name: str) -> list[list[int]]:
    """A prompt, and one that begins as it does."""
    model = loaded(str(folder_of(name)))
    tokens = model.tokenizer(DIARY)["input_ids"][: PROMPT_TOKENS.get(name, TINY_PROMPT_TOKENS)]
    return [tokens, [*tokens[:-7], *model.tokenizer(REST, add_special_tokens=False)["input_ids"]]]


@functools.cache
def reference(name: str, which: int) -> list[int]:
    """What transformers' own generate makes of a prompt, with its own cache."""
    model = loaded(str(folder_of(name))).model
    prompt = torch.tensor([prompts(name)[which]])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        prefill_chunk_size=CHUNK,
        cache=DynamicCache(config=model.config),
    )
    return output[0, prompt.shape[1] :].tolist()


def bytes_needed(service: Service, prompt_tokens: int, cached_tokens: int) -> int:
    """What a generation worker lacks of a prompt: of a window only what the next token reads."""
    layout = service.parts.manager.layout
    nbytes = 0
    for index, group in enumerate(layout.groups):
        if group.kind == "state":
            nbytes += layout.block_bytes(index)
            continue
        start = max(cached_tokens, group.first_block_needed(prompt_tokens) * group.tokens_per_block)
        nbytes += (prompt_tokens - start) * (layout.block_bytes(index) // group.tokens_per_block)
    return nbytes


class Worker:
    """One side, as a client sees it."""

    def __init__(self, service: Service, http: httpx.Client) -> None:
        self.service = service
        self._http = http

    def complete(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, "disaggregated_params": params}
        answer = self._http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextlib.contextmanager
def worker(role: Role, cell: dict[str, Any], manager: str, registry: Registry) -> Iterator[Worker]:
    config = {
        "cache_transceiver_config": {
            "backend": cell["backend"],
            "transceiver_runtime": cell["runtime"],
            "enable_pipelined_transfer": cell["pipelined"],
        },
        "kv_cache_config": {
            "dtype": "float32",
            "max_tokens": 2048,
            "enable_block_reuse": cell["reuse"],
            "use_kv_cache_manager_v2": manager == "V2",
        },
        "device": "cpu",
    }
    options = WorkerOptions(role, str(folder_of(cell["model"])), prefill_chunk=CHUNK, threads=1)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            running_service(options, parse_engine_args(config), registry, progress=lambda *_: None, load=load)
        )
        server = HttpServer(make_app(service), stack.enter_context(bind_http("127.0.0.1", 0)))
        server.start()
        stack.callback(server.stop)
        yield Worker(service, stack.enter_context(httpx.Client(base_url=server.url, timeout=300, trust_env=False)))


def ask(context: Worker, generation: Worker, prompt: list[int], style: str) -> dict[str, Any]:
    first = context.complete(prompt, {"request_type": "context_only", "schedule_style": style})
    params = first["choices"][0]["disaggregated_params"]
    return generation.complete(first["prompt_token_ids"], {**params, "request_type": "generation_only"})


def run(cell: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """Send what the cell asks through a pair of its own: with reuse a second prompt, whose beginning is known."""
    managers = cell["manager"].split("-")
    answers = []
    with (
        worker(Role.CONTEXT, cell, managers[0], registry) as context,
        worker(Role.GENERATION, cell, managers[-1], registry) as generation,
    ):
        for which, prompt in enumerate(prompts(cell["model"])[: 2 if cell["reuse"] else 1]):
            answer = ask(context, generation, prompt, cell["style"])
            handoff = answer["kvferry"]["handoff"]
            answers.append(
                {
                    "prompt_tokens": len(prompt),
                    "token_ids": answer["choices"][0]["token_ids"],
                    "reference": reference(cell["model"], which),
                    "bytes": handoff["bytes"],
                    "expected_bytes": bytes_needed(generation.service, len(prompt), handoff["cached_tokens"]),
                    "cached_tokens": handoff["cached_tokens"],
                }
            )
        plan = generation.service.parts.plan
        built = {"manager": plan.manager, "runtime": plan.runtime, "backend": plan.backend}
    return {**built, "answers": answers}


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    registry = isolated_registry(builtin_models=True)
    for line in sys.stdin:
        try:
            result = run(json.loads(line), registry)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"cell": json.loads(line), **result}), flush=True)


if __name__ == "__main__":
    main()
