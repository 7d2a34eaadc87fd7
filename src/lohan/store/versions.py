"""Which slot holds which chunk: the committed version, the working one, and what must not be written over.

Each table maps every chunk to a slot. A write goes to a slot that no version still needed points to:

    committed   what a reopened store finds
    committing  a commit under way: it may become the committed one at any moment
    base        the working version as the step began, kept when the step must be undoable
    working     what reads see; rewritten in place wherever its slot is nobody else's

No I/O here and no locking: the store calls this under its own lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lohan.store.layout import Layout
from lohan.store.manifest import NEVER, Manifest

BROKEN = 254
"""The slot of a chunk whose last write failed."""

Slots = npt.NDArray[np.uint8]


class Versions:
    """The slot tables of one open store, and the checksum of every chunk in every slot."""

    def __init__(self, layout: Layout, manifest: Manifest):
        self.layout = layout
        self.committed: Slots = manifest.slots.copy()
        self.working: Slots = manifest.slots.copy()
        self.committing: Slots | None = None
        self.base: Slots | None = None
        self.sums = np.zeros((layout.versions, layout.num_chunks), np.uint64)
        written = np.flatnonzero(self.committed != NEVER)
        self.sums[self.committed[written], written] = manifest.sums[written]

    def targets(self, chunks: slice) -> Slots | None:
        """The slots a write to these chunks goes to, or None if it has to wait for the commit under way."""
        if self.layout.versions == 1:
            return None if self.committing is not None else np.zeros(chunks.stop - chunks.start, np.uint8)
        working = self.working[chunks]
        needed = [t[chunks] for t in (self.committed, self.committing, self.base) if t is not None]
        target = np.full(len(working), NEVER, np.uint8)
        for slot in reversed(range(self.layout.versions)):
            target[~np.logical_or.reduce([table == slot for table in needed])] = slot
        # Rewriting in place keeps neighbours in one slot, and so in one request.
        in_place = (working < BROKEN) & ~np.logical_or.reduce([table == working for table in needed])
        target[in_place] = working[in_place]
        scratch = self.layout.chunk_scratch[chunks]
        target[scratch] = 0
        return None if np.any(target == NEVER) else target

    def failed(self, chunks: npt.NDArray[np.int64], slots: Slots) -> None:
        """A write to these places failed: whoever counted on them must know."""
        for table in (self.working, self.committing, self.base):
            if table is not None:
                table[chunks[table[chunks] == slots]] = BROKEN

    def snapshot(self, table: Slots) -> tuple[Slots, npt.NDArray[np.uint64]]:
        """Slots and checksums of one version, as a manifest keeps them. Scratch is not kept."""
        slots = np.where(self.layout.chunk_scratch, np.uint8(NEVER), table)
        known = np.flatnonzero(slots < BROKEN)
        sums = np.zeros(self.layout.num_chunks, np.uint64)
        sums[known] = self.sums[slots[known], known]
        return slots, sums
