"""Private files that survive a crash: written whole or not at all, readable by the owner only.

A write goes to a temporary file beside the target, is synced, and replaces the target by rename; then the
folder is synced. A reader sees the old bytes or the new ones. Blocking.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from mesh.errors import Internal, InvalidRequest, Overloaded

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def make_private_folder(folder: Path) -> None:
    """Create `folder` (and its parents) with mode 0700. An empty one that exists is tightened to 0700.

    Raises InvalidRequest if it exists, holds files and lets others in: what is in it may have been read."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            if any(folder.iterdir()):
                raise InvalidRequest(
                    f"{folder} holds secrets but is open to other users; run chmod 700 on it, "
                    "or remove it if they may have been read",
                    field="folder",
                )
            folder.chmod(FOLDER_MODE)
    except OSError as error:
        raise write_error(folder, error) from error


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, mode 0600. Raises Overloaded on a full disk, Internal on other trouble; the old
    file is then still there and no temporary one is left."""
    try:
        # mkstemp creates with mode 0600.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise write_error(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise
    sync_folder(path.parent)


def write_error(path: Path, error: OSError) -> Overloaded | Internal:
    """The MeshError for an operating system error on `path`."""
    if error.errno in _DISK_FULL:
        return Overloaded(f"the disk of {path} is full; free some space, nothing was changed", path=str(path))
    return Internal(f"cannot write {path}: {error.strerror or error}", path=str(path))


def sync_folder(folder: Path) -> None:
    """Make what was made, renamed or removed in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
