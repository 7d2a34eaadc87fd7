"""A local Hugging Face folder: which tensors are in which file, and their bytes without loading them.

open_folder() reads headers only. What is wrong with the files does not raise there: it is kept in
Folder.problems, so that everything wrong with a folder can be told at once (checkpoint.match_folder).
Each thread that reads has a few MiB for what it is lent; all of it is safe from any thread until close().
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lohan.errors import ModelError
from lohan.models.tensor_file import BadTensorFile, TensorEntry, read_entries
from lohan.store.arena import PAGE_BYTES, map_memory, round_up

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENT_BYTES = 4 << 20
"""The most that lend() gives at once."""


class Folder:
    def __init__(
        self,
        path: Path,
        tensors: dict[str, TensorEntry],
        problems: tuple[str, ...],
        unread: frozenset[str] = frozenset(),
        *,
        direct: bool = False,
    ):
        self.path = path
        self.tensors = tensors
        self.problems = problems
        self.unread = unread
        """Files that are missing or whose header cannot be read; what they hold is not known."""

        self._direct = direct
        self._descriptors: dict[tuple[Path, bool], int] = {}
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._closed = False

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def read(self, entry: TensorEntry, into: Any, start_byte: int = 0, num_bytes: int | None = None) -> None:
        """Fill `into` (any writable buffer) with bytes of a tensor, from start_byte of the tensor on."""
        given = memoryview(into)
        target = given.cast("B") if given.nbytes else given
        wanted = entry.num_bytes - start_byte if num_bytes is None else num_bytes
        if start_byte < 0 or wanted < 0 or start_byte + wanted > entry.num_bytes or wanted > len(target):
            raise ValueError(
                f"{entry.name} has {entry.num_bytes} bytes; {wanted} from {start_byte} on do not fit it or the "
                f"{len(target)} bytes given"
            )
        for done in range(0, wanted, LENT_BYTES):
            count = min(LENT_BYTES, wanted - done)
            # By numpy, which lets other threads go on meanwhile.
            np.frombuffer(target, np.uint8)[done : done + count] = np.frombuffer(
                self.lend(entry, start_byte + done, count), np.uint8
            )

    def lend(self, entry: TensorEntry, start_byte: int, num_bytes: int) -> memoryview:
        """Bytes of a tensor, in memory that is this thread's until it asks for more."""
        if start_byte < 0 or not 0 <= num_bytes <= LENT_BYTES or start_byte + num_bytes > entry.num_bytes:
            raise ValueError(f"{entry.name} has {entry.num_bytes} bytes; {num_bytes} from {start_byte} on are not lent")
        memory = self._memory()
        first = entry.offset + start_byte
        begin = first // PAGE_BYTES * PAGE_BYTES
        skipped, end = first - begin, first - begin + num_bytes
        reached = 0
        while reached < end:
            direct = self._direct
            descriptor = self._descriptor(entry.file, direct=direct)
            try:
                got = os.preadv(descriptor, [memory[reached : round_up(end)]], begin + reached)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._direct = False  # a file system with other rules: from now on through the page cache
                    continue
                raise ModelError(f"{entry.file}: {entry.name} cannot be read: {error.strerror or error}") from error
            before, reached = reached, reached + got
            if reached < end:
                reached = reached // PAGE_BYTES * PAGE_BYTES  # of a page that came in part, all of it once more
                if reached == before:
                    raise ModelError(
                        f"{entry.file} ends inside {entry.name}: it was cut short after it was opened.\n"
                        f"Restore the file."
                    )
        return memory[skipped:end]

    def _memory(self) -> memoryview:
        """Of this thread, for lend(): what it can ask for, from and to the ends of pages."""
        if not hasattr(self._of_thread, "memory"):
            self._of_thread.memory = memoryview(map_memory(LENT_BYTES + 2 * PAGE_BYTES))
        memory: memoryview = self._of_thread.memory
        return memory

    def _descriptor(self, file: Path, *, direct: bool) -> int:
        key = (file, direct)
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            if key not in self._descriptors:
                try:
                    self._descriptors[key] = _open(file, direct=direct)
                except OSError as error:
                    raise ModelError(f"{file} cannot be opened: {error.strerror or error}") from error
            return self._descriptors[key]


def _open(file: Path, *, direct: bool) -> int:
    """For reading, past the page cache where the file system knows how to."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct:
        try:
            return os.open(file, flags | os.O_DIRECT)
        except (AttributeError, OSError):
            pass  # what else is wrong with the file comes up again
    return os.open(file, flags)


def open_folder(folder: Path, *, direct: bool = False) -> Folder:
    """Find the weight files of a folder and read their headers. Files are opened when they are first read.

    With `direct` their bytes come past the page cache, where the file system can do that: for who reads them once.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder. Give the folder that holds config.json and *.safetensors.")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder.\n"
            f"Give the folder that holds config.json and the *.safetensors files."
        )
    problems: list[str] = []
    promised: dict[str, str] = {}
    # transformers prefers the single file when a folder has both.
    if (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        promised, index_problems = _read_index(folder / INDEX_FILE)
        problems += index_problems
        names = sorted(set(promised.values()))
    else:
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.{_advice(folder)}")

    tensors: dict[str, TensorEntry] = {}
    unread: set[str] = set()
    for name in names:
        if not (folder / name).is_file():
            problems.append(f"missing file: {name}, named by {INDEX_FILE}")
            unread.add(name)
            continue
        try:
            entries, cut_off = read_entries(folder / name)
        except BadTensorFile as error:
            problems.append(f"bad file: {name}: {error}")
            unread.add(name)
            continue
        problems += [f"truncated: {tensor} in {name}" for tensor in cut_off]
        for tensor, entry in entries.items():
            if tensor in tensors:
                problems.append(f"duplicate: {tensor} is in {tensors[tensor].file.name} and in {name}")
            else:
                tensors[tensor] = entry
    for tensor, name in promised.items():
        if name not in unread and (tensor not in tensors or tensors[tensor].file.name != name):
            problems.append(f"missing: {tensor} is not in {name}, where {INDEX_FILE} says it is")
    return Folder(folder, tensors, tuple(problems), frozenset(unread), direct=direct)


def _read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map = index["weight_map"]
        good = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Download or save the model again."
        ) from error
    if not good or not weight_map:
        raise ModelError(f"{path} has no weight_map from tensor names to file names. Download or save the model again.")
    promised, outside = {}, set()
    for tensor, file in weight_map.items():
        # Shards lie beside their index. Anything else could point at any file of this machine.
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            outside.add(file)
        else:
            promised[tensor] = file
    return promised, [f"outside the folder: {INDEX_FILE} names {file!r}" for file in sorted(outside)]


def _advice(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            "\nIt has pickled weights, which are never loaded here. Load it once with transformers and save it with "
            "save_pretrained, which writes safetensors."
        )
    if any(folder.glob("adapter_model.safetensors")):
        return "\nIt has a PEFT adapter. Merge it into its base model (merge_and_unload) and save that."
    if any(folder.glob("*.safetensors")):
        return (
            f"\nIts safetensors files have other names. Rename a single one to {SINGLE_FILE}; shards need their index."
        )
    return "\nDownload the weights of the model into it."
