"""The files that a node gives to others of its mesh, by the SHA-256 of their bytes.

A digest is computed when a file is first asked about and again when its size or time has changed, so that a file
that was replaced is never given under its old name. Safe from any thread; blocks on disk.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import NotFound
from mesh.kv.kvtc.artifact import SUFFIX
from mesh.settings import ModelFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One file as it is now. `kind`: "model" or "kvtc"."""

    digest: str
    size_bytes: int
    name: str
    kind: str
    path: Path
    mtime_ns: int


class BlobShelf:
    """See the module. A file that is not there (any more) is left out, not an error: others can be given still."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: dict[Path, tuple[str, str]] = {}  # path -> name, kind
        self._known: dict[Path, Blob] = {}

    def offer(self, path: Path, *, name: str, kind: str) -> None:
        """Give this file from now on. Folders are not given: a model in one stays where it is."""
        with self._lock:
            self._offered[path] = name, kind

    def blobs(self) -> tuple[Blob, ...]:
        """All files that are there, by name. Reads a file through that was not asked about since it changed."""
        with self._lock:
            offered = list(self._offered.items())
        found = (self._blob(path, name, kind) for path, (name, kind) in offered)
        return tuple(sorted((b for b in found if b is not None), key=lambda b: (b.name, b.digest)))

    def find(self, digest: str) -> Blob:
        """The file of this digest. Raises NotFound."""
        for blob in self.blobs():
            if blob.digest == digest:
                return blob
        raise NotFound(f"no file with SHA-256 {digest[:64]} is given here", field="digest")

    def _blob(self, path: Path, name: str, kind: str) -> Blob | None:
        try:
            if not path.is_file():
                return None
            stat = path.stat()
            known = self._known.get(path)
            if known is not None and (known.size_bytes, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return known
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return None
        blob = Blob(digest=digest, size_bytes=stat.st_size, name=name, kind=kind, path=path, mtime_ns=stat.st_mtime_ns)
        with self._lock:
            self._known[path] = blob
        return blob


def model_shelf(models: Iterable[ModelFile]) -> BlobShelf:
    """A shelf with these models' files and the kvtc artifacts that lie, or will lie, beside them."""
    shelf = BlobShelf()
    for model in models:
        shelf.offer(model.path, name=model.id, kind="model")
        shelf.offer(model.path.with_name(model.path.name + SUFFIX), name=model.path.name + SUFFIX, kind="kvtc")
    return shelf
