"""API keys on real calls, and the table of roles against the wire contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from mesh.errors import Expired, PolicyDenied, Unauthenticated
from mesh.identity.principal import AccessRole
from mesh.identity.tenants import TenantDirectory, issue_key, new_tenant
from mesh.rpc.auth import NEEDED_ROLE, Authenticator, current_principal
from mesh.rpc.channel import bearer
from mesh.rpc.deadlines import remaining_s
from mesh.rpc.errors import ErrorInterceptor, translate_rpc_errors
from mesh.v1 import admin_pb2, enrolment_pb2, inference_pb2
from tests.mesh.rpc.conftest import Serve

TABLE = {
    "/test.Service/Tenant": AccessRole.TENANT,
    "/test.Service/Stream": AccessRole.TENANT,
    "/test.Service/Admin": AccessRole.ADMIN,
    "/test.Service/Open": None,
}


class Keys:
    """A directory that a test can change, and one key per role."""

    def __init__(self) -> None:
        self.directory = TenantDirectory().with_tenant(new_tenant("dev"))
        self.key: dict[AccessRole, str] = {}
        for role in AccessRole:
            self.key[role], record = issue_key("dev", role, created_unix_s=0)
            self.directory = self.directory.with_key(record)


async def who(request: bytes, context: Any) -> bytes:
    await asyncio.sleep(0)
    principal = current_principal()
    return f"{principal.tenant} {principal.role.name}".encode()


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield await who(request, context)


HANDLERS = {
    **{name: grpc.unary_unary_rpc_method_handler(who) for name in ("Tenant", "Admin", "Open", "Unlisted")},
    "Stream": grpc.unary_stream_rpc_method_handler(stream),
}


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
async def channel(serve: Serve, keys: Keys) -> grpc.aio.Channel:
    return await serve(HANDLERS, [ErrorInterceptor(), Authenticator(lambda: keys.directory, TABLE)])


async def call(channel: grpc.aio.Channel, name: str, metadata: Any = ()) -> bytes:
    with translate_rpc_errors():
        response: bytes = await channel.unary_unary(f"/test.Service/{name}")(b"", metadata=metadata, timeout=10)
        return response


async def test_roles_include_the_ones_below(channel: grpc.aio.Channel, keys: Keys) -> None:
    for role in AccessRole:
        assert await call(channel, "Tenant", bearer(keys.key[role])) == f"dev {role.name}".encode()
    assert await call(channel, "Admin", bearer(keys.key[AccessRole.ADMIN])) == b"dev ADMIN"
    with pytest.raises(PolicyDenied, match="needs the role admin; this key has operator") as caught:
        await call(channel, "Admin", bearer(keys.key[AccessRole.OPERATOR]))
    assert caught.value.details["rule"] == "role"


async def test_missing_wrong_doubled_and_revoked_keys(channel: grpc.aio.Channel, keys: Keys) -> None:
    good = keys.key[AccessRole.TENANT]
    stranger, _ = issue_key("dev", AccessRole.ADMIN, created_unix_s=0)
    for metadata in ((), bearer("nonsense"), bearer(stranger), (*bearer(good), *bearer(good))):
        with pytest.raises(Unauthenticated, match="no valid API key"):
            await call(channel, "Tenant", metadata)
    assert await call(channel, "Tenant", bearer(good))
    keys.directory = keys.directory.with_revoked(good.split("_")[1])
    with pytest.raises(Unauthenticated):
        await call(channel, "Tenant", bearer(good))


async def test_streams_see_their_principal(channel: grpc.aio.Channel, keys: Keys) -> None:
    def responses(metadata: Any) -> Any:
        return channel.unary_stream("/test.Service/Stream")(b"", metadata=metadata, timeout=10)

    assert [part async for part in responses(bearer(keys.key[AccessRole.TENANT]))] == [b"dev TENANT"] * 3
    with pytest.raises(Unauthenticated), translate_rpc_errors():
        await responses(()).read()


async def test_concurrent_calls_keep_their_principals(channel: grpc.aio.Channel, keys: Keys) -> None:
    roles = list(AccessRole) * 10
    answers = await asyncio.gather(*(call(channel, "Tenant", bearer(keys.key[role])) for role in roles))
    assert answers == [f"dev {role.name}".encode() for role in roles]


async def test_an_rpc_that_is_not_in_the_table_is_refused_to_all(channel: grpc.aio.Channel, keys: Keys) -> None:
    with pytest.raises(PolicyDenied, match="not served"):
        await call(channel, "Unlisted", bearer(keys.key[AccessRole.ADMIN]))
    with pytest.raises(Unauthenticated):
        await call(channel, "Unlisted")


async def test_an_open_rpc_has_no_principal(channel: grpc.aio.Channel, keys: Keys) -> None:
    with pytest.raises(Unauthenticated, match="carries no API key"):
        await call(channel, "Open", bearer(keys.key[AccessRole.ADMIN]))


def test_the_table_names_exactly_the_public_rpcs() -> None:
    served = {
        f"/{service.full_name}/{method.name}"
        for file in (inference_pb2, admin_pb2, enrolment_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        if service.name != "Certificates"  # on the node listener
        for method in service.methods
    }
    assert {method for method in NEEDED_ROLE if method.startswith("/mesh.v1.")} == served


async def test_remaining_time(serve: Serve) -> None:
    async def left(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return str(remaining_s(context, cap_s=50.0)).encode()

    channel = await serve({"Left": grpc.unary_unary_rpc_method_handler(left)}, [ErrorInterceptor()])
    stub = channel.unary_unary("/test.Service/Left")
    assert float(await stub(b"")) == 50.0
    assert float(await stub(b"", timeout=100)) == 50.0
    assert float(await stub(b"", timeout=20)) < 50.0

    class Late:
        def time_remaining(self) -> float:
            return -0.1

    with pytest.raises(Expired):
        remaining_s(Late(), cap_s=1.0)
