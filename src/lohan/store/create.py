"""Making a store: decide the layout, take all its space, and write the headers last.

A directory without a header holds no store, so a creation that is cut off leaves nothing that could be taken
for one. The next creation clears what it left; where it had come as far as a header, it says which files to remove,
since from one header alone an unfinished store cannot be told from a drive of another one.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lohan.errors import ConfigError, StoreExists, StoreFull, StoreMissing
from lohan.sizes import format_bytes
from lohan.store.drive import DATA_NAME, DriveLock, Header, header_twins, reserve_data
from lohan.store.files import Files
from lohan.store.layout import DEFAULT_CHUNK_BYTES, Layout, RecordSpec, check_records, make_layout
from lohan.store.manifest import NEVER, Manifest, manifest_payload_bytes
from lohan.store.rates import measure_drive
from lohan.store.sealed import LAYOUT, MANIFEST, place_bytes
from lohan.store.transfer import describe
from lohan.store.twins import Twins


def create_store(
    directories: Sequence[str | Path],
    records: Sequence[RecordSpec],
    *,
    versions: int = 2,
    weights: Sequence[float] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    files: Files | None = None,
) -> Layout:
    """Create an empty store over these directories, all its space reserved.

    `versions` 2 keeps the committed version whole while the next is written; 3 also allows undoing a step that
    was not preceded by a commit; 1 writes in place: half the space and no safety, for the caller to choose.
    `weights` say how much of the data each drive takes; left out, each drive's rate is measured.
    """
    files = files or Files()
    paths = [Path(d) for d in directories]
    if not paths:
        raise ConfigError("No directory was given for the store. Name at least one in `ssd`.")
    if weights is not None and len(weights) != len(paths):
        raise ConfigError(f"{len(weights)} weights were given for {len(paths)} directories. Give one for each.")
    check_records(records)
    _prepare(files, paths)
    locks: list[DriveLock] = []
    made = False
    try:
        for path in paths:
            locks.append(DriveLock(files, path))
        for path in paths:
            _clear_unfinished(files, path)
        if weights is None:
            weights = [measure_drive(files, path).weight for path in paths] if len(paths) > 1 else [1.0]
        layout = make_layout(records, weights=weights, versions=versions, chunk_bytes=chunk_bytes)
        _check_space(files, paths, layout)
        made = True
        _write(files, paths, layout)
        return layout
    except BaseException as error:
        if made:
            for path in paths:
                try:
                    _remove(files, path)
                except OSError:
                    pass  # the drive is broken, and the error under way says so
        if isinstance(error, OSError):
            raise describe(error, "creating the store", Path(error.filename or paths[0])) from error
        raise
    finally:
        for lock in locks:
            lock.release()


def _prepare(files: Files, paths: list[Path]) -> None:
    for path in paths:
        try:
            if not files.is_directory(path):
                files.make_directory(path)
                files.sync_directory(path.parent)
        except FileNotFoundError:
            raise StoreMissing(
                f"{path.parent} does not exist. Mount the drive or make the directory, then repeat the command."
            ) from None
        except FileExistsError:
            raise StoreMissing(f"{path} is a file, not a directory. Correct the path in `ssd`.") from None
        except OSError as error:
            raise describe(error, "making the directory", path) from error
    names = [files.identity(path) for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given twice. Each drive needs a directory of its own.")
    for path in paths:
        if any(files.exists(header) for header in header_twins(files, path).paths):
            raise StoreExists(f"{path} already holds a store. Choose another directory, or remove its lohan.* files.")


def _store_files(files: Files, path: Path) -> list[Path]:
    twins = [header_twins(files, path)]
    twins += [Twins(files, path, kind, place_bytes=0) for kind in (LAYOUT, MANIFEST)]
    return [p for t in twins for p in t.paths] + [path / DATA_NAME]


def _clear_unfinished(files: Files, path: Path) -> None:
    try:
        for leftover in _store_files(files, path):
            files.remove(leftover)
    except OSError as error:
        raise describe(error, "clearing an unfinished store", path) from error


def _remove(files: Files, path: Path) -> None:
    """Headers first: with them gone there is no store here any more."""
    for part in _store_files(files, path):
        files.remove(part)
    files.sync_directory(path)


def _metadata_bytes(layout: Layout, layout_payload: int) -> int:
    return 2 * place_bytes(layout_payload) + 4 * place_bytes(manifest_payload_bytes(layout))


def _check_space(files: Files, paths: list[Path], layout: Layout) -> None:
    """Before any byte is written: directories of one filesystem share its free space."""
    needed: dict[int, int] = defaultdict(int)
    for index, path in enumerate(paths):
        needed[files.filesystem(path)] += layout.data_bytes(index)
        if index == 0:
            needed[files.filesystem(path)] += _metadata_bytes(layout, len(layout.to_bytes()))
    for path in paths:
        free, need = files.free_bytes(path), needed[files.filesystem(path)]
        if free < need:
            raise StoreFull(
                f"The store needs {format_bytes(need)} on the filesystem of {path} and {format_bytes(free)} are free. "
                f"Free {format_bytes(need - free)}, add a drive to `ssd`, or give this one a smaller weight."
            )


def _write(files: Files, paths: list[Path], layout: Layout) -> None:
    for index, path in enumerate(paths):
        reserve_data(files, path, max(layout.data_bytes(index), 1))
    payload = layout.to_bytes()
    layout_place = place_bytes(len(payload))
    manifest_place = place_bytes(manifest_payload_bytes(layout))
    empty = Manifest(
        None, {}, False, np.full(layout.num_chunks, NEVER, np.uint8), np.zeros(layout.num_chunks, np.uint64)
    )
    Twins(files, paths[0], LAYOUT, place_bytes=layout_place).create(payload)
    Twins(files, paths[0], MANIFEST, place_bytes=manifest_place, places=2).create(empty.to_bytes())
    files.sync_directory(paths[0])
    name = uuid.uuid4().hex
    for index in reversed(range(len(paths))):  # the first drive last: its header completes the store
        header = Header(
            store=name, drive=index, num_drives=len(paths), data_bytes=layout.data_bytes(index),
            layout_place_bytes=layout_place, manifest_place_bytes=manifest_place,
        )  # fmt: skip
        header_twins(files, paths[index]).create(header.to_bytes())
        files.sync_directory(paths[index])
