"""Examples out of Parquet files and folders written by `datasets`. Both need an extra package, imported here only."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lohan.errors import DataError
from lohan.train.data.files import Record

_ROWS_AT_ONCE = 256
"""Rows of a table turned into Python objects together. Picked by feel: a few megabytes of text."""


class _Table:
    def __init__(self, path: Path):
        self.path = path
        self.done_bytes = 0

    def place(self, number: int) -> str:
        return f"{self.path}, row {number}"


class Parquet(_Table):
    def __init__(self, path: Path):
        super().__init__(path)
        self._parquet = _need("pyarrow.parquet", path, "pyarrow")

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        size, number = self.path.stat().st_size, 0
        try:
            with self._parquet.ParquetFile(self.path) as table:
                total = max(table.metadata.num_rows, 1)
                for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
                    for row in batch.to_pylist():
                        number += 1
                        self.done_bytes = size * number // total
                        yield number, row
        except (OSError, ValueError) as error:  # pyarrow's errors are one of these
            raise DataError(
                f"{self.path} cannot be read as Parquet after row {number}: {_first_line(error)}. Download or write it "
                "again."
            ) from None


class DatasetFolder(_Table):
    """A folder written by Dataset.save_to_disk."""

    def __init__(self, path: Path):
        super().__init__(path)
        if (path / "dataset_dict.json").exists():
            splits = sorted(each.name for each in path.iterdir() if (each / "state.json").exists())
            named = " or ".join(str(path / split) for split in splits) or "one of its splits"
            raise DataError(f"{path} holds several splits. Give one of them: {named}.")
        if not (path / "state.json").exists():
            raise DataError(
                f"{path} is a folder that datasets' save_to_disk did not write. Give a file, a list of files, or a "
                "folder with a state.json."
            )
        self._datasets = _need("datasets", path, "datasets")

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        size, number = folder_bytes(self.path), 0
        try:
            table = self._datasets.load_from_disk(str(self.path), keep_in_memory=False)
            for start in range(0, len(table), _ROWS_AT_ONCE):
                columns = table[start : start + _ROWS_AT_ONCE]
                for values in zip(*columns.values(), strict=True):
                    number += 1
                    self.done_bytes = size * number // len(table)
                    yield number, dict(zip(columns, values, strict=True))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be read as a datasets folder after row {number}: {_first_line(error)}. "
                "Write it again with save_to_disk."
            ) from None


def folder_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size


def _need(module: str, path: Path, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"Reading {path} needs the package {package}, which is not installed. "
            f"Install it: pip install {package}. JSONL needs nothing."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
