"""Equal slabs of host memory for one purpose, cut from the arena at start and handed round.

Each purpose (weights, state, gradients) has a pool of its own, so that one can never take the memory another
needs to make progress: that is what keeps the lanes free of deadlock, whatever their timing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from lohan.store import Arena, Slab


def as_tensor(memory: memoryview) -> Tensor:
    """The same bytes as a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8)


class HostBuffer:
    """Bytes of host memory: a tensor for arithmetic, a memoryview for the store."""

    __slots__ = ("_pool", "tensor", "view")

    def __init__(self, view: memoryview, pool: Pool | None = None):
        self.view = view
        self.tensor = as_tensor(view)
        # A pool holds its buffers. If they held it too, its memory would stay until Python looks for garbage.
        self._pool = None if pool is None else weakref.ref(pool)

    @property
    def of_pool(self) -> bool:
        return self._pool is not None

    def release(self) -> None:
        pool = None if self._pool is None else self._pool()
        if pool is not None:
            pool.give_back(self)


class Pool:
    """A fixed number of slabs. With `poison`, all free ones hold bytes that are NaN in every float format."""

    def __init__(self, arena: Arena, slab_bytes: int, num_slabs: int, *, poison: bool = False):
        self._poison = poison
        self._slabs: list[Slab] = [arena.lease(slab_bytes) for _ in range(num_slabs)] if slab_bytes else []
        self._free = deque(HostBuffer(slab.padded, self) for slab in self._slabs)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        if poison:
            for buffer in self._free:
                buffer.tensor.fill_(0xFF)

    def lease(self) -> HostBuffer:
        """Wait for a slab. Raises the run's error if it fails meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._free.popleft()

    def has_free(self) -> bool:
        return bool(self._free)

    def is_exhausted(self) -> bool:
        """Whether there are slabs and all of them are leased: whoever wants one has to wait."""
        return bool(self._slabs) and not self._free

    def give_back(self, buffer: HostBuffer) -> None:
        if self._poison:
            buffer.tensor.fill_(0xFF)
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
