"""A model whose forward works although most of its weights are not in memory.

The forward is the model's own, called as often as anybody likes, with key-value caches or without. When it reaches a
part (what comes before the blocks, each block, what comes after them) that part's weights are put in place, and the
next part's are read meanwhile. Parts that fit into the budget are read once and stay. For forward only, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lohan.errors import PlanInfeasible
from lohan.generate.weights import Weights
from lohan.models.installer import Installer
from lohan.models.units import ParamSpec, Units
from lohan.sizes import format_bytes

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Residency:
    """Which parts stay in memory, and how many are on their way at once."""

    resident: frozenset[int]
    slots: int
    slot_bytes: int
    total_bytes: int


def choose_residency(sizes: Sequence[int], budget: int) -> Residency:
    """The most bytes that can stay beside two slots for the others, or beside one where two do not fit.

    A slot must hold the largest part that is streamed, so some of the largest stay first. PlanInfeasible if not even
    the largest part fits.
    """
    if sum(sizes) <= budget:
        return Residency(frozenset(range(len(sizes))), 0, 0, sum(sizes))
    order = sorted(range(len(sizes)), key=lambda part: -sizes[part])
    for slots in (2, 1):
        found = [_fill(sizes, order, first, slots, budget) for first in range(len(sizes))]
        feasible = [one for one in found if one is not None]
        if feasible:
            return max(feasible, key=lambda one: sum(sizes[part] for part in one.resident))
    raise PlanInfeasible(
        f"memory is {format_bytes(budget)} and the largest part of this model takes {format_bytes(max(sizes))}. "
        f"Set memory to {format_bytes(1.02 * max(sizes))} or more; with {format_bytes(2.04 * max(sizes))} reading "
        "overlaps computing."
    )


def _fill(sizes: Sequence[int], order: Sequence[int], first: int, slots: int, budget: int) -> Residency | None:
    """The `first` largest parts stay, and of the others as many as fit."""
    slot = sizes[order[first]]
    resident = set(order[:first])
    taken = sum(sizes[part] for part in resident) + slots * slot
    if taken > budget:
        return None
    for part in order[first + 1 :]:
        if taken + sizes[part] <= budget:
            resident.add(part)
            taken += sizes[part]
    return Residency(frozenset(resident), slots, slot, taken)


class StreamedModel:
    """While this is entered, model(...) works. `memory_bytes` is for weights; caches and activations come on top."""

    def __init__(self, model: nn.Module, units: Units, weights: Weights, *, memory_bytes: int, device: torch.device):
        self.model = model
        self._weights, self._device = weights, device
        self._parts = _parts(units)
        sizes = [_num_bytes(part) for part in self._parts]
        self.residency = choose_residency(sizes, memory_bytes)
        tied = {param.name for param in units.embedding.params if param.name in units.tied}
        if 0 in self.residency.resident:  # then the head finds them in place
            self._parts[-1] = [param for param in self._parts[-1] if param.name not in tied]
        self._streamed = [part for part in range(len(self._parts)) if part not in self.residency.resident]
        blocks = model.get_submodule(units.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = list(blocks)
        self._installer = Installer(model, units)
        self._resident: dict[int, dict[str, Tensor]] = {}
        self._slots: list[Tensor] = []
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._in_place: int | None = None
        """The part that was streamed last."""

        self._next_slot = 0
        self._owned = ExitStack()

    def __enter__(self) -> StreamedModel:
        with ExitStack() as owned:
            self._reader = owned.enter_context(ThreadPoolExecutor(1, thread_name_prefix="lohan-read"))
            owned.callback(self._installer.uninstall_all)
            owned.callback(self._let_go)
            self._slots = [
                torch.empty(self.residency.slot_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(self.residency.slots)
            ]
            for part in self.residency.resident:
                memory = torch.empty(_num_bytes(self._parts[part]), dtype=torch.uint8, device=self._device)
                self._resident[part] = self._read(part, memory)
                self._install(self._resident[part])
            for index, block in enumerate(self._blocks):
                before = block.__dict__.get("forward")
                block.__dict__["forward"] = self._wrapped(index, block.forward)
                owned.callback(_put_back, block, before)
            hook = self.model.register_forward_pre_hook(lambda *_: self._reach(0))
            owned.callback(hook.remove)
            original = type(self.model)
            # What is on meta between two uses would be taken for the model's device.
            device = self._device
            self.model.__class__ = type(original.__name__, (original,), {"device": property(lambda _: device)})
            owned.callback(setattr, self.model, "__class__", original)
            self._owned = owned.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    def _let_go(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            if not self._ahead[1].cancelled():
                self._ahead[1].exception()  # nothing may still be filling memory that is given back
        self._ahead, self._slots, self._resident = None, [], {}

    def _wrapped(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._reach(index + 1)
            result = original(*args, **kwargs)
            if index == len(self._blocks) - 1:
                self._reach(len(self._parts) - 1)
            return result

        return forward

    def _reach(self, part: int) -> None:
        """Put this part in place, take the one before out, and start reading the next."""
        if part in self.residency.resident:
            return
        if self._in_place is not None:
            for param in self._parts[self._in_place]:
                self._installer.uninstall_param(param.name)
        if self._ahead is None or self._ahead[0] != part:
            self._let_ahead_finish()
            self._start(part)
        assert self._ahead is not None
        tensors = self._ahead[1].result()
        self._ahead = None
        self._install(tensors)
        self._in_place = part
        if self.residency.slots > 1:
            place = self._streamed.index(part)
            self._start(self._streamed[(place + 1) % len(self._streamed)])

    def _let_ahead_finish(self) -> None:
        if self._ahead is not None:
            self._ahead[1].result()
            self._ahead = None

    def _start(self, part: int) -> None:
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self._slots)
        self._ahead = part, self._reader.submit(self._read, part, slot)

    def _read(self, part: int, memory: Tensor) -> dict[str, Tensor]:
        tensors, at = {}, 0
        for param in self._parts[part]:
            size = param.num_elements * param.dtype.itemsize
            tensors[param.name] = memory[at : at + size].view(param.dtype).view(param.shape)
            at += _aligned(size)
        self._weights.read(tensors)
        return tensors

    def _install(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._installer.install_param(name, tensor)


def _parts(units: Units) -> list[list[ParamSpec]]:
    """What is needed at once: embedding, every block, head with the weights it shares with the embedding."""
    shared = [param for param in units.embedding.params if param.name in units.tied]
    return [*([*unit.params] for unit in units.units[:-1]), [*units.head.params, *shared]]


def _num_bytes(params: Sequence[ParamSpec]) -> int:
    return sum(_aligned(param.num_elements * param.dtype.itemsize) for param in params)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _put_back(block: nn.Module, before: Callable[..., Any] | None) -> None:
    if before is None:
        block.__dict__.pop("forward", None)
    else:
        block.__dict__["forward"] = before
