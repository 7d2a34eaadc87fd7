"""What a real block reaches: a Llama-shaped one through the engine's own forward, replay and backward.

Three micro-batches pass through each block, as in a run: the first pays for widening the weights, the last for casting
the gradient, the middle one is arithmetic alone. FLOPs are those of the heavy operators as the rehearsal counts them,
attention included: forward once, replay what backward needs, and twice forward for backward itself.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lohan.engine.compute import Compute
from lohan.engine.create import without_caches
from lohan.engine.devices.base import Device
from lohan.engine.layout import UnitLayout, lay_out
from lohan.measure.rehearsal import Rehearsal
from lohan.measure.traffic import Shares, Traffic
from lohan.models.skeleton import build_skeleton
from lohan.models.units import Units, partition
from lohan.optim import AdamW, Updater, default_format
from lohan.plan.activations import recompute_flops
from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.profiles import OperatorProfile

_VOCABULARY = 256
_BLOCKS = 1
_MICRO_BATCHES = 3
_TURNS = 2
"""Of computing with nothing kept and with everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """A Llama block and the micro-batch it is given."""

    hidden_size: int
    tokens: int
    """Of one micro-batch."""

    sequence_length: int = 1024
    """At most; a micro-batch of more tokens has several sequences."""

    head_size: int = 64

    @property
    def intermediate_size(self) -> int:
        return -(-self.hidden_size * 11 // 4 // 64) * 64

    @property
    def rows(self) -> int:
        return max(1, self.tokens // self.sequence_length)

    @property
    def columns(self) -> int:
        return max(2, min(self.tokens, self.sequence_length))

    @property
    def num_parameters(self) -> int:
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    def device_bytes(self, dtype: torch.dtype) -> int:
        """About what measuring it takes: weights as they travel and widened, gradients, one replay's tensors."""
        weights = (_BLOCKS + 1) * self.num_parameters * (2 + 3 * dtype.itemsize)
        wide = 16 * self.hidden_size + 8 * self.intermediate_size
        return weights + _MICRO_BATCHES * self.rows * self.columns * wide * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRate:
    """What a block reaches on a device."""

    flops_per_second: float
    weights_seconds_per_parameter: float
    """Forward and backward each, whatever the number of micro-batches: widening weights, casting gradients."""

    saved_by_keeping: float
    """Of the time its FLOPs would say, what keeping all a block's operators saves: what lies between them is computed
    again all the same."""

    shape: BlockShape
    shares: Shares | None = None
    """With traffic on the drives; None where that was not measured or computing is not done by the cores."""

    singles: tuple[float, float, float] | None = None
    """Bytes per second that drives read, write, and do both together, one record at a time while the cores compute;
    None as above."""


def choose_shape(
    device: Device, dtype: torch.dtype, tokens: int | None = None, hidden_size: int | None = None
) -> BlockShape:
    """The largest block that is quick to measure here: by its arithmetic on a CPU, by its memory on a GPU."""
    limit = device.memory_budget
    on_gpu = device.torch_device.type == "cuda"
    if limit is None and on_gpu:
        limit = torch.cuda.mem_get_info(device.torch_device)[0]
    smaller = (256, 128)
    sizes: tuple[int, ...] = (4096, 2048, 1024, 512, *smaller) if on_gpu else (1024, 512, *smaller)
    if hidden_size is not None:
        sizes = (hidden_size,)
    numbers = (4096, 2048, 1024, 512, *smaller) if on_gpu else (512, *smaller)
    shapes = [
        BlockShape(hidden_size=hidden, tokens=number)
        for hidden in sizes
        for number in ((tokens,) if tokens is not None else numbers)
    ]
    return next((s for s in shapes if limit is None or s.device_bytes(dtype) <= 0.6 * limit), shapes[-1])


def measure_block(
    device: Device,
    shape: BlockShape,
    *,
    dtype: torch.dtype,
    wire: torch.dtype = torch.bfloat16,
    seconds: float = 5.0,
    traffic: Traffic | None = None,
    tell: Callable[[float], None] = lambda share: None,
) -> BlockRate:
    """Rounds of forward and backward for about `seconds`, at least one after one that is not counted."""
    with ExitStack() as owned:
        model = _build(shape, dtype)
        owned.enter_context(without_caches(model))
        units = partition(model, None)
        layouts = lay_out(units, wire, Updater(AdamW(), default_format(wire), wire), PIECE_ELEMENTS)
        operators = _operators(model, units, shape, dtype, device)
        keep: list[dict[int, str]] = [{} for _ in layouts]
        compute = Compute(model, units, layouts, device, compute_dtype=dtype, wire=wire, seed=0, keep=keep)
        owned.callback(compute.close)
        owned.enter_context(device.rng_state_guard())
        bench = _Bench(compute, device, layouts, shape)
        owned.callback(bench.close)
        bench.round()  # also watches for what escapes from a block
        disturbed = traffic is not None and not device.separate_memory
        kept = {number: "device" for number, operator in enumerate(operators) if operator.needed}
        alone: list[list[float]] = []
        keeping: list[list[float]] = []
        share = 0.15 if disturbed else 0.25
        for turn in range(_TURNS):  # in turns, so that both meet the same moments
            alone += _rounds(bench, seconds * share, partial(_tell_turn, tell, turn))
            for block in keep[1:-1]:
                block.update(kept)
            keeping += _rounds(bench, seconds * share, lambda share: None)
            for block in keep[1:-1]:
                block.clear()
        shares, singles = None, None
        if traffic is not None and disturbed:
            with traffic.flowing() as flow:
                beside = _rounds(bench, seconds * 0.2, lambda share: None)
            shares = traffic.shares(_mean_seconds(alone), _mean_seconds(beside), flow)
            with traffic.trickling() as trickle:
                _rounds(bench, seconds * 0.2, lambda share: None)
            singles = trickle.rates
    forward, again = sum(operator.flops for operator in operators), recompute_flops(operators, ())
    # The middle ones only tell what is besides; sums, which vary less, tell the rest.
    besides = max(0.0, statistics.median(first + last - 2 * middle for first, middle, last in alone))
    whole = statistics.median(sum(taken) for taken in alone)
    arithmetic = (whole - besides) / _MICRO_BATCHES
    saved = (whole - statistics.median(sum(taken) for taken in keeping)) / _MICRO_BATCHES
    share = again / (3 * forward + again)
    return BlockRate(
        flops_per_second=(3 * forward + again) / arithmetic,
        weights_seconds_per_parameter=besides / 2 / shape.num_parameters,
        saved_by_keeping=min(1.0, max(0.0, saved / (share * arithmetic))),
        shape=shape,
        shares=shares,
        singles=singles,
    )


def _tell_turn(tell: Callable[[float], None], turn: int, share: float) -> None:
    tell((turn + share) / _TURNS)


def _mean_seconds(rounds: list[list[float]]) -> float:
    return statistics.mean(sum(taken) for taken in rounds)


def _rounds(bench: _Bench, seconds: float, tell: Callable[[float], None]) -> list[list[float]]:
    """For so long, at least once: of every block that passed, the seconds of each micro-batch."""
    found: list[list[float]] = []
    started = time.perf_counter()
    while not found or time.perf_counter() - started < seconds:
        found += bench.round()
        tell(min(1.0, (time.perf_counter() - started) / max(seconds, 1e-9)))
    return found


class _Bench:
    """A small model on the device, run step by step as the engine's compute lane runs it."""

    def __init__(self, compute: Compute, device: Device, layouts: list[UnitLayout], shape: BlockShape):
        self._compute, self._device, self._layouts = compute, device, layouts
        generator = torch.Generator().manual_seed(0)
        size = (shape.rows, shape.columns)
        ids = [torch.randint(_VOCABULARY, size, generator=generator) for _ in range(_MICRO_BATCHES)]
        self._batches: list[dict[str, Any]] = [{"input_ids": one, "labels": one} for one in ids]
        self._weights = [self._make_weights(layout, generator) for layout in layouts]
        self._gradients = [self._empty(layout) for layout in layouts]
        self._step = 0

    def _empty(self, layout: UnitLayout) -> Tensor:
        with self._device.lane("to_gpu"):
            return self._device.empty(layout.pieces.weights_bytes)

    def _make_weights(self, layout: UnitLayout, generator: torch.Generator) -> Tensor:
        host = torch.zeros(layout.pieces.weights_bytes, dtype=torch.uint8)
        for index, param in enumerate(layout.spec.params):
            # Norms near one and matrices small: what passes through stays as large as in a trained model.
            scale = torch.randn(param.shape, generator=generator) * 0.02
            layout.tensor(host, index).copy_(scale if len(param.shape) > 1 else 1 + scale)
        there = self._empty(layout)
        with self._device.lane("to_gpu"):
            self._device.to_device(host, there)
        return there

    def round(self) -> list[list[float]]:
        """One step over all units: for each block, the seconds of each micro-batch's forward and backward together."""
        self._step += 1
        compute, head = self._compute, len(self._layouts) - 1
        compute.begin(self._step, self._batches, training=True)
        taken = [[0.0] * _MICRO_BATCHES for _ in self._layouts]
        try:
            for unit in range(head + 1):
                for micro_batch in range(_MICRO_BATCHES):
                    taken[unit][micro_batch] += self._timed(unit, micro_batch, self._forward)
            for unit in reversed(range(head)):
                for micro_batch in range(_MICRO_BATCHES):
                    taken[unit][micro_batch] += self._timed(unit, micro_batch, self._backward)
        except BaseException:
            compute.abort()
            raise
        return taken[1:head]

    def _timed(self, unit: int, micro_batch: int, work: Callable[[int, int], None]) -> float:
        started = time.perf_counter()
        with self._device.lane("gpu"), self._device.compute(0.0):
            work(unit, micro_batch)
        return time.perf_counter() - started

    def _forward(self, unit: int, micro_batch: int) -> None:
        self._compute.forward(unit, micro_batch, self._weights[unit], None, None)
        if unit == len(self._layouts) - 1 and micro_batch == _MICRO_BATCHES - 1:
            self._compute.take_gradient(unit, self._gradients[unit])

    def _backward(self, unit: int, micro_batch: int) -> None:
        self._compute.backward(unit, micro_batch, self._weights[unit], None)
        if micro_batch == _MICRO_BATCHES - 1:
            self._compute.take_gradient(unit, self._gradients[unit])

    def close(self) -> None:
        for tensor in (*self._weights, *self._gradients):
            self._device.free(tensor)
        self._weights, self._gradients = [], []


def _build(shape: BlockShape, dtype: torch.dtype) -> nn.Module:
    heads = max(1, shape.hidden_size // shape.head_size)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": _VOCABULARY,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_hidden_layers": _BLOCKS,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": shape.columns,
        "tie_word_embeddings": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lohan-block-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return build_skeleton(Path(folder), compute_dtype=dtype)


def _operators(
    model: nn.Module, units: Units, shape: BlockShape, dtype: torch.dtype, device: Device
) -> Sequence[OperatorProfile]:
    """The heavy ones of one block, for one micro-batch."""
    rehearsal = Rehearsal(
        model, units, rows=shape.rows, tokens=shape.columns, dtype=dtype, device=device.torch_device
    )  # fmt: skip
    return rehearsal.kinds[0].operators
