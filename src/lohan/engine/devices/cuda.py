"""An NVIDIA GPU. Written against documented torch calls only, and thin: no machine that builds this project has one.

Nothing here runs at import. Each lane has one stream; an operation issues its work there and waits for that stream
before it counts as done (lane()). All order between lanes is the engine's, as base.py says, so there are no events.
Units take tens of milliseconds, so the gap a wait leaves between two kernels does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lohan.engine.devices.base import Device, check_copy
from lohan.errors import ConfigError, DeviceOutOfMemory
from lohan.sizes import format_bytes

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process, whichever thread copies."""


def open_cuda(name: str, memory_bytes: int | None) -> CudaDevice:
    """The GPU `cuda` or `cuda:N`, or a ConfigError that says why it cannot be used."""
    if not torch.cuda.is_available():
        why = (
            f"this torch ({torch.__version__}) was built without CUDA: install the CUDA build from pytorch.org"
            if torch.version.cuda is None
            else "no GPU or no working driver was found: check that nvidia-smi lists one"
        )
        raise ConfigError(f"device: {name} cannot be used: {why}.\nOr set device: cpu, or device: virtual to try out.")
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device: {name} does not exist: there are {count} GPUs, the last is cuda:{count - 1}.")
    return CudaDevice(name, index, memory_bytes)


class CudaDevice(Device):
    """One GPU: a stream per lane, torch's caching allocator under a limit, the host arena page-locked."""

    separate_memory = True

    def __init__(self, name: str, index: int, memory_bytes: int | None):
        self.name = name
        self.torch_device = torch.device("cuda", index)
        self._lock = threading.Lock()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pinned: dict[int, int] = {}
        self._properties = torch.cuda.get_device_properties(self.torch_device)
        total = self._properties.total_memory
        if memory_bytes is not None and memory_bytes > total:
            raise ConfigError(
                f"gpu_memory is {format_bytes(memory_bytes)} and {self._properties.name} has {format_bytes(total)}. "
                f"Lower gpu_memory to {format_bytes(0.9 * total)}, which leaves room for CUDA itself."
            )
        self._limit = memory_bytes
        if memory_bytes is not None:
            # Limits what the allocator takes from the driver, free blocks it keeps included. The CUDA context and
            # library handles (some hundred MB) come on top and cannot be limited.
            torch.cuda.set_per_process_memory_fraction(memory_bytes / total, self.torch_device)

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        stream = self._stream(name)
        # Device and stream are per thread in torch, so each operation sets its own.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                # The one ordering rule: nothing is done before its stream has run dry. Also after an exception,
                # because kernels and copies already issued still use memory the caller is about to give back.
                # Errors of the work itself surface here. torch releases the GIL while it waits.
                stream.synchronize()

    @contextmanager
    def compute(self, flops: float) -> Iterator[None]:
        # Backward runs in torch's own thread for this GPU, but on the stream each operator's forward ran on, and
        # the lane's stream waits for it before backward() returns. Recompute and backward run in the same lane, so
        # that is one and the same stream and lane() waits for all of it.
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory("A computation") from error

    def empty(self, num_bytes: int) -> Tensor:
        # The allocator keeps blocks per stream and hands a freed block to the same stream at once, while the work
        # queued before still reads it. So memory comes from the pool of the stream of the lane that asks, which has
        # nothing queued when an operation begins. Taking it from another lane's pool would be a race:
        # a temporary freed halfway through a running computation would become the target of a copy.
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(f"A buffer of {format_bytes(num_bytes)}") from error

    def free(self, tensor: Tensor) -> None:
        # The allocator takes the block back when the last reference is dropped, and may hand it to the lane it
        # came from at once. No record_stream is needed, because every lane waits for its stream before an operation
        # is done, and rule 3 of base.py lets nobody drop memory before its last operation is done.
        pass

    def to_device(self, host: Tensor, device: Tensor) -> None:
        check_copy(host, device)
        # On the stream of the calling lane. From page-locked memory this returns at once and `host` is read later:
        # it must stay as it is until lane() has waited. From ordinary memory torch copies through its own staging.
        device.copy_(host, non_blocking=True)

    def to_host(self, device: Tensor, host: Tensor) -> None:
        check_copy(device, host)
        # `host` holds garbage until lane() has waited for the stream; reading it before is the classic silent error.
        host.copy_(device, non_blocking=True)

    @property
    def memory_budget(self) -> int | None:
        return self._limit

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def pin(self, memory: memoryview) -> None:
        address = _address(memory)
        with torch.cuda.device(self.torch_device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)
        if result != runtime.cudaError.success:
            raise ConfigError(
                f"CUDA could not page-lock {format_bytes(memory.nbytes)} of host memory (error {int(result)}). "
                f"Lower host_memory, or raise the limit on locked memory (ulimit -l)."
            )
        self._pinned[address] = memory.nbytes

    def unpin(self, memory: memoryview) -> None:
        self._unregister(_address(memory))

    def seed(self, value: int) -> None:
        super().seed(value)
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(value)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def rng_state_guard(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self.torch_device.index])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "gpu": self._properties.name,
            "total_bytes": self._properties.total_memory,
            "capability": f"{self._properties.major}.{self._properties.minor}",
            "cuda": torch.version.cuda,
        }

    def close(self) -> None:
        try:
            if self._pinned or self._streams:
                # A copy may still be running on memory that is about to be unlocked.
                self.synchronize()
        finally:
            self._streams.clear()
            if self._limit is not None:
                torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)  # it outlives this object
            for address in list(self._pinned):
                self._unregister(address)

    def _stream(self, name: str) -> torch.cuda.Stream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
            return self._streams[name]

    def _unregister(self, address: int) -> None:
        if self._pinned.pop(address, None) is None:
            return
        with torch.cuda.device(self.torch_device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostUnregister(address)
        if result != runtime.cudaError.success:
            raise RuntimeError(
                f"cudaHostUnregister failed (error {int(result)}): was the memory unmapped before unpin()?"
            )

    def _out_of_memory(self, what: str) -> DeviceOutOfMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        live = torch.cuda.memory_allocated(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device)
        budget = total if self._limit is None else self._limit
        return DeviceOutOfMemory(
            f"{what} did not fit: {format_bytes(live)} of the budget of {format_bytes(budget)} is in use by tensors, "
            f"{format_bytes(kept)} is held by torch, and the GPU has {format_bytes(free)} of {format_bytes(total)} "
            f"free.\nRaise gpu_memory, use smaller micro-batches, or close other programs on the GPU."
        )


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
