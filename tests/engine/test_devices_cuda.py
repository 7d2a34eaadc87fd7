"""cuda.py without a GPU: its lines run against a recorder in place of torch.cuda, and the order of calls is checked.

This shows that the calls are made in the order the comments promise. It cannot show that CUDA keeps its part.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lohan.engine.devices import cuda as cuda_module
from lohan.engine.devices import open_device
from lohan.errors import ConfigError, DeviceOutOfMemory

GB = 10**9


class Recorder:
    """Stands in for torch.cuda and writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.available = True
        self.register_result = 0
        self.sync_error: Exception | None = None
        recorder = self

        class Stream:
            def __init__(self, device: torch.device):
                recorder.calls.append(f"new stream on {device}")

            def synchronize(self) -> None:
                recorder.calls.append("synchronize stream")
                if recorder.sync_error:
                    raise recorder.sync_error

        self.Stream = Stream

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, device):
        return SimpleNamespace(name="Test GPU", total_memory=24 * GB, major=8, minor=9)

    def set_per_process_memory_fraction(self, fraction, device):
        self.calls.append(f"fraction {fraction:.2f} on {device}")

    @contextmanager
    def device(self, device):
        self.calls.append(f"enter {device}")
        yield
        self.calls.append(f"leave {device}")

    @contextmanager
    def stream(self, stream):
        self.calls.append("enter stream")
        try:
            yield
        finally:
            self.calls.append("leave stream")

    def synchronize(self, device):
        self.calls.append(f"synchronize {device}")
        if self.sync_error:
            raise self.sync_error

    def memory_allocated(self, device):
        return 3 * GB

    def max_memory_allocated(self, device):
        return 5 * GB

    def memory_reserved(self, device):
        return 6 * GB

    def mem_get_info(self, device):
        return 1 * GB, 24 * GB

    def reset_peak_memory_stats(self, device):
        self.calls.append("reset peak")

    def cudart(self):
        def register(address, size, flags):
            self.calls.append(f"register {size} flags {flags}")
            return self.register_result

        def unregister(address):
            self.calls.append("unregister")
            return self.register_result

        return SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=unregister, cudaError=SimpleNamespace(success=0)
        )


class Bytes:
    """A tensor of bytes that only writes down what is copied into it."""

    dtype = torch.uint8

    def __init__(self, recorder: Recorder, name: str, num_bytes: int = 8):
        self.recorder, self.name, self.num_bytes, self.shape = recorder, name, num_bytes, (num_bytes,)

    def dim(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.num_bytes

    def copy_(self, source: Bytes, *, non_blocking: bool) -> None:
        self.recorder.calls.append(f"copy {source.name} to {self.name} non_blocking={non_blocking}")


class FakeTorch:
    """torch with its `cuda` replaced, and tensors asked for on a GPU made on the CPU."""

    def __init__(self, recorder: Recorder):
        self.cuda = recorder
        self.version = SimpleNamespace(cuda="12.8")
        self.full = False

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, num_bytes, *, dtype, device):
        self.cuda.calls.append(f"empty {num_bytes} on {device}")
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(num_bytes, dtype=dtype)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def fake(monkeypatch, recorder):
    replaced = FakeTorch(recorder)
    monkeypatch.setattr(cuda_module, "torch", replaced)
    return replaced


@pytest.fixture
def device(fake, recorder):
    opened = open_device("cuda:1", memory_bytes=12 * GB)
    recorder.calls.clear()
    return opened


def test_opening_sets_the_allocators_limit_and_closing_lifts_it(fake, recorder):
    device = open_device("cuda", memory_bytes=6 * GB)
    assert device.separate_memory
    assert str(device.torch_device) == "cuda:0"
    device.close()
    assert recorder.calls == ["fraction 0.25 on cuda:0", "fraction 1.00 on cuda:0"]


def test_a_copy_runs_on_its_lanes_stream_and_is_done_before_the_lane_is_left(device, recorder):
    with device.lane("to_gpu"):
        device.to_device(Bytes(recorder, "host"), Bytes(recorder, "gpu"))
    assert recorder.calls == [
        "new stream on cuda:1",
        "enter cuda:1",
        "enter stream",
        "copy host to gpu non_blocking=True",
        "synchronize stream",
        "leave stream",
        "leave cuda:1",
    ]


def test_the_way_back_is_the_same(device, recorder):
    with device.lane("to_host"):
        device.to_host(Bytes(recorder, "gpu"), Bytes(recorder, "host"))
    assert recorder.calls[3:5] == ["copy gpu to host non_blocking=True", "synchronize stream"]


def test_a_lane_keeps_its_stream_and_lanes_do_not_share(device, recorder):
    for name in ("gpu", "to_gpu", "gpu", "to_gpu"):
        with device.lane(name):
            pass
    assert recorder.calls.count("new stream on cuda:1") == 2


def test_a_lane_waits_for_its_stream_also_when_the_operation_fails(device, recorder):
    with pytest.raises(KeyError), device.lane("gpu"):
        raise KeyError
    assert "synchronize stream" in recorder.calls


def test_an_error_of_the_work_itself_surfaces_when_the_lane_is_left(device, recorder):
    recorder.sync_error = RuntimeError("CUDA error: illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"), device.lane("gpu"):
        pass


def test_running_out_of_memory_is_told_with_numbers(device, fake):
    fake.full = True
    with pytest.raises(DeviceOutOfMemory, match=r"A buffer of 2 GB did not fit: 3 GB of the budget of 12 GB"):
        device.empty(2 * GB)
    with pytest.raises(DeviceOutOfMemory, match="smaller micro-batches"), device.compute(1e12):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_comes_from_the_calling_lanes_stream(device, recorder):
    with device.lane("to_gpu"):
        device.free(device.empty(64))
    assert recorder.calls[2:5] == ["enter stream", "empty 64 on cuda:1", "synchronize stream"]


def test_memory_numbers_are_the_allocators(device, recorder):
    assert (device.memory_budget, device.live_bytes, device.peak_bytes) == (12 * GB, 3 * GB, 5 * GB)
    device.reset_peak()
    assert recorder.calls == ["reset peak"]
    assert device.describe()["capability"] == "8.9"


def test_the_arena_is_page_locked_once_and_unlocked_after_everything_has_finished(device, recorder):
    arena = memoryview(bytearray(8192))
    device.pin(arena)
    device.close()
    device.close()
    assert recorder.calls == [
        "enter cuda:1",
        "register 8192 flags 1",
        "leave cuda:1",
        "synchronize cuda:1",
        "fraction 1.00 on cuda:1",
        "enter cuda:1",
        "unregister",
        "leave cuda:1",
        "fraction 1.00 on cuda:1",
    ]


def test_unpin_leaves_nothing_for_close(device, recorder):
    arena = memoryview(bytearray(8192))
    device.pin(arena)
    device.unpin(arena)
    device.unpin(arena)
    device.close()
    assert recorder.calls.count("unregister") == 1


def test_memory_is_unlocked_even_when_waiting_fails(device, recorder):
    device.pin(memoryview(bytearray(8192)))
    recorder.sync_error = RuntimeError("CUDA error: device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        device.close()
    assert "unregister" in recorder.calls


def test_memory_that_cannot_be_page_locked_is_refused(device, recorder):
    recorder.register_result = 2
    with pytest.raises(ConfigError, match="ulimit -l"):
        device.pin(memoryview(bytearray(8192)))


def test_a_failed_unlock_is_not_silent(device, recorder):
    arena = memoryview(bytearray(8192))
    device.pin(arena)
    recorder.register_result = 1
    with pytest.raises(RuntimeError, match="unmapped before unpin"):
        device.unpin(arena)


def test_the_random_state_of_this_gpu_is_guarded(device, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: asked.append(devices))
    device.rng_state_guard()
    assert asked == [[1]]


@pytest.mark.parametrize(
    ("name", "memory_bytes", "says"),
    [("cuda:2", None, "the last is cuda:1"), ("cuda", 30 * GB, r"gpu_memory is 30 GB and Test GPU has 24 GB")],
)
def test_what_the_gpu_cannot_give_is_refused(fake, name, memory_bytes, says):
    with pytest.raises(ConfigError, match=says):
        open_device(name, memory_bytes=memory_bytes)


@pytest.mark.parametrize(("version", "says"), [(None, "install the CUDA build"), ("12.8", "nvidia-smi")])
def test_without_cuda_the_reason_and_the_way_out_are_named(fake, recorder, version, says):
    recorder.available = False
    fake.version.cuda = version
    with pytest.raises(ConfigError, match=f"(?s){says}.*device: cpu"):
        open_device("cuda", memory_bytes=None)
