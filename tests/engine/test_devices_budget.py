"""What counts as device memory on `virtual`, for how long, and what happens when there is no more."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from lohan.engine.devices import DeviceOutOfMemory, VirtualDevice

FLOAT = 4


@pytest.fixture
def device():
    return VirtualDevice(1_000_000)


def test_buffers_count_until_they_are_freed(device):
    first, second = device.empty(1000), device.empty(500)
    assert device.live_bytes == 1500
    device.free(first)
    assert device.live_bytes == 500
    device.free(second)
    assert (device.live_bytes, device.peak_bytes) == (0, 1500)


def test_a_buffer_that_was_only_dropped_counts_no_longer(device):
    buffer = device.empty(1000)
    view = buffer.view(torch.float32)[:10]
    del buffer
    assert device.live_bytes == 1000
    del view
    assert device.live_bytes == 0


def test_a_freed_buffer_that_dies_later_is_taken_off_once(device):
    buffer = device.empty(1000)
    other = device.empty(10)
    device.free(buffer)
    del buffer
    assert device.live_bytes == 10
    device.free(other)


def test_freeing_twice_is_an_error(device):
    buffer = device.empty(1000)
    device.free(buffer)
    with pytest.raises(RuntimeError, match="freed twice"):
        device.free(buffer)
    assert device.live_bytes == 0


def test_results_count_and_stay_counted_after_the_computation(device):
    with device.compute(0):
        kept = torch.zeros(100) + 1
    assert device.live_bytes == 100 * FLOAT
    assert device.peak_bytes == 200 * FLOAT
    del kept
    assert device.live_bytes == 0


def test_a_result_can_be_freed_by_hand(device):
    with device.compute(0):
        kept = torch.zeros(100)
    device.free(kept)
    assert device.live_bytes == 0
    assert kept.isnan().all()


def test_views_and_in_place_results_add_nothing(device):
    with device.compute(0):
        base = torch.zeros(10, 10)
        views = [base.view(100), base.t(), base[2:5], base.detach(), base.expand(3, 10, 10), *base.split(5)]
        base.add_(1).mul_(2)
        torch.add(base, 1, out=base)
        views.append(torch.ops.aten._unsafe_view(base, [100]))
    assert device.live_bytes == 100 * FLOAT
    del base
    assert device.live_bytes == 100 * FLOAT
    del views
    assert device.live_bytes == 0


def test_memory_from_elsewhere_never_counts(device):
    arena = torch.frombuffer(bytearray(400), dtype=torch.float32)
    weight = nn.Parameter(torch.ones(100))
    with device.compute(0):
        views = [arena.view(10, 10), torch.ops.aten._unsafe_view(arena, [10, 10]), weight.detach(), weight.t()]
        arena.add_(1)
    assert len(views) == 4
    assert device.live_bytes == 0


def test_every_result_of_an_operator_counts(device):
    with device.compute(0):
        values, indices = torch.arange(50.0).sort()
        assert device.live_bytes == 50 * (FLOAT + 8)
        pieces = torch._foreach_add([values, values], 1)
    assert device.live_bytes == 50 * (3 * FLOAT + 8)
    del values, indices, pieces


def test_a_buffer_that_grows_in_place_is_followed(device):
    with device.compute(0):
        out = torch.empty(0)
        torch.add(torch.ones(50), 1, out=out)
        assert device.live_bytes == 50 * FLOAT
        kept = torch.empty(10)
        kept.resize_(100)
    assert device.live_bytes == 150 * FLOAT


def test_what_autograd_saves_counts_until_backward_gives_it_back(device):
    x = torch.ones(100, requires_grad=True)
    with device.compute(0):
        loss = x.exp().sum()
        assert device.live_bytes == 101 * FLOAT
        loss.backward()
    del loss
    assert device.live_bytes == 100 * FLOAT  # x.grad, made in backward
    x.grad = None
    assert device.live_bytes == 0


def test_backward_runs_out_of_memory_too():
    x = torch.ones(1000, requires_grad=True)
    device = VirtualDevice(10_000)
    with device.compute(0):
        loss = x.exp().sum()
        held = device.empty(4000)
        assert device.live_bytes == 8004
        with pytest.raises(DeviceOutOfMemory):
            loss.backward()
    device.free(held)
    del loss
    gc.collect()
    assert device.live_bytes == 0


def test_a_buffer_over_the_budget_is_refused_with_numbers():
    device = VirtualDevice(1_000_000)
    held = device.empty(900_000)
    with pytest.raises(DeviceOutOfMemory) as refused:
        device.empty(300_000)
    assert "needs 300 kB" in str(refused.value)
    assert "100 kB is free" in str(refused.value)
    assert "by at least 200 kB" in str(refused.value)
    assert (device.live_bytes, device.peak_bytes) == (900_000, 900_000)
    device.free(held)
    assert device.empty(1_000_000).numel() == 1_000_000


def test_a_refused_result_is_gone_even_while_the_error_is_kept(device):
    with device.compute(0):
        small = torch.zeros(1000)
        with pytest.raises(DeviceOutOfMemory, match=r"aten\.repeat") as refused:
            small.repeat(1000)
        assert device.live_bytes == 1000 * FLOAT
        assert device.peak_bytes <= 1_000_000
        small.repeat(100)
    del refused, small  # the error's traceback does hold what the operator was given
    assert device.live_bytes == 0


def test_the_peak_starts_again_from_what_is_live(device):
    kept, passing = device.empty(100), device.empty(1000)
    device.free(passing)
    device.reset_peak()
    assert device.peak_bytes == 100
    device.free(kept)


def test_without_a_budget_only_buffers_are_counted():
    device = VirtualDevice(None)
    with device.compute(0):
        kept = torch.zeros(100)
    buffer = device.empty(10)
    assert device.live_bytes == 10
    device.free(buffer)
    del kept


def test_storages_that_die_in_other_threads_and_cycles_are_taken_off(device):
    with device.compute(0):
        cycle: list[object] = [torch.zeros(100)]
        cycle.append(cycle)
        handed = [torch.zeros(100)]
    thread = threading.Thread(target=handed.clear)
    thread.start()
    thread.join()
    assert device.live_bytes == 100 * FLOAT
    del cycle
    gc.collect()
    assert device.live_bytes == 0


def test_threads_that_allocate_together_never_lose_a_byte():
    device = VirtualDevice(10**9)

    def work() -> None:
        for _ in range(200):
            with device.compute(0):
                torch.ones(10).mul(2)
            device.free(device.empty(64))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.live_bytes == 0


def test_counting_changes_no_bit_of_the_arithmetic(device):
    def step(counted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        x = torch.randn(2, 8, 32, requires_grad=True)
        if counted:
            with device.compute(0):
                layer(x).square().mean().backward()
        else:
            layer(x).square().mean().backward()
        return [t.grad for t in [x, *layer.parameters()]]

    for plain, counted in zip(step(False), step(True), strict=True):
        assert torch.equal(plain, counted)
