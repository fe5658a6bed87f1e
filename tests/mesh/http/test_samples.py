"""`n` choices: a request of its own for each, one answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from mesh.errors import Overloaded
from tests.mesh.http.fake_gateway import FakeGateway, decision, finish, tokens

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi", "seed": 5}


def answers(gateway: FakeGateway, *texts: str) -> None:
    for index, text in enumerate(texts):
        deltas = [tokens(i, letter) for i, letter in enumerate(text)]
        gateway.by_sample[index] = [decision(), *deltas, finish()]


def chunks_of(response: httpx.Response) -> list[Any]:
    lines = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_each_sample_is_a_request_with_its_index(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answers(gateway, "abc", "d", "ef")
    body = (await http.post("/v1/completions", json=COMPLETION | {"n": 3})).json()
    assert [r.sampling.sample_index for r in gateway.requests] == [0, 1, 2]
    assert {(r.sampling.seed, r.text, r.model) for r in gateway.requests} == {(5, "hi", "tiny")}
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "abc"), (1, "d"), (2, "ef")]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["total_tokens"] == 19
    assert [s["request_id"] for s in body["kvmesh"]["samples"]] == ["osaka-0:ab12"] * 3
    assert gateway.n_closed == 3


async def test_chat_choices(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answers(gateway, "yes", "no")
    body = (await http.post("/v1/chat/completions", json=CHAT | {"n": 2})).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["yes", "no"]


async def test_one_is_what_it_was(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    one = (await http.post("/v1/chat/completions", json=CHAT | {"n": 1})).json()
    assert one == (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert not gateway.requests[0].sampling.HasField("sample_index")


async def test_a_stream_of_several(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answers(gateway, "abc", "de")
    asked = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = chunks_of(await http.post("/v1/chat/completions", json=CHAT | asked))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    texts, ends = ["", ""], []
    for chunk in chunks:
        assert chunk["id"] == "chatcmpl-osaka-0:ab12"
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            ends.append(choice["index"])
    assert texts == ["abc", "de"]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refusal_refuses_all(stream: bool, http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answers(gateway, "abc", "de")
    gateway.by_sample[1] = [Overloaded("no room")]
    gateway.by_sample[2] = [None]  # would wait for ever
    response = await http.post("/v1/completions", json=COMPLETION | {"n": 3, "stream": stream})
    assert response.status_code == 429
    assert gateway.n_closed == 3


async def test_an_error_in_one_stream_ends_all(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.by_sample = {0: [decision(), None], 1: [decision(), tokens(0, "a"), Overloaded("no room")]}
    *_, last = chunks_of(await http.post("/v1/completions", json=COMPLETION | {"n": 2, "stream": True}))
    assert last["error"]["message"] == "no room"
    assert gateway.n_closed == 2


async def test_a_client_that_leaves_cancels_all(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.by_sample = {0: [decision(), None], 1: [decision(), None]}
    task = asyncio.create_task(http.post("/v1/completions", json=COMPLETION | {"n": 2}))
    await gateway.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(20):
        await asyncio.sleep(0)
    assert gateway.n_closed == 2


async def test_a_key_to_resume_by_names_one_stream(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    response = await http.post("/v1/completions", json=COMPLETION | {"n": 2, "kvmesh": {"idempotency_key": "k"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "idempotency_key"
    assert gateway.requests == []
