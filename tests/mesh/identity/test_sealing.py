"""What is sealed opens with its key, purpose and name only, and nothing of it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesh.errors import InvalidRequest, PayloadCorrupt
from mesh.identity.sealing import OVERHEAD_BYTES, StateKey, _open_to, is_sealed

KEY = StateKey(bytes(range(32)))


@pytest.mark.parametrize("data", [b"", b"x", b"tenant secret" * 1000])
def test_there_and_back(data: bytes) -> None:
    sealer = KEY.sealer("audit")
    sealed = sealer.seal(data, "n")
    assert (sealer.open(sealed, "n"), is_sealed(sealed), len(sealed)) == (data, True, len(data) + OVERHEAD_BYTES)
    assert sealer.seal(data, "n") != sealed
    assert len(data) < 4 or data not in sealed


def test_another_key_purpose_or_name_opens_nothing() -> None:
    sealed = KEY.sealer("audit").seal(b"data", "n")
    for sealer, name in (
        (StateKey(b"o" * 32).sealer("audit"), "n"),
        (KEY.sealer("site-config"), "n"),
        (KEY.sealer("audit"), "m"),
    ):
        with pytest.raises(PayloadCorrupt, match="another key"):
            sealer.open(sealed, name)


def test_every_changed_byte_and_every_cut_is_found() -> None:
    sealer = KEY.sealer("audit")
    sealed = sealer.seal(b"data", "n")
    for i in range(len(sealed)):
        with pytest.raises(PayloadCorrupt):
            sealer.open(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], "n")
        with pytest.raises(PayloadCorrupt):
            sealer.open(sealed[:i], "n")


def test_a_key_file_is_private_and_long_enough(tmp_path: Path) -> None:
    made = StateKey.create(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    sealed = made.sealer("p").seal(b"data", "n")
    assert StateKey.load(tmp_path / "key").sealer("p").open(sealed, "n") == b"data"
    with pytest.raises(InvalidRequest, match="cannot make"):
        StateKey.create(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        StateKey.load(tmp_path / "key")
    with pytest.raises(InvalidRequest, match="cannot read"):
        StateKey.load(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="32 to"):
        StateKey(b"short")


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "taken"),
    [
        (0, 0, 0o440, True),  # as systemd shows a credential
        (0, 0, 0o444, False),
        (0, 0, 0o460, False),
        (0, 0, 0o640, False),
        (0, 5, 0o440, False),
        (7, 0, 0o440, False),
        (7, 7, 0o400, True),
    ],
)
def test_who_else_may_read_a_state_key(uid: int, gid: int, mode: int, taken: bool) -> None:
    stat = os.stat_result((mode, 0, 0, 1, uid, gid, 32, 0, 0, 0))
    assert (_open_to(stat) == 0) == taken
