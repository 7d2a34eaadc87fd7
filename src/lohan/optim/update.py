"""One parameter's update, in blocks small enough to stay in cache: stored state in, stored state out.

State is one run of bytes per piece of a parameter: the format's arrays one after another, each starting on a multiple
of 64 bytes. The bits do not depend on how a parameter is cut, neither here into blocks nor by the caller into pieces,
as long as pieces start at multiples of CHUNK_ALIGNMENT elements of their own parameter and never span two.

An update is done by the compiled kernel of lohan.optim.native where there is one, else by torch operators block by
block: two to four times slower, the same to the bit (benchmarks/results/2026-11-16_update_native.md). `path` says
which and why.

An Updater owns scratch of about five f32 blocks, taken when torch operators need it, and serves one thread at a time;
different Updaters share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lohan.errors import ConfigError
from lohan.optim.formats import WIRE_DTYPES, Scratch, StateFormat
from lohan.optim.native import Kernel, Numbers, Range, Unavailable, find_kernel
from lohan.optim.optimizers import CHUNK_ALIGNMENT, Optimizer

STATE_ALIGNMENT = 64
"""Bytes: a cache line. Stored arrays of f32 and int16 start on one and so does every block of them."""

BLOCK_ELEMENTS = 1 << 19
"""Within 2 % of the best with one thread and the best of four sizes with two: benchmarks/results/
2026-11-16_update_rate.md. Smaller blocks fit L2 better, but each pays torch's fixed cost of about 20 us per fused
call, and with several threads a barrier for each of a dozen operators."""


class Updater:
    """Updates pieces of parameters that share an optimizer, a state format and a wire dtype."""

    def __init__(
        self,
        optimizer: Optimizer,
        format: StateFormat,
        wire_dtype: torch.dtype,
        *,
        block_elements: int = BLOCK_ELEMENTS,
    ):
        if wire_dtype not in WIRE_DTYPES:
            raise ConfigError(
                f"The wire dtype is {wire_dtype}, and weights travel as bfloat16, float16 or float32. Set one of them."
            )
        if block_elements <= 0 or block_elements % CHUNK_ALIGNMENT:
            raise ValueError(f"block_elements={block_elements} is not a positive multiple of {CHUNK_ALIGNMENT}")
        self.optimizer = optimizer
        self.format = format
        self.wire_dtype = wire_dtype
        self._specs = format.arrays(optimizer.moments, wire_dtype)
        self._scratch = Scratch(block_elements)
        self._kernel: Kernel | None = None
        self._path: str | None = None

    @property
    def path(self) -> str:
        """What does the updates: "native", or "torch" and why. The first look at it may compile."""
        if self._path is None:
            try:
                self._kernel = find_kernel(self.optimizer, self.format, self.wire_dtype, self._update_by_torch)
                self._path = "native"
            except Unavailable as reason:
                self._path = f"torch: {reason}"
        return self._path

    def state_bytes(self, num_elements: int) -> int:
        """Bytes of state for this many parameters, padding between the arrays included."""
        return self._layout(num_elements)[1]

    def state_views(self, state: Tensor, num_elements: int) -> dict[str, Tensor]:
        """The stored arrays by name, as views of the state's bytes."""
        starts, total = self._layout(num_elements)
        if state.dtype != torch.uint8 or state.numel() < total:
            raise ValueError(
                f"State of {num_elements} elements takes {total} bytes of uint8, got {state.numel()} of {state.dtype}"
            )
        return {
            spec.name: state[start : start + num_elements * spec.dtype.itemsize].view(spec.dtype)
            for spec, start in zip(self._specs, starts, strict=True)
        }

    @torch.no_grad()
    def initialise(self, values: Tensor, wire_out: Tensor, state: Tensor, start: int = 0) -> None:
        """First state of a parameter from its f32 master, or from values of another dtype, exactly as f32.

        `values` may be `wire_out` itself, or those from element `start` on; several calls in order do all of them.
        Moments and the padding between arrays become zero with the first.
        """
        end = start + values.numel()
        part = wire_out[start:end]
        self._check(part, values)
        arrays = {name: array[start:end] for name, array in self.state_views(state, wire_out.numel()).items()}
        if start == 0:
            state[: self.state_bytes(wire_out.numel())].zero_()
        if "remainder" in arrays and values.dtype == torch.float32 and values.is_contiguous() and self.path == "native":
            assert self._kernel is not None
            self._kernel.split(values, part, arrays["remainder"])
            return
        for wire, stored, block in self._blocks(part, arrays, values):
            num = wire.numel()
            master = self._scratch.f32("master", num).copy_(block)
            moments = {
                name: stored[name] if stored[name].dtype == torch.float32 else self._scratch.f32(name, num).zero_()
                for name in self.optimizer.moments
            }
            self.format.pack(master, moments, wire, stored, self._scratch)

    @torch.no_grad()
    def update(
        self,
        wire: Tensor,
        state: Tensor,
        grad: Tensor,
        *,
        step: int,
        lr: float,
        weight_decay: float,
        grad_multipliers: Sequence[Tensor | float] = (),
        in_team: bool = False,
    ) -> None:
        """Optimizer step number `step` (from 1) in place on `wire` and `state`.

        The gradient is taken as f32, multiplied by each of the multipliers in turn (0-dim f32 tensors or numbers, f32
        rounding after each one), and is not changed. `in_team`: on the threads that the calling thread's own torch
        operators run on, which is faster where they have just run; the same to the bit.
        """
        self._check(wire, grad)
        arrays = self.state_views(state, wire.numel())
        numbers = Numbers(step, lr, weight_decay, tuple(grad_multipliers))
        rest = [(0, wire.numel())]
        if self.path == "native" and self._kernel is not None:
            rest = self._kernel.update(wire, arrays, grad, numbers, in_team=in_team)
        for within in rest:
            self._update_by_torch(wire, arrays, grad, within, numbers)

    @torch.no_grad()
    def read_master(self, wire: Tensor, state: Tensor, out: Tensor) -> None:
        """Write the f32 master into `out`."""
        self._read_master(wire, self.state_views(state, wire.numel()), out)

    @torch.no_grad()
    def join_master(self, wire: Tensor, kept: Tensor, out: Tensor) -> None:
        """The same for some elements, of which `kept` is what master_dtype speaks of, in bytes."""
        first = self._specs[:1] if self.master_dtype is not None else ()
        self._read_master(wire, {spec.name: kept.view(spec.dtype) for spec in first}, out)

    @property
    def master_dtype(self) -> torch.dtype | None:
        """Of the array that, with the weight, makes a master: the first of a state. None: the weight is the master."""
        return next((spec.dtype for spec in self._specs[:1] if spec.name in ("remainder", "master")), None)

    def _read_master(self, wire: Tensor, arrays: Mapping[str, Tensor], out: Tensor) -> None:
        self._check(wire, out)
        for wire_block, stored, out_block in self._blocks(wire, arrays, out):
            out_block.copy_(self.format.unpack(wire_block, stored, self._scratch)[0])

    @torch.no_grad()
    def read_moments(self, wire: Tensor, state: Tensor) -> dict[str, Tensor]:
        """The moments as new f32 tensors, by name."""
        out = {name: torch.empty(wire.numel()) for name in self.optimizer.moments}
        start = 0
        for wire_block, arrays, _ in self._blocks(wire, self.state_views(state, wire.numel()), wire):
            for name, values in self.format.unpack(wire_block, arrays, self._scratch)[1].items():
                out[name][start : start + values.numel()] = values
            start += wire_block.numel()
        return out

    @torch.no_grad()
    def _update_by_torch(
        self, wire: Tensor, arrays: Mapping[str, Tensor], grad: Tensor, within: Range, numbers: Numbers
    ) -> None:
        for wire_block, block, grad_block in self._blocks(wire, arrays, grad, within):
            master, moments = self.format.unpack(wire_block, block, self._scratch)
            self.optimizer.update(
                master,
                self._scaled(grad_block, numbers.multipliers),
                moments,
                step=numbers.step,
                lr=numbers.lr,
                weight_decay=numbers.weight_decay,
            )
            self.format.pack(master, moments, wire_block, block, self._scratch)

    def _scaled(self, grad: Tensor, multipliers: Sequence[Tensor | float]) -> Tensor:
        scaled = grad
        if grad.dtype != torch.float32:
            scaled = self._scratch.f32("grad", grad.numel()).copy_(grad)
        for multiplier in multipliers:
            scaled = torch.mul(scaled, multiplier, out=self._scratch.f32("grad", grad.numel()))
        return scaled

    def _blocks(
        self, wire: Tensor, arrays: Mapping[str, Tensor], other: Tensor, within: Range | None = None
    ) -> Iterator[tuple[Tensor, Mapping[str, Tensor], Tensor]]:
        first, last = within or (0, wire.numel())
        if last - first == wire.numel() <= self._scratch.num_elements:
            if last:
                yield wire, arrays, other
            return
        for start in range(first, last, self._scratch.num_elements):
            end = min(start + self._scratch.num_elements, last)
            yield wire[start:end], {name: array[start:end] for name, array in arrays.items()}, other[start:end]

    def _layout(self, num_elements: int) -> tuple[list[int], int]:
        starts, end = [], 0
        for spec in self._specs:
            starts.append(-(-end // STATE_ALIGNMENT) * STATE_ALIGNMENT)
            end = starts[-1] + num_elements * spec.dtype.itemsize
        return starts, end

    def _check(self, wire: Tensor, other: Tensor) -> None:
        if wire.dtype != self.wire_dtype:
            raise ValueError(f"The wire weight is {wire.dtype} and this updater was made for {self.wire_dtype}")
        if wire.dim() != 1 or wire.shape != other.shape:
            raise ValueError(f"Two 1-D tensors of one length are needed, got {wire.shape} and {other.shape}")
