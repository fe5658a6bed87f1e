"""The client commands as a user types them, against an entry over real gRPC."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from mesh.cli.client_commands import register
from mesh.cli.client_connection import Flags, resolve
from mesh.cli.client_output import message_json, printable, size_words
from mesh.errors import InvalidRequest, NotFound, Overloaded
from mesh.v1 import common_pb2, inference_pb2
from tests.mesh.fake_entry import KEY, WORDS, FakeEntry, running

TEXT = "".join(WORDS) + "end"


class Mesh:
    """An entry in a thread of its own, and the state file of a local mesh."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.entry: FakeEntry
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.entry = FakeEntry()
        async with running(self.entry) as address:
            facts = {"grpc": address, "edges": {"paris": {"grpc": address}}, "api_key": KEY, "admin_key": KEY}
            self.state.write_text(json.dumps(facts))
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path_factory.mktemp("state") / "up.json")
    yield mesh
    mesh.close()


@pytest.fixture(autouse=True)
def fresh(mesh: Mesh) -> Iterator[None]:
    yield
    mesh.entry.errors.clear()
    mesh.entry.requests.clear()


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def _run(app: typer.Typer, mesh: Mesh, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--state", str(mesh.state)], input=stdin)


def _json_lines(result: Result) -> list[Any]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_streams_to_stdout_and_tells_where_it_ran(app: typer.Typer, mesh: Mesh) -> None:
    result = _run(app, mesh, "generate", "hi", "--label", "internal", "--max-tokens", "8", "--stop", "a", "--stop", "b")
    assert result.stdout == TEXT + "\n"
    assert "split core-0 → osaka-0" in result.stderr
    assert "moved osaka-0 → core-0 at token 4 (operator" in result.stderr
    request = mesh.entry.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi")]
    assert (request.label, request.sampling.max_tokens, list(request.sampling.stop)) == ("internal", 8, ["a", "b"])


def test_generate_json_is_one_event_a_line(app: typer.Typer, mesh: Mesh) -> None:
    events = _json_lines(_run(app, mesh, "generate", "hi", "--json", "--site", "paris"))
    assert [e["event"] for e in events] == ["decision", *["tokens"] * 4, "migration", *["tokens"] * 5, "finish"]
    assert events[-1]["receipt"]["record"]["body"] == "e30="
    assert events[-1]["usage"]["cached_tokens"] == 1


def test_generate_raw_from_standard_input(app: typer.Typer, mesh: Mesh) -> None:
    _run(app, mesh, "generate", "-", "--raw", "--temperature", "0", "--at-site", "osaka", stdin="from stdin")
    request = mesh.entry.requests[0]
    assert request.text == "from stdin"
    assert request.placement.site == "osaka"
    assert request.sampling.HasField("temperature")


def test_chat_keeps_the_conversation(app: typer.Typer, mesh: Mesh) -> None:
    result = _run(app, mesh, "chat", "--system", "be brief", stdin="one\n\ntwo\n/new\nthree\n/quit\nfour\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == (TEXT + "\n") * 3
    said = [[(m.role, m.content) for m in r.chat.messages] for r in mesh.entry.requests]
    assert said == [
        [("system", "be brief"), ("user", "one")],
        [("system", "be brief"), ("user", "one"), ("assistant", TEXT), ("user", "two")],
        [("system", "be brief"), ("user", "three")],
    ]


def test_chat_keeps_the_label_of_the_conversation(app: typer.Typer, mesh: Mesh) -> None:
    _run(app, mesh, "chat", stdin="one\ntwo\n/new\nthree\n")
    assert [r.continues for r in mesh.entry.requests] == ["", "kmc1.next", ""]


def test_attributes_of_a_request(app: typer.Typer, mesh: Mesh) -> None:
    _run(app, mesh, "generate", "hi", "--attribute", "team=x=y", "--attribute", "empty=", "--continues", "kmc1.abc")
    request = mesh.entry.requests[-1]
    assert (dict(request.attributes), request.continues) == ({"team": "x=y", "empty": ""}, "kmc1.abc")


def test_chat_goes_on_after_an_error(app: typer.Typer, mesh: Mesh) -> None:
    mesh.entry.errors = {0: Overloaded("no room now")}
    result = _run(app, mesh, "chat", stdin="one\n")
    assert "no room now [OVERLOADED]" in result.stderr
    lines = _json_lines(_run(app, mesh, "chat", "--json", stdin="one\ntwo\n"))
    assert [(line["event"], line["reason"]) for line in lines] == [("error", "OVERLOADED")] * 2
    assert [m.content for m in mesh.entry.requests[-1].chat.messages] == ["two"]


def test_ctrl_c_ends_the_answer_and_not_the_chat(app: typer.Typer, mesh: Mesh) -> None:
    mesh.entry.wait_at = {3}

    def interrupt() -> None:
        while not mesh.entry.waiting.is_set():
            time.sleep(0.01)
        time.sleep(0.5)  # what was sent has arrived: a request is aborted by its id, which the first event brings
        mesh.entry.wait_at = set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # A shell starts background jobs with SIGINT ignored, and then Python installs no handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        result = _run(app, mesh, "chat", stdin="one\ntwo\n")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "(stopped)" in result.stderr
    assert result.stdout.endswith(TEXT + "\n")
    assert mesh.entry.aborted == ["n:1"]


def test_explain_shows_filters_scores_and_plan(app: typer.Typer, mesh: Mesh) -> None:
    result = _run(app, mesh, "explain", "hi")
    assert result.exit_code == 0, result.output
    for part in (
        "paris-0",
        "label, stale",
        "allowed",
        "1.250",
        "split: prefill core-0, decode osaka-0",
        "labels.internal",
    ):
        assert part in result.stdout
    refused = _run(app, mesh, "explain", "hi", "--label", "secret")
    assert "no plan: rule labels.secret allows no node [POLICY_DENIED]" in refused.stdout
    assert _json_lines(_run(app, mesh, "explain", "hi", "--json"))[0]["decision"]["plan"]["shape"] == "PLAN_SHAPE_SPLIT"


def test_models_and_nodes(app: typer.Typer, mesh: Mesh) -> None:
    assert "tiny" in _run(app, mesh, "models").stdout
    assert _json_lines(_run(app, mesh, "models", "--json"))[0][0]["max_context_tokens"] == 64
    result = _run(app, mesh, "nodes")
    for part in ("core-0", "tiny (BF16): core-0", "900", "disconnected", "0%"):
        assert part in result.stdout
    snapshot = _json_lines(_run(app, mesh, "nodes", "--json"))[0]
    assert (snapshot["version"], snapshot["nodes"][0]["kv_capacity_tokens"]) == (7, 10)


def test_move(app: typer.Typer, mesh: Mesh) -> None:
    result = _run(app, mesh, "move", "n:1", "--to", "core-0")
    assert "n:1 moved from osaka-0 to core-0: 9 tokens of KV, 2.0 kB" in result.stdout
    moved = _json_lines(_run(app, mesh, "move", "n:1", "--tier", "edge", "--json"))[0]
    assert (moved["to_node_id"], moved["kv_wire_bytes"]) == ("best-edge", 2048)
    assert isinstance(_run(app, mesh, "move", "n:1").exception, InvalidRequest)


def test_policies(app: typer.Typer, mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("a: 1\n")
    assert "version 1" in _run(app, mesh, "policy", "apply", str(file), "--tenant", "dev").stdout
    applied = _run(app, mesh, "policy", "apply", "-", "--tenant", "dev", "--json", stdin="a: 2\n")
    assert _json_lines(applied) == [{"tenant": "dev", "version": 2}]
    assert _run(app, mesh, "policy", "get", "dev").stdout == "a: 2\n"
    ((listed,),) = _json_lines(_run(app, mesh, "policy", "list", "--json"))
    assert (listed["tenant"], listed["yaml"], listed["version"]) == ("dev", "a: 2\n", 2)
    assert "dev" in _run(app, mesh, "policy", "list").stdout
    assert "valid" in _run(app, mesh, "policy", "validate", str(file)).stdout
    assert "built-in" in _run(app, mesh, "policy", "delete", "dev").stdout
    assert isinstance(_run(app, mesh, "policy", "get", "dev").exception, NotFound)


def test_a_policy_with_problems_is_not_applied(app: typer.Typer, mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("bad: true\n")
    for command in (("validate",), ("apply", "--tenant", "dev")):
        result = _run(app, mesh, "policy", *command, str(file))
        assert result.exit_code == 1
        assert f"{file.name}:3:5: labels.x: unknown key" in result.stderr.replace("\n", "")
        as_json = _run(app, mesh, "policy", *command, str(file), "--json")
        assert as_json.exit_code == 1
        assert json.loads(as_json.stdout)[0]["path"] == "labels.x"
    assert _json_lines(_run(app, mesh, "policy", "list", "--json")) == [[]]
    assert isinstance(_run(app, mesh, "policy", "validate", str(tmp_path / "none")).exception, InvalidRequest)


def test_tenants(app: typer.Typer, mesh: Mesh) -> None:
    assert "acme added" in _run(app, mesh, "tenant", "create", "acme").stdout
    assert _run(app, mesh, "tenant", "key", "issue", "acme", "--role", "operator").stdout == "km_secret\n"
    assert "active" in _run(app, mesh, "tenant", "list").stdout
    assert "revoked" in _run(app, mesh, "tenant", "key", "revoke", "k1").stdout
    listed = _json_lines(_run(app, mesh, "tenant", "list", "--json"))[0]
    assert listed[0]["keys"][0] == {
        "key_id": "k1", "role": "operator", "created_unix_s": 1_700_000_000, "revoked": True,
    }  # fmt: skip


def test_flags_win_over_the_state_file(tmp_path: Path) -> None:
    state, key = tmp_path / "up.json", tmp_path / "key"
    state.write_text(json.dumps({"grpc": "127.0.0.1:1", "api_key": "a", "admin_key": "b", "ca_file": "/ca.pem"}))
    key.write_text("from-file\n")
    assert resolve(Flags(state=state), admin=False).api_key == "a"
    assert resolve(Flags(state=state), admin=True).api_key == "b"
    assert resolve(Flags(state=state, api_key="c"), admin=True).api_key == "c"
    assert resolve(Flags(state=state, api_key_file=key), admin=True).api_key == "from-file"
    local = resolve(Flags(state=state), admin=False)
    assert (local.tls_ca, local.receipt_ca) == (None, Path("/ca.pem"))
    far = resolve(Flags(state=state, address="mesh.example:7000"), admin=False)
    assert (far.address, far.tls_ca) == ("mesh.example:7000", Path("/ca.pem"))
    assert resolve(Flags(state=state, ca_file=Path("/mine.pem")), admin=False).tls_ca == Path("/mine.pem")
    assert "api_key" not in repr(local)


@pytest.mark.parametrize(
    ("state", "flags", "says"),
    [
        (None, {}, "run `kvmesh up`"),
        (None, {"address": "127.0.0.1:1"}, "an API key is missing"),
        ("{", {}, "cannot read"),
        ("[]", {}, "not what"),
        ("{}", {}, "an address is missing in"),
        ('{"grpc": "127.0.0.1:1"}', {"site": "oslo"}, "no site 'oslo'"),
        (
            '{"grpc": "x", "edges": {"a": {"grpc": "127.0.0.1:1"}}}',
            {"address": "127.0.0.1:1", "site": "a"},
            "one of them",
        ),
        ('{"grpc": "127.0.0.1:1"}', {"api_key_file": Path("/nonexistent")}, "cannot read the API key file"),
    ],
)
def test_what_is_missing_or_wrong_is_said(tmp_path: Path, state: str | None, flags: Any, says: str) -> None:
    path = tmp_path / "up.json"
    if state is not None:
        path.write_text(state)
    with pytest.raises(InvalidRequest, match=says):
        resolve(Flags(state=path, **flags), admin=False)


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b\n\tc→é") == "a\ufffd[2Jb\ufffd\ufffd\ufffd\n\tc→é"


def test_messages_as_json() -> None:
    finish = inference_pb2.Finish(reason=common_pb2.FINISH_REASON_STOP)
    finish.receipt.record.body = b"x"
    shown = message_json(finish)
    assert shown["reason"] == "FINISH_REASON_STOP"
    assert shown["receipt"]["record"]["body"] == "eA=="
    assert "usage" not in shown
    assert message_json(common_pb2.SamplingParams(seed=2**63))["seed"] == 2**63


@pytest.mark.parametrize(
    ("n", "words"), [(5, "5 B"), (2048, "2.0 kB"), (1_200_000, "1.2 MB"), (5 * 10**12, "5000.0 GB")]
)
def test_sizes(n: int, words: str) -> None:
    assert size_words(n) == words


def test_a_policy_s_history(app: typer.Typer, mesh: Mesh, tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 2\n"):
        _run(app, mesh, "policy", "apply", "-", "--tenant", "hist", stdin=text)
    ((newest, oldest),) = _json_lines(_run(app, mesh, "policy", "history", "hist", "--json"))
    assert (newest["version"], oldest["version"]) == (2, 1)
    assert "not known" in _run(app, mesh, "policy", "history", "hist").stdout
    assert _run(app, mesh, "policy", "diff", "hist", "1").stdout.splitlines()[-2:] == ["-a: 1", "+a: 2"]
    assert _run(app, mesh, "policy", "diff", "hist", "2", "2").stdout == ""
    rolled = _run(app, mesh, "policy", "rollback", "hist", "1", "--json")
    assert _json_lines(rolled) == [{"tenant": "hist", "version": 3, "as": 1}]
    assert _run(app, mesh, "policy", "get", "hist").stdout == "a: 1\n"
    assert isinstance(_run(app, mesh, "policy", "rollback", "hist", "9").exception, NotFound)
    assert isinstance(_run(app, mesh, "policy", "diff", "hist", "9").exception, NotFound)
