"""Messages between agent and llama.cpp process: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import typing

import pytest

from edge_node.engine import messages as m
from mesh.errors import Internal, InvalidRequest, NotFound
from mesh.node.engine import (
    EngineLoad,
    Finished,
    FinishReason,
    Held,
    ImportSpec,
    Prefilled,
    RunId,
    RunSpec,
    SelfTest,
    Tokens,
)
from mesh.node.sampling import SamplingParams

R = RunId("r1")
SPEC = RunSpec(
    run_id=R,
    token_ids=(1, 2, 49151),
    prompt_tokens=2,
    sampling=SamplingParams(max_tokens=7, seed=2**64 - 1, temperature=0.1, stop=("a\0", "é"), logprobs=3),
    salt=b"\x00\xff",
    kv_from=RunId("r0"),
)
START = m.Start(
    model_path="/m.gguf",
    n_threads=1,
    n_ctx_tokens=2,
    max_context_tokens=3,
    max_running=4,
    max_sequences=5,
    max_step_tokens=6,
    max_waiting=7,
    max_stall_s=0.5,
    slot_bytes=8,
    n_layers=9,
    n_kv_heads=10,
    head_dim=11,
    vocab_size=12,
    eos_token_ids=(0, 2),
)
LOAD = EngineLoad(
    running=1,
    waiting=2,
    waiting_prefill_tokens=3,
    kv_used_tokens=4,
    kv_capacity_tokens=5,
    prefill_tokens_per_s=0.1,
    decode_tokens_per_s=1e-9,
)
ALL = [
    START,
    m.Submit(3, SPEC),
    m.Cancel(3),
    m.Call(1, m.Pause(R)),
    m.Call(1, m.Release(R)),
    m.Call(1, m.KvTokens(R)),
    m.Call(1, m.Export(R, 1, 2, 0)),
    m.Call(1, m.Write(R, 1, 2, 1)),
    m.Call(1, m.OpenImport(ImportSpec(run_id=R, token_ids=(5,), max_tokens=9, salt=b""))),
    m.Call(1, m.Join(R, RunId("head"))),
    m.Call(1, m.CachedTokens((1, 2, 3), b"\x01")),
    m.Call(1, m.GetLoad()),
    m.Call(1, m.RunSelfTest()),
    m.Call(1, m.CheckIntegrity()),
    m.Ready("llama"),
    m.Event(3, Prefilled(5, 2)),
    m.Event(3, Tokens((4,), ((-0.25, ((4, -0.25), (9, -1.5))),))),
    m.Event(3, Tokens((4,), ((-math.inf, ()),))),
    m.Event(3, Finished(FinishReason.STOP, "end")),
    m.Event(3, Finished(FinishReason.LENGTH)),
    m.Event(3, Held(12)),
    m.Reply(1, None),
    m.Reply(1, 5),
    m.Reply(1, "text"),
    m.Reply(1, LOAD),
    m.Reply(1, SelfTest(prefill_tokens_per_s=1.5, decode_tokens_per_s=2.5, notes=("a", "b"))),
    m.Failure("run", 3, "NOT_FOUND", "gone", (("run", "r1"),)),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_what_goes_in_comes_out(message: m.ToChild | m.FromChild) -> None:
    frame = m.encode(message)
    (length,) = m.LENGTH.unpack(frame[:4])
    assert length == len(frame) - 4
    assert m.decode(frame[4:]) == message


def test_every_request_is_covered_here() -> None:
    assert {type(c.request) for c in ALL if isinstance(c, m.Call)} == set(typing.get_args(m.Request))


def test_errors_keep_their_class_and_details() -> None:
    error = m.Failure.from_error("call", 1, NotFound("no run", run="r")).error()
    assert type(error) is NotFound
    assert (error.message, error.details) == ("no run", {"run": "r"})
    assert type(m.Failure("call", 1, "FROM_A_NEWER_PEER", "?").error()) is Internal


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b'{"@":"Ready"}',
        b'{"build":"x"}',
        b'{"@":"Ready","build":"x","more":1}',
        b'{"@":"os.system","command":"x"}',
        b'{"@":"Submit","key":1,"spec":{"@":"RunSpec"}}',
        b'{"@":"Call","id":1,"request":{"@":"CachedTokens","token_ids":[1],"salt":"zz"}}',
        b'{"@":"Event","key":1,"event":{"@":"Finished","reason":"bored"}}',
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(Internal, match="malformed"):
        m.decode(body)


def test_sampling_is_checked_again_on_arrival() -> None:
    frame = json.loads(m.encode(m.Submit(1, SPEC))[4:])
    frame["spec"]["sampling"]["temperature"] = 99
    with pytest.raises(InvalidRequest, match="temperature"):
        m.decode(json.dumps(frame).encode())


def test_only_messages_are_encoded() -> None:
    with pytest.raises(TypeError):
        m.encode(object())  # type: ignore[arg-type]
