"""Text to measure kvtc on: the same kind as calibration's, and kinds that it never saw."""

from __future__ import annotations

import gzip
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core_node.kvtc.texts import Text, windows
from mesh.errors import InvalidRequest
from mesh.model.description import ModelDescription
from mesh.model.tokenizer import load_tokenizer

_MANUALS = Path("/usr/share/man")
_UNSEEN_LANGUAGES = ("hu", "fi", "ro", "cs", "da")  # none is among the built-in texts
_MAX_CHARS = 400_000
Windows = list[tuple[str, NDArray[np.int64]]]


def test_windows(
    description: ModelDescription,
    home: str,
    language_text: Path,
    n_home: int,
    n_unseen: int,
    window_tokens: int,
    home_kind: str,
) -> tuple[Windows, list[str]]:
    """Windows of (kind, ids) and notes on what was left out."""
    tokenizer = load_tokenizer(description.path)
    notes: list[str] = []
    found = windows(
        [Text(kind=home_kind, text=home, share=1.0)], tokenizer, n_windows=n_home, window_tokens=window_tokens
    )
    for kind, text in (("other code", _code()), ("other language", _language(language_text))):
        try:
            found += windows(
                [Text(kind=kind, text=text, share=1.0)], tokenizer, n_windows=n_unseen, window_tokens=window_tokens
            )
        except InvalidRequest as exc:
            notes.append(f"{kind} left out: {exc.message}")
    rng = np.random.default_rng(7)
    found += [
        ("random tokens", rng.integers(0, description.vocab_size, window_tokens).astype(np.int64))
        for _ in range(max(1, n_unseen // 2))
    ]
    return found, notes


def _code() -> str:
    """Python source that calibration leaves out: packages below the standard library's top."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*library.glob("json/*.py"), *library.glob("xml/*/*.py"), *library.glob("concurrent/*/*.py")])
    files += sorted([*library.glob("multiprocessing/*.py"), *library.glob("importlib/*.py")])
    return "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in files)[:_MAX_CHARS]


def _language(path: Path) -> str:
    """The given file, or manual pages in languages that the built-in texts lack, without their markup."""
    if path.is_file():
        return path.read_text(encoding="utf-8")[:_MAX_CHARS]
    pages: list[str] = []
    for language in _UNSEEN_LANGUAGES:
        files = sorted((_MANUALS / language).glob("man[158]/*.gz"))
        random.Random(1).shuffle(files)
        for file in files[:20]:
            with gzip.open(file, "rt", encoding="utf-8", errors="replace") as page:
                text = page.read()
            text = "\n".join(line for line in text.split("\n") if not line.startswith(('.\\"', "'\\\"")))
            pages.append(re.sub(r"\\f[A-Z]|\\&|\\", "", re.sub(r"^\.[A-Za-z]{1,3} ?", "", text, flags=re.MULTILINE)))
    return "\n".join(pages)[:_MAX_CHARS]
