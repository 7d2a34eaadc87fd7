"""A hard memory budget over live tensor storages: what makes `virtual` run out of memory like a real device.

Two things count: what was reserved by hand, and every storage an operator creates while watch() is active. Only new
storages count: views, in-place results and memory that came from elsewhere (the host arena, a mapped file) do not.
A storage counts until it dies, wherever that happens: in backward, in another thread, in the garbage collector.

Costs 7 to 15 µs per operator on one 2-core machine, more than half of it torch's own way into a dispatch mode.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.errors import DeviceOutOfMemory
from lohan.sizes import format_bytes


class _Counted(weakref.ref[UntypedStorage]):
    """One storage that counts. torch keeps a storage's Python object as long as the storage, so they die together."""

    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class MemoryBudget:
    """Counts live bytes and refuses what would pass the limit. Safe from any thread."""

    def __init__(self, limit_bytes: int | None, *, device_types: tuple[str, ...] = ("cpu",)):
        self.limit_bytes = limit_bytes
        self.device_types = device_types
        self._lock = threading.Lock()
        self._counted: dict[int, _Counted] = {}
        self._live = 0
        self._peak = 0
        # A storage can die inside any allocation, also one made below while the lock is held. So its callback
        # takes no lock: it leaves the size here, and whoever reads the sum next takes it off.
        self._died: deque[int] = deque()

    @property
    def live_bytes(self) -> int:
        with self._lock:
            return self._settle()

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = self._settle()

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory that counts from now until give_back() or until it dies."""
        self._reserve(num_bytes, "A buffer")
        try:
            # Not torch.empty, which is an operator: inside watch() it would be seen, and counted a second time.
            storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
        except BaseException:
            self._died.append(num_bytes)
            raise
        self._count(storage, num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def give_back(self, storage: UntypedStorage) -> None:
        """Stop counting a storage that may stay alive a little longer. A storage never counted is let pass."""
        with self._lock:
            counted = self._counted.get(id(storage))
            if counted is None:
                return
            if counted.num_bytes < 0:
                raise RuntimeError("Device memory was freed twice: whoever freed it first may not be its owner.")
            self._died.append(counted.num_bytes)
            counted.num_bytes = -1

    def watch(self) -> TorchDispatchMode:
        """Active inside `with`, in this thread (and in a CPU backward, which runs in the thread that calls it)."""
        return _Watch(self)

    def see(self, storage: UntypedStorage, operator: object) -> None:
        """Count a storage that an operator returned, unless it counts already; follow it when it was resized."""
        num_bytes = storage.nbytes()
        counted = self._counted.get(id(storage))
        if counted is None:
            self._reserve(num_bytes, f"The result of {operator}")
            self._count(storage, num_bytes)
        elif 0 <= counted.num_bytes != num_bytes:
            self._reserve(num_bytes - counted.num_bytes, f"The result of {operator}")
            counted.num_bytes = num_bytes

    def knows(self, storage: UntypedStorage) -> bool:
        return id(storage) in self._counted

    def _settle(self) -> int:
        while self._died:
            self._live -= self._died.popleft()
        return self._live

    def _reserve(self, num_bytes: int, what: str) -> None:
        with self._lock:
            live = self._settle()
            limit = self.limit_bytes
            if limit is not None and live + num_bytes > limit:
                raise DeviceOutOfMemory(
                    f"{what} needs {format_bytes(num_bytes)} of device memory and "
                    f"{format_bytes(max(0, limit - live))} is free: {format_bytes(live)} of the budget of "
                    f"{format_bytes(limit)} is in use.\n"
                    f"Raise gpu_memory by at least {format_bytes(live + num_bytes - limit)}, or use smaller "
                    f"micro-batches."
                )
            self._live = live + num_bytes
            self._peak = max(self._peak, self._live)

    def _count(self, storage: UntypedStorage, num_bytes: int) -> None:
        counted = _Counted(storage, self._on_death)
        counted.key = id(storage)
        counted.num_bytes = num_bytes
        self._counted[counted.key] = counted

    def _on_death(self, counted: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(counted, _Counted)
        # The id is not given to another object before this returns.
        self._counted.pop(counted.key, None)
        if counted.num_bytes > 0:
            self._died.append(counted.num_bytes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # flex_attention and the like are passed through and their results seen

    def __init__(self, budget: MemoryBudget):
        super().__init__()  # type: ignore[no-untyped-call]
        self._budget = budget

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keeping the compiler out would import it: 75 MB and seconds at the first operator. Nothing here compiles.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = _returns(func)
        if returns is _VIEWS:
            return result
        budget = self._budget
        try:
            for tensor in _tensors(result):
                if tensor.device.type in budget.device_types:
                    storage = tensor.untyped_storage()
                    # Only an operator that says its result is new may add a storage, and even then some
                    # (aten::_unsafe_view) return their argument's. In-place results are looked at for resizing.
                    if budget.knows(storage) or (returns is _NEW and not _among(storage, args, kwargs)):
                        budget.see(storage, func)
        except DeviceOutOfMemory as error:
            # A traceback keeps the frames it passed. Forget them, or the refused memory lives as long as the error.
            del result, tensor, storage
            raise error.with_traceback(None) from None
        return result


_VIEWS, _CHANGED, _NEW = "views", "changed", "new"
_returns_of: dict[Any, str] = {}


def _returns(func: Any) -> str:
    """What an operator's schema says it returns: only views, arguments changed in place, or something new."""
    known = _returns_of.get(func)
    if known is None:
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is None or any(value.alias_info is None for value in schema.returns):
            known = _NEW
        elif any(value.alias_info.is_write for value in schema.returns):
            known = _CHANGED
        else:
            known = _VIEWS
        _returns_of[func] = known
    return known


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _among(storage: UntypedStorage, args: Any, kwargs: Any) -> bool:
    return any(tensor.untyped_storage() is storage for tensor in _tensors((args, kwargs)))
