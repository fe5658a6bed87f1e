"""The basis artifact: what calibration learned of one model, as a file with a digest. Both ends of a transfer need the
same one; the codec's name holds its digest.

File: MAGIC, u32 length of a JSON header, the header (geometry, lineage, settings, shapes), then the arrays in the
order of `_shapes`, little-endian and C order. The digest is SHA-256 over the whole file. F is the number of features
of a token in K (in V as many): n_layers * n_kv_heads * head_dim; B = n_layers * n_kv_heads; R_K and R_V are the ranks
of the two bases, R the larger one. A basis is stored as bf16 where nearly all energy is (the first HEAD columns) and as
int8 with a scale a column in the tail, where its rounding is far below the quantiser's.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InvalidRequest, KvIncompatible, PayloadCorrupt
from mesh.kv.elements import bf16_bits_to_f32, f32_to_bf16_bits
from mesh.kv.geometry import KvGeometry
from mesh.kv.kvtc.rans import N_SYMBOLS, FrequencyTables

MAGIC = b"KVTC0003"
SUFFIX = ".kvtc"
MAX_RANK = 4096
MAX_BYTES = 1 << 30
MAX_BOUND = 1e30
N_CONTEXTS = 64
HEAD = 128  # columns of a basis in bf16
PREDICTED = 1024  # coefficients of V that are predicted of K's, at most
_FIGURES = ("loss_ratio", "loss_stderr_ratio", "divergence_ratio", "coded_ratio")
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a setting did to held-out text, of the kind `text`: how much the continuation perplexity rose (0.01 is
    1 %), its standard error over windows, how much it would rise on text that the model itself would write (from the
    Kullback-Leibler divergence: the same on average where the model fits the text, with far less noise), and f16 bytes
    over coded bytes in the coded region."""

    text: str
    loss_ratio: float
    loss_stderr_ratio: float
    divergence_ratio: float
    coded_ratio: float
    windows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One point of the curve.

    `steps` f32 [2, R]: quantiser step of each coefficient of K and of V, 0 where it is dropped or there is none.
    `restore` f32 [2, R]: what a level of one stands for when decoded (a little more than the step). `contexts` u8
    [2, R]: its frequency table. `bound`: the weighted squared error that a token of usual text has at most,
    on average over a chunk; see mesh.kv.kvtc.guard for what an encoder makes of it.
    """

    name: str
    steps: F32
    restore: F32
    contexts: NDArray[np.uint8]
    bound: float
    quality: tuple[Quality, ...] = ()

    @property
    def worst_loss_ratio(self) -> float:
        """See `worst_loss_ratio` of this module."""
        return worst_loss_ratio(self.quality)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A codec that needs no artifact, such as q4, and what it was measured to do to this model."""

    codec: str
    quality: tuple[Quality, ...]


def worst_loss_ratio(quality: tuple[Quality, ...]) -> float:
    """The loss to reckon with, of the worst kind of text: the divergence, or the measured loss where that is larger
    by more than its standard error; infinite if nothing was measured."""
    return max((max(q.divergence_ratio, q.loss_ratio - q.loss_stderr_ratio) for q in quality), default=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Artifact:
    """`mean` f32 [2, F]; `weights` f32 [2, B, head_dim, head_dim], symmetric and positive: features times these are
    in units of what the model's output feels; `basis` f32 [F, R_K] and [F, R_V], orthonormal columns over weighted
    features; `predict` f32 [R_K, P]: what K's coefficients tell of V's first P; `residual` f32 [2, B]: mean magnitude
    of what the basis leaves of a block, over that of all blocks."""

    geometry: KvGeometry
    weights_lineage: str
    mean: F32
    weights: F32
    basis: tuple[F32, F32]
    predict: F32
    residual: F32
    tables: FrequencyTables
    settings: tuple[Setting, ...]
    probed: tuple[Probed, ...]
    notes: str  # for people: texts, counts, build
    digest: str  # hex

    @property
    def ranks(self) -> tuple[int, int]:
        """R_K and R_V."""
        return self.basis[0].shape[1], self.basis[1].shape[1]

    @property
    def basis_bytes(self) -> int:
        """Size in the file of what does not depend on the settings."""
        columns = sum(2 * min(r, HEAD) + max(0, r - HEAD) for r in self.ranks)
        return columns * int(self.mean.shape[1]) + 2 * self.weights.size + 4 * self.mean.size + self.predict.size

    def kept(self, setting: Setting) -> tuple[F32, F32]:
        """The columns that a setting uses, of K and of V."""
        used = [basis[:, setting.steps[s, : basis.shape[1]] > 0] for s, basis in enumerate(self.basis)]
        return used[0], used[1]

    def setting(self, name: str) -> Setting:
        """Raises KvIncompatible if there is none of this name."""
        for setting in self.settings:
            if setting.name == name:
                return setting
        names = ", ".join(s.name for s in self.settings)
        raise KvIncompatible(f"kvtc artifact {self.digest[:16]} has no setting {name!r}, only {names}", field="codec")


def n_features(geometry: KvGeometry) -> int:
    """Features of a token in K, and in V."""
    return geometry.n_layers * geometry.n_kv_heads * geometry.head_dim


def make_artifact(
    *,
    geometry: KvGeometry,
    weights_lineage: str,
    mean: F32,
    weights: F32,
    basis: tuple[F32, F32],
    predict: F32,
    residual: F32,
    frequencies: NDArray[np.uint16],
    settings: tuple[Setting, ...],
    notes: str,
    probed: tuple[Probed, ...] = (),
) -> tuple[Artifact, bytes]:
    """The artifact and its file. Values are rounded to what the file holds first, so that both sides compute with
    the same."""
    header = {
        "geometry": asdict(geometry),
        "weights_lineage": weights_lineage,
        "ranks": [b.shape[1] for b in basis],
        "predicted": predict.shape[1],
        "notes": notes,
        "probed": [asdict(p) for p in probed],
        "settings": [{"name": s.name, "bound": s.bound, "quality": [asdict(q) for q in s.quality]} for s in settings],
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    arrays = [
        mean.astype("<f4"),
        weights.astype("<f2"),
        *(part for b in basis for part in _pack_basis(b)),
        *_pack_int8(predict),
        residual.astype("<f4"),
        frequencies.astype("<u2"),
        np.stack([s.steps for s in settings]).astype("<f4"),
        np.stack([s.restore for s in settings]).astype("<f4"),
        np.stack([s.contexts for s in settings]),
    ]
    data = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(a.tobytes() for a in arrays)])
    return parse_artifact(data), data


def parse_artifact(data: bytes) -> Artifact:
    """Raises PayloadCorrupt unless `data` is a whole, sane artifact."""
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 4:
        raise PayloadCorrupt("this is no kvtc artifact, or one of another format")
    at = len(MAGIC) + 4
    size = int.from_bytes(data[at - 4 : at], "little")
    try:
        header = json.loads(data[at : at + size])
        geometry = KvGeometry(**header["geometry"])
        rank_k, rank_v = (int(r) for r in header["ranks"])
        shapes = _shapes(geometry, (rank_k, rank_v), int(header["predicted"]), len(header["settings"]))
        arrays: dict[str, NDArray[Any]] = {}
        at += size
        for name, (dtype, shape) in shapes.items():
            count = math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype=dtype, count=count, offset=at).reshape(shape)
            at += arrays[name].nbytes
        settings = tuple(
            Setting(
                name=str(s["name"]),
                steps=arrays["steps"][i].astype(np.float32),
                restore=arrays["restore"][i].astype(np.float32),
                contexts=arrays["contexts"][i],
                bound=float(s["bound"]),
                quality=tuple(_quality(q) for q in s["quality"]),
            )
            for i, s in enumerate(header["settings"])
        )
        probed = tuple(
            Probed(codec=str(p["codec"]), quality=tuple(_quality(q) for q in p["quality"])) for p in header["probed"]
        )
        lineage, notes = str(header["weights_lineage"]), str(header["notes"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise PayloadCorrupt(f"kvtc artifact is malformed: {exc}") from exc
    artifact = Artifact(
        geometry=geometry,
        weights_lineage=lineage,
        mean=arrays["mean"].astype(np.float32),
        weights=arrays["weights"].astype(np.float32),
        basis=(_unpack_basis(arrays, "k"), _unpack_basis(arrays, "v")),
        predict=_unpack_int8(arrays, "predict"),
        residual=arrays["residual"].astype(np.float32),
        tables=FrequencyTables(arrays["frequencies"]),
        settings=settings,
        probed=probed,
        notes=notes,
        digest=hashlib.sha256(data).hexdigest(),
    )
    if at != len(data):
        raise PayloadCorrupt(f"kvtc artifact has {len(data) - at} bytes too many")
    _check_values(artifact)
    return artifact


def _quality(fields: dict[str, Any]) -> Quality:
    figures = {name: float(fields[name]) for name in _FIGURES}
    return Quality(text=str(fields["text"]), windows=int(fields["windows"]), **figures)


def read_artifact(path: Path) -> Artifact:
    """Raises InvalidRequest if it cannot be read, PayloadCorrupt if it is malformed. Blocks for a second or so."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PayloadCorrupt(f"{path.name} is larger than a kvtc artifact can be")
        return parse_artifact(path.read_bytes())
    except OSError as exc:
        raise InvalidRequest(f"kvtc artifact {path.name} cannot be read: {exc.strerror}", field="artifact") from exc


def _pack_basis(basis: F32) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Head in bf16, scales of the tail's columns, tail in int8."""
    head, tail = basis[:, :HEAD], basis[:, HEAD:]
    return f32_to_bf16_bits(head).astype("<u2"), *_pack_int8(tail)


def _pack_int8(columns: F32) -> tuple[NDArray[Any], NDArray[Any]]:
    """A scale a column, and the columns in int8."""
    scales = np.maximum(np.abs(columns).max(axis=0, initial=0.0) / 127, 1e-12).astype("<f4")
    return scales, np.rint(columns / scales).astype("i1")


def _unpack_int8(arrays: dict[str, NDArray[Any]], name: str) -> F32:
    return arrays[name].astype(np.float32) * arrays[f"scales_{name}"].astype(np.float32)


def _unpack_basis(arrays: dict[str, NDArray[Any]], stream: str) -> F32:
    return np.concatenate([bf16_bits_to_f32(arrays[f"head_{stream}"]), _unpack_int8(arrays, f"tail_{stream}")], axis=1)


def _shapes(
    g: KvGeometry, ranks: tuple[int, int], predicted: int, n_settings: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    sizes = (g.n_layers, g.n_kv_heads, g.head_dim)
    if not all(isinstance(n, int) and 1 <= n <= 1 << 14 for n in sizes) or g.head_dim % 2:
        raise ValueError(f"layers, heads and dims are {sizes}")
    features, blocks = n_features(g), g.n_layers * g.n_kv_heads
    if not (all(1 <= r <= min(features, MAX_RANK) for r in ranks) and 1 <= n_settings <= 64):
        raise ValueError(f"ranks {ranks} with {n_settings} settings")
    if not 0 <= predicted <= min(ranks[1], PREDICTED):
        raise ValueError(f"{predicted} coefficients of V are predicted")
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "mean": ("<f4", (2, features)),
        "weights": ("<f2", (2, blocks, g.head_dim, g.head_dim)),
    }
    for stream, r in zip("kv", ranks, strict=True):
        shapes[f"head_{stream}"] = ("<u2", (features, min(r, HEAD)))
        shapes[f"scales_tail_{stream}"] = ("<f4", (max(0, r - HEAD),))
        shapes[f"tail_{stream}"] = ("i1", (features, max(0, r - HEAD)))
    rank = max(ranks)
    shapes |= {"scales_predict": ("<f4", (predicted,)), "predict": ("i1", (ranks[0], predicted))}
    return shapes | {
        "residual": ("<f4", (2, blocks)),
        "frequencies": ("<u2", (N_CONTEXTS, N_SYMBOLS)),
        "steps": ("<f4", (n_settings, 2, rank)),
        "restore": ("<f4", (n_settings, 2, rank)),
        "contexts": ("u1", (n_settings, 2, rank)),
    }


def _check_values(a: Artifact) -> None:
    parts = {
        "mean": a.mean,
        "weights": a.weights,
        "basis of K": a.basis[0],
        "basis of V": a.basis[1],
        "prediction": a.predict,
    }
    for name, part in (parts | {"residual": a.residual}).items():
        if not np.isfinite(part).all():
            raise PayloadCorrupt(f"kvtc artifact: {name} is not finite")
    if (a.residual <= 0).any():
        raise PayloadCorrupt("kvtc artifact: a block's residual is not positive")
    names = [s.name for s in a.settings]
    if len(set(names)) != len(names) or not all(n.isprintable() and 1 <= len(n) <= 32 and ":" not in n for n in names):
        raise PayloadCorrupt("kvtc artifact: names of settings are malformed")
    for s in a.settings:
        if not (np.isfinite(s.steps).all() and (s.steps >= 0).all() and s.steps.any()):
            raise PayloadCorrupt(f"kvtc artifact: steps of {s.name} are not positive")
        if not (np.isfinite(s.restore).all() and ((s.restore > 0) == (s.steps > 0)).all()):
            raise PayloadCorrupt(f"kvtc artifact: {s.name} restores other coefficients than it keeps")
        if any((s.steps[i, r:] > 0).any() for i, r in enumerate(a.ranks)):
            raise PayloadCorrupt(f"kvtc artifact: {s.name} keeps coefficients that the basis lacks")
        if (s.contexts >= N_CONTEXTS).any() or not 0 < s.bound <= MAX_BOUND:
            raise PayloadCorrupt(f"kvtc artifact: setting {s.name} is malformed")
    for name, quality in [*((s.name, s.quality) for s in a.settings), *((p.codec, p.quality) for p in a.probed)]:
        figures = [(q.loss_ratio, q.loss_stderr_ratio, q.divergence_ratio, q.coded_ratio) for q in quality]
        if not all(math.isfinite(x) for row in figures for x in row) or any(row[3] <= 0 for row in figures):
            raise PayloadCorrupt(f"kvtc artifact: quality of {name} is malformed")
