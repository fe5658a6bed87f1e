"""Text to calibrate on: the caller's files, and what is there wherever kvmesh is: Python's own documentation and
source, and a page in a dozen languages that ships with the package."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest
from mesh.model.tokenizer import Tokenizer

_MAX_CHARS = 2_000_000
_MAX_CHARS_PER_TOKEN = 8
_SOURCE_FILES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """`kind` is a word for people; `share`: how much of the windows it should fill, against the others'."""

    kind: str
    text: str
    share: float


def built_in() -> tuple[Text, ...]:
    """Prose about Python, Python source and languages. Reads a few MB."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted([*library.glob("*.py"), *library.glob("asyncio/*.py"), *library.glob("email/*.py")])
    random.Random(2).shuffle(sources)
    code = "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in sources[:_SOURCE_FILES])
    topics = library / "pydoc_data" / "topics.py"
    prose = topics.read_text(encoding="utf-8").replace("\\n", "\n") if topics.exists() else ""
    languages = (resources.files("core_node.kvtc") / "languages.txt").read_text(encoding="utf-8")
    texts = (
        Text(kind="prose", text=prose[:_MAX_CHARS], share=0.5),
        Text(kind="code", text=code[:_MAX_CHARS], share=0.3),
        Text(kind="languages", text=languages, share=0.2),
    )
    return tuple(t for t in texts if t.text)


def from_files(paths: Sequence[Path]) -> tuple[Text, ...]:
    """One Text a file. Raises InvalidRequest on one that cannot be read as UTF-8."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")[:_MAX_CHARS]
        except (OSError, UnicodeDecodeError) as exc:
            raise InvalidRequest(f"text {path.name} cannot be read: {exc}", field="text") from exc
        texts.append(Text(kind=path.stem[:32], text=text, share=1.0))
    return tuple(texts)


def windows(
    texts: Sequence[Text], tokenizer: Tokenizer, *, n_windows: int, window_tokens: int
) -> list[tuple[str, NDArray[np.int64]]]:
    """About `n_windows` windows of (kind, ids), spread evenly over each text by its share, kinds interleaved. Raises
    InvalidRequest if a text has not one window."""
    total = sum(t.share for t in texts)
    columns: list[list[tuple[str, NDArray[np.int64]]]] = []
    for text in texts:
        wanted = max(1, round(n_windows * text.share / total))
        found = _spread(text.text, tokenizer, wanted, window_tokens)
        columns.append([(text.kind, ids) for ids in found])
        if not found:
            raise InvalidRequest(f"text {text.kind} is too short: {window_tokens} tokens are needed", field="text")
    order = [(i / len(column), window) for column in columns for i, window in enumerate(column)]
    return [window for _, window in sorted(order, key=lambda item: item[0])]


def _spread(text: str, tokenizer: Tokenizer, wanted: int, window_tokens: int) -> list[NDArray[np.int64]]:
    """The beginnings of `wanted` equal parts of a text; of fewer where a part has not a window."""
    for n in range(wanted, 0, -1):
        size = len(text) // n
        parts = [text[at * size :][: min(size, window_tokens * _MAX_CHARS_PER_TOKEN)] for at in range(n)]
        ids = [np.asarray(tokenizer.encode(part)[:window_tokens], dtype=np.int64) for part in parts]
        if all(len(i) == window_tokens for i in ids):
            return ids
    return []
