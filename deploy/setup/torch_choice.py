"""Which torch: one that is there, or the pinned one, its size said before it is fetched. Standard library only."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

_GB = 1e9


def system_torch(oldest: str, python: Path | str = sys.executable) -> str | None:
    """Version of the torch that this Python can import, if it is at least `oldest`; else None.

    The package is looked up, not imported: that takes seconds."""
    code = (
        "import importlib.metadata as m, importlib.util as u\nprint(m.version('torch') if u.find_spec('torch') else '')"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    version = done.stdout.strip()
    return version if done.returncode == 0 and version and _number(version) >= _number(oldest) else None


def explain_download(python: Path, requirement: str) -> str:
    """What pip would fetch for the requirement, as one line: packages, size, whether it is a CUDA build."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        items = json.loads(done.stdout)["install"]
    except (ValueError, KeyError):
        return f"{requirement} is installed (what pip would fetch for it is not known)"
    sizes = [_size_bytes(item["download_info"]["url"]) for item in items]
    known = sum(size for size in sizes if size is not None)
    least = "at least " if None in sizes else ""
    kind = "a CUDA build" if any(i["metadata"]["name"].startswith("nvidia") for i in items) else "a build for the CPU"
    torch = next((i["metadata"]["version"] for i in items if i["metadata"]["name"] == "torch"), "")
    return f"torch {torch} is installed: {kind}, {least}{known / _GB:.2f} GB in {len(items)} packages"


def _size_bytes(url: str) -> int | None:
    """Size of one file that pip would fetch, without fetching it."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (urllib.error.URLError, TimeoutError, TypeError, ValueError):
        return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
