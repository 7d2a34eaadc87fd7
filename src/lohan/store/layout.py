"""Where every byte lies: records are cut into chunks, and chunks are dealt to the drives by weight.

A chunk is the unit of everything: it is checksummed, versioned and placed as one. Chunks never span two
records. Records of a group lie one after another, and the chunks of a group that land on one drive are
adjacent there, so reading a group is a few large requests per drive whatever its records' sizes.

A drive's data file is `versions` equal regions followed by one scratch region:

    [ region of slot 0 | region of slot 1 | ... | scratch ]

A versioned chunk has the same offset in each region; which slot holds its current bytes is the manifest's
business. Scratch chunks have one place and are forgotten when the store is closed.

Pure: no files, no clock. The layout is decided once, when the store is created, and saved with it.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan.errors import ConfigError, RecordMissing
from lohan.store.arena import PAGE_BYTES, round_up

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_DRIVES = 250
MAX_VERSIONS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSpec:
    """A named byte range to keep."""

    name: str
    num_bytes: int
    group: str = ""
    """Records of one group lie together and can be moved in one call. Empty: a group of its own."""

    scratch: bool = False
    """Not versioned and not kept: for what only has to outlive its stay in RAM."""


class Layout:
    """The placement of all records. Arrays are indexed by chunk; a record's chunks are consecutive."""

    def __init__(
        self,
        *,
        records: Sequence[RecordSpec],
        chunk_bytes: int,
        versions: int,
        num_drives: int,
        chunk_drive: npt.NDArray[np.uint8],
        chunk_offset: npt.NDArray[np.int64],
        region_bytes: Sequence[int],
        scratch_bytes: Sequence[int],
    ):
        self.records = tuple(records)
        self.chunk_bytes = chunk_bytes
        self.versions = versions
        self.num_drives = num_drives
        self.chunk_drive = chunk_drive
        self.chunk_offset = chunk_offset
        self.region_bytes = tuple(region_bytes)
        self.scratch_bytes = tuple(scratch_bytes)
        sizes = np.fromiter((r.num_bytes for r in self.records), np.int64, len(self.records))
        counts = -(-sizes // chunk_bytes)
        self.first_chunk: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self.num_chunks = int(self.first_chunk[-1])
        self.chunk_length = np.full(self.num_chunks, chunk_bytes, np.int64)
        self.chunk_length[self.first_chunk[1:] - 1] = sizes - (counts - 1) * chunk_bytes
        self.chunk_scratch = np.repeat([r.scratch for r in self.records], counts).astype(bool)
        self._index = {r.name: i for i, r in enumerate(self.records)}
        self._groups: dict[str, tuple[int, int]] = {}
        for i, r in enumerate(self.records):
            first, _ = self._groups.get(r.group or r.name, (i, i))
            self._groups[r.group or r.name] = (first, i + 1)

    def record(self, name: str) -> int:
        """The index of a record, or an error that says what there is."""
        try:
            return self._index[name]
        except KeyError:
            raise RecordMissing(
                f"The store has no record {name!r}; it has {len(self.records)}, the first being "
                f"{self.records[0].name!r}."
            ) from None

    def num_bytes(self, name: str) -> int:
        """The size of a record."""
        return self.records[self.record(name)].num_bytes

    def has(self, name: str) -> bool:
        """Whether there is a record of this name."""
        return name in self._index

    def group(self, name: str) -> range:
        """The indices of a group's records, in the order they lie."""
        if name not in self._groups:
            raise RecordMissing(f"The store has no group {name!r}; it has {len(self._groups)} groups.")
        return range(*self._groups[name])

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def group_offsets(self, name: str) -> dict[str, int]:
        """Where each record starts in the buffer of a whole group: one after another, each on a new page."""
        offsets, position = {}, 0
        for index in self.group(name):
            offsets[self.records[index].name] = position
            position += round_up(self.records[index].num_bytes)
        return offsets

    def group_bytes(self, name: str) -> int:
        """The size of the buffer that holds a whole group."""
        return sum(round_up(self.records[index].num_bytes) for index in self.group(name))

    def record_of_chunk(self, chunk: int) -> tuple[RecordSpec, int]:
        """The record a chunk belongs to and its offset inside it."""
        index = int(np.searchsorted(self.first_chunk, chunk, side="right")) - 1
        return self.records[index], (chunk - int(self.first_chunk[index])) * self.chunk_bytes

    def file_offsets(self, chunks: slice, slots: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """The place of each chunk in its drive's data file, given the slot each one is in."""
        region = np.asarray(self.region_bytes, np.int64)[self.chunk_drive[chunks]]
        slot = slots.astype(np.int64)
        slot[self.chunk_scratch[chunks]] = self.versions
        places: npt.NDArray[np.int64] = self.chunk_offset[chunks] + slot * region
        return places

    def data_bytes(self, drive: int) -> int:
        """The size of one drive's data file."""
        return self.versions * self.region_bytes[drive] + self.scratch_bytes[drive]

    # -- saved form -----------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The payload of the layout file; docs/formats.md describes it."""
        groups = list(self._groups)
        number = {name: i for i, name in enumerate(groups)}
        table = {
            "chunk_bytes": self.chunk_bytes,
            "versions": self.versions,
            "num_drives": self.num_drives,
            "region_bytes": self.region_bytes,
            "scratch_bytes": self.scratch_bytes,
            "groups": groups,
            "records": [[r.name, r.num_bytes, number[r.group or r.name], int(r.scratch)] for r in self.records],
        }
        text = json.dumps(table, separators=(",", ":")).encode()
        return b"".join(
            (
                len(text).to_bytes(8, "little"),
                text,
                self.chunk_drive.astype("u1").tobytes(),
                self.chunk_offset.astype("<u8").tobytes(),
            )
        )

    @classmethod
    def from_bytes(cls, payload: bytes) -> Layout:
        """Read a saved layout. ValueError if it does not describe places inside its own drives."""
        text_bytes = int.from_bytes(payload[:8], "little")
        table: dict[str, Any] = json.loads(payload[8 : 8 + text_bytes])
        groups = table["groups"]
        records = [
            RecordSpec(name=name, num_bytes=size, group="" if groups[group] == name else groups[group], scratch=bool(s))
            for name, size, group, s in table["records"]
        ]
        check_records(records, error=ValueError)
        chunk_bytes, num_drives = int(table["chunk_bytes"]), int(table["num_drives"])
        _check_shape(chunk_bytes, int(table["versions"]), num_drives, error=ValueError)
        num_chunks = sum(-(-r.num_bytes // chunk_bytes) for r in records)
        body = memoryview(payload)[8 + text_bytes :]
        if len(body) != 9 * num_chunks:
            raise ValueError(f"it lists {num_chunks} chunks and holds {len(body)} bytes of places for them")
        layout = cls(
            records=records,
            chunk_bytes=chunk_bytes,
            versions=int(table["versions"]),
            num_drives=num_drives,
            chunk_drive=np.frombuffer(body[:num_chunks], "u1"),
            chunk_offset=np.frombuffer(body[num_chunks:], "<u8").astype(np.int64),
            region_bytes=[int(n) for n in table["region_bytes"]],
            scratch_bytes=[int(n) for n in table["scratch_bytes"]],
        )
        layout._check_places()
        return layout

    def _check_places(self) -> None:
        """Every chunk inside its region, on a page, and no two on the same bytes."""
        if len(self.region_bytes) != self.num_drives or len(self.scratch_bytes) != self.num_drives:
            raise ValueError("it has a different number of drives and of regions")
        if any(size < 0 or size % PAGE_BYTES for size in self.region_bytes + self.scratch_bytes):
            raise ValueError("it has a region that is not made of pages")
        if self.num_chunks and int(self.chunk_drive.max()) >= self.num_drives:
            raise ValueError(f"it places a chunk on drive {int(self.chunk_drive.max())} of {self.num_drives}")
        starts, sizes = self.chunk_offset, -(-self.chunk_length // PAGE_BYTES) * PAGE_BYTES
        limits = np.where(
            self.chunk_scratch,
            np.asarray(self.scratch_bytes, np.int64)[self.chunk_drive],
            np.asarray(self.region_bytes, np.int64)[self.chunk_drive],
        )
        # Nothing is added to `starts` before this: a forged offset near 2^63 would wrap around.
        if np.any(starts % PAGE_BYTES) or np.any(starts < 0) or np.any(starts > limits - sizes):
            raise ValueError("it places a chunk outside its drive's data file")
        order = np.lexsort((starts, self.chunk_drive, self.chunk_scratch))
        same = (np.diff(self.chunk_drive[order].astype(np.int64)) == 0) & (
            self.chunk_scratch[order][1:] == self.chunk_scratch[order][:-1]
        )
        if np.any(same & ((starts + sizes)[order][:-1] > starts[order][1:])):
            raise ValueError("it places two chunks on the same bytes")


def check_records(records: Sequence[RecordSpec], *, error: type[Exception] = ConfigError) -> None:
    """Names are unique, sizes positive, a group's records consecutive and of one kind."""
    if not records:
        raise error("A store needs at least one record.")
    seen: set[str] = set()
    closed: set[str] = set()
    last, last_scratch = "", False
    for r in records:
        if type(r.name) is not str or type(r.group) is not str:
            raise error(f"Record name {r.name!r} or its group {r.group!r} is not text.")
        if not r.name or r.name in seen:
            raise error(f"Record name {r.name!r} is " + ("used twice." if r.name else "empty."))
        if type(r.num_bytes) is not int or r.num_bytes <= 0:
            raise error(f"Record {r.name!r} has {r.num_bytes!r} bytes; give it at least 1.")
        seen.add(r.name)
        group = r.group or r.name
        if group == last:
            if r.scratch != last_scratch:
                raise error(f"Group {group!r} mixes scratch and kept records; use two groups.")
        elif group in closed:
            raise error(f"The records of group {group!r} are not next to each other in the list.")
        closed.add(group)
        last, last_scratch = group, r.scratch


def _check_shape(chunk_bytes: int, versions: int, num_drives: int, *, error: type[Exception]) -> None:
    if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise error(f"chunk_bytes is {chunk_bytes}; it must be a multiple of {PAGE_BYTES}.")
    if not 1 <= versions <= MAX_VERSIONS:
        raise error(f"versions is {versions}; it must be 1 to {MAX_VERSIONS}.")
    if not 1 <= num_drives <= MAX_DRIVES:
        raise error(f"{num_drives} drives; a store has 1 to {MAX_DRIVES}.")


def make_layout(
    records: Sequence[RecordSpec],
    *,
    weights: Sequence[float],
    versions: int,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Layout:
    """Deal the chunks of all records to the drives, each drive getting bytes in proportion to its weight.

    Each run of about `chunk_bytes` goes to the drive that is furthest behind its share, so any large piece
    of any record is spread by the weights too: no read waits for a slow drive longer than its share takes.
    """
    check_records(records)
    _check_shape(chunk_bytes, versions, len(weights), error=ConfigError)
    if any(not (0 < w < float("inf")) for w in weights):
        raise ConfigError(f"Drive weights are {list(weights)}; each must be a positive number.")
    region, scratch = [0] * len(weights), [0] * len(weights)
    # When each drive's next run is half done, on a clock where a drive with weight w moves w bytes per second. The
    # drive with the earliest such time is furthest behind: the deviation from the shares stays within a few runs.
    clock = [(chunk_bytes / 2 / w, d) for d, w in enumerate(weights)]
    heapq.heapify(clock)
    # A store of terabytes has millions of chunks: machine integers here, not Python's.
    drives, offsets = array("B"), array("q")
    here, run = clock[0][1], 0
    for r in records:
        used = scratch if r.scratch else region
        for start in range(0, r.num_bytes, chunk_bytes):
            size = min(chunk_bytes, -(-(r.num_bytes - start) // PAGE_BYTES) * PAGE_BYTES)
            if run + size > chunk_bytes:
                heapq.heapreplace(clock, (clock[0][0] + run / weights[here], here))
                here, run = clock[0][1], 0
            drives.append(here)
            offsets.append(used[here])
            used[here] += size
            run += size
    return Layout(
        records=records,
        chunk_bytes=chunk_bytes,
        versions=versions,
        num_drives=len(weights),
        chunk_drive=np.frombuffer(drives, np.uint8),
        chunk_offset=np.frombuffer(offsets, np.int64),
        region_bytes=region,
        scratch_bytes=scratch,
    )
