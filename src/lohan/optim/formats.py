"""How master weights and moments are stored between updates.

A format says which arrays a parameter keeps beside its wire weight, and turns them into f32 for the update and back.
Three are known; bytes per parameter with AdamW, without the 2 of the wire:

    fp32           12   master f32, moments f32
    split          10   remainder int16, moments f32; bf16 wire only, loses nothing
    bf16-moments    6   remainder int16 (master f32 for fp16), moments bf16; rounds the moments every step

With an fp32 wire the wire weight is the master, so none is stored. A new format is one class: `arrays`, and `unpack`
and `pack` where its arrays are not plain numbers, listed in FORMATS. Formats hold no state; safe from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lohan.errors import ConfigError
from lohan.optim.optimizers import Optimizer
from lohan.optim.rounding import join_master, round_to_wire, split_master

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ArraySpec(NamedTuple):
    """One stored array, with one element per parameter."""

    name: str
    dtype: torch.dtype


class Scratch:
    """Named f32 buffers of one block's length, allocated at first use and kept: one owner, one thread at a time."""

    def __init__(self, num_elements: int):
        self.num_elements = num_elements
        self._whole: dict[str, Tensor] = {}

    def f32(self, name: str, num_elements: int) -> Tensor:
        whole = self._whole.get(name)
        if whole is None:
            whole = self._whole[name] = torch.empty(self.num_elements)
        return whole if num_elements == self.num_elements else whole[:num_elements]

    def int32(self, name: str, num_elements: int) -> Tensor:
        return self.f32(name, num_elements).view(torch.int32)


class StateFormat(ABC):
    """What is stored. The default unpack and pack follow the arrays: a `remainder` or a `master`, or neither when
    the wire weight is the master; every other array is a moment, stored in its own dtype."""

    name: ClassVar[str]

    @abstractmethod
    def arrays(self, moments: tuple[str, ...], wire: torch.dtype) -> tuple[ArraySpec, ...]:
        """The arrays kept beside a wire weight of this dtype. Raises ConfigError where the two do not go together."""

    def unpack(self, wire: Tensor, arrays: Mapping[str, Tensor], scratch: Scratch) -> tuple[Tensor, dict[str, Tensor]]:
        """The f32 master and moments of one block: the stored arrays themselves where they are f32, else scratch."""
        num = wire.numel()
        if "remainder" in arrays:
            master = scratch.f32("master", num)
            join_master(wire, arrays["remainder"], master, scratch.int32("bits", num))
        else:
            master = arrays.get("master", wire)
        moments = {}
        for name, stored in arrays.items():
            if name in ("remainder", "master"):
                continue
            moments[name] = stored
            if stored.dtype != torch.float32:
                moments[name] = scratch.f32(name, num).copy_(stored)
        return master, moments

    def pack(
        self,
        master: Tensor,
        moments: Mapping[str, Tensor],
        wire: Tensor,
        arrays: Mapping[str, Tensor],
        scratch: Scratch,
    ) -> None:
        """Store what unpack gave, after the update: new wire weight and arrays, in place. May spoil `master`."""
        if "remainder" in arrays:
            split_master(master, wire, arrays["remainder"], master.view(torch.int32))
        elif "master" in arrays:
            _store(master, arrays["master"])
            round_to_wire(master, wire, scratch.int32("bits", wire.numel()))
        else:
            _store(master, wire)
        for name, values in moments.items():
            _store(values, arrays[name])


def _store(values: Tensor, stored: Tensor) -> None:
    if values is not stored:
        stored.copy_(values)


class Fp32(StateFormat):
    name = "fp32"

    def arrays(self, moments: tuple[str, ...], wire: torch.dtype) -> tuple[ArraySpec, ...]:
        return (*_plain_master(wire), *(ArraySpec(name, torch.float32) for name in moments))


class Split(StateFormat):
    name = "split"

    def arrays(self, moments: tuple[str, ...], wire: torch.dtype) -> tuple[ArraySpec, ...]:
        if wire != torch.bfloat16:
            raise ConfigError(
                f"state_format is split and the wire dtype is {_dtype_name(wire)}: only a bfloat16 weight is the top "
                "half of its master.\nSet state_format: fp32, or the wire dtype to bfloat16."
            )
        return (ArraySpec("remainder", torch.int16), *(ArraySpec(name, torch.float32) for name in moments))


class Bf16Moments(StateFormat):
    """Moments rounded to bf16 after every step. A change below half a unit of bf16 (0.2 to 0.4 %) is rounded away, so
    with beta2 = 0.999 exp_avg_sq can rise but never fall, and steps stay small after a burst of large gradients. Use
    beta2 <= 0.99 where that matters."""

    name = "bf16-moments"

    def arrays(self, moments: tuple[str, ...], wire: torch.dtype) -> tuple[ArraySpec, ...]:
        master = (ArraySpec("remainder", torch.int16),) if wire == torch.bfloat16 else _plain_master(wire)
        return (*master, *(ArraySpec(name, torch.bfloat16) for name in moments))


FORMATS: dict[str, StateFormat] = {known.name: known for known in (Fp32(), Split(), Bf16Moments())}


def get_format(name: str) -> StateFormat:
    """The format of this name, or a ConfigError that lists them."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"There is no state_format {name!r}. Set state_format to one of: {', '.join(FORMATS)}."
        ) from None


def default_format(wire: torch.dtype) -> StateFormat:
    """The smallest format that loses nothing."""
    return FORMATS["split"] if wire == torch.bfloat16 else FORMATS["fp32"]


def bytes_per_parameter(state_format: StateFormat, optimizer: Optimizer, wire: torch.dtype) -> int:
    """Bytes of state kept for each parameter, the wire weight not included."""
    return sum(spec.dtype.itemsize for spec in state_format.arrays(optimizer.moments, wire))


def _plain_master(wire: torch.dtype) -> tuple[ArraySpec, ...]:
    return () if wire == torch.float32 else (ArraySpec("master", torch.float32),)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
