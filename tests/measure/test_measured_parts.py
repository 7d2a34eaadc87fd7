"""Every part of a machine's profile really runs, in small. What it finds depends on the machine and is not checked."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from lohan.engine.devices import CpuDevice, VirtualDevice, VirtualOptions
from lohan.errors import StoreError, StoreFull
from lohan.measure import store_rate
from lohan.measure.block_rate import BlockShape, choose_shape, measure_block
from lohan.measure.lane_overhead import measure_op_seconds
from lohan.measure.link_rate import measure_links
from lohan.measure.store_rate import RECORD_BYTES, Streams, measure_store, measure_sustained, temporary_store
from lohan.measure.timing import durations
from lohan.measure.traffic import open_traffic
from lohan.measure.update_rate import measure_update
from lohan.optim import AdamW, Updater, get_format
from lohan.store import Files

TINY = BlockShape(hidden_size=64, tokens=16, head_size=16)
SMALL_STORE = 4 * RECORD_BYTES


def test_work_is_repeated_until_the_time_is_used_up_and_the_first_run_is_not_counted():
    now, runs = 0.0, 0

    def work() -> None:
        nonlocal now, runs
        runs += 1
        now += 5.0 if runs == 1 else 1.0

    assert durations(work, 3.0, clock=lambda: now) == [1.0, 1.0, 1.0]
    assert durations(work, 0.0, clock=lambda: now) == [1.0, 1.0]
    prepared = []

    def before():
        prepared.append(now)
        work()

    assert durations(work, 5.0, before=before, every=2, clock=lambda: now) == [1.0, 1.0, 1.0]
    assert len(prepared) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_runs_as_the_engine_runs_it(dtype):
    before = torch.get_rng_state()
    found = measure_block(CpuDevice(), TINY, dtype=dtype, seconds=0.0)
    assert found.flops_per_second > 0
    assert found.weights_seconds_per_parameter >= 0
    assert 0 <= found.saved_by_keeping <= 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_block_leaves_no_memory_behind_on_its_device():
    device = VirtualDevice(64 << 20)
    measure_block(device, TINY, dtype=torch.float32, seconds=0.0)
    assert device.peak_bytes > 0
    assert device.live_bytes == 0


@pytest.mark.parametrize("budget", [20 << 20, 100 << 20, 400 << 20])
def test_the_block_is_chosen_to_fit_the_device(budget):
    device = VirtualDevice(budget)
    shape = choose_shape(device, torch.float32)
    assert shape.device_bytes(torch.float32) <= budget
    assert choose_shape(device, torch.float32, tokens=48).tokens == 48


def test_what_a_block_takes_is_within_its_estimate():
    shape = BlockShape(hidden_size=256, tokens=256)
    device = VirtualDevice(shape.device_bytes(torch.float32))
    measure_block(device, shape, dtype=torch.float32, seconds=0.0)
    assert device.peak_bytes <= shape.device_bytes(torch.float32)


@pytest.mark.parametrize("state_format", ["split", "fp32"])
def test_updates_and_norms_run(state_format):
    updater = Updater(AdamW(), get_format(state_format), torch.bfloat16)
    found = measure_update(updater, seconds=0.0, piece_elements=4096)
    assert found.parameters_per_second > 0
    assert found.norm_share > 0


def test_work_and_traffic_are_measured_side_by_side_and_nothing_stays(tmp_path: Path):
    updater = Updater(AdamW(), get_format("split"), torch.bfloat16)
    with open_traffic([tmp_path], seconds=0.05, num_bytes=SMALL_STORE) as traffic:
        update = measure_update(updater, seconds=0.1, piece_elements=4096, traffic=traffic)
        block = measure_block(CpuDevice(), TINY, dtype=torch.float32, seconds=0.1, traffic=traffic)
        device = measure_block(VirtualDevice(64 << 20), TINY, dtype=torch.float32, seconds=0.0, traffic=traffic)
    for found in (update, block):
        assert found.shares is not None
        assert 0 < found.shares.work <= 1
        assert 0 < found.shares.drives <= 1
    assert block.singles is not None
    assert min(block.singles) > 0
    assert device.shares is None, "a device of its own computes whatever the cores do"
    assert not list(tmp_path.iterdir())


def test_traffic_flows_while_it_is_asked_for_and_its_shares_are_ratios(tmp_path: Path):
    with open_traffic([tmp_path], seconds=0.05, num_bytes=SMALL_STORE) as traffic:
        with traffic.flowing() as flow:
            assert flow.rate == 0.0
        assert flow.rate > 0
        assert traffic.shares(1.0, 2.0, flow).work == 0.5
        assert traffic.shares(1.0, 0.9, flow).work == 1.0
        with pytest.raises(KeyError), traffic.flowing():
            raise KeyError


def test_copies_run_both_ways_and_give_their_memory_back():
    device = VirtualDevice(8 << 20)
    found = measure_links(device, seconds=0.0, num_bytes=1 << 20)
    assert found.to_gpu > 0
    assert found.to_host > 0
    assert 0 < found.duplex_share <= 1
    assert device.live_bytes == 0


def test_a_paced_link_measures_no_faster_than_its_pace():
    device = VirtualDevice(options=VirtualOptions(to_gpu_bytes_per_second=1e8, to_host_bytes_per_second=2e8))
    found = measure_links(device, seconds=0.0, num_bytes=1 << 20)
    assert found.to_gpu <= 1.01e8
    assert found.to_host <= 2.02e8


def test_lanes_pass_tasks_along():
    assert measure_op_seconds(0.0) > 0


# -- drives -------------------------------------------------------------------------------------------------------


def test_a_store_is_measured_and_gone(tmp_path: Path):
    told: list[float] = []
    found = measure_store([tmp_path], seconds=0.1, num_bytes=SMALL_STORE, tell=told.append)
    assert min(found.read, found.write, found.mixed, found.cpu_seconds_per_byte, found.commit_seconds) > 0
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert not list(tmp_path.iterdir())


def test_a_store_over_several_directories_is_measured_and_gone(tmp_path: Path):
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    found = measure_store(places, seconds=0.1, num_bytes=SMALL_STORE, weights=[2.0, 1.0])
    assert found.mixed > 0
    assert [list(place.iterdir()) for place in places] == [[], []]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_stays_behind_when_measuring_is_cut_off(tmp_path: Path, monkeypatch, error):
    def run(self: Streams, kind: str, seconds: float) -> tuple[int, float]:
        assert list(tmp_path.iterdir()), "there is a store now"
        raise error

    monkeypatch.setattr(Streams, "run", run)
    with pytest.raises(error):
        measure_store([tmp_path], seconds=0.1, num_bytes=SMALL_STORE)
    assert not list(tmp_path.iterdir())


def test_nothing_stays_behind_when_a_drive_fails(tmp_path: Path, monkeypatch):
    def write(self: Files, descriptor: int, pieces: object, offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    def fill_a_broken_drive() -> None:
        with temporary_store([tmp_path], num_bytes=SMALL_STORE) as streams:
            monkeypatch.setattr(Files, "write", write)
            streams.fill()

    with pytest.raises(StoreError):
        fill_a_broken_drive()
    assert not list(tmp_path.iterdir())


def test_a_full_drive_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 30 << 20)
    with pytest.raises(StoreFull, match="Free") as refused:
        measure_store([tmp_path], num_bytes=SMALL_STORE)
    assert str(tmp_path) in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_long_write_ends_with_the_space_it_may_use(tmp_path: Path):
    found = measure_sustained(tmp_path, num_bytes=6 * RECORD_BYTES, window_seconds=0.0)
    assert found.writes.sustained > 0
    assert found.mixed > 0
    assert found.written_bytes >= 6 * RECORD_BYTES
    assert not list(tmp_path.iterdir())


def test_a_long_write_ends_with_its_time(tmp_path: Path):
    found = measure_sustained(tmp_path, num_bytes=40 * RECORD_BYTES, window_seconds=0.0, seconds=0.0)
    assert found.written_bytes < 40 * RECORD_BYTES
    assert not list(tmp_path.iterdir())


def test_a_long_write_stops_when_the_rate_has_fallen_and_settled(tmp_path: Path, monkeypatch):
    """On a clock of its own: after ten records the drive takes four times as long for each."""
    now = 0.0

    def finish(self: Streams, pending, slabs, real=Streams._finish) -> int:
        nonlocal now
        done = real(self, pending, slabs)
        now += 1.0 if done <= 10 * RECORD_BYTES else 4.0
        return done

    monkeypatch.setattr(Streams, "_finish", finish)
    monkeypatch.setattr(Streams, "run", lambda self, kind, seconds: (RECORD_BYTES, 1.0))
    monkeypatch.setattr(store_rate.time, "perf_counter", lambda: now)
    found = measure_sustained(tmp_path, num_bytes=100 * RECORD_BYTES, window_seconds=1.0)
    assert found.writes.settled
    assert found.writes.burst == pytest.approx(RECORD_BYTES)
    assert found.writes.sustained == pytest.approx(RECORD_BYTES / 4)
    assert found.writes.burst_bytes == 10 * RECORD_BYTES
    assert found.written_bytes < 60 * RECORD_BYTES
