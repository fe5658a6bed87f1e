"""MeshClient for programs without asyncio: the same methods, blocking, over a private event loop in a thread.

with SyncMeshClient("127.0.0.1:7000", api_key) as mesh:
    print(mesh.complete("Once upon a time", max_tokens=64).text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from mesh.client import MeshClient
from mesh.client_types import Completion, Event, Options, Prompt
from mesh.v1 import admin_pb2, enrolment_pb2, inference_pb2

T = TypeVar("T")
_CLOSE_WAIT_S: Final = 5.0


class SyncMeshClient:
    """See MeshClient for what each method does. May be used from several threads."""

    def __init__(
        self,
        address: str,
        api_key: str,
        *,
        ca_file: Path | str | None = None,
        reconnect_s: float = 20.0,
        others: Sequence[str] = (),
    ) -> None:
        """As MeshClient. Raises InvalidRequest."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh-client", daemon=True)
        self._thread.start()

        async def connect() -> MeshClient:
            return MeshClient(address, api_key, ca_file=ca_file, reconnect_s=reconnect_s, others=others)

        try:
            self._client = self._run(connect())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._stop()

    def generate(
        self, prompt: Prompt, *, resume: bool = True, **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """Closing the generator ends the request."""
        pump = _Pump(self._client.generate(prompt, resume=resume, **options))
        try:
            asyncio.run_coroutine_threadsafe(pump.run(), self._loop)
            while (item := pump.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.close(self._loop)

    def complete(self, prompt: Prompt, *, resume: bool = True, **options: Unpack[Options]) -> Completion:
        """The whole answer."""
        return self._run(self._client.complete(prompt, resume=resume, **options))

    def explain(self, prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.ExplainResponse:
        """The plan without running it."""
        return self._run(self._client.explain(prompt, **options))

    def tokenize(self, prompt: Prompt, *, model: str = "") -> list[int]:
        """Token ids."""
        return self._run(self._client.tokenize(prompt, model=model))

    def models(self) -> list[inference_pb2.ModelInfo]:
        """Models."""
        return self._run(self._client.models())

    def abort(self, request_id: str) -> bool:
        """End a request."""
        return self._run(self._client.abort(request_id))

    def snapshot(self) -> admin_pb2.Snapshot:
        """All nodes."""
        return self._run(self._client.snapshot())

    def list_requests(self) -> admin_pb2.ListRequestsResponse:
        """Requests that run now."""
        return self._run(self._client.list_requests())

    def migrate(
        self, request_id: str, *, node_id: str = "", tier: str = "", how: str = ""
    ) -> admin_pb2.MigrateResponse:
        """Move a request."""
        return self._run(self._client.migrate(request_id, node_id=node_id, tier=tier, how=how))

    def set_node_role(self, node_id: str, role: str) -> admin_pb2.SetNodeRoleResponse:
        """Give a core node a role."""
        return self._run(self._client.set_node_role(node_id, role))

    def create_site(
        self, site: str, region: str, jurisdiction: str, terms: enrolment_pb2.TokenTerms | None = None
    ) -> enrolment_pb2.EnrolmentToken:
        """Add a site."""
        return self._run(self._client.create_site(site, region, jurisdiction, terms))

    def site_token(self, site: str, terms: enrolment_pb2.TokenTerms | None = None) -> enrolment_pb2.EnrolmentToken:
        """A token for one more box."""
        return self._run(self._client.site_token(site, terms))

    def list_sites(self) -> list[enrolment_pb2.SiteView]:
        """All sites."""
        return self._run(self._client.list_sites())

    def revoke_site(self, site: str) -> list[str]:
        """Cut a site off."""
        return self._run(self._client.revoke_site(site))

    def put_policy(self, tenant: str, yaml: str, *, expected_version: int | None = None) -> int:
        """Store a policy."""
        return self._run(self._client.put_policy(tenant, yaml, expected_version=expected_version))

    def get_policy(self, tenant: str) -> admin_pb2.StoredPolicy:
        """A tenant's policy."""
        return self._run(self._client.get_policy(tenant))

    def list_policies(self) -> list[admin_pb2.StoredPolicy]:
        """All policies."""
        return self._run(self._client.list_policies())

    def delete_policy(self, tenant: str) -> None:
        """Remove a policy."""
        self._run(self._client.delete_policy(tenant))

    def policy_history(self, tenant: str) -> list[admin_pb2.StoredPolicy]:
        """Versions that are kept, the newest first."""
        return self._run(self._client.policy_history(tenant))

    def validate_policy(self, yaml: str) -> list[admin_pb2.PolicyProblem]:
        """Problems of a policy document."""
        return self._run(self._client.validate_policy(yaml))

    def policy_warnings(self, yaml: str) -> list[admin_pb2.PolicyProblem]:
        """What is odd in a valid policy document."""
        return self._run(self._client.policy_warnings(yaml))

    def create_tenant(self, tenant: str, *, sites: Iterable[str] = ()) -> None:
        """Add a tenant, served at these sites ("*": every one) and by the placement services."""
        self._run(self._client.create_tenant(tenant, sites=sites))

    def set_tenant_sites(self, tenant: str, sites: Iterable[str]) -> None:
        """Sites whose entries serve the tenant from now on; "*": every one."""
        self._run(self._client.set_tenant_sites(tenant, sites))

    def list_tenants(self) -> list[admin_pb2.Tenant]:
        """All tenants."""
        return self._run(self._client.list_tenants())

    def issue_key(self, tenant: str, *, role: str = "tenant") -> admin_pb2.IssueKeyResponse:
        """A new API key."""
        return self._run(self._client.issue_key(tenant, role=role))

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key."""
        self._run(self._client.revoke_key(key_id))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a KeyboardInterrupt here must end the call there
            raise

    def _stop(self) -> None:
        async def end_calls() -> None:
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

        self._run(end_calls())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Pump:
    """Carries events from the loop's thread to the caller's. A KeyboardInterrupt may hit the caller at any line, so
    the generator is closed where it runs, by the task that runs it."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self.items: SimpleQueue[Event | BaseException | None] = SimpleQueue()
        self._events = events
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()

    async def run(self) -> None:
        """Queue every event, then None or the error."""
        self._task = asyncio.current_task()
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self.items.put(event)
            self.items.put(None)
        except BaseException as error:
            self.items.put(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._ended.set()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the request if it runs; returns when it has ended."""
        if not self._ended.is_set():
            loop.call_soon_threadsafe(self._cancel)
            self._ended.wait(_CLOSE_WAIT_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
