"""The compiled update, called through ctypes. The call releases the GIL and shares nothing with other calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lohan.optim.native.team import torch_team
from lohan.optim.optimizers import Adam

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""What weights, moments and gradients may be, and how update.c calls them."""

_MAX_SHARES = 256
_MAX_STEP = 1 << 24
"""torch counts steps in f32, which stops there."""

_F32_MAX = torch.finfo(torch.float32).max

Range = tuple[int, int]
"""Elements from the first up to the second."""


class Numbers(NamedTuple):
    """What an update is called with beside tensors."""

    step: int
    lr: float
    weight_decay: float
    multipliers: tuple[Tensor | float, ...] = ()


class Update(ctypes.Structure):
    """`struct update` in update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("wire", "remainder", "master", "exp_avg", "exp_avg_sq", "grad")),
        ("multipliers", ctypes.POINTER(ctypes.c_float)),
        *((name, ctypes.c_int64) for name in ("num", "step")),
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_int32) for name in ("wire_dtype", "moment_dtype", "grad_dtype", "num_multipliers")),
        *((name, ctypes.c_int32) for name in ("decoupled", "lanes")),
    )


class Kernel:
    """One optimizer's compiled update on one kind of stored state. Holds nothing; safe from any thread."""

    def __init__(self, library: ctypes.CDLL, optimizer: Adam, lanes: int):
        self._call, self._split = library.lohan_update, library.lohan_split
        self._optimizer, self._lanes = optimizer, lanes

    def split(self, master: Tensor, wire: Tensor, remainder: Tensor) -> None:
        """`split_master` of lohan.optim.rounding in one pass, on this core; all contiguous and of one length."""
        self._split(master.data_ptr(), wire.data_ptr(), remainder.data_ptr(), wire.numel())

    def update(
        self,
        wire: Tensor,
        arrays: Mapping[str, Tensor],
        grad: Tensor,
        numbers: Numbers,
        *,
        num_threads: int | None = None,
        in_team: bool = False,
    ) -> list[Range]:
        """Update in place all but the ranges returned: from where a NaN comes up, or all that is not for this kernel.

        `num_threads` is torch's unless given. `in_team`: torch's own threads do it, where they can be had.
        """
        num = wire.numel()
        multipliers = [float(multiplier) for multiplier in numbers.multipliers]
        if (
            num == 0
            or not 1 <= numbers.step <= _MAX_STEP
            or not all(abs(multiplier) <= _F32_MAX for multiplier in multipliers)
            or not all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in (wire, grad))
            or any(tensor.device.type != "cpu" for tensor in (wire, grad, *arrays.values()))
        ):
            return [(0, num)]
        update = Update(
            wire=wire.data_ptr(),
            grad=grad.data_ptr(),
            **{name: array.data_ptr() for name, array in arrays.items()},
            multipliers=(ctypes.c_float * len(multipliers))(*multipliers),
            num=num,
            step=numbers.step,
            lr=float(numbers.lr),
            beta1=self._optimizer.betas[0],
            beta2=self._optimizer.betas[1],
            eps=self._optimizer.eps,
            weight_decay=float(numbers.weight_decay),
            wire_dtype=DTYPES[wire.dtype],
            moment_dtype=DTYPES[arrays["exp_avg"].dtype],
            grad_dtype=DTYPES[grad.dtype],
            num_multipliers=len(multipliers),
            decoupled=self._optimizer.decoupled_weight_decay,
            lanes=self._lanes,
        )
        undone = (ctypes.c_int64 * (2 * _MAX_SHARES))()
        team = torch_team() if in_team else None
        count = self._call(ctypes.byref(update), num_threads or torch.get_num_threads(), team, undone)
        return [(undone[2 * index], undone[2 * index + 1]) for index in range(count)]
