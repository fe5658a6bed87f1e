"""An entry over real gRPC that knows one answer, keeps it for clients that come back, and a link that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from mesh.errors import MeshError, NotFound, Unauthenticated
from mesh.rpc.server import public_server
from mesh.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc

KEY = "km_test_key"
WORDS = [f"w{i} " for i in range(8)]


def answer() -> list[inference_pb2.GenerateResponse | int]:
    """Token indices stand for tokens; a migration in the middle and held-back text at the end."""
    decision = inference_pb2.Decision(
        request_id="n:1",
        label="internal",
        policy_version=2,
        prompt_tokens=3,
        model="tiny",
        continuation="kmc1.next",
    )
    decision.plan.shape = inference_pb2.PLAN_SHAPE_SPLIT
    decision.plan.legs.add(kind="prefill", node_id="core-0", site="cloud")
    decision.plan.legs.add(kind="decode", node_id="osaka-0", site="osaka")
    finish = inference_pb2.Finish(
        reason=common_pb2.FINISH_REASON_STOP,
        usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=8, cached_tokens=1),
        ttft_s=0.5,
    )
    finish.receipt.record.body = b"{}"
    return [
        inference_pb2.GenerateResponse(decision=decision),
        0, 1, 2, 3,
        inference_pb2.GenerateResponse(
            migration=inference_pb2.Migration(
                from_node_id="osaka-0", to_node_id="core-0", offset_tokens=4, cause="operator"
            )
        ),
        4, 5, 6, 7,
        inference_pb2.GenerateResponse(tokens=inference_pb2.TokenDelta(offset_tokens=8, text="end", node_id="core-0")),
        inference_pb2.GenerateResponse(finish=finish),
    ]  # fmt: skip


@dataclass
class FakeEntry(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]
    """`wait_at`: event indices where the stream waits until `go` is set; `errors`: raised at an index."""

    events: list[Any] = field(default_factory=answer)
    wait_at: set[int] = field(default_factory=set)
    errors: dict[int, MeshError] = field(default_factory=dict)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        _authenticate(context)
        self.requests.append(request)
        try:
            for i, event in enumerate(self.events):
                if i in self.wait_at:
                    self.waiting.set()
                    await self.go.wait()
                if i in self.errors:
                    raise self.errors[i]
                if not isinstance(event, int):
                    yield event
                elif event >= request.resume_offset_tokens:
                    delta = inference_pb2.TokenDelta(offset_tokens=event, ids=[100 + event], text=WORDS[event])
                    yield inference_pb2.GenerateResponse(tokens=delta)
        finally:
            self.left.set()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        _authenticate(context)
        return inference_pb2.TokenizeResponse(tokens=common_pb2.TokenIds(ids=[len(request.text)]))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.ModelInfo(id="tiny", max_context_tokens=64, node_ids=["core-0"])
        return inference_pb2.ListModelsResponse(models=[model])

    async def Abort(self, request: inference_pb2.AbortRequest, context: Any) -> inference_pb2.AbortResponse:
        self.aborted.append(request.request_id)
        return inference_pb2.AbortResponse(aborted=True)

    async def Explain(self, request: inference_pb2.ExplainRequest, context: Any) -> inference_pb2.ExplainResponse:
        response = inference_pb2.ExplainResponse(snapshot_age_s=0.5)
        if request.request.label == "secret":
            response.refusal, response.refusal_reason = "rule labels.secret allows no node", "POLICY_DENIED"
        else:
            response.decision.CopyFrom(self.events[0].decision)
            plan = response.decision.plan
            plan.rule = "labels.internal"
            plan.candidates.add(
                shape=inference_pb2.PLAN_SHAPE_SPLIT, prefill_node_id="core-0", decode_node_id="osaka-0", cost_s=1.25
            )
            plan.refused.add(reason="label", count=2, node_ids=["paris-0"])
        response.nodes.add(node_id="osaka-0", site="osaka", tier="edge")
        response.nodes.add(node_id="paris-0", site="paris", tier="edge", refused=["label", "stale"])
        return response


class FakePolicies(admin_pb2_grpc.PoliciesServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.stored: dict[str, admin_pb2.StoredPolicy] = {}
        self.history: list[admin_pb2.StoredPolicy] = []

    async def History(self, request: Any, context: Any) -> admin_pb2.PolicyHistoryResponse:
        found = [p for p in reversed(self.history) if p.tenant == request.tenant]
        return admin_pb2.PolicyHistoryResponse(policies=found)

    async def Put(self, request: admin_pb2.PutPolicyRequest, context: Any) -> admin_pb2.PutPolicyResponse:
        old = self.stored.get(request.tenant)
        version = (old.version if old else 0) + 1
        self.stored[request.tenant] = admin_pb2.StoredPolicy(tenant=request.tenant, yaml=request.yaml, version=version)
        self.history.append(self.stored[request.tenant])
        return admin_pb2.PutPolicyResponse(version=version)

    async def Get(self, request: admin_pb2.GetPolicyRequest, context: Any) -> admin_pb2.GetPolicyResponse:
        if request.tenant not in self.stored:
            raise NotFound(f"tenant {request.tenant} has no policy")
        return admin_pb2.GetPolicyResponse(policy=self.stored[request.tenant])

    async def List(self, request: Any, context: Any) -> admin_pb2.ListPoliciesResponse:
        return admin_pb2.ListPoliciesResponse(policies=self.stored.values())

    async def Delete(self, request: admin_pb2.DeletePolicyRequest, context: Any) -> admin_pb2.DeletePolicyResponse:
        self.stored.pop(request.tenant, None)
        return admin_pb2.DeletePolicyResponse()

    async def Validate(self, request: admin_pb2.ValidatePolicyRequest, context: Any) -> Any:
        problems = [admin_pb2.PolicyProblem(line=3, column=5, path="labels.x", message="unknown key")]
        return admin_pb2.ValidatePolicyResponse(problems=problems if "bad" in request.yaml else [])


class FakeTenants(admin_pb2_grpc.TenantsServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.tenants: dict[str, admin_pb2.Tenant] = {}

    async def Create(self, request: admin_pb2.CreateTenantRequest, context: Any) -> admin_pb2.CreateTenantResponse:
        self.tenants[request.tenant] = admin_pb2.Tenant(tenant=request.tenant, sites=request.sites)
        return admin_pb2.CreateTenantResponse()

    async def SetSites(
        self, request: admin_pb2.SetTenantSitesRequest, context: Any
    ) -> admin_pb2.SetTenantSitesResponse:
        self.tenants[request.tenant].sites[:] = request.sites
        return admin_pb2.SetTenantSitesResponse()

    async def List(self, request: Any, context: Any) -> admin_pb2.ListTenantsResponse:
        return admin_pb2.ListTenantsResponse(tenants=self.tenants.values())

    async def IssueKey(self, request: admin_pb2.IssueKeyRequest, context: Any) -> admin_pb2.IssueKeyResponse:
        self.tenants[request.tenant].keys.add(key_id="k1", role=request.role, created_unix_s=1_700_000_000)
        return admin_pb2.IssueKeyResponse(key_id="k1", api_key="km_secret")

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, context: Any) -> admin_pb2.RevokeKeyResponse:
        for tenant in self.tenants.values():
            for key in tenant.keys:
                key.revoked = key.revoked or key.key_id == request.key_id
        return admin_pb2.RevokeKeyResponse()


class FakeMeshView(admin_pb2_grpc.MeshViewServicer):  # type: ignore[misc]
    async def GetSnapshot(self, request: Any, context: Any) -> admin_pb2.GetSnapshotResponse:
        response = admin_pb2.GetSnapshotResponse()
        response.snapshot.version = 7
        node = response.snapshot.nodes.add(
            node_id="core-0",
            tier="core",
            site="cloud",
            state="ready",
            prefill_tokens_per_s=900.0,
            kv_capacity_tokens=10,
        )
        node.models.add(id="tiny", weights_dtype="BF16")
        response.snapshot.nodes.add(node_id="osaka-0", tier="edge", site="osaka", state="disconnected")
        return response

    async def ListRequests(self, request: Any, context: Any) -> admin_pb2.ListRequestsResponse:
        running = admin_pb2.RunningRequest(
            request_id="osaka-0:abc", tenant="acme", model="tiny", label="internal", shape="split",
            entry_node_id="osaka-0", node_id="core-0", moving=True, prompt_tokens=30, generated_tokens=4,
            max_tokens=64, kv_bytes=34_000, age_s=2.5, token_s=0.05,
        )  # fmt: skip
        return admin_pb2.ListRequestsResponse(requests=[running], silent_entry_node_ids=["paris-0"])

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: Any) -> admin_pb2.MigrateResponse:
        to = request.node_id or f"best-{request.tier}"
        return admin_pb2.MigrateResponse(from_node_id="osaka-0", to_node_id=to, kv_wire_bytes=2048, kv_tokens=9)


def _authenticate(context: grpc.aio.ServicerContext) -> None:
    if dict(context.invocation_metadata()).get("authorization") != f"Bearer {KEY}":
        raise Unauthenticated("no API key, or one that is not known here")


@asynccontextmanager
async def running(entry: FakeEntry) -> AsyncIterator[str]:
    """Serve it on loopback; gives the address."""
    listener = public_server("127.0.0.1:0", credentials=None)
    inference_pb2_grpc.add_InferenceServicer_to_server(entry, listener.server)
    admin_pb2_grpc.add_PoliciesServicer_to_server(FakePolicies(), listener.server)
    admin_pb2_grpc.add_TenantsServicer_to_server(FakeTenants(), listener.server)
    admin_pb2_grpc.add_MeshViewServicer_to_server(FakeMeshView(), listener.server)
    await listener.server.start()
    try:
        yield listener.address
    finally:
        entry.go.set()
        await listener.server.stop(0)


class Link:
    """A TCP relay to an address. `cut` breaks all connections; `down` refuses new ones until it is False again."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.down = False
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Link]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.down:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        pair = {writer, there_writer}
        self._open |= pair
        with suppress(OSError):
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        self._open -= pair


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.transport.abort()
