"""The layout of a local mesh: names, places, thread shares, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.address import HostPort
from mesh.errors import InvalidRequest
from mesh.identity.place import Tier
from mesh.local.layout import KNOWN_SITES, LocalPlan, Site, core_dtype, parse_site, share_threads, sites_of
from mesh.settings import CoreSettings, EdgeSettings, PlacementSettings, RegistryKind


def make_plan(**changes: object) -> LocalPlan:
    values: dict[str, object] = {
        "folder": Path("/f"), "model_id": "m", "model_path": Path("/m.gguf"), "cores": 2, "sites": KNOWN_SITES,
        "core_threads": 2, "edge_threads": 1, "core_device": "cpu", "core_dtype": "bf16",
    }  # fmt: skip
    return LocalPlan(**(values | changes))  # type: ignore[arg-type]


def test_places() -> None:
    places = make_plan().places()
    assert [p.node_id for p in places] == ["placement-1", "core-1", "core-2", "edge-paris", "edge-osaka"]
    assert [(p.site, p.region, p.jurisdiction) for p in places[2:]] == [
        ("dc1", "eu-west", "DE"),
        ("paris", "eu-west", "FR"),
        ("osaka", "ap-northeast", "JP"),
    ]
    assert [p.tier for p in places] == [Tier.CORE] * 3 + [Tier.EDGE] * 2


def test_settings_of_each_role() -> None:
    plan = make_plan(grpc_port=7, consul=HostPort("127.0.0.1", 8500))
    placement, core, _, paris, _ = plan.places()
    address = HostPort("127.0.0.1", 9)
    first = plan.settings_of(placement, None)
    assert isinstance(first, PlacementSettings)
    assert first.listeners.public.port == 7
    assert first.bootstrap is not None
    assert first.bootstrap.keys_file == plan.keys_file
    second = plan.settings_of(core, address)
    assert isinstance(second, CoreSettings)
    assert (second.engine.n_threads, second.engine.dtype) == (2, "bf16")
    third = plan.settings_of(paris, address)
    assert isinstance(third, EdgeSettings)
    assert third.engine.n_threads == 1
    for settings in (first, second, third):
        assert settings.registry.kind is RegistryKind.CONSUL
    assert len({s.state_folder for s in (first, second, third)}) == 3


def test_sites() -> None:
    assert sites_of("paris, osaka") == KNOWN_SITES
    assert sites_of("") == ()
    assert parse_site("lab:us-east:US") == Site(name="lab", region="us-east", jurisdiction="US")
    for text in ("atlantis", "a:b", "a:b:c:d"):
        with pytest.raises(InvalidRequest, match="a site is paris, osaka or"):
            parse_site(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": -1},
        {"cores": 65},
        {"cores": 0, "sites": ()},
        {"sites": (KNOWN_SITES[0], KNOWN_SITES[0])},
        {"sites": (Site(name="../up", region="r", jurisdiction="J"),)},
        {"sites": (Site(name="", region="r", jurisdiction="J"),)},
    ],
)
def test_what_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        make_plan(**changes)


@pytest.mark.parametrize(
    ("processors", "cores", "edges", "core", "edge"),
    [(1, 1, 2, 1, 1), (2, 1, 2, 1, 1), (4, 1, 2, 2, 1), (16, 1, 2, 8, 4), (16, 2, 0, 8, 4), (8, 0, 2, 1, 4)],
)
def test_threads_are_shared_out(processors: int, cores: int, edges: int, core: int, edge: int) -> None:
    threads = share_threads(processors, cores, edges)
    assert (threads.core, threads.edge) == (core, edge)


def test_dtype_follows_the_processor() -> None:
    assert core_dtype("cpu", frozenset({"avx2"})) == "f32"
    assert core_dtype("cpu", frozenset({"avx512_bf16"})) == "bf16"
    assert core_dtype("cuda:0", frozenset()) == "bf16"
