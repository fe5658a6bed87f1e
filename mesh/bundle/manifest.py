"""What lies in a bundle: every file with its size and SHA-256, the llama.cpp builds with what each needs of a CPU.

Pure. The installer (deploy/bundle/install.py) reads the same JSON with the standard library alone, since it runs before
anything is installed; tests hold the two together.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from mesh.errors import InvalidRequest, PayloadCorrupt

MANIFEST_FILE: Final = "manifest.json"
SIGNATURE_FILE: Final = "manifest.sig"
FORMAT: Final = 1

# What a compiler may use of a CPU when it is told to build for this one (x86-64): a build for one machine runs on
# another only if that has all of these that the first has. Names as in /proc/cpuinfo.
INSTRUCTION_FLAGS: Final = frozenset({
    "pni", "ssse3", "sse4_1", "sse4_2", "sse4a", "popcnt", "cx16", "avx", "f16c", "fma", "fma4", "xop", "bmi1",
    "bmi2", "avx2", "abm", "lahf_lm", "movbe", "adx", "rdseed", "rdrnd", "aes", "pclmulqdq", "sha_ni", "sha512",
    "sm3", "sm4", "gfni", "vaes", "vpclmulqdq", "avx_vnni", "avx_vnni_int8", "avx_vnni_int16", "avx_ifma",
    "avx_ne_convert", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2",
    "avx512_vnni", "avx512_bitalg", "avx512_bf16", "avx512_fp16", "avx512ifma", "avx512_vpopcntdq",
    "avx512_vp2intersect", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "fsgsbase", "xsavec", "xsaves",
    "clflushopt", "clwb", "rdpid", "serialize", "movdiri", "movdir64b", "waitpkg", "prefetchw", "3dnowprefetch",
})  # fmt: skip
BASELINE_FLAGS: Final = frozenset({"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16"})
"""x86-64-v2, which every x86 server or mini PC since about 2009 has."""

_SAFE_PATH = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*(/[A-Za-z0-9_+][A-Za-z0-9._+-]*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """One file; `path` is relative, with forward slashes."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBuild:
    """One wheel of llama-cpp-python, and the CPU flags without which it dies of an illegal instruction."""

    name: str
    folder: str
    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleModel:
    """The model to serve."""

    model_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleManifest:
    """All of it. `llama`: the fastest build first. `python`: versions (major.minor) that the wheels are for."""

    kvmesh: str
    machine: str
    python: tuple[str, ...]
    created_unix_s: int
    llama: tuple[LlamaBuild, ...]
    model: BundleModel | None
    files: tuple[BundleFile, ...]

    def to_json(self) -> bytes:
        """The bytes that are signed."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> BundleManifest:
        """Raises PayloadCorrupt for what `to_json` did not write, NotImplementedHere's word for a newer format."""
        try:
            tree: dict[str, Any] = json.loads(data)
            if tree.pop("format") != FORMAT:
                raise PayloadCorrupt(f"the bundle is of another format than {FORMAT}: use its own kvmesh")
            manifest = cls(
                kvmesh=str(tree["kvmesh"]),
                machine=str(tree["machine"]),
                python=tuple(map(str, tree["python"])),
                created_unix_s=int(tree["created_unix_s"]),
                llama=tuple(LlamaBuild(**{**b, "needs": tuple(b["needs"])}) for b in tree["llama"]),
                model=None if tree["model"] is None else BundleModel(**tree["model"]),
                files=tuple(BundleFile(**file) for file in tree["files"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise PayloadCorrupt("this is no manifest of a kvmesh bundle") from exc
        for file in manifest.files:
            check_path(file.path)
        return manifest


def check_path(path: str) -> None:
    """Raise InvalidRequest unless a path stays inside the bundle and needs no quoting."""
    if len(path) > 255 or not _SAFE_PATH.fullmatch(path):
        raise InvalidRequest(f"a bundle holds no file of the name {path[:100]!r}", field="path")


def needed_flags(builder_flags: frozenset[str]) -> tuple[str, ...]:
    """What a CPU must have for a build that was made for the CPU of the machine that built it."""
    return tuple(sorted(builder_flags & INSTRUCTION_FLAGS))
