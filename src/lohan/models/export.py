"""Writes a Hugging Face folder from streamed weights: sharded safetensors, config, tokenizer and the rest.

Weights pass through a few buffers, so memory does not depend on the size of the model. Everything goes to a temporary
folder beside the target, is flushed to the drive, and appears under its name only when complete; on any failure
nothing stays behind. An existing folder with something in it is never touched.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from lohan.errors import ModelError
from lohan.models.folder import INDEX_FILE, SINGLE_FILE
from lohan.models.tensor_file import format_header
from lohan.sizes import format_bytes

BUFFER_BYTES = 8 << 20
"""One write. Picked by feel: drives reach their rate well below it."""

_THREADS = 3
"""One reads, one converts, one writes, in turns."""

_BLOCK_BYTES = 4096
"""What direct I/O wants places and sizes to be multiples of."""

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "tokenizer*", "vocab*", "merges*", "LICENSE*", "NOTICE*")
_COPIED_FOLDERS = ("additional_chat_templates",)
_NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "config.json", "trainer_state.json")

Reader = Callable[[memoryview, int, int], None]
"""reader(into, start_byte, num_bytes) fills `into` with that part of the tensor. Both are whole elements. Called by
several threads at once."""


class ExportTensor(NamedTuple):
    name: str
    dtype: torch.dtype
    """Of what the reader gives."""
    shape: tuple[int, ...]
    reader: Reader

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def export_folder(
    out: Path,
    source_folder: Path,
    params: Iterable[ExportTensor | tuple[str, torch.dtype, tuple[int, ...], Reader]],
    *,
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `params`, and what else source_folder holds, to the new folder `out`.

    dtype converts floating-point tensors on the way (to nearest, as Tensor.to does); None keeps each as it is.
    """
    tensors = [ExportTensor(*param) for param in params]
    if dtype is not None:
        tensors = [_converted(tensor, dtype) for tensor in tensors]
    _refuse_unusable(out, source_folder, tensors)
    shards = _cut_into_shards(tensors, int(max_shard_bytes))
    config = _new_config(source_folder / "config.json", tensors)
    copied = files_to_copy(source_folder)
    need = sum(_num_bytes(tensor) for tensor in tensors) + sum(file.stat().st_size for file in copied)
    need += (16 << 20) + 1024 * len(tensors)  # headers, index and the file system's own records

    with _appears_when_complete(out, need) as partial:
        for file in copied:
            target = partial / file.relative_to(source_folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
            _flush(target)
        _write_json(partial / "config.json", config)
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_THREADS):
            buffers.put(memoryview(mmap.mmap(-1, BUFFER_BYTES)))  # page-aligned
        for name, shard in shards.items():
            _write_shard(partial / name, shard, buffers)
        if len(shards) > 1:
            _write_json(partial / INDEX_FILE, _index_of(shards))


def _write_shard(path: Path, tensors: list[ExportTensor], buffers: SimpleQueue[memoryview]) -> None:
    """Stretches of the file by several threads, each read, converted and written at its place: so all of it overlaps.

    Whole blocks go past the page cache, where the file system can do that; the rest goes through it.
    """
    header = format_header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    total = len(header) + sum(_num_bytes(tensor) for tensor in tensors)
    flags = os.O_WRONLY | os.O_CLOEXEC
    with ExitStack() as owned:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        owned.callback(os.close, descriptor)
        try:
            os.posix_fallocate(descriptor, 0, total)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve space
                raise
        try:
            direct = os.open(path, flags | os.O_DIRECT)
            owned.callback(os.close, direct)
        except (AttributeError, OSError):
            direct = descriptor
        _write_at(descriptor, memoryview(header), 0)
        pool = owned.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="lohan-export"))
        running = [
            pool.submit(_write_stretch, stretch, descriptor, direct, buffers)
            for stretch in _stretches(tensors, len(header))
        ]
        try:
            for one in running:
                one.result()
        except BaseException:
            for one in running:
                one.cancel()
            raise
        os.fsync(descriptor)


class _Stretch(NamedTuple):
    """What one buffer holds on its way."""

    start: int
    """In the file."""

    parts: list[tuple[ExportTensor, int, int]]
    """Tensor, first byte in it, number of bytes."""


def _stretches(tensors: list[ExportTensor], start: int) -> Iterator[_Stretch]:
    """All but the first begin and all but the last end at whole buffers of the file."""
    parts: list[tuple[ExportTensor, int, int]] = []
    filled, room = 0, BUFFER_BYTES - start % BUFFER_BYTES
    for tensor in tensors:
        done, size = 0, _num_bytes(tensor)
        while done < size:
            # Whole elements only: a reader may convert them.
            space = (room - filled) // tensor.dtype.itemsize * tensor.dtype.itemsize
            if space == 0:
                yield _Stretch(start, parts)
                start, parts, filled = start + filled, [], 0
                room = BUFFER_BYTES - start % BUFFER_BYTES
                continue
            count = min(space, size - done)
            parts.append((tensor, done, count))
            done, filled = done + count, filled + count
    if parts:
        yield _Stretch(start, parts)


def _write_stretch(stretch: _Stretch, descriptor: int, direct: int, buffers: SimpleQueue[memoryview]) -> None:
    buffer = buffers.get()
    try:
        filled = 0
        for tensor, start, count in stretch.parts:
            tensor.reader(buffer[filled : filled + count], start, count)
            filled += count
        whole = filled // _BLOCK_BYTES * _BLOCK_BYTES if stretch.start % _BLOCK_BYTES == 0 else 0
        done = _write_directly(direct, buffer[:whole], stretch.start)
        _write_at(descriptor, buffer[done:filled], stretch.start + done)
    finally:
        buffers.put(buffer)


def _write_directly(descriptor: int, data: memoryview, start: int) -> int:
    """As far as it can be done; the rest is for another way."""
    try:
        return os.pwrite(descriptor, data, start) // _BLOCK_BYTES * _BLOCK_BYTES if data else 0
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system with other rules
            raise
        return 0


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


def _converted(tensor: ExportTensor, dtype: torch.dtype) -> ExportTensor:
    if tensor.dtype == dtype or not tensor.dtype.is_floating_point:
        return tensor

    def read(into: memoryview, start_byte: int, num_bytes: int) -> None:
        count, first = num_bytes // dtype.itemsize, start_byte // dtype.itemsize
        raw = bytearray(count * tensor.dtype.itemsize)
        tensor.reader(memoryview(raw), first * tensor.dtype.itemsize, len(raw))
        torch.frombuffer(into, dtype=dtype, count=count).copy_(torch.frombuffer(raw, dtype=tensor.dtype))

    return ExportTensor(tensor.name, dtype, tensor.shape, read)


def _cut_into_shards(tensors: list[ExportTensor], max_shard_bytes: int) -> dict[str, list[ExportTensor]]:
    """File name -> tensors, filled in the order given. A tensor larger than a shard has one for itself."""
    shards: list[list[ExportTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + _num_bytes(tensor) > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += _num_bytes(tensor)
    for shard in shards:
        shard.sort(key=lambda tensor: -tensor.dtype.itemsize)  # wide elements first keeps every tensor aligned
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _index_of(shards: dict[str, list[ExportTensor]]) -> dict[str, Any]:
    tensors = [tensor for shard in shards.values() for tensor in shard]
    return {
        "metadata": {
            "total_parameters": sum(tensor.num_elements for tensor in tensors),
            "total_size": sum(_num_bytes(tensor) for tensor in tensors),
        },
        "weight_map": {tensor.name: name for name, shard in shards.items() for tensor in shard},
    }


def _new_config(path: Path, tensors: list[ExportTensor]) -> Any:
    """The source's config with the dtype of most of the weights."""
    held: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.num_elements
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if held:
        name = str(max(held, key=lambda dtype: held[dtype])).removeprefix("torch.")
        _set_dtype(config, name)
        if "torch_dtype" not in config:  # what it was called before transformers 5
            config["dtype"] = name
    return config


def _set_dtype(config: dict[str, Any], name: str) -> None:
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = name
        elif key.endswith("_config") and isinstance(value, dict):
            _set_dtype(value, name)


def files_to_copy(source_folder: Path) -> list[Path]:
    """What a model folder holds beside its weights and config.json: tokenizer, generation settings, templates, code."""
    found = {file for pattern in _COPIED for file in source_folder.glob(pattern)}
    found |= {file for name in _COPIED_FOLDERS for file in (source_folder / name).glob("*.jinja")}
    return sorted(
        file
        for file in found
        if file.is_file() and not any(file.match(pattern) for pattern in _NOT_COPIED) and not file.name.startswith(".")
    )


def _refuse_unusable(out: Path, source_folder: Path, tensors: list[ExportTensor]) -> None:
    if not (source_folder / "config.json").is_file():
        raise ModelError(
            f"{source_folder} has no config.json, and the exported folder needs it.\n"
            f"Give the folder the model was loaded from."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(
            f"{out} exists and is not empty. Nothing is overwritten: name a new folder, or empty this one."
        )
    twice = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
    if twice or not tensors:
        raise ModelError(f"Tensors to export: {'named twice: ' + ', '.join(twice) if twice else 'none'}.")


@contextmanager
def _appears_when_complete(out: Path, need_bytes: int) -> Iterator[Path]:
    """A folder to fill. It takes the name `out` at the end, or vanishes."""
    out = Path(os.path.abspath(out))
    made = [parent for parent in (out.parent, *out.parent.parents) if not parent.exists()]
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < need_bytes:
            raise ModelError(
                f"{out} needs {format_bytes(need_bytes)} and {format_bytes(free)} is free there.\n"
                f"Free {format_bytes(need_bytes - free)}, or export to another drive."
            )
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed and had the same number
        partial.mkdir()
        yield partial
        for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
            _flush(folder)
        os.rename(partial, out)  # replaces an empty folder, fails on any other
        _flush(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            try:
                parent.rmdir()
            except OSError:
                break  # it holds something by now
        if not isinstance(error, OSError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"The drive of {out} became full while exporting {format_bytes(need_bytes)}. Nothing was left behind.\n"
                f"Free that much, or export to another drive."
            ) from error
        raise ModelError(
            f"{out} cannot be written: {error.strerror or error}. Nothing was left behind. Name another folder."
        ) from error


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _num_bytes(tensor: ExportTensor) -> int:
    return tensor.num_elements * tensor.dtype.itemsize
