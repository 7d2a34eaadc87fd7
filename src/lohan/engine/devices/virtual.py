"""A stand-in for a discrete GPU, made of CPU memory: slow links, a memory budget, and poison for every missing wait.

It does the real arithmetic and the real copies, so its results are the cpu device's to the bit; then it waits out, with
the GIL released, what a device of the set rates would have taken. A race that a real GPU would lose once a week is
lost here every time:

- Fresh and freed memory, and the target of a copy until the copy is done, hold 0xFF bytes: NaN in every float format.
- A copy takes its bytes at the end of its time, and fails if they are not the bytes it saw at the start. So a source
  that was not ready yet, or was given back or overwritten too early, cannot pass by luck.
- Random delays before, inside and after operations move the lanes against each other; a seed repeats them.

Each direction's rate holds per calling thread: one lane, one thread, one link.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from lohan.engine.devices.base import Device, check_copy
from lohan.engine.devices.budget import MemoryBudget
from lohan.errors import ConfigError

POISON = 0xFF
"""As bf16, fp16 and fp32 alike, memory full of it is NaN; as an index it is -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualOptions:
    """How fast the stand-in is, and how hard it looks for races. By default: as fast as it can, with poison."""

    flops_per_second: float | None = None
    """Rate of the compute lane. Below what the CPU reaches, or it cannot be kept; None does not wait."""

    to_gpu_bytes_per_second: float | None = None
    to_host_bytes_per_second: float | None = None

    delay_seed: int | None = None
    """Repeats the same delays, lane by lane. None injects none."""

    max_delay_seconds: float = 0.01
    """The longest of the random delays; their mean is a quarter of it."""

    poison: bool = True
    """Costs a few passes over the bytes of every copy; turn it off only where time is what is measured."""

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "to_gpu_bytes_per_second", "to_host_bytes_per_second"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ConfigError(f"{name} is {rate}; a rate must be above 0. Leave it out for no limit.")
        if not self.max_delay_seconds >= 0:
            raise ConfigError(f"max_delay_seconds is {self.max_delay_seconds}; a delay cannot be negative.")


class VirtualDevice(Device):
    """A device with memory, links and a pace of its own, on any machine."""

    name = "virtual"
    separate_memory = True

    def __init__(
        self,
        memory_bytes: int | None = None,
        options: VirtualOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.torch_device = torch.device("cpu")
        self.options = options or VirtualOptions()
        self._budget = MemoryBudget(memory_bytes)
        self._clock = clock
        self._sleep = sleep
        self._here = threading.local()
        self._delays: dict[str, random.Random] = {}
        self._late = {"compute": 0.0, "to_gpu": 0.0, "to_host": 0.0}

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        outer = getattr(self._here, "lane", None)
        self._here.lane = name
        try:
            self._delay()
            yield
            self._delay()
        finally:
            self._here.lane = outer

    @property
    def poisons(self) -> bool:  # type: ignore[override]
        return self.options.poison

    def pause(self, lane: str) -> None:
        if lane:
            with self.lane(f"before {lane}"):
                pass

    @contextmanager
    def compute(self, flops: float) -> Iterator[None]:
        begin = self._clock()
        with ExitStack() as active:
            if self._budget.limit_bytes is not None:
                active.enter_context(self._budget.watch())
            yield
        if self.options.flops_per_second is not None:
            self._wait_until(begin + flops / self.options.flops_per_second, "compute")

    def empty(self, num_bytes: int) -> Tensor:
        tensor = self._budget.allocate(num_bytes)
        if self.options.poison:
            tensor.fill_(POISON)
        return tensor

    def free(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._budget.give_back(storage)
        if self.options.poison:
            # Through a tensor of its own: autograd's version counter must not warn where a real GPU would not.
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        self._copy(host, device, self.options.to_gpu_bytes_per_second, "to_gpu")

    def to_host(self, device: Tensor, host: Tensor) -> None:
        self._copy(device, host, self.options.to_host_bytes_per_second, "to_host")

    @property
    def memory_budget(self) -> int | None:
        return self._budget.limit_bytes

    @property
    def live_bytes(self) -> int:
        return self._budget.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._budget.peak_bytes

    def reset_peak(self) -> None:
        self._budget.reset_peak()

    def describe(self) -> dict[str, Any]:
        # late_seconds: how much longer than its set pace the real work took. Where it is not near zero, the rates
        # are more than this machine can play, and no time measured here means anything.
        return {**super().describe(), **asdict(self.options), "late_seconds": dict(self._late)}

    def _copy(self, source: Tensor, target: Tensor, bytes_per_second: float | None, link: str) -> None:
        check_copy(source, target)
        begin = self._clock()
        end = begin if bytes_per_second is None else begin + source.numel() / bytes_per_second
        if self.options.poison:
            target.fill_(POISON)
            seen = _fingerprint(source)
            self._delay()
            # The passes still to come are like the two just made, so start them that much before the end.
            now = self._clock()
            self._pause(end - now - (now - begin))
            target.copy_(source)
            # Checked on what arrived: a change between a check and the copy could slip through.
            if _fingerprint(target) != seen:
                target.fill_(POISON)
                raise RuntimeError(
                    f"The source of a {link} copy of {source.numel()} bytes changed while it was being copied: "
                    f"it was not ready yet, or was reused too early. A wait is missing."
                )
        else:
            target.copy_(source)
            self._delay()
        if bytes_per_second is not None:
            self._wait_until(end, link)

    def _delay(self) -> None:
        if self.options.delay_seed is None:
            return
        lane = getattr(self._here, "lane", None) or "none"
        # From the seed and the lane's name only: how the threads interleave must not change what a lane draws.
        delays = self._delays.get(lane)
        if delays is None:
            delays = self._delays.setdefault(lane, random.Random(f"{self.options.delay_seed}/{lane}"))
        # Cubed (picked by feel): mostly short, now and then the whole length, so lanes overtake each other far.
        self._pause(self.options.max_delay_seconds * delays.random() ** 3)

    def _wait_until(self, end: float, what: str) -> None:
        left = end - self._clock()
        if left < 0:
            self._late[what] -= left
        self._pause(left)

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)


def _fingerprint(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.numpy().data)
