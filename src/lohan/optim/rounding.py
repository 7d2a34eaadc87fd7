"""How a float32 master becomes a weight on the wire, and how a bf16 wire gives the master back.

bf16 takes the top half of the master's bits, rounded to nearest with ties away from zero:

    wire = (bits + 0x8000) >> 16        bits = (wire << 16) + remainder

The remainder is then the low half of the bits read as a signed 16-bit number, so splitting loses nothing. Ties to
even, which `.to(bfloat16)` uses, would need a 17th bit. A NaN stays a NaN on the wire and when joined again; only its
payload may change. All calls write in place into tensors the caller owns, safe from any thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF_UNIT = 0x8000
_QUIET = 0x40
"""The bit that makes a bf16 with exponent 255 a NaN whatever its other bits are."""


def round_to_wire(master: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Write `master` (f32) into `out`: bf16 as above, fp16 as torch rounds, fp32 as it is.

    `scratch` is an int32 tensor of the same length; it may be `master` itself read as int32 when that is no longer
    needed. Without one, one is allocated.
    """
    if out.dtype != torch.bfloat16:
        out.copy_(master)
        return
    bits, wire = master.view(torch.int32), out.view(torch.int16)
    if not _surely_without_nan(master):
        kept = (bits >> 16) | _QUIET
        wire.copy_(torch.where(torch.isnan(master), kept, (bits + _HALF_UNIT) >> 16))
        return
    if scratch is None:
        scratch = torch.empty_like(bits)
    torch.add(bits, _HALF_UNIT, out=scratch)
    scratch.bitwise_right_shift_(16)
    wire.copy_(scratch)


def split_master(master: Tensor, wire_out: Tensor, remainder_out: Tensor, scratch: Tensor | None = None) -> None:
    """Cut `master` (f32) into a bf16 weight and an int16 remainder. `scratch` as in round_to_wire."""
    remainder_out.copy_(master.view(torch.int32))  # narrowing keeps the low 16 bits
    round_to_wire(master, wire_out, scratch)


def join_master(wire: Tensor, remainder: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
    """Write into `out` (f32) the master that split_master cut. `scratch` is int32 of the same length, not `out`."""
    out.copy_(wire)  # bf16 to f32 is wire << 16, in one pass
    # Adding the int16 tensor directly takes 2x as long: torch widens it into memory allocated for each call.
    if scratch is None:
        scratch = torch.empty_like(remainder, dtype=torch.int32)
    scratch.copy_(remainder)
    out.view(torch.int32).add_(scratch)


def _surely_without_nan(values: Tensor) -> bool:
    # A NaN or an infinity anywhere makes the dot product not finite. So may very large numbers: those only cost the
    # slow way. One pass that writes nothing; isnan().any() takes 25x as long.
    return math.isfinite(torch.dot(values, values).item())
