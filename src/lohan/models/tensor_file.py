"""The safetensors format, as far as it is needed to stream: the header, and where each tensor's bytes are.

A file is 8 bytes (little-endian length of the header), a JSON header, then the bytes of the tensors without gaps.
Nothing in a header is believed: sizes, shapes and offsets are checked against each other and against the size of
the file before anyone reads or allocates by them. No weights pass through here.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from lohan.errors import ModelError

HEADER_LIMIT_BYTES = 100_000_000
"""The limit of the safetensors library. A model of 10^6 tensors stays below it."""

PAGE_BYTES = 4096
"""Headers are padded to this, so that the data begins on a page and large writes stay aligned."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in one file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the beginning of the file."""
    num_bytes: int


_LFS_POINTER = b"version https://git-lfs"


class BadTensorFile(ModelError):
    """A safetensors file that cannot be read. The message is one line without the path."""


def read_entries(path: Path) -> tuple[dict[str, TensorEntry], list[str]]:
    """The tensors of a file, and the names of those whose bytes are cut off at its end."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            first = file.read(8)
            if len(first) < 8:
                raise BadTensorFile(f"truncated: {file_bytes} bytes, too short for a header")
            if first == _LFS_POINTER[:8] and file.read(len(_LFS_POINTER) - 8) == _LFS_POINTER[8:]:
                raise BadTensorFile("a Git LFS pointer instead of the weights: run `git lfs pull` in the folder")
            file.seek(8)
            (header_bytes,) = struct.unpack("<Q", first)
            if header_bytes > HEADER_LIMIT_BYTES:
                raise BadTensorFile(
                    f"not safetensors: its header claims {header_bytes:,} bytes, the limit is {HEADER_LIMIT_BYTES:,}"
                )
            if 8 + header_bytes > file_bytes:
                raise BadTensorFile(f"truncated: {file_bytes:,} bytes, and its header alone needs {8 + header_bytes:,}")
            text = file.read(header_bytes)
    except OSError as error:
        raise BadTensorFile(f"cannot be read: {error.strerror or error}") from error
    return _parse(path, text, 8 + header_bytes, file_bytes)


def _parse(path: Path, text: bytes, data_start: int, file_bytes: int) -> tuple[dict[str, TensorEntry], list[str]]:
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadTensorFile(f"not safetensors: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise BadTensorFile("not safetensors: its header is not a JSON object")
    entries = {
        name: _parse_one(path, name, value, data_start) for name, value in header.items() if name != "__metadata__"
    }
    reached, cut_off = data_start, []
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != reached:
            raise BadTensorFile(
                f"damaged header: {entry.name} begins at byte {entry.offset:,} of the file and the tensor before it "
                f"ends at {reached:,}"
            )
        reached = entry.offset + entry.num_bytes
        if reached > file_bytes:
            cut_off.append(entry.name)
    if not cut_off and reached != file_bytes:
        raise BadTensorFile(f"damaged: its tensors end at byte {reached:,} and the file has {file_bytes:,}")
    return entries, cut_off


def _parse_one(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise BadTensorFile(f"damaged header: the entry of {name} is not an object")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise BadTensorFile(f"{name} has dtype {value.get('dtype')!r}, which is not known here")
    shape, offsets = _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise BadTensorFile(
            f"damaged header: {name} has shape {value.get('shape')!r} and data_offsets {value.get('data_offsets')!r}"
        )
    begin, end = offsets
    num_bytes = prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise BadTensorFile(
            f"damaged header: {name} of shape {shape} and dtype {value['dtype']} needs {num_bytes:,} bytes and is "
            f"given {end - begin:,}"
        )
    return TensorEntry(name, path, dtype, tuple(shape), data_start + begin, num_bytes)


def _sizes(value: Any) -> list[int] | None:
    """A list of lengths or offsets, or None when it cannot be one. No tensor has 64 dimensions."""
    if isinstance(value, list) and len(value) < 64 and all(type(one) is int and 0 <= one < 2**63 for one in value):
        return value
    return None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise BadTensorFile(f"damaged header: named twice: {', '.join(twice)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """What the format calls this dtype."""
    if dtype not in _NAMES:
        raise ModelError(f"{dtype} cannot be written to a safetensors file. It knows {', '.join(DTYPES)}.")
    return _NAMES[dtype]


def format_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Everything before the data, for tensors that follow in this order; a whole number of pages."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    reached = 0
    for name, dtype, shape in tensors:
        begin, reached = reached, reached + prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, reached]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    if len(text) > HEADER_LIMIT_BYTES:
        raise ModelError(f"The header of one file would need {len(text):,} bytes, the limit is {HEADER_LIMIT_BYTES:,}.")
    return struct.pack("<Q", len(text)) + text
