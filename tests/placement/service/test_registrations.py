"""A node's registration and back; what is not of this mesh is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.errors import InvalidRequest
from mesh.node.serving_role import ServingRole
from mesh.registry.checks import check_registration
from mesh.registry.types import Registration
from placement.service.registrations import from_registration, role_of, to_registration
from tests.fakes.mesh import place_of
from tests.placement.entry.test_mesh_view import MODEL

CORE = place_of("core-1")
GOOD = to_registration(CORE, "10.0.0.1:7", (MODEL, replace(MODEL, model_id="b")), ttl_s=5.0, health_address="h:1")


def test_there_and_back() -> None:
    check_registration(GOOD)
    assert from_registration(GOOD, mesh="toy") == (CORE, (MODEL, replace(MODEL, model_id="b")))
    assert (GOOD.node_id, GOOD.address, GOOD.ttl_s, GOOD.health_address) == ("core-1", "10.0.0.1:7", 5.0, "h:1")
    assert from_registration(to_registration(CORE, "", (), ttl_s=1.0), mesh="toy") == (CORE, ())


@pytest.mark.parametrize("role", list(ServingRole))
def test_the_serving_role_is_registered(role: ServingRole) -> None:
    made = to_registration(CORE, "a:1", (MODEL,), ttl_s=1.0, role=role)
    assert role_of(made) is role
    older = replace(made, meta={k: v for k, v in made.meta.items() if k != "serving-role"})
    assert role_of(older) is ServingRole.BOTH
    with pytest.raises(InvalidRequest):
        role_of(changed(**{"serving-role": "dream"}))


def test_eight_models_fit_and_nine_are_refused() -> None:
    models = [replace(MODEL, model_id=str(n)) for n in range(9)]
    check_registration(to_registration(CORE, "a:1", models[:8], ttl_s=1.0))
    with pytest.raises(InvalidRequest):
        check_registration(to_registration(CORE, "a:1", models, ttl_s=1.0))


def changed(**meta: str | None) -> Registration:
    merged = {**GOOD.meta, **meta}
    return replace(GOOD, meta={k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize(
    "registration",
    [
        changed(place=None),
        changed(place="spiffe://nonsense"),
        changed(place=CORE.uri.replace("tier/core", "tier/moon")),
        changed(place=replace(CORE, mesh="other").uri),
        changed(place=place_of("core-2").uri),
        changed(**{"model-0-max_context_tokens": "many"}),
        *(
            changed(**{f"model-0-{field}": value})
            for field in ("max_context_tokens", "kv_bytes_per_token")
            for value in ("0", "-1", str(2**31), "9" * 25, "9" * 5000, "1_0", " 7", "٧", "")
        ),
        changed(**{"model-1-kv_bytes_per_token": None}),
    ],
)
def test_what_cannot_be_read_is_refused(registration: Registration) -> None:
    with pytest.raises(InvalidRequest):
        from_registration(registration, mesh="toy")


def test_the_largest_counts_are_read() -> None:
    registration = changed(**{"model-0-kv_bytes_per_token": str(2**31 - 1), "model-0-max_context_tokens": "1"})
    _, models = from_registration(registration, mesh="toy")
    assert (models[0].kv_bytes_per_token, models[0].max_context_tokens) == (2**31 - 1, 1)
