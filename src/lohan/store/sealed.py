"""Small metadata, sealed: a fixed head with checksums, then the payload, several copies per file.

A metadata file holds a fixed number of equal places, each able to hold one sealed page. Places are written
whole and never moved, and their space is taken when the store is created, so a full disk cannot stop a
commit. docs/formats.md gives the head byte by byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from lohan.errors import UnknownFormat
from lohan.store.arena import round_up

FORMAT_VERSION = 1
MAGIC = b"lohanst\0"
HEAD = struct.Struct("<8sIIQQQ")  # magic, format version, kind, sequence, payload bytes, payload checksum
HEAD_BYTES = HEAD.size + 8  # and the checksum of the head itself

# What reading a forged payload may raise: its checksums are right, and anything else may be wrong.
UNUSABLE = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)

HEADER, LAYOUT, MANIFEST = 1, 2, 3
KIND_NAMES = {HEADER: "header", LAYOUT: "layout", MANIFEST: "manifest"}


@dataclass(frozen=True, slots=True)
class Page:
    """A sealed page that was read and is whole."""

    sequence: int
    payload: bytes


def checksum(data: bytes | memoryview) -> int:
    """The store's one checksum, for pages and for data: xxHash's XXH3 with 64 bits, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


def seal(kind: int, sequence: int, payload: bytes) -> bytes:
    """The bytes of one page."""
    head = HEAD.pack(MAGIC, FORMAT_VERSION, kind, sequence, len(payload), checksum(payload))
    return head + checksum(head).to_bytes(8, "little") + payload


def place_bytes(payload_bytes: int) -> int:
    """The size of a place that can hold a payload of this size."""
    return round_up(HEAD_BYTES + payload_bytes)


def unseal(kind: int, place: bytes) -> Page | None:
    """The page in this place, or None if the place was never written. ValueError says what is wrong with it.

    UnknownFormat is raised only when the head is whole: a flipped bit must not look like a newer version.
    """
    if not any(place[:HEAD_BYTES]):
        return None
    if len(place) < HEAD_BYTES:
        raise ValueError("it is cut short")
    magic, version, found, sequence, payload_bytes, payload_sum = HEAD.unpack_from(place)
    if magic != MAGIC:
        raise ValueError("it does not start like one")
    if checksum(place[: HEAD.size]) != int.from_bytes(place[HEAD.size : HEAD_BYTES], "little"):
        raise ValueError("the checksum of its head is wrong")
    if version != FORMAT_VERSION:
        raise UnknownFormat(
            f"It is written in format version {version}; this program knows version {FORMAT_VERSION}. "
            "Use the lohan release that wrote it, or a newer one."
        )
    if found != kind:
        raise ValueError(f"it is a {KIND_NAMES.get(found, f'page of kind {found}')}, not a {KIND_NAMES[kind]}")
    payload = place[HEAD_BYTES : HEAD_BYTES + payload_bytes]
    if len(payload) != payload_bytes:
        raise ValueError(f"it is cut short: {len(payload)} of {payload_bytes} bytes")
    if checksum(payload) != payload_sum:
        raise ValueError("its checksum is wrong")
    return Page(sequence, payload)
