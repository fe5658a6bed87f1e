"""llama.cpp's sequence state, field by field. Pure numpy; knows nothing of llama.cpp itself.

The blob of `llama_state_seq_get_data` carries no version, length, checksum or model identity, and a reader that
believes it may allocate by an unchecked count or clear its target before it fails. So nothing reaches or leaves
llama.cpp unless every field here is what the model's layout says. Little-endian, without padding, for a plain
f16 cache in one stream with flash attention on (V not transposed):

    magic u32, source sequence i32 (ignored), streams u32 = 1, cells u32 = n
    n times: position i32, sequence count u32 = 1, sequence i32
    transposed V u32 = 0, layers u32
    per layer, all K and then all V: ggml type i32 = 1 (f16), row bytes u64, n rows of [kv_heads, head_dim] f16

Cells come in the order of their place in the cache, which need not be that of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mesh.errors import PayloadCorrupt
from mesh.kv.geometry import KvGeometry

MAGIC: Final = 0xAF143CD8
GGML_F16: Final = 1

_HEAD: Final = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
_CELL: Final = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_BODY: Final = np.dtype([("transposed", "<u4"), ("layers", "<u4")])

Blob = NDArray[np.uint8]
Rows = NDArray[np.float16]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """What fixes a blob's size beside its token count."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, geometry: KvGeometry) -> BlobLayout:
        return cls(n_layers=geometry.n_layers, n_kv_heads=geometry.n_kv_heads, head_dim=geometry.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of K (or V) of one token in one layer."""
        return self.n_kv_heads * self.head_dim * 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers, headers not counted."""
        return self.n_layers * self.row_bytes * 2

    def shape(self, n_tokens: int) -> tuple[int, int, int, int]:
        """Shape of a slab's K or V."""
        return (self.n_layers, n_tokens, self.n_kv_heads, self.head_dim)

    def blob_bytes(self, n_tokens: int) -> int:
        """Exact size of a blob of `n_tokens` cells."""
        layer = self._layer(n_tokens).itemsize
        return _HEAD.itemsize + n_tokens * _CELL.itemsize + _BODY.itemsize + 2 * self.n_layers * layer

    def _layer(self, n_tokens: int) -> np.dtype[np.void]:
        rows = ("rows", "<f2", (n_tokens, self.n_kv_heads, self.head_dim))
        return np.dtype([("type", "<i4"), ("row_bytes", "<u8"), rows])


def build(layout: BlobLayout, start: int, k: Rows, v: Rows) -> Blob:
    """The blob that restores positions [start, start + n) from K and V of shape `layout.shape(n)`."""
    n_tokens = int(k.shape[1])
    if k.shape != layout.shape(n_tokens) or v.shape != k.shape or n_tokens == 0:
        raise PayloadCorrupt(f"KV of shape {k.shape} and {v.shape}, the model needs {layout.shape(n_tokens)}")
    blob = np.empty(layout.blob_bytes(n_tokens), np.uint8)
    head, cells, body, layers = _views(blob, layout, n_tokens)
    head[0] = (MAGIC, 0, 1, n_tokens)
    cells["position"] = np.arange(start, start + n_tokens)
    cells["sequences"] = 1
    cells["sequence"] = 0
    body[0] = (0, layout.n_layers)
    layers["type"] = GGML_F16
    layers["row_bytes"] = layout.row_bytes
    layers["rows"][: layout.n_layers] = k
    layers["rows"][layout.n_layers :] = v
    return blob


def check(blob: Blob, layout: BlobLayout, start: int, stop: int) -> None:
    """Raise PayloadCorrupt naming the first field that is not that of positions [start, stop) of this model."""
    n_tokens = stop - start
    if n_tokens <= 0 or start < 0:
        raise PayloadCorrupt(f"KV blob: [{start}, {stop}) is no range of positions", field="range")
    if blob.size < _HEAD.itemsize:
        raise PayloadCorrupt(f"KV blob: {blob.size} bytes is too short for its head", field="size")
    head = np.frombuffer(blob, _HEAD, 1)[0]
    _expect("magic", int(head["magic"]), MAGIC)
    _expect("streams", int(head["streams"]), 1)
    _expect("cells", int(head["cells"]), n_tokens)
    _expect("size", int(blob.size), layout.blob_bytes(n_tokens))
    # The size is exact from here on, so every view below is inside the blob.
    _, cells, body, layers = _views(blob, layout, n_tokens)
    if (cells["sequences"] != 1).any():
        raise PayloadCorrupt("KV blob: a cell belongs to more or fewer than one sequence", field="sequences")
    if not np.array_equal(np.sort(cells["position"]), np.arange(start, stop)):
        raise PayloadCorrupt(f"KV blob: its positions are not [{start}, {stop})", field="position")
    _expect("transposed", int(body["transposed"][0]), 0)
    _expect("layers", int(body["layers"][0]), layout.n_layers)
    for index, (ggml_type, row_bytes) in enumerate(zip(layers["type"], layers["row_bytes"], strict=True)):
        _expect(f"type of tensor {index}", int(ggml_type), GGML_F16)
        _expect(f"row bytes of tensor {index}", int(row_bytes), layout.row_bytes)


def parse(blob: Blob, layout: BlobLayout, start: int, stop: int) -> tuple[Rows, Rows]:
    """Checked K and V of positions [start, stop) in order, each of shape `layout.shape(stop - start)`.

    They are views of the blob if its cells are in order, else copies. Raises PayloadCorrupt."""
    check(blob, layout, start, stop)
    _, cells, _, layers = _views(blob, layout, stop - start)
    rows: NDArray[np.float16] = layers["rows"]
    positions = cells["position"]
    if (np.diff(positions) != 1).any():
        rows = rows[:, np.argsort(positions)]
    return rows[: layout.n_layers], rows[layout.n_layers :]


def _expect(field: str, got: int, want: int) -> None:
    if got != want:
        raise PayloadCorrupt(f"KV blob: {field} is {got:#x}, expected {want:#x}", field=field)


def _views(
    blob: Blob, layout: BlobLayout, n_tokens: int
) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
    """Head, cells, body and the 2 * n_layers tensors of a blob of exactly the right size, as views."""
    cells_at = _HEAD.itemsize
    body_at = cells_at + n_tokens * _CELL.itemsize
    layers_at = body_at + _BODY.itemsize
    head = blob[:cells_at].view(_HEAD)
    cells = blob[cells_at:body_at].view(_CELL)
    body = blob[body_at:layers_at].view(_BODY)
    return head, cells, body, blob[layers_at:].view(layout._layer(n_tokens))
