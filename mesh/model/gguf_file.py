"""GGUF headers: checked before anything is allocated, read in one pass.

Every count, length and offset is compared with the bytes that are there, so a truncated or hostile file ends in
an InvalidRequest that says what and where, never in a large allocation or in a C library. Tensor data is not
read here; `tensor_bytes` maps it. Arrays are kept: numbers as numpy arrays, strings as tuples.

Source: the GGUF specification of ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from mesh.errors import InvalidRequest

MAX_TENSORS: Final = 65_536
MAX_KEYS: Final = 65_536
MAX_NAME_BYTES: Final = 65_535
MAX_ARRAY_ITEMS: Final = 1 << 24
MAX_DIMS: Final = 4
MIN_TENSOR_INFO_BYTES: Final = 8 + 4 + 8 + 4 + 8
MIN_PAIR_BYTES: Final = 8 + 4 + 1

Value = bool | int | float | str | tuple[str, ...] | NDArray[np.generic]

_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor. `shape` in ggml's order, fastest dimension first; `offset_bytes` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A checked header. The typed getters raise InvalidRequest naming the key when it is absent or of another type."""

    path: Path
    version: int
    size_bytes: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]

    def text(self, key: str, default: str | None = None) -> str:
        """A string value."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise _wrong_type(self.path, key, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(self.path, key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong_type(self.path, key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise _wrong_type(self.path, key, "a boolean")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """An array of strings."""
        value = self._get(key, None)
        if not isinstance(value, tuple):
            raise _wrong_type(self.path, key, "an array of strings")
        return value

    def integers(self, key: str) -> NDArray[np.int64]:
        """An array of integers."""
        value = self._get(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise _wrong_type(self.path, key, "an array of integers")
        return value.astype(np.int64)

    def tensor(self, name: str) -> TensorInfo | None:
        """The tensor of this name, if there is one."""
        return next((t for t in self.tensors if t.name == name), None)

    def tensor_bytes(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Read-only map of a tensor's raw bytes (one dimension)."""
        return np.memmap(self.path, np.uint8, "r", offset=tensor.offset_bytes, shape=(tensor.size_bytes,))

    def _get(self, key: str, default: Value | None) -> Value:
        value = self.metadata.get(key, default)
        if value is None:
            raise InvalidRequest(f"{self.path.name}: the model file lacks {key}", field=key)
        return value


def read_gguf(path: Path) -> GgufFile:
    """Check and read the header of `path`. Blocks on disk; raises InvalidRequest saying what is wrong and where."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise InvalidRequest(f"{path.name}: {size} bytes is too short for a GGUF file", field="model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view).read()
    except OSError as exc:
        raise InvalidRequest(f"{path}: cannot read the model file: {exc.strerror or exc}", field="model") from exc


class _Reader:
    """A cursor over the mapped file; each `_take` is bounds-checked, so no read passes the end."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path, self._view, self._at, self._end = path, view, 0, len(view)

    def read(self) -> GgufFile:
        if (magic := self._view[:4]) != b"GGUF":
            raise self._error(f"starts with {magic.hex()} instead of the magic 'GGUF'")
        self._at = 4
        version = self._u32("the version")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)")
        n_tensors = self._count("tensors", MAX_TENSORS, MIN_TENSOR_INFO_BYTES)
        n_keys = self._count("metadata pairs", MAX_KEYS, MIN_PAIR_BYTES)
        metadata: dict[str, Value] = {}
        for i in range(n_keys):
            key = self._string(f"key {i}", MAX_NAME_BYTES)
            if key in metadata:
                raise self._error(f"key {key!r} appears twice")
            metadata[key] = self._value(key)
        raw = [self._tensor_info(i) for i in range(n_tensors)]
        tensors = self._place(raw, self._alignment(metadata))
        return GgufFile(path=self._path, version=version, size_bytes=self._end, metadata=metadata, tensors=tensors)

    def _error(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._path.name}: {what} (at byte {self._at} of {self._end})", field="model")

    def _take(self, n_bytes: int, what: str) -> int:
        """Offset of the next n_bytes, which exist."""
        start = self._at
        if n_bytes > self._end - start:
            raise self._error(
                f"truncated: {what} needs {n_bytes} bytes, {self._end - start} are left; download the model file again"
            )
        self._at = start + n_bytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._view, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._view, self._take(8, what))[0]
        return value

    def _count(self, what: str, limit: int, min_item_bytes: int) -> int:
        count = self._u64(f"the number of {what}")
        if count > limit:
            raise self._error(f"{count} {what} is more than the limit of {limit}")
        if count * min_item_bytes > self._end - self._at:
            raise self._error(f"truncated: {count} {what} do not fit the bytes that are left")
        return count

    def _string(self, what: str, limit_bytes: int | None = None) -> str:
        length = self._u64(f"the length of {what}")
        if limit_bytes is not None and length > limit_bytes:
            raise self._error(f"{what} has {length} bytes, more than the limit of {limit_bytes}")
        start = self._take(length, what)
        try:
            return self._view[start : start + length].decode()
        except UnicodeDecodeError as exc:
            raise self._error(f"{what} is not UTF-8") from exc

    def _value(self, key: str) -> Value:
        kind = self._u32(f"the type of {key}")
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        value = self._numbers(key, kind, 1)[0].item()
        assert isinstance(value, bool | int | float)
        return value

    def _array(self, key: str) -> Value:
        kind = self._u32(f"the item type of {key}")
        count = self._u64(f"the length of {key}")
        if count > MAX_ARRAY_ITEMS:
            raise self._error(f"{key} has {count} items, more than the limit of {MAX_ARRAY_ITEMS}")
        if kind == _STRING:
            return self._strings(key, count)
        return self._numbers(key, kind, count)

    def _strings(self, key: str, count: int) -> tuple[str, ...]:
        # Hot: vocabularies have 10^5 items. One local loop with the same checks as _string.
        if count * 8 > self._end - self._at:
            raise self._error(f"truncated: {count} strings of {key} do not fit the bytes that are left")
        view, at, end, unpack = self._view, self._at, self._end, _U64.unpack_from
        items: list[str] = []
        for i in range(count):
            if end - at < 8 or (length := unpack(view, at)[0]) > end - at - 8:
                self._at = at
                raise self._error(f"truncated: item {i} of {key} ends after the file")
            at += 8
            try:
                items.append(view[at : at + length].decode())
            except UnicodeDecodeError as exc:
                self._at = at
                raise self._error(f"item {i} of {key} is not UTF-8") from exc
            at += length
        self._at = at
        return tuple(items)

    def _numbers(self, key: str, kind: int, count: int) -> NDArray[np.generic]:
        name = _SCALARS.get(kind)
        if name is None:
            nested = " (arrays of arrays are not supported)" if kind == _ARRAY else ""
            raise self._error(f"{key} has the unknown type {kind}{nested}")
        dtype = np.dtype(name)
        start = self._take(count * dtype.itemsize, key)
        raw = self._view[start : self._at]
        if kind == 7 and raw.strip(b"\0\1"):
            raise self._error(f"{key} is a boolean that is neither 0 nor 1")
        return np.frombuffer(raw, dtype)

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES)
        n_dims = self._u32(f"the dimensions of {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._error(f"tensor {name} has {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
        shape = tuple(self._u64(f"the shape of {name}") for _ in range(n_dims))
        kind, offset = self._u32(f"the type of {name}"), self._u64(f"the offset of {name}")
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError as exc:
            raise self._error(f"tensor {name} has the unknown type {kind}") from exc

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two from 8 to 1 MiB, it is {alignment!r}")
        return alignment

    def _place(
        self, raw: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: int
    ) -> tuple[TensorInfo, ...]:
        data_start = -(-self._at // alignment) * alignment
        tensors: list[TensorInfo] = []
        for name, shape, kind, offset in raw:
            block_items, block_bytes = GGML_QUANT_SIZES[kind]
            n_items = math.prod(shape)
            if n_items == 0 or shape[0] % block_items:
                raise self._error(f"tensor {name} of shape {shape} cannot be {kind.name}")
            size = n_items // block_items * block_bytes
            if offset % alignment:
                raise self._error(f"tensor {name} starts at offset {offset}, not a multiple of {alignment}")
            if data_start + offset + size > self._end:
                missing = data_start + offset + size - self._end
                raise self._error(
                    f"truncated: tensor {name} ends {missing} bytes after the file; download the model file again"
                )
            tensors.append(
                TensorInfo(name=name, shape=shape, ggml_type=kind, offset_bytes=data_start + offset, size_bytes=size)
            )
        if len({t.name for t in tensors}) != len(tensors):
            raise self._error("two tensors have the same name")
        return tuple(tensors)


def _wrong_type(path: Path, key: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{path.name}: {key} is not {wanted}", field=key)
