"""Activations on their way between device, host memory and SSD, and back.

What a block leaves for its backward, of one micro-batch, travels together: its input if the Plan sends it away, and
the kept outputs of its heavy operators. What waits in host memory has a slab for each tensor; what goes on to SSD is
packed into one transit slab, written as one record and read back as one. On `cpu` it is used where it lies: copied out
of the heap once, so that what waits long does not leave holes between what comes and goes, and never copied back.

out() and back() run on the copy lanes, write() and read() on the swap lanes; the Schedule orders them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lohan.engine.cut import Input, SavedCall
from lohan.engine.devices.base import Device
from lohan.engine.pools import HostBuffer, Pool, as_tensor
from lohan.engine.replay import Kept
from lohan.errors import PlanInfeasible
from lohan.plan.plan import Plan
from lohan.sizes import format_bytes
from lohan.store import Arena, Handle, RecordSpec, Slab, Store, create_store, open_store, round_up
from lohan.store.store import Observer

ALIGN = 64
_SMALL_BYTES = 4096
"""Random state and other odds and ends stay where they are."""

Place = tuple[int, int]
"""Unit and micro-batch."""


@dataclass(slots=True)
class _Parcel:
    """One tensor that is away."""

    owner: Input | Kept
    stride: tuple[int, ...]
    num_bytes: int
    offset: int = -1
    """In the transit slab; -1 when it has a slab of its own."""
    slab: Slab | None = None


def record_name(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


class Swapper:
    """All activations of a step that are not on the device."""

    def __init__(self, device: Device, arena: Arena, plan: Plan, scratch: Store | None):
        self._device, self._arena, self._plan, self._scratch = device, arena, plan, scratch
        self.transit = Pool(arena, plan.transit_bytes, plan.transit_slabs, poison=device.poisons)
        self._away: dict[Place, list[_Parcel]] = {}
        self._packed: dict[Place, HostBuffer] = {}
        self._arrived: dict[Place, Tensor] = {}
        self._in_use: dict[Place, list[_Parcel]] = {}
        """On a device without memory of its own: what backward works with where it lies."""

    def out(self, place: Place, call: SavedCall) -> None:
        """Copy to host memory what the Plan sends away, and let go of it on the device."""
        parcels = self._away[place] = list(self._address(place, call))
        with self._device.lane("to_host"):
            for parcel in parcels:
                assert parcel.owner.tensor is not None
                self._device.to_host(flatten(parcel.owner.tensor)[0], self._in_host(place, parcel))
        for parcel in parcels:  # only now are the copies finished
            owner = parcel.owner
            assert owner.tensor is not None
            if isinstance(owner, Input):
                owner.check(place[0] - 1)
                owner.version = None
            owner.shape, owner.dtype, owner.tensor = owner.tensor.shape, owner.tensor.dtype, None

    def _address(self, place: Place, call: SavedCall) -> Iterator[_Parcel]:
        """Give every tensor that leaves its place in host memory."""
        packed = 0
        for owner, tier in self._travellers(place[0], call):
            assert owner.tensor is not None
            parcel = _Parcel(owner, flatten(owner.tensor)[1], owner.tensor.nbytes)
            if tier == "ssd":
                parcel.offset, packed = packed, packed + -(-parcel.num_bytes // ALIGN) * ALIGN
                if packed > self._plan.transit_bytes:
                    raise PlanInfeasible(
                        f"A micro-batch of unit {place[0]} sends {format_bytes(packed)} of activations to SSD and the "
                        f"plan has room for {format_bytes(self._plan.transit_bytes)}. Keep fewer of them, or use "
                        "smaller micro-batches."
                    )
                if place not in self._packed:
                    self._packed[place] = self.transit.lease()
            else:
                parcel.slab = self._arena.try_lease(parcel.num_bytes)
                if parcel.slab is None and not self._device.separate_memory:
                    continue  # it can as well stay where it is
                if parcel.slab is None:
                    raise PlanInfeasible(
                        f"The activations of unit {place[0]} need {format_bytes(parcel.num_bytes)} more host memory "
                        "than is free. Raise host_memory, or use fewer or shorter micro-batches."
                    )
            yield parcel

    def _in_host(self, place: Place, parcel: _Parcel) -> Tensor:
        if parcel.slab is not None:
            return as_tensor(parcel.slab.view)
        return self._packed[place].tensor[parcel.offset : parcel.offset + parcel.num_bytes]

    def _travellers(self, unit: int, call: SavedCall) -> Iterator[tuple[Input | Kept, str]]:
        tiers, tier = self._plan.tiers(unit), self._plan.input_tier(unit)
        for one in call.inputs:
            if one.leaf is not None and tier in tiers and _can_travel(one.tensor, 1):
                yield one, tier
        for kept in call.recording.parcels() if call.recording is not None else ():
            if kept.tier in tiers and _can_travel(kept.tensor, _SMALL_BYTES):
                yield kept, kept.tier

    def write(self, place: Place) -> Handle:
        """Send a packed slab on to SSD; it is free again when it is there."""
        assert self._scratch is not None
        packed = self._packed.pop(place, None)
        if packed is None:
            return finished()
        handle = self._scratch.write(record_name(place), packed.view[: round_up(self._plan.transit_bytes)])
        handle.then(lambda _: packed.release())
        return handle

    def read(self, place: Place) -> Handle:
        assert self._scratch is not None
        if not any(parcel.offset >= 0 for parcel in self._away[place]):
            return finished()
        packed = self._packed[place] = self.transit.lease()
        return self._scratch.read(record_name(place), packed.view[: round_up(self._plan.transit_bytes)])

    def back(self, place: Place) -> None:
        """Bring everything back to the device."""
        parcels = self._away.pop(place)
        if not self._device.separate_memory:
            for parcel in parcels:
                _restore(parcel, self._in_host(place, parcel))
            self._in_use[place] = parcels  # until free()
            return
        if parcels:
            memory = self._arrived[place] = self._device.empty(sum(_padded(parcel) for parcel in parcels))
            start = 0
            with self._device.lane("to_gpu"):
                for parcel in parcels:
                    target = memory[start : start + parcel.num_bytes]
                    self._device.to_device(self._in_host(place, parcel), target)
                    _restore(parcel, target)
                    start += _padded(parcel)
        self._give_back(place, parcels)  # only now are the copies finished

    def _give_back(self, place: Place, parcels: Sequence[_Parcel]) -> None:
        for parcel in parcels:
            if parcel.slab is not None:
                parcel.slab.release()
        packed = self._packed.pop(place, None)
        if packed is not None:
            packed.release()

    def free(self, place: Place) -> None:
        """Backward is done with them."""
        memory = self._arrived.pop(place, None)
        if memory is not None:
            self._device.free(memory)
        parcels = self._in_use.pop(place, None)
        if parcels is not None:
            self._give_back(place, parcels)

    def clear(self) -> None:
        """Let go of whatever a step that failed has left."""
        for parcels in self._away.values():
            for parcel in parcels:
                if parcel.slab is not None:
                    parcel.slab.release()
        self._away.clear()
        for packed in self._packed.values():
            packed.release()
        self._packed.clear()
        self._arrived.clear()


def _padded(parcel: _Parcel) -> int:
    return -(-parcel.num_bytes // ALIGN) * ALIGN


def _restore(parcel: _Parcel, memory: Tensor) -> None:
    owner = parcel.owner
    assert owner.dtype is not None
    assert owner.shape is not None
    owner.tensor = memory.view(owner.dtype).as_strided(owner.shape, parcel.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor's bytes in the order they lie in, and the strides that make the tensor of them again."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8), tensor.stride()


def _can_travel(tensor: Tensor | None, least_bytes: int) -> bool:
    """A view with gaps stays where it is: packed, it would come back with other strides, and kernels with others may
    sum in another order."""
    assert tensor is not None
    return tensor.nbytes >= least_bytes and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory without gaps, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def finished() -> Handle:
    """A handle with nothing to wait for."""
    handle = Handle("nothing")
    handle.finish()
    return handle


@contextmanager
def open_scratch(
    directories: Sequence[Path],
    plan: Plan,
    places: Sequence[Place],
    *,
    weights: Sequence[float],
    observer: Observer | None,
) -> Iterator[Store | None]:
    """Room on the drives for activations, for as long as it is open; None if the plan sends none there."""
    if not places:
        yield None
        return
    folders = [directory / "activations" for directory in directories]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir()
    records = [RecordSpec(name=record_name(p), num_bytes=plan.transit_bytes, scratch=True) for p in places]
    shares = [max(weight, 1.0) for weight in weights]  # a small store may have nothing on its slowest drive
    try:
        create_store(folders, records, versions=1, weights=shares)
        with open_store(folders, observer=observer) as store:
            store.begin(1)
            yield store
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
