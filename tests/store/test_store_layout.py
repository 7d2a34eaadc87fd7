import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import ConfigError, RecordMissing
from lohan.store import PAGE_BYTES, Layout, RecordSpec
from lohan.store.layout import make_layout

CHUNK = 4 * PAGE_BYTES

record_lists = st.lists(
    st.tuples(st.integers(1, 20 * CHUNK), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
).map(
    lambda rows: [
        RecordSpec(name=f"r{i}", num_bytes=size, group=f"g{i // 3}.{int(scratch)}" if grouped else "", scratch=scratch)
        for i, (size, grouped, scratch) in enumerate(sorted(rows, key=lambda row: row[2]))
    ]
)
weight_lists = st.lists(st.floats(0.05, 20), min_size=1, max_size=4)


def consecutive(records):
    groups = [r.group or r.name for r in records]
    return all(groups.index(g) + groups.count(g) > i for i, g in enumerate(groups))


@settings(max_examples=200, deadline=None)
@given(records=record_lists.filter(consecutive), weights=weight_lists, versions=st.integers(1, 3))
def test_a_saved_layout_loads_as_it_was(records, weights, versions):
    layout = make_layout(records, weights=weights, versions=versions, chunk_bytes=CHUNK)
    loaded = Layout.from_bytes(layout.to_bytes())
    assert loaded.records == layout.records
    assert (loaded.region_bytes, loaded.scratch_bytes) == (layout.region_bytes, layout.scratch_bytes)
    np.testing.assert_array_equal(loaded.chunk_drive, layout.chunk_drive)
    np.testing.assert_array_equal(loaded.chunk_offset, layout.chunk_offset)
    assert loaded.to_bytes() == layout.to_bytes()


@settings(max_examples=200, deadline=None)
@given(weights=st.lists(st.floats(0.2, 5), min_size=2, max_size=3), chunks=st.integers(1, 200), data=st.data())
def test_any_piece_of_a_record_is_spread_by_the_weights_to_within_a_chunk_at_each_end(weights, chunks, data):
    layout = make_layout(
        [RecordSpec(name="x", num_bytes=chunks * CHUNK)], weights=weights, versions=2, chunk_bytes=CHUNK
    )
    first = data.draw(st.integers(0, chunks - 1))
    last = data.draw(st.integers(first + 1, chunks))
    for drive, weight in enumerate(weights):
        got = int((layout.chunk_drive[first:last] == drive).sum())
        assert abs(got - weight / sum(weights) * (last - first)) <= 2


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.2, 5), min_size=2, max_size=4), sizes=st.lists(st.integers(1, 9 * CHUNK), max_size=30)
)
def test_a_whole_store_is_spread_by_the_weights_to_within_a_chunk(weights, sizes):
    records = [RecordSpec(name=f"r{i}", num_bytes=n) for i, n in enumerate([*sizes, CHUNK])]
    layout = make_layout(records, weights=weights, versions=1, chunk_bytes=CHUNK)
    total = sum(layout.region_bytes)
    for weight, used in zip(weights, layout.region_bytes, strict=True):
        assert abs(used - weight / sum(weights) * total) <= 2 * CHUNK


def test_a_group_lies_together_on_every_drive():
    records = [RecordSpec(name=f"{group}.{i}", num_bytes=5000 + i, group=group) for group in "abc" for i in range(40)]
    layout = make_layout(records, weights=[1, 2, 1], versions=2, chunk_bytes=CHUNK)
    for group in "abc":
        records_of_group = layout.group(group)
        chunks = slice(*layout.first_chunk[[records_of_group.start, records_of_group.stop]])
        for drive in range(3):
            own = layout.chunk_drive[chunks] == drive
            starts = layout.chunk_offset[chunks][own]
            assert np.all(np.diff(starts) == 2 * PAGE_BYTES)


def test_chunks_never_share_bytes_and_never_leave_their_file():
    records = [RecordSpec(name=f"r{i}", num_bytes=1 + 7919 * i, scratch=i > 8) for i in range(12)]
    layout = make_layout(records, weights=[3, 1], versions=3, chunk_bytes=CHUNK)
    taken = [np.zeros(layout.data_bytes(d), bool) for d in range(2)]
    for slot in range(3):
        slots = np.full(layout.num_chunks, slot, np.uint8)
        offsets = layout.file_offsets(slice(0, layout.num_chunks), slots)
        for chunk in range(layout.num_chunks):
            if layout.chunk_scratch[chunk] and slot > 0:
                continue
            place = taken[layout.chunk_drive[chunk]][offsets[chunk] : offsets[chunk] + layout.chunk_length[chunk]]
            assert len(place) == layout.chunk_length[chunk]
            assert not place.any()
            place[:] = True


def test_group_offsets_put_every_record_on_a_page_of_its_own():
    records = [RecordSpec(name="a", num_bytes=10, group="g"), RecordSpec(name="b", num_bytes=5000, group="g")]
    layout = make_layout(records, weights=[1], versions=2)
    assert layout.group_offsets("g") == {"a": 0, "b": PAGE_BYTES}
    assert layout.group_bytes("g") == 3 * PAGE_BYTES


def test_an_unknown_record_or_group_is_named():
    layout = make_layout([RecordSpec(name="a", num_bytes=10)], weights=[1], versions=2)
    with pytest.raises(RecordMissing, match="'nothing'"):
        layout.record("nothing")
    with pytest.raises(RecordMissing, match="'nothing'"):
        layout.group("nothing")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "at least one record"),
        ([("a", 1, "", False), ("a", 1, "", False)], "'a' is used twice"),
        ([("", 1, "", False)], "is empty"),
        ([("a", 0, "", False)], "'a' has 0 bytes"),
        ([("a", -1, "", False)], "'a' has -1 bytes"),
        ([("a", 1.5, "", False)], "'a' has 1.5 bytes"),
        ([(5, 1, "", False)], "5 or its group '' is not text"),
        ([("a", 1, "g", False), ("b", 1, "", False), ("c", 1, "g", False)], "'g' are not next to each other"),
        ([("a", 1, "g", False), ("b", 1, "g", True)], "'g' mixes scratch and kept"),
    ],
)
def test_records_that_make_no_sense_are_refused_by_name(records, message):
    specs = [RecordSpec(name=n, num_bytes=b, group=g, scratch=s) for n, b, g, s in records]
    with pytest.raises(ConfigError, match=message):
        make_layout(specs, weights=[1], versions=2)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": []},
        {"weights": [0.0]},
        {"weights": [-1.0, 2.0]},
        {"weights": [float("nan")]},
        {"weights": [float("inf"), 1.0]},
        {"weights": [1.0], "versions": 0},
        {"weights": [1.0], "versions": 9},
        {"weights": [1.0], "chunk_bytes": 1000},
        {"weights": [1.0], "chunk_bytes": 0},
        {"weights": [1.0] * 251},
    ],
)
def test_shapes_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        make_layout([RecordSpec(name="a", num_bytes=1)], **{"versions": 2, **options})


def forge(layout, change):
    """A saved layout whose table or places were changed."""
    payload = layout.to_bytes()
    size = int.from_bytes(payload[:8], "little")
    table = json.loads(payload[8 : 8 + size])
    drives = np.frombuffer(payload[8 + size : 8 + size + layout.num_chunks], "u1").copy()
    offsets = np.frombuffer(payload[8 + size + layout.num_chunks :], "<u8").copy()
    change(table, drives, offsets)
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + drives.tobytes() + offsets.tobytes()


def set_key(key, value):
    return lambda table, drives, offsets: table.__setitem__(key, value)


def set_offset(value):
    return lambda table, drives, offsets: offsets.__setitem__(2, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda table, drives, offsets: drives.__setitem__(0, 2),
        set_offset(0),
        set_offset(PAGE_BYTES + 1),
        set_offset(1 << 40),
        set_offset((1 << 63) - PAGE_BYTES),
        set_offset((1 << 64) - PAGE_BYTES),
        set_key("versions", 0),
        set_key("versions", 200),
        set_key("chunk_bytes", 1000),
        set_key("chunk_bytes", float("inf")),
        set_key("chunk_bytes", 1 << 62),
        set_key("num_drives", 3),
        set_key("region_bytes", [PAGE_BYTES]),
        set_key("region_bytes", [-PAGE_BYTES, PAGE_BYTES]),
        set_key("region_bytes", [1 << 70, 1 << 70]),
        set_key("region_bytes", [0, 0]),
        set_key("groups", []),
        set_key("records", [["a", 1 << 70, 0, 0]]),
        set_key("records", [["a", 0, 0, 0]]),
        set_key("records", [["a", "much", 0, 0]]),
        set_key("records", [["a"]]),
        set_key("records", [[["a"], 1, 0, 0]]),
        set_key("records", []),
        set_key("records", None),
    ],
)
def test_a_forged_layout_is_refused_and_nothing_else_happens(change):
    from lohan.store.sealed import UNUSABLE

    layout = make_layout([RecordSpec(name="a", num_bytes=8 * CHUNK)], weights=[1, 1], versions=2, chunk_bytes=CHUNK)
    with pytest.raises(UNUSABLE):
        Layout.from_bytes(forge(layout, change))


@given(st.binary(max_size=200))
def test_noise_is_never_taken_for_a_layout(noise):
    from lohan.store.sealed import UNUSABLE

    with pytest.raises(UNUSABLE):
        Layout.from_bytes(noise)
