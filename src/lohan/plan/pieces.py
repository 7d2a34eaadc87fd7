"""How a unit's tensors are cut for the drives and for the update.

A piece is what one update works on: up to PIECE_ELEMENTS of one large tensor, or several small tensors. It is
two records in the store, its wire weights and its optimizer state. Pieces of a unit lie one after another, so
the unit's weights are read in one call, and every tensor is contiguous in that buffer: a large tensor's pieces
are whole pages, except its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096
ALIGN_BYTES = 64
PIECE_ELEMENTS = 8 << 20
"""A state read of about 84 MB: small enough to have several under way, and so large that what a piece costs beside its
bytes (four operations, each with threads to wake) is little. With an eighth of it a step on two cores took 11 to 20 %
longer: benchmarks/results/2026-11-18_pieces.md."""


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A parameter, as far as cutting it needs to know."""

    name: str
    num_elements: int
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one tensor inside a piece."""

    tensor: int
    """Index in the unit's list of tensors."""

    start: int
    num_elements: int
    weights_offset: int
    """Bytes from the start of the unit's weights buffer."""

    state_offset: int
    """Bytes from the start of the piece's state; meaningless in a frozen piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One update's worth of a unit."""

    chunks: tuple[Chunk, ...]
    weights_offset: int
    weights_bytes: int
    state_bytes: int
    """0: frozen, never updated."""

    @property
    def num_elements(self) -> int:
        return sum(chunk.num_elements for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class UnitPieces:
    """A unit, cut."""

    tensors: tuple[TensorSize, ...]
    tensor_offset: tuple[int, ...]
    """Where each tensor starts in the unit's weights buffer, in bytes."""

    pieces: tuple[Piece, ...]
    weights_bytes: int
    """The whole weights buffer, in whole pages."""

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def state_bytes(self) -> int:
        return sum(piece.state_bytes for piece in self.pieces)


def cut_unit(
    tensors: Sequence[TensorSize],
    *,
    element_bytes: int,
    state_bytes: Callable[[int], int],
    piece_elements: int = PIECE_ELEMENTS,
) -> UnitPieces:
    """Cut a unit's tensors into pieces; `state_bytes(n)` is the state of n elements of one chunk."""
    if piece_elements % (PAGE_BYTES // 2):
        raise ValueError(f"piece_elements is {piece_elements}; it must be a multiple of {PAGE_BYTES // 2}")
    offsets = [0] * len(tensors)
    pieces: list[Piece] = []
    position = 0
    open_chunks: list[Chunk] = []
    open_start, open_elements, open_state, open_trainable = 0, 0, 0, True

    def close() -> None:
        nonlocal position, open_chunks, open_elements, open_state
        if open_chunks:
            pieces.append(Piece(tuple(open_chunks), open_start, position - open_start, open_state))
            position = _up(position, PAGE_BYTES)
        open_chunks, open_elements, open_state = [], 0, 0

    for index, tensor in enumerate(tensors):
        if tensor.num_elements > piece_elements:
            close()
            offsets[index] = position
            for start in range(0, tensor.num_elements, piece_elements):
                count = min(piece_elements, tensor.num_elements - start)
                state = state_bytes(count) if tensor.trainable else 0
                chunk = Chunk(index, start, count, position, 0)
                pieces.append(Piece((chunk,), position, count * element_bytes, state))
                position = _up(position + count * element_bytes, PAGE_BYTES)
            continue
        if open_chunks and (open_elements + tensor.num_elements > piece_elements or tensor.trainable != open_trainable):
            close()
        if not open_chunks:
            open_start, open_trainable = position, tensor.trainable
        position = _up(position, ALIGN_BYTES)
        offsets[index] = position
        open_chunks.append(Chunk(index, 0, tensor.num_elements, position, open_state))
        position += tensor.num_elements * element_bytes
        open_elements += tensor.num_elements
        open_state += _up(state_bytes(tensor.num_elements), ALIGN_BYTES) if tensor.trainable else 0
    close()
    return UnitPieces(tuple(tensors), tuple(offsets), tuple(pieces), _up(position, PAGE_BYTES))


def _up(number: int, to: int) -> int:
    return -(-number // to) * to
