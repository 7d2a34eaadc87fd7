"""A run's weights as a Hugging Face folder, read from its store piece by piece.

The weights are those that are trained with: in the wire dtype, to the bit. With `master` they are the fp32 master
weights instead. Memory does not depend on the model's size: a few pieces, and a few buffers on the way out.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lohan.engine.layout import UnitLayout
from lohan.engine.run_folder import RunFolder, read_run_folder, wire_dtype
from lohan.engine.settings import Settings, dtype_of
from lohan.errors import ConfigError, ModelError, StoreLocked, StoreMissing
from lohan.models.export import ExportTensor, Reader, export_folder
from lohan.optim import Updater
from lohan.plan.pieces import Chunk
from lohan.store import Handle, Store, open_store, round_up
from lohan.store.arena import map_memory

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""

_MOST_HELD = 80 << 20
"""Bytes held when more is fetched: two of the largest pieces, as far as they are needed, of which one is being left
while the next is entered, by several threads at once (models/export.py). Picked by arithmetic, not measured."""


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    ssd: Sequence[str | Path] = (),
    dtype: str | torch.dtype | None = None,
    master: bool = False,
    max_shard_bytes: float = 5e9,
    progress: Progress | None = None,
) -> None:
    """Export the last commit of a run that nobody has open. `run` is its first SSD directory.

    The other directories are those run.json names, unless `ssd` says where they are now.
    """
    folder = read_run_folder(Path(run))
    directories = [Path(directory) for directory in ssd] or run_directories(folder)
    with ExitStack() as owned:
        try:
            store = owned.enter_context(open_store(directories))
        except StoreLocked as error:
            raise StoreLocked(
                f"{error} An export needs the run to itself: training goes on to write over what is being read. Inside "
                "the training script, use run.export()."
            ) from None
        if store.name != folder.info.store:
            raise ConfigError(
                f"{directories[0]} holds another store than the run in {run} ({store.name[:8]} and "
                f"{folder.info.store[:8]}). Give all directories of that run with --ssd."
            )
        if store.committed_step is None:
            raise ModelError(
                f"The run in {run} was cut off while it was made and holds no weights. Open it again with its model."
            )
        export_store(
            store, folder, Path(out), dtype=dtype, master=master, max_shard_bytes=max_shard_bytes, progress=progress
        )


def run_directories(folder: RunFolder) -> list[Path]:
    """Where the run's drives are: the first where it was named, the others where they were last seen."""
    named = [folder.directory, *(Path(directory) for directory in folder.info.directories[1:])]
    lost = [str(directory) for directory in named if not directory.is_dir()]
    if lost:
        raise StoreMissing(
            f"{', '.join(lost)} (part of the run in {folder.directory}) is not there. Mount the drive, or name all "
            "directories of the run where they are now: --ssd DIR --ssd DIR."
        )
    return named


def export_store(
    store: Store,
    folder: RunFolder,
    out: Path,
    *,
    dtype: str | torch.dtype | None = None,
    master: bool = False,
    max_shard_bytes: float = 5e9,
    progress: Progress | None = None,
) -> None:
    """Export what a store holds now. Nothing may be writing to it."""
    if not (folder.model_folder / "config.json").is_file():
        raise ModelError(
            f"The run in {folder.directory} was made from a {folder.info.model} without a transformers config, so "
            "there is no folder to export it as. Use run.read_weights()."
        )
    wanted = None if dtype is None else dtype_of(dtype, "dtype")
    settings = Settings(
        optimizer=folder.info.settings["optimizer"],
        state_format=folder.info.settings["state_format"],
        wire_dtype=wire_dtype(folder.info),
    )
    updater = Updater(settings.make_optimizer(), settings.make_format(), settings.wire)
    stretches = _Stretches(store, updater, master=master)
    tensors = [
        ExportTensor(
            param.name,
            torch.float32 if master else layout.wire,
            param.shape,
            _reader(stretches, layout, index),
        )
        for layout in folder.layouts(updater)
        for index, param in enumerate(layout.spec.params)
    ]
    origin = folder.origin()
    try:
        stored = origin.as_stored(tensors)
        if progress is not None:
            stored = _counted(stored, progress)
        export_folder(out, folder.model_folder, stored, dtype=wanted, max_shard_bytes=max_shard_bytes)
    finally:
        stretches.close()
        origin.folder.close()


def _reader(stretches: _Stretches, layout: UnitLayout, tensor: int) -> Reader:
    places = [
        _Place(layout, index, chunk)
        for index, piece in enumerate(layout.pieces.pieces)
        for chunk in piece.chunks
        if chunk.tensor == tensor
    ]
    starts = [place.chunk.start for place in places]

    def read(into: memoryview, start_byte: int, num_bytes: int) -> None:
        size = stretches.element_bytes(layout)
        reached, end = start_byte // size, (start_byte + num_bytes) // size
        index = bisect_right(starts, reached) - 1
        while reached < end:
            place = places[index]
            inside = reached - place.chunk.start
            count = min(place.chunk.num_elements - inside, end - reached)
            values = stretches.get(place, inside, count, places[index + 1] if index + 1 < len(places) else None)
            first = (reached - start_byte // size) * size
            # By numpy, which lets other threads go on meanwhile.
            np.frombuffer(into, np.uint8)[first : first + count * size] = np.frombuffer(values, np.uint8)
            reached, index = reached + count, index + 1

    return read


@dataclass(frozen=True, slots=True)
class _Place:
    """A stretch of a tensor and the piece that holds it."""

    layout: UnitLayout
    piece: int
    chunk: Chunk

    @property
    def key(self) -> tuple[str, int]:
        return self.layout.weights_record(self.piece), self.chunk.tensor


class _Stretches:
    """The last few stretches that were read, and the next ones on their way. Safe from any thread."""

    def __init__(self, store: Store, updater: Updater, *, master: bool):
        self._store, self._updater, self._master = store, updater, master
        self._held: OrderedDict[tuple[str, int], tuple[list[Handle], Tensor, Tensor]] = OrderedDict()
        self._guard, self._combining = threading.Lock(), threading.Lock()

    def element_bytes(self, layout: UnitLayout) -> int:
        return 4 if self._master else layout.wire.itemsize

    def get(self, place: _Place, first: int, count: int, following: _Place | None) -> memoryview:
        """The bytes of `count` elements of a stretch, in the dtype that is exported."""
        with self._guard:
            self._fetch(place)
            self._held.move_to_end(place.key)
            handles, weights, kept = self._held[place.key]
            if following is not None:
                self._fetch(following)
        for handle in handles:
            handle.wait()
        wire = weights.view(place.layout.wire)[first : first + count]
        if not self._master:
            return memoryview(wire.view(torch.uint8).numpy().data)
        values = torch.empty(count)
        if place.layout.pieces.pieces[place.piece].state_bytes:
            size = self._kept_bytes(1)
            with self._combining:  # an updater has memory of its own to work in
                self._updater.join_master(wire, kept[first * size : (first + count) * size], values)
        else:
            values.copy_(wire)
        return memoryview(values.view(torch.uint8).numpy().data)

    def _fetch(self, place: _Place) -> None:
        if place.key in self._held:
            return
        while self._held and self._held_bytes() > _MOST_HELD:
            handles, _, _ = self._held.popitem(last=False)[1]
            for handle in handles:
                handle.wait()  # memory on its way belongs to the store until then
        layout, chunk = place.layout, place.chunk
        piece = layout.pieces.pieces[place.piece]
        start, size = chunk.weights_offset - piece.weights_offset, chunk.num_elements * layout.wire.itemsize
        handles, weights = self._read(layout.weights_record(place.piece), start, size)
        kept = torch.empty(0, dtype=torch.uint8)
        if self._master and piece.state_bytes and self._kept_bytes(1):
            size = self._kept_bytes(chunk.num_elements)
            more, kept = self._read(layout.state_record(place.piece), chunk.state_offset, size)
            handles += more
        self._held[place.key] = (handles, weights, kept)

    def _kept_bytes(self, num_elements: int) -> int:
        """Of a state's first array, which is all of it that a master needs."""
        dtype = self._updater.master_dtype
        return 0 if dtype is None else num_elements * dtype.itemsize

    def _read(self, record: str, start: int, num_bytes: int) -> tuple[list[Handle], Tensor]:
        """Bytes of a record, on their way; the store reads whole chunks of it."""
        step, total = self._store.layout.chunk_bytes, self._store.layout.num_bytes(record)
        begin, end = start // step * step, min(total, round_up(start + num_bytes, step))
        memory = _memory(end - begin)
        handle = self._store.read(record, memory.numpy(), offset=begin, num_bytes=end - begin)
        return [handle], memory[start - begin : start - begin + num_bytes]

    def _held_bytes(self) -> int:
        return sum(weights.nbytes + kept.nbytes for _, weights, kept in self._held.values())

    def close(self) -> None:
        self._store.drain()
        self._held.clear()


def _memory(num_bytes: int) -> Tensor:
    """Whole pages, so that the store reads into it without a copy."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(map_memory(round_up(num_bytes)), dtype=np.uint8))


def _counted(tensors: Sequence[ExportTensor], progress: Progress) -> list[ExportTensor]:
    total = sum(tensor.num_elements * tensor.dtype.itemsize for tensor in tensors)
    done, guard = 0, threading.Lock()

    def counted(reader: Reader) -> Reader:
        def read(into: memoryview, start_byte: int, num_bytes: int) -> None:
            nonlocal done
            reader(into, start_byte, num_bytes)
            with guard:
                done += num_bytes
                progress(done, total)

        return read

    return [ExportTensor(t.name, t.dtype, t.shape, counted(t.reader)) for t in tensors]
