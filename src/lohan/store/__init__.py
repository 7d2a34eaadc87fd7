"""Bytes on SSD and in RAM: versions, stripes, checksums, asynchronous handles. Knows no model.

create_store() makes a store over one or more drive directories, open_store() opens it, Arena is the memory
that stands between it and everything else. docs/store.md explains it, docs/formats.md specifies the bytes.
"""

from lohan.store.arena import PAGE_BYTES, Arena, Slab, open_arena, round_up
from lohan.store.create import create_store
from lohan.store.drive import has_store
from lohan.store.files import Files
from lohan.store.handle import Handle
from lohan.store.layout import Layout, RecordSpec
from lohan.store.rates import DriveRate, measure_drive
from lohan.store.store import Store, open_store
from lohan.store.verify import Problem, verify_store

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "DriveRate",
    "Files",
    "Handle",
    "Layout",
    "Problem",
    "RecordSpec",
    "Slab",
    "Store",
    "create_store",
    "has_store",
    "measure_drive",
    "open_arena",
    "open_store",
    "round_up",
    "verify_store",
]
