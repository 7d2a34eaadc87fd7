"""A small store on drives in memory, and one way to say what it should hold."""

import random
from pathlib import Path

from lohan.store import PAGE_BYTES, RecordSpec, create_store, open_store
from lohan.testing.faults import FaultyFiles

CHUNK = PAGE_BYTES
DRIVES = [Path("/nvme0"), Path("/nvme1")]
PATHS = [drive / "store" for drive in DRIVES]
RECORDS = [
    RecordSpec(name="weights", num_bytes=10 * CHUNK + 7),
    RecordSpec(name="small", num_bytes=100),
    RecordSpec(name="moments.0", num_bytes=3 * CHUNK, group="moments"),
    RecordSpec(name="moments.1", num_bytes=CHUNK + 1, group="moments"),
    RecordSpec(name="scratch", num_bytes=2 * CHUNK, scratch=True),
]
KEPT = [r for r in RECORDS if not r.scratch]


def content(name, step):
    size = next(r.num_bytes for r in RECORDS if r.name == name)
    return (f"{name} of step {step}. ".encode() * size)[:size]


def metadata(step):
    """Long enough for a manifest of several sectors, so that losing power can tear it."""
    return {"step": step, "noise": random.Random(step).randbytes(1500).hex()}


def read(store, name):
    """The record's bytes now."""
    into = bytearray(store.layout.records[store.layout.record(name)].num_bytes)
    store.read(name, into).wait(30)
    return bytes(into)


def write_step(store, step):
    for record in KEPT:
        store.write(record.name, content(record.name, step)).wait(30)


def commit_step(store, step):
    store.begin(step)
    write_step(store, step)
    store.commit(step, metadata(step)).wait(30)


def assert_holds(store, step):
    """Exactly the committed version of this step, to the bit."""
    assert store.committed_step == step
    assert store.metadata == metadata(step)
    for record in KEPT:
        assert read(store, record.name) == content(record.name, step)


class Bench:
    """A store with step 1 committed, on drives in memory that do what a test tells them."""

    def __init__(self, versions=2):
        self.files = FaultyFiles(DRIVES)
        self.paths = PATHS
        create_store(PATHS, RECORDS, versions=versions, weights=[1, 1], chunk_bytes=CHUNK, files=self.files)
        with self.open() as store:
            commit_step(store, 1)

    def open(self, **options):
        return open_store(PATHS, files=self.files, threads_per_drive=1, **options)

    def assert_holds(self, step=1):
        with self.open() as store:
            assert_holds(store, step)
