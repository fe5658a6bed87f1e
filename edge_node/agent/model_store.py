"""The models of a box: two folders, one in force. A new model is made ready beside the old, then one rename switches.

    models/a/model.gguf  models/a/record.json      current -> a
    models/b/...

A slot's record is written last, when the file was verified by digest, its header read in a child process and llama.cpp
has computed with it in another. `current` is a symbolic link that is replaced whole. So whenever the power goes, what
is in force is whole, and what was being made ready is not in force. A model that is new in force is on trial until an
agent has started with it (`started`); an agent that finds its model begun with before and never ready goes back.
Blocking but for `install`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge_node.engine.selftest import SelfTestResult, run_self_test
from mesh.errors import InvalidRequest, MeshError, NotFound, Overloaded, PayloadCorrupt
from mesh.identity.files import make_private_folder, sync_folder, write_private
from mesh.rpc.blobs.fetch import KEEP_FREE_BYTES, fetch_blob
from mesh.telemetry.log import get_logger

log = get_logger(__name__)
MODELS_FOLDER = "models"
SLOTS = ("a", "b")
_FILE, _RECORD, _CURRENT = "model.gguf", "record.json", "current"
_CHECK_S, _SELF_TEST_S = 120.0, 300.0
_COPY_BYTES = 4 << 20

Fetch = Callable[[Path], Awaitable[None]]
"""Bring the bytes to this path, resumably."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is in a slot. `starts`: agents that began to start with it; `proven`: one of them was ready."""

    digest: str
    model_id: str
    starts: int = 0
    proven: bool = False
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The model in force."""

    slot: str
    path: Path
    record: Record


class ModelStore:
    """One per box; one process at a time changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def current(self) -> Installed | None:
        """The model in force, if one was ever installed."""
        with suppress(OSError):
            slot = os.readlink(self.folder / _CURRENT)
            if slot in SLOTS:
                return self._installed(slot)
        return None

    def slots(self) -> dict[str, Installed | None]:
        """What is in each slot; None: nothing whole."""
        return {slot: self._installed(slot) for slot in SLOTS}

    async def install(
        self, digest: str, model_id: str, fetch: Fetch, *, n_threads: int, self_test: bool = True
    ) -> Installed:
        """Make a model ready in the slot that is not in force, and put it in force. Raises what `fetch` does,
        InvalidRequest (no model that this build takes) or PayloadCorrupt; the old one is in force then, as before."""
        await asyncio.to_thread(make_private_folder, self.folder)
        now = self.current()
        if now is not None and now.record.digest == digest:
            return now
        slot = SLOTS[1] if now is None or now.slot == SLOTS[0] else SLOTS[0]
        if now is None:
            slot = SLOTS[0]
        path = self.folder / slot / _FILE
        kept = self._installed(slot)
        if now is not None and not now.record.proven and kept is not None and kept.record.proven:
            raise InvalidRequest(
                f"{now.record.model_id} is in force and no agent was ever ready with it: start one, or go back, before "
                f"{kept.record.model_id}, which works, is overwritten",
                field="model",
            )
        if kept is None or kept.record.digest != digest:
            await asyncio.to_thread(self._clear, slot)
            await fetch(path)
        await asyncio.to_thread(self._verify, path, digest)
        await asyncio.to_thread(check_header, path)
        if self_test:
            result = await asyncio.to_thread(run_self_test, path, n_threads, _SELF_TEST_S)
            if not result.ok:
                raise _failed(result)
        record = Record(digest=digest, model_id=model_id)
        await asyncio.to_thread(self._write, slot, record)
        await asyncio.to_thread(self._switch, slot)
        log.info("model_installed", model=model_id)
        return Installed(slot=slot, path=path, record=record)

    def start(self) -> Installed | None:
        """An agent is about to start with the model in force: verify it, count the start, go back if it has failed
        before. None: nothing was installed. Raises PayloadCorrupt if neither slot has a whole model."""
        now = self.current()
        if now is None:
            return None
        trouble = now.record.failed
        if not trouble and not now.record.proven and now.record.starts > 0:
            trouble = "an agent that had begun to start with it was never ready"
        if not trouble:
            try:
                self._verify(now.path, now.record.digest)
            except PayloadCorrupt as error:
                trouble = error.message
        if trouble:
            return self.back(trouble)
        if not now.record.proven:
            now = replace(now, record=replace(now.record, starts=now.record.starts + 1))
            self._write(now.slot, now.record)
        return now

    def started(self) -> None:
        """The agent is ready with the model in force: it stays."""
        now = self.current()
        if now is not None and not now.record.proven:
            self._write(now.slot, replace(now.record, proven=True))

    def back(self, why: str) -> Installed:
        """Put the other model in force; the one that was stays where it is, marked. Raises NotFound or PayloadCorrupt
        if there is no other whole one."""
        now = self.current()
        if now is None:
            raise NotFound("no model was installed here", field="model")
        other = self._installed(SLOTS[1 - SLOTS.index(now.slot)])
        if other is None or other.record.failed:
            raise NotFound(f"there is no other model to go back to; {now.record.model_id}: {why}", field="model")
        self._verify(other.path, other.record.digest)
        log.error("model_set_back", model=now.record.model_id, error=why)
        self._write(now.slot, replace(now.record, failed=why[:300]))
        self._switch(other.slot)
        return other

    def _installed(self, slot: str) -> Installed | None:
        try:
            record = Record(**json.loads((self.folder / slot / _RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        path = self.folder / slot / _FILE
        return Installed(slot=slot, path=path, record=record) if path.is_file() else None

    def _clear(self, slot: str) -> None:
        """The record first: from then on the slot holds nothing. What was fetched of another file goes as well."""
        folder = self.folder / slot
        make_private_folder(folder)
        for name in (_RECORD, _FILE):
            (folder / name).unlink(missing_ok=True)

    def _verify(self, path: Path, digest: str) -> None:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise PayloadCorrupt(f"{path} cannot be read: {error.strerror}") from error
        if found != digest:
            raise PayloadCorrupt(f"{path} has SHA-256 {found}, not {digest}: it was changed", field="digest")

    def _write(self, slot: str, record: Record) -> None:
        write_private(self.folder / slot / _RECORD, json.dumps(asdict(record)).encode())

    def _switch(self, slot: str) -> None:
        new = self.folder / f".{_CURRENT}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(slot)
        os.replace(new, self.folder / _CURRENT)
        sync_folder(self.folder)


def check_header(path: Path) -> None:
    """Read the GGUF's header in a process of its own, with bounded memory and time. Raises InvalidRequest."""
    command = (sys.executable, "-P", "-m", "edge_node.agent.check_model", str(path))
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHECK_S, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"{path.name}: its header was not read within {_CHECK_S:g} s", field="model") from None
    if done.returncode:
        said = _said(done.stdout)
        raise InvalidRequest(said or f"{path.name}: reading its header ended with {done.returncode}", field="model")


def _said(stdout: bytes) -> str:
    try:
        message: Any = json.loads(stdout)["error"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(message)[:500]


def _failed(result: SelfTestResult) -> MeshError:
    return InvalidRequest(f"the new model fails the self-test: {result.message}", field="model")


def from_mesh(dial: Callable[[], Any], digest: str, on_progress: Callable[[int, int], None]) -> Fetch:
    """From the node at the other end of `dial`."""

    async def fetch(path: Path) -> None:
        await fetch_blob(dial, digest, path, on_progress=on_progress)

    return fetch


def from_file(source: Path) -> Fetch:
    """From a file on this box, such as a stick."""

    async def fetch(path: Path) -> None:
        await asyncio.to_thread(_copy, source, path)

    return fetch


def _copy(source: Path, path: Path) -> None:
    size = source.stat().st_size
    free = shutil.disk_usage(path.parent).free
    if size + KEEP_FREE_BYTES > free:
        raise Overloaded(f"{source.name} has {size >> 20} MiB, {free >> 20} MiB are free: free some", path=str(path))
    part = path.with_name(f".{path.name}.part")
    with source.open("rb") as old, part.open("wb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
        new.flush()
        os.fsync(new.fileno())
    os.replace(part, path)
