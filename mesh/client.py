"""The Python client.

    async with MeshClient("127.0.0.1:7000", api_key) as mesh:
        async for event in mesh.generate("Once upon a time", label="internal", max_tokens=64):
            if isinstance(event, Tokens):
                print(event.text, end="")

A stream that breaks is taken up again with an idempotency key and the offset reached; nothing is lost or doubled.
Errors are those of mesh.errors. SyncMeshClient (mesh.client_sync) is the same for programs without asyncio.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, Unpack

import grpc
import grpc.aio

from mesh.client_stream import StreamProgress
from mesh.client_types import (
    Completion,
    Decision,
    Event,
    Finish,
    Leg,
    Migration,
    Options,
    Prompt,
    Tokens,
    Usage,
    generate_request,
    tokenize_request,
)
from mesh.errors import Draining, Internal, InvalidRequest, MeshError, NodeUnreachable, NotFound
from mesh.rpc.channel import bearer, public_channel
from mesh.rpc.errors import DETAILS_KEY, from_rpc_error
from mesh.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    enrolment_pb2,
    enrolment_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

__all__ = [
    "Completion", "Decision", "Event", "Finish", "Leg", "MeshClient", "Migration", "Options", "Prompt", "Tokens",
    "Usage",
]  # fmt: skip

CALL_TIMEOUT_S: Final = 30.0
MOVE_TACTICS: Final = {
    "": admin_pb2.MOVE_TACTIC_UNSPECIFIED,
    "precopy": admin_pb2.MOVE_TACTIC_PRECOPY,
    "stop_and_copy": admin_pb2.MOVE_TACTIC_STOP_AND_COPY,
    "replay": admin_pb2.MOVE_TACTIC_REPLAY,
}
MIGRATE_TIMEOUT_S: Final = 120.0
_ABORT_TIMEOUT_S: Final = 2.0
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.1, 2.0


class MeshClient:
    """One connection to one entry. Use it as an async context manager, or call `close`."""

    def __init__(
        self,
        address: str,
        api_key: str,
        *,
        ca_file: Path | str | None = None,
        reconnect_s: float = 20.0,
        others: Sequence[str] = (),
    ) -> None:
        """`address` is host:port of an entry's gRPC listener. `ca_file`: the mesh's CA certificate (PEM) for TLS;
        without it the connection is plain text, which is possible on loopback only. A broken stream is tried
        again for `reconnect_s`. `others`: further placement services, where a generation goes on (and new ones begin)
        when the first does not answer or is stopping; all else is asked of the first. Needs a running event loop.
        Raises InvalidRequest."""
        self._address = address
        self._metadata = bearer(api_key)
        self._reconnect_s = reconnect_s
        ca_pem = _read_ca(ca_file) if ca_file is not None else None
        self._channel = public_channel(address, ca_pem)
        self._others = tuple(public_channel(other, ca_pem) for other in others)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._entries: list[Any] = [self._inference, *map(inference_pb2_grpc.InferenceStub, self._others)]
        self._entry = 0  # of the entries: the one that answered last
        self._policies: Any = admin_pb2_grpc.PoliciesStub(self._channel)
        self._tenants: Any = admin_pb2_grpc.TenantsStub(self._channel)
        self._sites: Any = enrolment_pb2_grpc.SitesStub(self._channel)
        self._mesh: Any = admin_pb2_grpc.MeshViewStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; open calls end. Idempotent."""
        for channel in (self._channel, *self._others):
            await channel.close()

    async def generate(
        self, prompt: Prompt, *, resume: bool = True, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """Generate: a Decision first, Tokens, a Migration where one happens, a Finish last.

        Leaving the iterator ends the request. With `resume`, a connection that breaks is made again and the stream
        goes on; without, it raises NodeUnreachable and the entry ends the request."""
        request = generate_request(prompt, options)
        if resume and not request.idempotency_key:
            request.idempotency_key = secrets.token_hex(16)
        progress = StreamProgress(request.resume_offset_tokens)
        ended = False
        try:
            async with aclosing(self._follow(request, progress, resume)) as events:
                async for event in events:
                    yield event
            ended = True
        except MeshError:
            ended = True
            raise
        finally:
            if not ended and resume and progress.request_id:
                # The entry waits for a client with a key to come back; this one will not.
                with suppress(MeshError):
                    await self._call(
                        self._entries[self._entry].Abort,
                        inference_pb2.AbortRequest(request_id=progress.request_id),
                        timeout_s=_ABORT_TIMEOUT_S,
                    )

    async def complete(self, prompt: Prompt, *, resume: bool = True, **options: Unpack[Options]) -> Completion:
        """The whole answer of `generate`."""
        texts: list[str] = []
        ids: list[int] = []
        migrations: list[Migration] = []
        decision: Decision | None = None
        finish: Finish | None = None
        async with aclosing(self.generate(prompt, resume=resume, **options)) as events:
            async for event in events:
                match event:
                    case Decision():
                        decision = event
                    case Tokens():
                        texts.append(event.text)
                        ids.extend(event.ids)
                    case Migration():
                        migrations.append(event)
                    case Finish():
                        finish = event
        if decision is None or finish is None:
            raise Internal("the stream lacks its decision or its finish")
        return Completion(
            text="".join(texts), ids=tuple(ids), decision=decision, migrations=tuple(migrations), finish=finish
        )

    async def explain(self, prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.ExplainResponse:
        """The plan for a request, or why there is none, without running it."""
        request = inference_pb2.ExplainRequest(request=generate_request(prompt, options))
        response: inference_pb2.ExplainResponse = await self._call(self._inference.Explain, request)
        return response

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> list[int]:
        """Token ids of a text or chat, as the model would see them."""
        response = await self._call(self._inference.Tokenize, tokenize_request(prompt, model))
        return list(response.tokens.ids)

    async def models(self) -> list[inference_pb2.ModelInfo]:
        """Models that this caller may use."""
        return list((await self._call(self._inference.ListModels, inference_pb2.ListModelsRequest())).models)

    async def abort(self, request_id: str) -> bool:
        """End a running request; False if it had ended already."""
        response = await self._call(self._inference.Abort, inference_pb2.AbortRequest(request_id=request_id))
        return bool(response.aborted)

    async def snapshot(self) -> admin_pb2.Snapshot:
        """All nodes as this entry sees them. Needs the role operator."""
        response = await self._call(self._mesh.GetSnapshot, admin_pb2.GetSnapshotRequest())
        snapshot: admin_pb2.Snapshot = response.snapshot
        return snapshot

    async def list_requests(self) -> admin_pb2.ListRequestsResponse:
        """Requests that run now: those of this entry, and at placement those of attached sites. Needs the role
        operator."""
        response: admin_pb2.ListRequestsResponse = await self._call(
            self._mesh.ListRequests, admin_pb2.ListRequestsRequest()
        )
        return response

    async def migrate(
        self, request_id: str, *, node_id: str = "", tier: str = "", how: str = ""
    ) -> admin_pb2.MigrateResponse:
        """Move a running request to a node, or to the best node of a tier; returns when it runs there. `how`:
        "precopy", "stop_and_copy" or "replay"; empty: what is predicted to pause it least."""
        if how not in MOVE_TACTICS:
            words = ", ".join(word for word in MOVE_TACTICS if word)
            raise InvalidRequest(f"unknown way to move {how[:40]!r}: one of {words}", field="how")
        if bool(node_id) == bool(tier):
            raise InvalidRequest("give a node (node_id, --to) or a tier (--tier), one of them", field="node_id")
        target = {"node_id": node_id} if node_id else {"tier": tier}
        request = admin_pb2.MigrateRequest(request_id=request_id, tactic=MOVE_TACTICS[how], **target)
        response: admin_pb2.MigrateResponse = await self._call(self._mesh.Migrate, request, timeout_s=MIGRATE_TIMEOUT_S)
        return response

    async def set_node_role(self, node_id: str, role: str) -> admin_pb2.SetNodeRoleResponse:
        """Give a core node a role (prefill, decode or both) until it is started anew; what runs there goes on. Needs
        the role operator."""
        request = admin_pb2.SetNodeRoleRequest(node_id=node_id, role=role)
        response: admin_pb2.SetNodeRoleResponse = await self._call(self._mesh.SetNodeRole, request)
        return response

    async def put_policy(self, tenant: str, yaml: str, *, expected_version: int | None = None) -> int:
        """Store a policy and return its version; `expected_version`: only if that is the current one."""
        request = admin_pb2.PutPolicyRequest(tenant=tenant, yaml=yaml, expected_version=expected_version)
        return int((await self._call(self._policies.Put, request)).version)

    async def get_policy(self, tenant: str) -> admin_pb2.StoredPolicy:
        """The current policy of a tenant."""
        response = await self._call(self._policies.Get, admin_pb2.GetPolicyRequest(tenant=tenant))
        policy: admin_pb2.StoredPolicy = response.policy
        return policy

    async def list_policies(self) -> list[admin_pb2.StoredPolicy]:
        """The current policies of all tenants."""
        return list((await self._call(self._policies.List, admin_pb2.ListPoliciesRequest())).policies)

    async def delete_policy(self, tenant: str) -> None:
        """Remove a tenant's policy; the built-in one applies then."""
        await self._call(self._policies.Delete, admin_pb2.DeletePolicyRequest(tenant=tenant))

    async def policy_history(self, tenant: str) -> list[admin_pb2.StoredPolicy]:
        """Versions of a tenant's policy that are kept, the newest first."""
        response = await self._call(self._policies.History, admin_pb2.PolicyHistoryRequest(tenant=tenant))
        return list(response.policies)

    async def validate_policy(self, yaml: str) -> list[admin_pb2.PolicyProblem]:
        """What is wrong with a policy document; empty if nothing is."""
        return list((await self._call(self._policies.Validate, admin_pb2.ValidatePolicyRequest(yaml=yaml))).problems)

    async def policy_warnings(self, yaml: str) -> list[admin_pb2.PolicyProblem]:
        """What a valid policy document says that is hardly meant, such as a label that no node may have."""
        return list((await self._call(self._policies.Validate, admin_pb2.ValidatePolicyRequest(yaml=yaml))).warnings)

    async def create_tenant(self, tenant: str, *, sites: Iterable[str] = ()) -> None:
        """Add a tenant, served at these sites ("*": every one) and by the placement services."""
        await self._call(self._tenants.Create, admin_pb2.CreateTenantRequest(tenant=tenant, sites=sites))

    async def set_tenant_sites(self, tenant: str, sites: Iterable[str]) -> None:
        """Sites whose entries serve the tenant from now on; "*": every one."""
        await self._call(self._tenants.SetSites, admin_pb2.SetTenantSitesRequest(tenant=tenant, sites=sites))

    async def list_tenants(self) -> list[admin_pb2.Tenant]:
        """All tenants with their keys, without secrets."""
        return list((await self._call(self._tenants.List, admin_pb2.ListTenantsRequest())).tenants)

    async def issue_key(self, tenant: str, *, role: str = "tenant") -> admin_pb2.IssueKeyResponse:
        """A new API key; its secret is shown this once."""
        request = admin_pb2.IssueKeyRequest(tenant=tenant, role=role)
        response: admin_pb2.IssueKeyResponse = await self._call(self._tenants.IssueKey, request)
        return response

    async def revoke_key(self, key_id: str) -> None:
        """Revoke an API key by its public id."""
        await self._call(self._tenants.RevokeKey, admin_pb2.RevokeKeyRequest(key_id=key_id))

    async def create_site(
        self, site: str, region: str, jurisdiction: str, terms: enrolment_pb2.TokenTerms | None = None
    ) -> enrolment_pb2.EnrolmentToken:
        """A new site and a token for its first box, shown this once. Needs the role operator."""
        request = enrolment_pb2.CreateSiteRequest(site=site, region=region, jurisdiction=jurisdiction, terms=terms)
        token: enrolment_pb2.EnrolmentToken = (await self._call(self._sites.Create, request)).token
        return token

    async def site_token(
        self, site: str, terms: enrolment_pb2.TokenTerms | None = None
    ) -> enrolment_pb2.EnrolmentToken:
        """A token for one more box of a site, shown this once. Needs the role operator."""
        request = enrolment_pb2.IssueTokenRequest(site=site, terms=terms)
        token: enrolment_pb2.EnrolmentToken = (await self._call(self._sites.IssueToken, request)).token
        return token

    async def list_sites(self) -> list[enrolment_pb2.SiteView]:
        """All sites that were created here, with their boxes. Needs the role operator."""
        return list((await self._call(self._sites.List, enrolment_pb2.ListSitesRequest())).sites)

    async def revoke_site(self, site: str) -> list[str]:
        """The site's boxes are no nodes any more; returns those that were cut off. Needs the role operator."""
        return list((await self._call(self._sites.Revoke, enrolment_pb2.RevokeSiteRequest(site=site))).cut_off)

    async def _call(self, method: Any, request: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, node=self._address) from error

    async def _follow(
        self, request: inference_pb2.GenerateRequest, progress: StreamProgress, resume: bool
    ) -> AsyncGenerator[Event, None]:
        """Events over as many connections as it takes."""
        failures, give_up_s = 0, 0.0
        while True:
            request.resume_offset_tokens = progress.offset_tokens
            progress.reconnected()
            call = self._entries[self._entry].Generate(request, metadata=self._metadata)
            try:
                async for response in call:
                    failures = 0
                    if (event := progress.take(response)) is not None:
                        yield event
                if not progress.finished:
                    raise Internal("the stream ended without a finish")
                return
            except grpc.aio.AioRpcError as error:
                now_s = time.monotonic()
                give_up_s = give_up_s if failures else now_s + self._reconnect_s
                failures += 1
                elsewhere = len(self._entries) > 1 and _may_go_on_elsewhere(error, progress)
                if not resume or not (_is_broken_link(error) or elsewhere) or now_s >= give_up_s:
                    raise from_rpc_error(error, node=self._address) from error
                self._entry = (self._entry + 1) % len(self._entries)
            finally:
                call.cancel()
            await asyncio.sleep(_backoff_s(failures))


def _is_broken_link(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection broke. An error with details of ours is the entry's verdict on the request."""
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return isinstance(from_rpc_error(error), NodeUnreachable)


def _may_go_on_elsewhere(error: grpc.aio.AioRpcError, progress: StreamProgress) -> bool:
    """Whether another entry may have what this one has not: it is stopping, or does not know a request that began
    elsewhere (the other one is back, or has not heard that its entry is gone)."""
    told = from_rpc_error(error)
    return isinstance(told, Draining) or (isinstance(told, NotFound) and progress.offset_tokens > 0)


def _backoff_s(failures: int) -> float:
    """Doubling, with jitter so that the clients of a restarted entry do not come all at once."""
    return min(_BACKOFF_MOST_S, _BACKOFF_FIRST_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)


def _read_ca(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"cannot read the CA file {path}: {exc.strerror}", field="ca_file") from exc
