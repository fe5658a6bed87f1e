"""The handshake of two ends and the cipher after it, against a relay that does what it likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.errors import MeshError, PayloadCorrupt, Unauthenticated
from mesh.identity.ca import CertificateAuthority
from mesh.identity.place import Place
from mesh.identity.signing import NodeIdentity
from mesh.rpc.relay.sealed import Handshake, SealedPair
from tests.mesh.rpc.relay.conftest import place_of

SESSION = bytes(32)
PARIS, OSAKA, SPY = place_of("paris"), place_of("osaka"), place_of("spy")


class Mesh:
    def __init__(self, folder: Path, mesh: str = "m") -> None:
        self.authority = CertificateAuthority.create_or_load(folder, mesh)

    def end(self, place: Place, *, calling: bool, expect: Place | None = None, session: bytes = SESSION) -> Handshake:
        identity = NodeIdentity(place, self.authority.issue(place))
        return Handshake(identity, self.authority.ca_pem, session=session, calling=calling, expect=expect)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    return Mesh(tmp_path_factory.mktemp("ca"))


def shake(caller: Handshake, called: Handshake) -> tuple[SealedPair, SealedPair]:
    caller.meet(called.hello)
    called.meet(caller.hello)
    called.check(caller.proof())
    caller.check(called.proof())
    return caller.pair(), called.pair()


def test_both_ends_know_each_other_and_nothing_else_opens(mesh: Mesh) -> None:
    caller, called = shake(mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(OSAKA, calling=False))
    assert (caller.peer, called.peer) == (OSAKA, PARIS)
    for i in range(3):
        text = f"message {i}".encode()
        sealed = caller.seal(text)
        assert text not in sealed
        assert called.open(sealed) == text
        assert caller.open(called.seal(text)) == text
    other, _ = shake(mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(OSAKA, calling=False))
    with pytest.raises(PayloadCorrupt):
        called.open(other.seal(b"of another connection"))


@pytest.mark.parametrize("what", ["flipped", "repeated", "skipped", "cut", "sent back"])
def test_a_message_that_was_tampered_with_is_not_opened(mesh: Mesh, what: str) -> None:
    caller, called = shake(mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(OSAKA, calling=False))
    first, second = caller.seal(b"first"), caller.seal(b"second")
    match what:
        case "flipped":
            bad = first[:-1] + bytes([first[-1] ^ 1])
        case "repeated":
            called.open(first)
            bad = first
        case "skipped":
            bad = second
        case "cut":
            bad = first[:10]
        case _:
            bad = called.seal(b"first")
    with pytest.raises(PayloadCorrupt):
        called.open(bad)


def test_another_node_of_the_mesh_cannot_answer(mesh: Mesh) -> None:
    """The relay puts the caller through to one that is not meant."""
    caller, spy = mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(SPY, calling=False)
    caller.meet(spy.hello)
    spy.meet(caller.hello)
    with pytest.raises(Unauthenticated):  # it sees at once that it is not the one
        spy.check(caller.proof())
    spy._peer = PARIS
    with pytest.raises(Unauthenticated, match="not"):
        caller.check(spy.proof())


def test_a_node_in_the_middle_with_its_own_keys_is_found_out(mesh: Mesh) -> None:
    """A relay with a certificate of the mesh speaks to both ends with keys of its own, and passes their proofs on."""
    caller, called = mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(OSAKA, calling=False)
    middle_a, middle_b = mesh.end(SPY, calling=False), mesh.end(SPY, calling=True, expect=OSAKA)
    caller.meet(middle_a.hello)
    called.meet(middle_b.hello)
    with pytest.raises(Unauthenticated, match="another connection"):
        called.check(caller.proof())


def test_a_proof_sent_back_is_refused(mesh: Mesh) -> None:
    caller = mesh.end(PARIS, calling=True, expect=OSAKA)
    caller.meet(caller.hello)
    with pytest.raises(Unauthenticated):
        caller.check(caller.proof())


def test_proofs_are_of_one_session(mesh: Mesh) -> None:
    caller, called = mesh.end(PARIS, calling=True, expect=OSAKA), mesh.end(OSAKA, calling=False, session=b"x" * 32)
    caller.meet(called.hello)
    called.meet(caller.hello)
    with pytest.raises(Unauthenticated, match="another connection"):
        called.check(caller.proof())


def test_another_authority_proves_nothing(mesh: Mesh, tmp_path: Path) -> None:
    caller, called = mesh.end(PARIS, calling=True, expect=OSAKA), Mesh(tmp_path).end(OSAKA, calling=False)
    caller.meet(called.hello)
    called.meet(caller.hello)
    with pytest.raises(Unauthenticated):
        called.check(caller.proof())


@pytest.mark.parametrize("hello", [b"", bytes(31), bytes(33)])
def test_a_hello_of_another_size_is_refused(mesh: Mesh, hello: bytes) -> None:
    with pytest.raises(PayloadCorrupt):
        mesh.end(PARIS, calling=True, expect=OSAKA).meet(hello)


def test_a_key_of_small_order_is_refused(mesh: Mesh) -> None:
    end = mesh.end(PARIS, calling=True, expect=OSAKA)
    end.meet(bytes(32))
    with pytest.raises(MeshError):
        end.pair()
