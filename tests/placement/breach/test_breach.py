"""No world leads to a breach, and a checker that shares nothing with what decides notices when it would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.identity.ca import CertificateAuthority
from mesh.identity.receipt import verify_receipt
from placement.breach.checker import Happened, breaches, happened_from
from placement.breach.mutations import MUTATIONS
from placement.breach.run import run_worlds
from tests.fakes.mesh import POLICY, ask, place_of, request_of
from tests.placement.entry.conftest import MakeMesh, authority, make_mesh, signer_of
from tests.placement.entry.test_receipts import SignerOf

__all__ = ["authority", "make_mesh", "signer_of"]

PARIS, OSAKA, CORE = place_of("paris"), place_of("osaka"), place_of("core-1")
CLEAN = Happened(
    entry=PARIS,
    claimed="restricted",
    effective="restricted",
    model="toy",
    prompt_at=frozenset({"paris"}),
    kv_moved_to=frozenset(),
    places={"paris": PARIS, "osaka": OSAKA, "core-1": CORE},
)


async def test_no_random_world_leads_to_a_breach() -> None:
    tally = await run_worlds(500, seed=20261201)
    assert (tally.breached, tally.breaches) == (0, [])
    assert tally.outcomes > 300
    assert {"local", "core", "split", "disaggregated"} <= set(tally.shapes), tally.shapes


@pytest.mark.soak
async def test_nor_do_ten_thousand() -> None:
    tally = await run_worlds(10_000, seed=7)
    assert (tally.breached, tally.breaches) == (0, [])


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_fault_in_what_decides_is_noticed(name: str) -> None:
    with MUTATIONS[name]():
        assert (await run_worlds(600, seed=1, until_breach=True)).breached


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"prompt_at": frozenset({"osaka"})}, "prompt was at osaka"),
        ({"prompt_at": frozenset({"unknown"})}, "prompt was at unknown"),
        ({"kv_moved_to": frozenset({"core-1"})}, "KV of a restricted prompt was moved to core-1"),
        ({"effective": "public"}, "below restricted, which the caller asks for"),
        ({"claimed": "", "effective": "public"}, "below internal, which the default asks for"),
        ({"effective": "no such label"}, "below restricted"),
        ({"not_looked_at": True, "claimed": "public", "effective": "confidential"}, "prompt that was not looked at"),
    ],
)  # fmt: skip
def test_the_checker_itself(changed: dict[str, object], words: str) -> None:
    found = breaches(replace(CLEAN, **changed), POLICY)  # type: ignore[arg-type]
    assert bool(found) == bool(words)
    assert words in "; ".join(found)


@pytest.mark.parametrize("text", ["", "- a", "rules: [", "rules: {restricted: 7}", "rules: {restricted: [7]}"])
def test_a_policy_that_cannot_be_read_proves_nothing(text: str) -> None:
    assert breaches(CLEAN, text)


async def test_receipts_of_real_requests_pass_it(
    make_mesh: MakeMesh, signer_of: SignerOf, authority: CertificateAuthority
) -> None:
    mesh = make_mesh("core-1", "paris", entry="paris", signer_of=signer_of)
    places = {n.place.node_id: n.place for n in mesh.nodes.values()}
    for label in ("public", "internal", "confidential", "restricted"):
        await ask(mesh.door, request_of("a longer prompt " * 6, label=label))
    assert len(mesh.receipts.kept) == 4
    for receipt in mesh.receipts.kept:
        assert breaches(happened_from(verify_receipt(receipt, authority.ca_pem), places), POLICY) == ()
