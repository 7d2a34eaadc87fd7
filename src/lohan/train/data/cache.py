"""Tokenised data on disk, written once and read through memory maps.

    tokens.i32     all tokens, one example after another
    learnt.u8      for each token whether it is learnt
    ends.i64       where each example ends
    records.u64    a hash of the record each example came from
    meta.json      sizes, a hash of all of it, and what was counted

A folder appears under its name when it is complete: it is written under a temporary one and renamed. Its name is the
hash of all it depends on.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lohan.errors import DataError
from lohan.train.data.encode import Tokens
from lohan.train.places import removed_if_empty

FORMAT_VERSION = 1
_META = "meta.json"
_FILES = {"tokens.i32": np.int32, "learnt.u8": np.uint8, "ends.i64": np.int64, "records.u64": np.uint64}
_BUFFERED = 1 << 16


@dataclass(slots=True)
class Counts:
    """What was found in the files, and what became of it."""

    records: int = 0
    examples: int = 0
    """Kept. More than records where conversations were split into one example per answer."""

    empty: int = 0
    """Left out: nothing to learn was written in them."""

    without_label: int = 0
    """Left out: no answer, or none left after cutting to max_length."""

    truncated: int = 0
    cut_tokens: int = 0
    split: int = 0
    """Conversations that became several examples."""

    ended: int = 0
    """Got the end-of-text token because the chat template marks no end of an answer."""

    tokens: int = 0
    labels: int = 0
    max_token: int = 0
    longest: int = 0

    def sentences(self, max_length: int) -> list[str]:
        """For people: what there is, and what is missing."""
        said = [f"{self.examples:,} examples, {self.tokens:,} tokens, {self.labels:,} of them learnt"]
        if self.truncated:
            share = self.cut_tokens / max(self.tokens + self.cut_tokens, 1)
            said.append(
                f"{self.truncated:,} examples are longer than max_length={max_length} and were cut off: "
                f"{self.cut_tokens:,} tokens, {share:.1%} of all"
            )
        if self.split:
            said.append(f"{self.split:,} conversations became one example per answer, as the chat template asks for")
        if self.ended:
            said.append(f"{self.ended:,} examples got an end-of-text token: the chat template marks no end of answers")
        if self.empty:
            said.append(f"{self.empty:,} empty examples were left out")
        if self.without_label:
            said.append(f"{self.without_label:,} examples without anything to learn were left out")
        return said


class TokenArrays:
    """All examples of some files, read only. Nothing is in memory but what is being looked at."""

    def __init__(self, folder: Path, content: str, counts: Counts):
        self.folder, self.counts = folder, counts
        self.content = content
        """A hash of every token, whether it is learnt, and the records they come from."""

        opened = {name: _map(folder / name, kind) for name, kind in _FILES.items()}
        self._tokens, self._learnt = opened["tokens.i32"], opened["learnt.u8"]
        self._ends, self.records = opened["ends.i64"], opened["records.u64"]

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each example."""
        return np.diff(self._ends, prepend=0)

    def __getitem__(self, index: int) -> Tokens:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        return Tokens(np.array(self._tokens[start:end]), self._learnt[start:end].astype(np.bool_))


class Writer:
    """Appends examples to files. Memory does not grow with their number."""

    def __init__(self, folder: Path):
        self._files = {name: open(folder / name, "wb") for name in _FILES}  # noqa: SIM115 - closed in __exit__
        self._folder = folder
        self._ends, self._records = array("q"), array("Q")
        self._end = 0
        self._hash = xxhash.xxh3_128()

    def __enter__(self) -> Writer:
        return self

    def append(self, tokens: Tokens, record: int) -> None:
        for name, values in (("tokens.i32", tokens.ids), ("learnt.u8", tokens.learnt.astype(np.uint8))):
            self._files[name].write(values.tobytes())
            self._hash.update(values.tobytes())
        self._hash.update(f"{len(tokens.ids)} {record}\n".encode())
        self._end += len(tokens.ids)
        self._ends.append(self._end)
        self._records.append(record)
        if len(self._ends) == _BUFFERED:
            self._flush()

    def finish(self, counts: Counts) -> None:
        """All of it on the drive, the description last."""
        self._flush()
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        content = self._hash.hexdigest()
        meta = {"format_version": FORMAT_VERSION, "content": content, "sizes": sizes, "counts": asdict(counts)}
        with open(self._folder / _META, "w", encoding="utf-8") as described:
            json.dump(meta, described, indent=1)
            described.flush()
            os.fsync(described.fileno())

    def _flush(self) -> None:
        self._files["ends.i64"].write(self._ends.tobytes())
        self._files["records.u64"].write(self._records.tobytes())
        self._ends, self._records = array("q"), array("Q")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as all_of_them:  # on a full drive closing fails, and the others must be closed all the same
            for file in self._files.values():
                all_of_them.callback(file.close)


@contextmanager
def new_folder(root: Path, key: str) -> Iterator[Path]:
    """A folder to write into, which gets its name when all went well and is gone when not."""
    with removed_if_empty(root):
        with _new_folder(root, key) as made:
            yield made


@contextmanager
def _new_folder(root: Path, key: str) -> Iterator[Path]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
    except OSError as error:
        raise DataError(
            f"{root} cannot be written to: {error.strerror}. Set dataset_cache_dir to a folder that can."
        ) from None
    try:
        yield made
        target = root / key
        if open_arrays(root, key) is None:
            shutil.rmtree(target, ignore_errors=True)
            try:
                made.rename(target)
            except OSError:
                # Somebody else was faster. Theirs is the same, because the name says so.
                if open_arrays(root, key) is None:
                    raise
    except OSError as error:
        raise DataError(
            f"{root} cannot be written to: {error.strerror}. Set dataset_cache_dir to another folder."
        ) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def open_arrays(root: Path, key: str) -> TokenArrays | None:
    """What was written under this key, if it is there and whole."""
    folder = root / key
    try:
        meta: dict[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
        whole = meta["format_version"] == FORMAT_VERSION and all(
            (folder / name).stat().st_size == meta["sizes"][name] for name in _FILES
        )
        content = str(meta["content"])
        known = {each.name for each in fields(Counts)}
        counts = Counts(**{name: int(value) for name, value in meta["counts"].items() if name in known})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return TokenArrays(folder, content, counts) if whole else None


def _map(path: Path, kind: type) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")
