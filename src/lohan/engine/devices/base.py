"""What a device is: memory, two copy directions, arithmetic; the same for cpu, virtual and cuda.

The engine has lanes: "gpu" computes, on the thread that asked for the step; "to_gpu" and "to_host" copy, on threads of
their own. A lane runs one operation at a time inside `lane(name)`, and an operation is done only when lane() has been
left, because that is when its work is really finished. So lanes are ordered by the engine's own dependencies and by
nothing else: no events, no record_stream. Three rules follow, and `virtual` is built to make breaking them show:

1. Start an operation only when the operations it depends on are done.
2. What an operation reads must not change, and what it writes must not be read, before it is done.
3. Give memory back (free(), or dropping the last reference) only when the last operation on it is done.

Everything here may be called from any lane's thread; open and close belong to the thread that owns the device.
"""

# ruff: noqa: B027 (what a device need not do is empty here on purpose)
from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class Device(ABC):
    """Where a model computes. Sizes are in bytes, tensors that carry bytes are 1-D uint8 and contiguous."""

    name: str
    """As the user wrote it: cpu, virtual, cuda, cuda:1."""

    torch_device: torch.device
    """What to pass to torch as `device=`."""

    separate_memory: bool
    """False when host memory is device memory: then nothing needs to be copied and nothing should be."""

    poisons: bool = False
    """Whether memory that is given back is to be spoilt, so that using it cannot pass by luck."""

    @abstractmethod
    def lane(self, name: str) -> AbstractContextManager[None]:
        """Enter in a lane's thread around one operation. When it is left, the operation's work is finished."""

    @abstractmethod
    def compute(self, flops: float) -> AbstractContextManager[None]:
        """Around arithmetic, inside lane("gpu"); `flops` is what the arithmetic amounts to."""

    @abstractmethod
    def empty(self, num_bytes: int) -> Tensor:
        """Device memory with undefined content, aligned to 64 bytes or more. Raises DeviceOutOfMemory."""

    @abstractmethod
    def free(self, tensor: Tensor) -> None:
        """Give back the whole allocation `tensor` lies in. No operation on it may be running (rule 3)."""

    @abstractmethod
    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy bytes to the device. `device` holds them, and `host` may be reused, when lane() has been left."""

    @abstractmethod
    def to_host(self, device: Tensor, host: Tensor) -> None:
        """Copy bytes to the host. `host` holds them, and `device` may be reused, when lane() has been left."""

    @property
    def memory_budget(self) -> int | None:
        """The most that live_bytes may reach, or None when nothing limits it."""
        return None

    @property
    def live_bytes(self) -> int:
        return 0

    @property
    def peak_bytes(self) -> int:
        """The most that was live since the start or the last reset_peak()."""
        return 0

    def reset_peak(self) -> None:
        """Start peak_bytes again from what is live now."""

    def pin(self, memory: memoryview) -> None:
        """Page-lock host memory, once, so that copies from and to it can run at the link's full rate."""

    def unpin(self, memory: memoryview) -> None:
        """Undo pin(), before the memory is unmapped."""

    def seed(self, value: int) -> None:
        """Start the random numbers that dropout draws on this device."""
        # torch.manual_seed() would also note, with a formatted stack, what to do once other devices wake up: 1 ms.
        torch.default_generator.manual_seed(value)

    def random_state(self) -> Tensor:
        """Where those random numbers are now, without waiting for the device."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Go on from there."""
        torch.set_rng_state(state)

    def rng_state_guard(self) -> AbstractContextManager[None]:
        """Whatever is drawn or seeded inside, the random state afterwards is the one before."""
        return torch.random.fork_rng(devices=[])

    def pause(self, lane: str) -> None:
        """Before an operation of any of the engine's lanes, those of the host too: time to be overtaken in."""

    def synchronize(self) -> None:
        """Wait for all work on the device, whatever lane it came from."""

    def describe(self) -> dict[str, Any]:
        """Plain values for traces and the doctor."""
        return {"device": self.name, "memory_budget": self.memory_budget, "peak_bytes": self.peak_bytes}

    def close(self) -> None:
        """Give everything back. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_copy(source: Tensor, target: Tensor) -> None:
    """Refuse what would be a conversion or a broadcast: only equal numbers of plain bytes are copied."""
    for tensor in (source, target):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"Copies move 1-D contiguous uint8 tensors, not {tensor.dtype} of shape {tuple(tensor.shape)}. "
                f"Pass tensor.view(-1).view(torch.uint8)."
            )
    if source.numel() != target.numel():
        raise ValueError(f"A copy of {source.numel()} bytes into {target.numel()} bytes cannot be meant.")


NOTHING: AbstractContextManager[None] = nullcontext()
"""nullcontext keeps no state, so one serves every thread."""
