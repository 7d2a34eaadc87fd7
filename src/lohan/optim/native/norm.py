"""The norm of a 16-bit gradient without an f32 copy, where it has given the bits of torch's on this machine.

Sums run in one thread, as torch's do: their order is what the bits depend on. Safe from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lohan.optim.native.build import Unavailable
from lohan.optim.native.find import LANES, is_switched_off, load
from lohan.optim.native.kernel import DTYPES

_MIN_ELEMENTS = 1024
"""Below, torch takes other ways, and little time."""

_LENGTHS = (1024, 1031, 4095, 70_003)

_found: dict[torch.dtype, Callable[[Tensor], float] | None] = {}
_lock = threading.Lock()


def find_norm(grad: Tensor, by_torch: Callable[[Tensor], Tensor]) -> Tensor | None:
    """What `by_torch` would give, to the bit; None where that is not known or not a number."""
    if grad.dtype not in (torch.bfloat16, torch.float16) or grad.numel() < _MIN_ELEMENTS:
        return None
    if grad.device.type != "cpu" or not grad.is_contiguous() or is_switched_off():
        return None
    with _lock:
        if grad.dtype not in _found:
            _found[grad.dtype] = _tested(grad.dtype, by_torch)
        call = _found[grad.dtype]
    value = math.nan if call is None else call(grad)
    return None if math.isnan(value) else torch.tensor(value)


def forget() -> None:
    """Look again at the next call: for tests, which change the machine."""
    with _lock:
        _found.clear()


def _tested(dtype: torch.dtype, by_torch: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float] | None:
    try:
        library = load()
    except Unavailable:
        return None
    generator = torch.Generator().manual_seed(0)
    cases = []
    for num in _LENGTHS:
        for scale in (1e-6, 1e-3, 1.0, 300.0):
            drawn = torch.randn(num, generator=generator) * torch.exp2(8 * torch.rand(num, generator=generator))
            cases.append((drawn * scale).to(dtype))
    expected = [by_torch(case).item() for case in cases]
    for lanes in LANES:

        def call(grad: Tensor, lanes: int = lanes) -> float:
            found: float = library.lohan_norm(grad.data_ptr(), grad.numel(), DTYPES[grad.dtype], lanes)
            return found

        if [call(case) for case in cases] == expected:
            return call
    return None
