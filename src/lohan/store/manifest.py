"""What a commit says: the step, the caller's metadata, and for every chunk its slot and checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan.errors import ConfigError
from lohan.sizes import format_bytes
from lohan.store.layout import Layout

NEVER = 255
"""The slot of a chunk that was never written."""

METADATA_BYTES = 1 << 20
"""Reserved in every manifest for the caller's metadata, as JSON."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed version."""

    step: int | None
    """The committed step; None before the first commit."""

    metadata: dict[str, Any]
    dirty: bool
    """Only with versions: 1: a step is being written over this one."""

    slots: npt.NDArray[np.uint8]
    sums: npt.NDArray[np.uint64]

    def to_bytes(self) -> bytes:
        try:
            text = json.dumps(
                {"step": self.step, "dirty": self.dirty, "metadata": self.metadata}, separators=(",", ":")
            ).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"A commit's metadata must be plain JSON values: {error}.") from error
        if len(text) > METADATA_BYTES:
            raise ConfigError(
                f"A commit's metadata takes {format_bytes(len(text))}; {format_bytes(METADATA_BYTES)} are reserved. "
                "Put large data into a record."
            )
        return b"".join(
            (
                len(text).to_bytes(8, "little"),
                text,
                self.slots.astype("u1").tobytes(),
                self.sums.astype("<u8").tobytes(),
            )
        )

    @classmethod
    def from_bytes(cls, payload: bytes, layout: Layout) -> Manifest:
        """Read a saved manifest. ValueError if it does not fit the layout."""
        text_bytes = int.from_bytes(payload[:8], "little")
        table = json.loads(payload[8 : 8 + text_bytes])
        body = memoryview(payload)[8 + text_bytes :]
        if len(body) != 9 * layout.num_chunks:
            raise ValueError(f"it describes {len(body) / 9:g} chunks and the layout has {layout.num_chunks}")
        slots = np.frombuffer(body[: layout.num_chunks], "u1")
        if np.any((slots >= layout.versions) & (slots != NEVER)):
            raise ValueError(f"it names slot {int(slots[slots != NEVER].max())} of {layout.versions}")
        step = table["step"]
        if step is not None and (type(step) is not int or step < 0):
            raise ValueError(f"its step is {step!r}")
        return cls(
            step=step,
            metadata=dict(table["metadata"]),
            dirty=bool(table["dirty"]),
            slots=slots,
            sums=np.frombuffer(body[layout.num_chunks :], "<u8"),
        )


def manifest_payload_bytes(layout: Layout) -> int:
    """The most a manifest for this layout can take."""
    return 8 + METADATA_BYTES + 9 * layout.num_chunks
