import asyncio
import threading
from types import SimpleNamespace

import httpx
import pytest

from kvferry.serving.app import make_app
from kvferry.serving.service import CHARACTERS_PER_TOKEN, Service
from kvferry_plugins.types import Role

TOKENS = 64


class SlowTokenizer:
    """Ends only once the test lets it."""

    def __init__(self):
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self, text, *, add_special_tokens):
        self.entered.set()
        assert self.released.wait(20), "nothing else was answered meanwhile"
        return {"input_ids": [1] * (TOKENS + 1)}


@pytest.fixture
def tokenizer():
    return SlowTokenizer()


@pytest.fixture
def client(tokenizer, tmp_path):
    loaded = SimpleNamespace(tokenizer=tokenizer, path=tmp_path, vocabulary_size=100, max_tokens=TOKENS)
    service = Service(
        role=Role.CONTEXT,
        model_name="tiny",
        parts=None,
        transceiver=SimpleNamespace(unusable=None),
        registry=None,
        loaded=loaded,
        engine=None,
        loop=SimpleNamespace(alive=True),
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://worker")


def test_others_are_answered_while_a_prompt_is_tokenised(client, tokenizer):
    async def both():
        async with client:
            completion = asyncio.create_task(client.post("/v1/completions", json={"prompt": "word"}))
            while not tokenizer.entered.is_set():
                await asyncio.sleep(0.001)
            health = await client.get("/healthz")
            assert not completion.done()
            tokenizer.released.set()
            return health, await completion

    health, completion = asyncio.run(both())
    assert health.status_code == 200
    assert completion.json()["error"]["code"] == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_without_tokenising_it(client, tokenizer):
    async def ask():
        async with client:
            return await client.post("/v1/completions", json={"prompt": "w" * (TOKENS * CHARACTERS_PER_TOKEN + 1)})

    answer = asyncio.run(ask())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert not tokenizer.entered.is_set()


@pytest.mark.parametrize("body", [rb'{"prompt": "\ud83d"}', rb'{"prompt": ["a \udfff"]}'])
def test_a_lone_surrogate_names_the_prompt(client, tokenizer, body):
    async def ask():
        async with client:
            return await client.post("/v1/completions", content=body)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "no valid Unicode" in answer.json()["error"]["message"]
