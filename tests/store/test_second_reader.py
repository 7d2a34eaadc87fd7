"""A second reader, written from docs/formats.md alone: if it fails, the page or the store is wrong.

The reader below imports nothing of lohan. Section numbers are those of the page.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lohan.store import RecordSpec, create_store, open_store

HEADER, LAYOUT, MANIFEST = 1, 2, 3
NAMES = {HEADER: "header", LAYOUT: "layout", MANIFEST: "manifest"}


class Unreadable(Exception):
    pass


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def read_place(path: Path, kind: int, place: int, place_bytes: int) -> tuple[int, bytes] | str | None:
    """Section 2: (sequence, payload) if whole, None if never written, a word if damaged."""
    if not path.exists():
        return "missing"
    with open(path, "rb") as file:
        file.seek(place * place_bytes)
        data = file.read(place_bytes)
    if not any(data[:48]):
        return None if len(data) == place_bytes else "short"
    if len(data) < 48:
        return "short"
    magic, version, found, sequence, length, payload_sum, head_sum = struct.unpack("<8sIIQQQQ", data[:48])
    if magic != b"lohanst\0" or checksum(data[:40]) != head_sum:
        return "head"
    if version != 1:
        raise Unreadable(f"format {version}")
    payload = data[48 : 48 + length]
    if found != kind or len(payload) != length or checksum(payload) != payload_sum:
        return "payload"
    return sequence, payload


def read_newest(directory: Path, kind: int, places: int, place_bytes: int) -> bytes:
    """Section 2: the payload that counts."""
    whole = []
    for place in range(places):
        twins = [read_place(directory / f"lohan.{NAMES[kind]}.{twin}", kind, place, place_bytes) for twin in (0, 1)]
        if all(isinstance(page, str) for page in twins):
            raise Unreadable(f"{NAMES[kind]} damaged in both copies: {twins}")
        whole += [page for page in twins if isinstance(page, tuple)]
        assert all(page[0] % places == place for page in twins if isinstance(page, tuple))
    if not whole:
        raise Unreadable(f"no {NAMES[kind]}")
    return max(whole)[1]


def split(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Sections 4 and 5: a JSON object with its length before it, then arrays."""
    (length,) = struct.unpack_from("<Q", payload)
    return json.loads(payload[8 : 8 + length]), payload[8 + length :]


def read_store(directories: list[Path]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Section 6: the manifest's JSON object, and every written record."""
    drives: dict[int, Path] = {}
    header: dict[str, Any] = {}
    for directory in directories:
        header = json.loads(read_newest(directory, HEADER, 1, 4096))
        drives[header["drive"]] = directory
        assert (directory / "lohan.data").stat().st_size >= header["data_bytes"]
    assert sorted(drives) == list(range(header["num_drives"]))

    layout, places = split(read_newest(drives[0], LAYOUT, 1, header["layout_place_bytes"]))
    commit, state = split(read_newest(drives[0], MANIFEST, 2, header["manifest_place_bytes"]))
    num_chunks = sum(-(-size // layout["chunk_bytes"]) for _, size, _, _ in layout["records"])
    assert len(places) == len(state) == 9 * num_chunks
    chunk_drive = places[:num_chunks]
    chunk_offset = struct.unpack(f"<{num_chunks}Q", places[num_chunks:])
    chunk_slot = state[:num_chunks]
    chunk_sum = struct.unpack(f"<{num_chunks}Q", state[num_chunks:])

    records: dict[str, bytes] = {}
    chunk = 0
    for name, size, group, scratch in layout["records"]:
        assert 0 <= group < len(layout["groups"])
        parts: list[bytes] = []
        for start in range(0, size, layout["chunk_bytes"]):
            length = min(layout["chunk_bytes"], size - start)
            drive, slot = chunk_drive[chunk], chunk_slot[chunk]
            if slot == 255:
                assert chunk_sum[chunk] == 0
            else:
                assert not scratch
                assert slot < layout["versions"]
                region = layout["region_bytes"][drive]
                assert chunk_offset[chunk] % 4096 == 0
                assert chunk_offset[chunk] + -(-length // 4096) * 4096 <= region
                with open(drives[drive] / "lohan.data", "rb") as data:
                    data.seek(slot * region + chunk_offset[chunk])
                    parts.append(data.read(length))
                if checksum(parts[-1]) != chunk_sum[chunk]:
                    raise Unreadable(f"{name} from byte {start}")
            chunk += 1
        if sum(map(len, parts)) == size:
            records[name] = b"".join(parts)
    return commit, records


# -- the store it reads ---------------------------------------------------------------------------------

SPECS = [
    RecordSpec(name="big", num_bytes=500_003),
    RecordSpec(name="passing", num_bytes=9_000, scratch=True),
    *(RecordSpec(name=f"block.{i}.{n}", num_bytes=s, group=f"block.{i}") for i in range(3) for n, s in
      [("norm", 100), ("weights", 70_000 + i), ("bias", 4096)]),
    RecordSpec(name="ünïcode \u2603", num_bytes=1),
    RecordSpec(name="never", num_bytes=20_000),
]  # fmt: skip
KEPT = [spec for spec in SPECS if not spec.scratch and spec.name != "never"]


def committed_store(directories: list[Path], versions: int = 2, steps: int = 5) -> dict[str, bytes]:
    """A store with a history: each step writes some of the records; the last one is not committed."""
    weights = [1.0, 2.0, 3.0][: len(directories)]
    create_store(directories, SPECS, versions=versions, weights=weights, chunk_bytes=16_384)
    chance = random.Random(versions)
    expected: dict[str, bytes] = {}
    with open_store(directories) as store:
        store.write("passing", bytes(9_000)).wait()
        for step in range(1, steps + 1):
            store.begin(step)
            for spec in KEPT if step == 1 else chance.sample(KEPT, 6):
                expected[spec.name] = chance.randbytes(spec.num_bytes)
                store.write(spec.name, expected[spec.name]).wait()
            store.commit(step, {"step was": step, "naïve": "ü"}).wait()
        if versions > 1:
            store.begin(steps + 1)
            store.write("big", bytes(500_003)).wait()
    return expected


@pytest.mark.parametrize("versions", [1, 2, 3])
@pytest.mark.parametrize("num_drives", [1, 3])
def test_the_page_is_enough_to_read_back_what_was_committed(tmp_path, versions, num_drives):
    directories = [tmp_path / str(i) for i in range(num_drives)]
    expected = committed_store(directories, versions)
    commit, records = read_store(directories[::-1])
    assert records == expected
    assert commit == {"step": 5, "dirty": False, "metadata": {"step was": 5, "naïve": "ü"}}


def test_a_new_store_reads_as_empty(tmp_path):
    create_store([tmp_path / "a"], SPECS)
    assert read_store([tmp_path / "a"]) == ({"step": None, "dirty": False, "metadata": {}}, {})


@pytest.mark.parametrize("name", ["header", "layout", "manifest"])
@pytest.mark.parametrize("twin", [0, 1])
def test_either_copy_alone_is_enough(tmp_path, name, twin):
    expected = committed_store([tmp_path / "a"])
    (tmp_path / "a" / f"lohan.{name}.{twin}").write_bytes(b"\xff" * 4096)
    assert read_store([tmp_path / "a"])[1] == expected
    with open_store([tmp_path / "a"], read_only=True) as store:
        assert store.committed_step == 5


def test_an_in_place_store_says_that_a_step_is_under_way(tmp_path):
    committed_store([tmp_path / "a"], versions=1)
    with open_store([tmp_path / "a"]) as store:
        store.begin(6)
    assert read_store([tmp_path / "a"])[0]["dirty"] is True


def test_it_notices_a_flipped_bit_too(tmp_path):
    committed_store([tmp_path / "a"], steps=1)
    data = bytearray((tmp_path / "a" / "lohan.data").read_bytes())
    data[100] ^= 4
    (tmp_path / "a" / "lohan.data").write_bytes(data)
    with pytest.raises(Unreadable, match="big from byte 0"):
        read_store([tmp_path / "a"])
