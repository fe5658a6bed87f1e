"""What a backup holds: folders under names, and the values of the registry. A tar of them, its manifest last.

Files are copied as they are at that moment. Of an audit log, which grows, only whole entries are taken, so that the
copy is a beginning of the chain. Nothing is put in place before the whole archive was read and every digest checked.
Blocking.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mesh.audit.log import AUDIT_FOLDER
from mesh.errors import AlreadyExists, InvalidRequest, PayloadCorrupt
from mesh.identity.files import FOLDER_MODE, write_error
from mesh.process import READY_FILE
from placement.backup.sealed import SealedWriter, Secret, opened

FORMAT = 1
MANIFEST, VALUES = "manifest.json", "registry_values.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LEFT_OUT = re.compile(r"\.lock$|^process\.log|^\.|\.tmp$")
_MOST_FILES, _MAX_MANIFEST_BYTES = 100_000, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was kept or put back."""

    made_unix_s: float
    mesh: str
    files: int
    size_bytes: int
    folders: tuple[str, ...]
    values: int


def write_backup(
    target: BinaryIO,
    secret: Secret,
    *,
    mesh: str,
    folders: Mapping[str, Path],
    values: Mapping[str, bytes] | None,
    made_unix_s: float,
    log_n: int | None = None,
) -> Summary:
    """`folders`: name -> folder, all files below it. `values`: of a registry that is not in one of them. Raises
    InvalidRequest for a folder that is not there."""
    sealed = SealedWriter(target, secret) if log_n is None else SealedWriter(target, secret, log_n=log_n)
    digests: dict[str, str] = {}
    size = 0
    with tarfile.open(fileobj=sealed, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for name, folder in folders.items():
            for path, data in _files(name, folder):
                _add(tar, path, data)
                digests[path] = hashlib.sha256(data).hexdigest()
                size += len(data)
        if values is not None:
            raw = json.dumps({key: value.hex() for key, value in sorted(values.items())}).encode()
            _add(tar, VALUES, raw)
            digests[VALUES] = hashlib.sha256(raw).hexdigest()
        manifest = {"format": FORMAT, "mesh": mesh, "made_unix_s": made_unix_s, "sha256": digests}
        _add(tar, MANIFEST, json.dumps(manifest, sort_keys=True).encode())
    sealed.finish()
    return Summary(
        made_unix_s=made_unix_s,
        mesh=mesh,
        files=len(digests),
        size_bytes=size,
        folders=tuple(folders),
        values=len(values or ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An archive that was read and found whole, unpacked beside where it is to go."""

    summary: Summary
    folder: Path
    values: Mapping[str, bytes] | None


def check_empty(folders: Iterable[Path]) -> None:
    """Raise AlreadyExists unless each folder is empty or not there: a restore never writes over anything."""
    for folder in folders:
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise AlreadyExists(f"{folder} is not empty; a backup is restored into an empty folder only")


def stage(source: BinaryIO, secret: Secret, parent: Path) -> Staged:
    """Unpack into a new private folder in `parent`. Raises PayloadCorrupt if anything is missing, added or changed;
    nothing is left then."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".restore-", dir=parent))
    except OSError as error:
        raise write_error(parent, error) from error
    try:
        return _unpack(source, secret, folder)
    except (OSError, tarfile.TarError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(folder, error) from error
        raise PayloadCorrupt(f"the archive's contents cannot be read: {error}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def put_in_place(staged: Staged, targets: Mapping[str, Path]) -> None:
    """Move each staged folder to its target, which `check_empty` has seen. Raises InvalidRequest for a folder of the
    archive without a target. What was unpacked is removed in any case."""
    try:
        missing = set(staged.summary.folders) - targets.keys()
        if missing:
            raise InvalidRequest(
                f"the backup holds {', '.join(sorted(missing))} too: say where they go", field="--more"
            )
        check_empty(targets[name] for name in staged.summary.folders)
        for name in staged.summary.folders:
            target = targets[name]
            target.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            if target.exists():
                target.rmdir()
            shutil.move(staged.folder / name, target)  # a copy, where it is another disk
    finally:
        shutil.rmtree(staged.folder, ignore_errors=True)  # it holds keys


def _files(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"a folder's name is lower-case letters, digits, '-' and '_', got {name[:40]!r}")
    if not folder.is_dir():
        raise InvalidRequest(f"there is no folder {folder}", field="folder")
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_symlink() or not path.is_file() or inner.name == READY_FILE or _LEFT_OUT.search(inner.name):
            continue
        data = path.read_bytes()
        if AUDIT_FOLDER in inner.parts and path.suffix == ".jsonl":
            data = data[: data.rfind(b"\n") + 1]
        yield f"{name}/{inner.as_posix()}", data


def _add(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), 0o600
    tar.addfile(entry, io.BytesIO(data))


class _Pieces(io.RawIOBase):
    """Decrypted pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        n = min(len(buffer), len(self._rest))
        buffer[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        return n


def _unpack(source: BinaryIO, secret: Secret, folder: Path) -> Staged:
    digests: dict[str, str] = {}
    manifest: bytes | None = None
    values: Mapping[str, bytes] | None = None
    size = 0
    pieces = _Pieces(opened(source, secret))
    with tarfile.open(fileobj=io.BufferedReader(pieces), mode="r|") as tar:
        for entry in tar:
            if not entry.isreg() or len(digests) >= _MOST_FILES or manifest is not None:
                raise PayloadCorrupt(f"the archive holds what no backup holds: {entry.name[:200]!r}")
            raw = tar.extractfile(entry)
            data = b"" if raw is None else raw.read()
            if entry.name == MANIFEST:
                manifest = data
                continue
            digests[entry.name] = hashlib.sha256(data).hexdigest()
            if entry.name == VALUES:
                values = {key: bytes.fromhex(value) for key, value in json.loads(data).items()}
                continue
            size += len(data)
            _write(folder, entry.name, data)
    for _ in pieces:  # to the last piece: an archive that was cut off shows there
        pass
    return Staged(summary=_checked(manifest, digests, size, len(values or ())), folder=folder, values=values)


def _write(folder: Path, name: str, data: bytes) -> None:
    parts = name.split("/")
    if len(parts) < 2 or not _NAME.fullmatch(parts[0]) or any(part in ("", ".", "..") for part in parts):
        raise PayloadCorrupt(f"the archive names a file that no backup names: {name[:200]!r}")
    path = folder.joinpath(*parts)
    inner = folder
    for part in parts[:-1]:
        inner /= part
        inner.mkdir(mode=FOLDER_MODE, exist_ok=True)
    with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checked(manifest: bytes | None, digests: dict[str, str], size: int, n_values: int) -> Summary:
    if manifest is None or len(manifest) > _MAX_MANIFEST_BYTES:
        raise PayloadCorrupt("the archive has no manifest: it was cut off")
    try:
        told = json.loads(manifest)
        if told["format"] != FORMAT:
            raise InvalidRequest(f"the backup has format {told['format']!r}, this build reads {FORMAT}")
        right = told["sha256"] == digests
        mesh, made = str(told["mesh"]), float(told["made_unix_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise PayloadCorrupt("the archive's manifest cannot be read") from error
    if not right:
        raise PayloadCorrupt("the archive's files are not those of its manifest")
    folders = tuple(sorted({name.split("/")[0] for name in digests if name != VALUES}))
    return Summary(made_unix_s=made, mesh=mesh, files=len(digests), size_bytes=size, folders=folders, values=n_values)
