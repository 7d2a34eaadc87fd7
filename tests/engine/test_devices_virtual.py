"""The pace, the poison and the delays of `virtual`, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import threading

import pytest
import torch

from lohan.engine.devices import VirtualDevice, VirtualOptions


class Clock:
    """Time that passes in sleep() alone; `during` runs what another lane would do meanwhile."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []
        self.during = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        self.during()


@pytest.fixture
def clock():
    return Clock()


def make(clock: Clock, **options) -> VirtualDevice:
    return VirtualDevice(None, VirtualOptions(**options), clock=clock, sleep=clock.sleep)


def ramp(num_bytes: int) -> torch.Tensor:
    return (torch.arange(num_bytes) % 251).to(torch.uint8)


@pytest.mark.parametrize("poison", [True, False])
def test_each_direction_takes_its_own_time(clock, poison):
    device = make(clock, to_gpu_bytes_per_second=1000, to_host_bytes_per_second=500, poison=poison)
    host, memory = ramp(2000), device.empty(2000)
    device.to_device(host, memory)
    assert clock.now == pytest.approx(102)
    device.to_host(memory, host)
    assert clock.now == pytest.approx(106)
    assert torch.equal(host, ramp(2000))


def test_without_rates_nothing_waits(clock):
    device = make(clock)
    device.to_device(ramp(100), device.empty(100))
    with device.lane("gpu"), device.compute(1e15):
        pass
    assert clock.naps == []


def test_compute_waits_out_what_the_arithmetic_left(clock):
    device = make(clock, flops_per_second=1e9)
    with device.compute(3e9):
        clock.now += 1
    assert clock.naps == [pytest.approx(2)]
    assert device.describe()["late_seconds"]["compute"] == 0


def test_a_pace_that_was_not_kept_is_reported(clock):
    device = make(clock, flops_per_second=1e9)
    with device.compute(1e9):
        clock.now += 5
    assert clock.naps == []
    assert device.describe()["late_seconds"]["compute"] == pytest.approx(4)


def test_a_failed_computation_does_not_wait(clock):
    device = make(clock, flops_per_second=1)
    with pytest.raises(ZeroDivisionError), device.compute(1000):
        raise ZeroDivisionError
    assert clock.naps == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_fresh_and_freed_memory_is_nan_in_every_float(clock, dtype):
    device = make(clock)
    memory = device.empty(64)
    assert memory.view(dtype).float().isnan().all()
    memory.zero_()
    device.free(memory)
    assert memory.view(dtype).float().isnan().all()


def test_freeing_a_view_poisons_its_whole_allocation(clock):
    device = make(clock)
    memory = device.empty(64).zero_()
    device.free(memory[8:16].view(torch.float32))
    assert (memory == 0xFF).all()


def test_the_target_of_a_copy_is_nan_until_the_copy_is_done(clock):
    device = make(clock, to_gpu_bytes_per_second=1000)
    memory = device.empty(400)
    memory.zero_()
    seen = []
    clock.during = lambda: seen.append(memory.view(torch.float32).isnan().all().item())
    device.to_device(torch.zeros(400, dtype=torch.uint8), memory)
    assert seen == [True]
    assert not memory.view(torch.float32).isnan().any()


def test_a_lane_that_reads_without_waiting_reads_nan():
    copying, looked = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        copying.set()
        assert looked.wait(30)

    device = VirtualDevice(None, VirtualOptions(to_gpu_bytes_per_second=1e-3), clock=lambda: 0.0, sleep=sleep)
    weights = device.empty(400)
    copy = threading.Thread(target=device.to_device, args=(torch.zeros(400, dtype=torch.uint8), weights))
    copy.start()
    assert copying.wait(30)
    early = weights.view(torch.float32).sum()
    looked.set()
    copy.join()
    assert early.isnan()
    assert weights.view(torch.float32).sum() == 0


@pytest.mark.parametrize("position", [0, 50, 99])
def test_a_source_that_changes_while_it_is_copied_is_an_error(clock, position):
    device = make(clock, to_host_bytes_per_second=1000)
    source, target = device.empty(100).zero_(), torch.zeros(100, dtype=torch.uint8)
    clock.during = lambda: source[position].fill_(7)
    with pytest.raises(RuntimeError, match="A wait is missing"):
        device.to_host(source, target)
    assert (target == 0xFF).all()


def test_a_source_that_is_freed_while_it_is_copied_is_an_error(clock):
    device = make(clock, to_host_bytes_per_second=1000)
    source = device.empty(100).zero_()

    def free_too_early() -> None:
        clock.during = lambda: None
        device.free(source)

    clock.during = free_too_early
    with pytest.raises(RuntimeError, match="to_host copy of 100 bytes changed"):
        device.to_host(source, torch.zeros(100, dtype=torch.uint8))


def test_without_rates_an_injected_delay_still_opens_the_copy_to_races(clock):
    device = make(clock, delay_seed=1, max_delay_seconds=1.0)
    source = torch.zeros(100, dtype=torch.uint8)
    clock.during = lambda: source.add_(1)
    with pytest.raises(RuntimeError, match="A wait is missing"), device.lane("to_gpu"):
        device.to_device(source, device.empty(100))


def test_without_poison_memory_is_left_alone(clock):
    device = make(clock, poison=False)
    memory = device.empty(64).zero_()
    device.free(memory)
    assert not memory.any()


def delays_of(seed: int, lanes: list[str]) -> dict[str, list[float]]:
    clock = Clock()
    device = make(clock, delay_seed=seed, max_delay_seconds=1.0)
    drawn: dict[str, list[float]] = {}
    for lane in lanes:
        before = len(clock.naps)
        with device.lane(lane):
            device.to_device(ramp(4), ramp(4))
        drawn.setdefault(lane, []).extend(clock.naps[before:])
    return drawn


def test_a_seed_repeats_a_lanes_delays_however_the_lanes_interleave():
    alternating = delays_of(7, ["gpu", "to_gpu"] * 5)
    in_turn = delays_of(7, ["to_gpu"] * 5 + ["gpu"] * 5)
    assert alternating == in_turn
    assert alternating["gpu"] != alternating["to_gpu"]
    assert delays_of(8, ["gpu"] * 5)["gpu"] != alternating["gpu"]


def test_delays_come_before_inside_and_after_and_stay_below_their_limit():
    drawn = delays_of(3, ["gpu"] * 50)["gpu"]
    assert len(drawn) == 150
    assert min(drawn) > 0
    assert 0.5 < max(drawn) < 1


def test_an_operation_that_fails_leaves_its_lane(clock):
    device = make(clock, delay_seed=1)
    with pytest.raises(KeyError), device.lane("gpu"):
        raise KeyError
    assert len(clock.naps) == 1
    with device.lane("gpu"), device.lane("to_gpu"):
        pass
    assert len(clock.naps) == 5
