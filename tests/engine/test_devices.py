"""What every device promises, and what open_device refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lohan.engine.devices import CpuDevice, VirtualDevice, VirtualOptions, open_device
from lohan.errors import ConfigError, LohanError


def ramp(num_bytes: int) -> torch.Tensor:
    return (torch.arange(num_bytes) % 251).to(torch.uint8)


@pytest.fixture(params=["cpu", "virtual"])
def device(request):
    with open_device(request.param, memory_bytes=None) as opened:
        yield opened


def test_bytes_go_there_and_back_unchanged(device):
    sent, back = ramp(10_000), torch.zeros(10_000, dtype=torch.uint8)
    there = device.empty(10_000)
    with device.lane("to_gpu"):
        device.to_device(sent, there)
    with device.lane("to_host"):
        device.to_host(there, back)
    assert torch.equal(back, sent)


def test_memory_is_aligned_for_every_dtype(device):
    for num_bytes in (1, 100, 4096, 1_000_000):
        assert device.empty(num_bytes).data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.zeros(4), torch.zeros(16, dtype=torch.uint8)), (ramp(8), ramp(9)), (ramp(8), ramp(8).view(2, 4))],
    ids=["floats", "sizes", "shapes"],
)
def test_a_copy_that_would_convert_or_broadcast_is_refused(device, source, target):
    with pytest.raises(ValueError, match=r"uint8|bytes"):
        device.to_device(source, target)


def test_the_guard_puts_the_random_state_back(device):
    device.seed(3)
    expected = torch.rand(2)
    device.seed(3)
    with device.rng_state_guard():
        device.seed(99)
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_pinning_and_waiting_are_harmless_where_they_mean_nothing(device):
    memory = memoryview(bytearray(4096))
    device.pin(memory)
    device.synchronize()
    device.unpin(memory)
    device.reset_peak()
    device.close()
    device.close()
    assert device.describe()["device"] == device.name


def test_cpu_has_no_memory_of_its_own():
    device = open_device("cpu", memory_bytes=None)
    assert isinstance(device, CpuDevice)
    assert not device.separate_memory
    memory = device.empty(8)
    device.to_device(memory, memory)
    with device.lane("gpu"), device.compute(1e12):
        pass
    device.free(memory)
    assert (device.memory_budget, device.live_bytes, device.peak_bytes) == (None, 0, 0)


def test_virtual_has_memory_of_its_own():
    device = open_device("virtual", memory_bytes=100, options=VirtualOptions(poison=False))
    assert isinstance(device, VirtualDevice)
    assert device.separate_memory
    assert device.memory_budget == 100
    assert device.describe()["poison"] is False


@pytest.mark.parametrize(
    ("name", "memory_bytes", "options", "says"),
    [
        ("tpu", None, None, "Write cpu, cuda"),
        ("cuda:x", None, None, "Write cpu, cuda"),
        ("virtual", 0, None, "like 20GB"),
        ("cpu", 1000, None, "host_memory"),
        ("cpu", None, VirtualOptions(), "device: virtual"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(name, memory_bytes, options, says):
    with pytest.raises(ConfigError, match=says):
        open_device(name, memory_bytes=memory_bytes, options=options)


@pytest.mark.parametrize("field", ["flops_per_second", "to_gpu_bytes_per_second", "to_host_bytes_per_second"])
def test_a_rate_of_nothing_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        VirtualOptions(**{field: 0})


def test_a_negative_delay_is_refused():
    with pytest.raises(ConfigError, match="max_delay_seconds"):
        VirtualOptions(max_delay_seconds=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_says_what_to_do():
    with pytest.raises(LohanError, match="device: virtual"):
        open_device("cuda", memory_bytes=None)


def test_importing_the_devices_does_not_start_cuda():
    code = "import torch, lohan.engine.devices.cuda; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
