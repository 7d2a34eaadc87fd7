"""What the device computes: a unit's forward for all micro-batches, and its backward.

Runs on the thread that asked the engine for a step. Weights are given as the unit's wire bytes in device memory; they
are cast to the compute dtype (or used as they are) and installed in the model for as long as the unit runs.
Gradients are summed over micro-batches in the compute dtype and leave cast to the wire dtype.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lohan.engine.cut import Cut, SavedCall
from lohan.engine.devices.base import Device
from lohan.engine.escapes import Escape, find_escapes, run_with_escapes
from lohan.engine.head_loss import HeadLoss
from lohan.engine.layout import UnitLayout
from lohan.engine.replay import Replayer
from lohan.engine.trees import tensors_in
from lohan.engine.vertical import BlockCall, Finished, PausedForward, Stops, check_order
from lohan.errors import ModelError, NonFinite
from lohan.models.installer import Installer
from lohan.models.units import Units

MicroBatch = Mapping[str, Any]
ALIGN = 64


def unit_seed(seed: int, step: int, micro_batch: int, unit: int) -> int:
    """The seed of one unit of one micro-batch, so that dropout is the same under any schedule."""
    return (((seed * 1_000_003 + step) * 1_000_003 + micro_batch) * 1_000_003 + unit) % 2**63


def num_labels(micro_batches: Sequence[MicroBatch]) -> int:
    """Labels that are predicted, over all micro-batches."""
    return sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in micro_batches)


def takes_num_items(model: nn.Module) -> bool:
    """Whether the model divides its loss by the labels of the whole step, by the rule of transformers' Trainer."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in parameters:
        return True
    if accepts is not None:
        return bool(accepts)
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


class Compute:
    """A model on a device, run unit by unit."""

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        layouts: Sequence[UnitLayout],
        device: Device,
        *,
        compute_dtype: torch.dtype,
        wire: torch.dtype,
        seed: int,
        head_chunks: int = 1,
        keep: Sequence[Mapping[int, str]] = (),
    ):
        """`keep`: for each unit, the heavy operators whose outputs are kept, and on which tier."""
        self.model, self.units, self.layouts, self.device = model, units, layouts, device
        self._dtype, self._wire, self._seed = compute_dtype, wire, seed
        self._installer = Installer(model, units)
        self._head_loss = HeadLoss(model, head_chunks)
        blocks = model.get_submodule(units.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = list(blocks)
        self._stops = Stops(blocks)
        self._escapes: dict[int, list[Escape]] = {}
        self._replayer = Replayer(device.random_state, device.set_random_state, poison=device.poisons)
        self._keep = keep
        self._takes_num_items = takes_num_items(model)
        cast_bytes = cast_memory_bytes(units, layouts, compute_dtype, wire)
        self._cast_memory = device.empty(cast_bytes) if cast_bytes else None
        self._table = {
            p.name
            for p in units.embedding.params
            if all(isinstance(model.get_submodule(path), nn.Embedding) for path, _ in p.places[:1])
        }
        self.between_gradients: Callable[[], None] | None = None
        """Called in a block's backward whenever the gradient of one of its weights is made."""

        # -- one step's state
        self._paused: list[PausedForward] = []
        self._results: list[Any] = []
        self.cuts: list[Cut] = []
        self.losses: list[float] = []
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._tied_leaves: dict[str, Tensor] = {}
        self._training = True
        self._step = 0
        self._num_items = 0
        self._batches: Sequence[MicroBatch] = ()

    def _param_bytes(self, shape: Sequence[int]) -> int:
        return _param_bytes(shape, self._dtype)

    @property
    def num_micro_batches(self) -> int:
        """Of the step under way."""
        return len(self._batches)

    @property
    def head(self) -> int:
        return len(self.layouts) - 1

    # -- a step, from outside -------------------------------------------------------------------------

    def begin(self, step: int, micro_batches: Sequence[MicroBatch], *, training: bool) -> None:
        """Take a step's micro-batches. Their forwards start with the embedding."""
        self._step, self._training, self._batches = step, training, micro_batches
        self._num_items = num_labels(micro_batches)
        if self._num_items == 0:
            raise ModelError(f"Step {step} has no label to predict: every label is -100. Check the data's masking.")
        self.model.train(training)
        self.losses = []
        self.cuts = [Cut() for _ in micro_batches]
        self._results = [None] * len(micro_batches)
        self._leaves, self._tied_leaves = {}, {}
        self._paused = []
        for batch in micro_batches:
            call = self._forward_call(batch)
            # Set before the context is copied into the micro-batch's own thread.
            with torch.set_grad_enabled(training):
                self._paused.append(PausedForward(call, self._enter))

    def _forward_call(self, batch: MicroBatch) -> Any:
        inputs = {
            name: value.to(self.device.torch_device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        if self._takes_num_items:
            inputs["num_items_in_batch"] = torch.tensor(self._num_items, device=self.device.torch_device)
        return lambda: self.model(**inputs)

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self.device.lane("gpu"))
        stack.enter_context(self.device.compute(0.0))

    def abort(self) -> None:
        """Unwind all micro-batches where they stand and let go of everything of the step."""
        for paused in self._paused:
            paused.cancel()
        self._end()

    def _end(self) -> None:
        self._paused, self._results, self.cuts = [], [], []
        self._leaves, self._tied_leaves = {}, {}

    def close(self) -> None:
        self.abort()
        self._stops.close()
        self._installer.uninstall_all()
        if self._cast_memory is not None:
            self.device.free(self._cast_memory)
            self._cast_memory = None

    # -- weights --------------------------------------------------------------------------------------

    def _install(self, unit: int, weights: Tensor | None, *, leaves: bool, at: int = 0) -> int:
        """Put a unit's weights into the model; with `leaves` they will collect gradients."""
        layout = self.layouts[unit]
        for index, param in enumerate(layout.spec.params):
            assert weights is not None
            at = self._install_param(layout, index, weights, at, leaves=leaves and param.trainable, unit=unit)
        return at

    def _install_param(
        self, layout: UnitLayout, index: int, weights: Tensor, at: int, *, leaves: bool, unit: int
    ) -> int:
        param = layout.spec.params[index]
        wire = layout.tensor(weights, index)
        if unit == 0 and param.name not in self._table and leaves:
            # Backward of the embedding comes last, when this memory holds other units: what is not a plain
            # table may be needed by it and gets a copy of its own.
            tensor = wire.to(self._dtype, copy=True)
        elif self._cast_memory is not None:
            size = param.num_elements * self._dtype.itemsize
            tensor = self._cast_memory[at : at + size].view(self._dtype).view(param.shape)
            tensor.copy_(wire)
            at += self._param_bytes(param.shape)
        else:
            tensor = wire
        # A Parameter, because some code asks: a slice of an nn.ParameterList would make new leaves of plain tensors.
        tensor = nn.Parameter(tensor, requires_grad=leaves)
        if leaves:
            if unit == 0 and layout.spec.index == 0 and self._tying:
                self._tied_leaves[param.name] = tensor
            else:
                self._leaves.setdefault(unit, {})[param.name] = tensor
        self._installer.install_param(param.name, tensor)
        return at

    _tying = False

    # -- forward --------------------------------------------------------------------------------------

    def forward(
        self, unit: int, micro_batch: int, weights: Tensor | None, tied_weights: Tensor | None, scale: float | None
    ) -> None:
        """One unit for one micro-batch. The head's forward, in training, is its backward too.

        Micro-batches come in order; the weights are put in place with the first and taken out with the last.
        """
        kind = self.layouts[unit].spec.kind
        if micro_batch == 0:
            at = self._install(unit, weights, leaves=self._training)
            if kind == "head" and tied_weights is not None:
                self._install_tied(tied_weights, at)
        if kind == "embedding":
            self.device.seed(unit_seed(self._seed, self._step, micro_batch, 0))
            self._results[micro_batch] = self._resume(self._paused[micro_batch], None, 0)
        elif kind == "block":
            with torch.no_grad():
                self._forward_block(unit - 1, micro_batch)
        else:
            self._finish_micro_batch(micro_batch, scale)
        if micro_batch == len(self._paused) - 1:
            if kind == "block":
                self._leaves.pop(unit, None)  # they collect nothing here: backward has its own
            if kind == "head" and not self._training:
                self._end()
            self._installer.uninstall_all()

    def _install_tied(self, weights: Tensor, at: int) -> None:
        self._tying = True
        embedding = self.layouts[0]
        for index, param in enumerate(embedding.spec.params):
            if param.name in self.units.tied:
                leaves = self._training and param.trainable
                at = self._install_param(embedding, index, weights, at, leaves=leaves, unit=0)
        self._tying = False

    def _advance(self, micro_batch: int, expected: int) -> BlockCall | Finished:
        """Run the glue up to the next stop."""
        result, self._results[micro_batch] = self._results[micro_batch], None
        reached: BlockCall | Finished = (
            self._resume(self._paused[micro_batch], result, expected) if expected > 0 else result
        )
        if expected < len(self.units.blocks) or isinstance(reached, BlockCall):
            check_order(reached, expected, len(self.units.blocks), self.units.blocks_name)
        return reached

    def _resume(self, paused: PausedForward, result: Any, expected: int) -> BlockCall | Finished:
        try:
            return paused.advance(result, to_the_end=expected == len(self.units.blocks))
        except RuntimeError as error:
            # A forward that passes over its blocks meets the weights behind them, which are not here yet.
            if expected < len(self.units.blocks) and "meta" in str(error):
                raise ModelError(
                    f"The model's forward used weights of a later part where {self.units.blocks_name}[{expected}] was "
                    "expected. Layers that are skipped (layer drop) cannot be streamed: switch that off in the model's "
                    f"config. ({error})"
                ) from error
            raise

    def _forward_block(self, block: int, micro_batch: int) -> None:
        reached = self._advance(micro_batch, block)
        assert isinstance(reached, BlockCall)
        cut, unit, module = self.cuts[micro_batch], block + 1, self._blocks[block]
        run = self._stops.originals[block]
        self.device.seed(unit_seed(self._seed, self._step, micro_batch, unit))
        if not self._training:
            self._results[micro_batch] = reached.context.run(_without_graph, run, reached.args, reached.kwargs)
            return
        call = cut.save(block, reached.args, reached.kwargs)
        trainable = any(param.trainable for param in self.layouts[unit].spec.params)
        if block not in self._escapes:
            # The first time a block runs, it is only watched for what leaves it, and recomputed from end to end.
            name = f"{self.units.blocks_name}.{block}"
            result, escaped, self._escapes[block] = find_escapes(
                module,
                name,
                # In the micro-batch's own context: hooks inside the block look there for who listens to them.
                lambda: reached.context.run(_without_graph, run, reached.args, reached.kwargs),
                tensors_in((reached.args, reached.kwargs)),
            )
            self._results[micro_batch] = cut.make_leaves(block, result, escaped, trainable)
            return
        args, kwargs, _ = call.fill()

        def go() -> Any:
            return run_with_escapes(
                module,
                self._escapes[block],
                lambda: reached.context.run(run, *args, **kwargs),
                lambda number, tensor: cut.follow(block, number, tensor),
            )

        keep = dict(self._keep[unit]) if self._keep else {}
        (result, _), call.recording = self._replayer.record(f"{self.units.blocks_name}.{block}", keep, go)
        self._results[micro_batch] = cut.make_leaves(block, result, (), trainable)

    def _finish_micro_batch(self, micro_batch: int, scale: float | None) -> None:
        self.device.seed(unit_seed(self._seed, self._step, micro_batch, len(self.units.blocks) + 1))
        share = None if self._takes_num_items else num_labels([self._batches[micro_batch]]) / self._num_items
        in_chunks = self._head_loss.chunked(scale=scale, share=share, num_items=self._num_items)
        with torch.set_grad_enabled(self._training), in_chunks:
            reached = self._advance(micro_batch, len(self.units.blocks))
            assert isinstance(reached, Finished)
            loss = _loss_of(reached.value)
            if share is not None:
                loss = loss * share
            del reached
            value = float(loss.item())
            self.losses.append(value)
            if not self._training:
                return
            if scale is None and not math.isfinite(value):
                raise NonFinite(
                    f"The loss of step {self._step}, micro-batch {micro_batch} is {value} (unit head). It was not "
                    "committed. Lower learning_rate, or look at this batch's data.",
                    step=self._step, micro_batch=micro_batch, unit="head",
                )  # fmt: skip
            torch.autograd.backward(loss if scale is None else loss * scale)
        self.cuts[micro_batch].collect()

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, unit: int, micro_batch: int, weights: Tensor | None, scale: float | None) -> None:
        """One unit's backward for one micro-batch; its gradients add up and wait for take_gradient()."""
        cut = self.cuts[micro_batch]
        if self.layouts[unit].spec.kind == "embedding":
            cut.push_rest()
            return
        if micro_batch == 0:
            self._install(unit, weights, leaves=True)
            if self.between_gradients is not None:
                for leaf in self._leaves.get(unit, {}).values():
                    leaf.register_post_accumulate_grad_hook(self._gradient_grew)  # type: ignore[no-untyped-call]
        block = unit - 1
        self.device.seed(unit_seed(self._seed, self._step, micro_batch, unit))
        cut.backward(block, lambda call, args, kwargs: self._recompute(block, call, args, kwargs))
        if scale is None:
            self._check_finite(cut, micro_batch, unit)
        if micro_batch == len(self.cuts) - 1:
            self._installer.uninstall_all()

    def _gradient_grew(self, leaf: Tensor) -> None:
        assert self.between_gradients is not None
        self.between_gradients()

    def _recompute(self, block: int, call: SavedCall, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        run = self._stops.originals[block]
        name = f"{self.units.blocks_name}.{block}"
        with torch.enable_grad() if call.recording is None else self._replayer.replay(call.recording, name):
            result, escaped = run_with_escapes(self._blocks[block], self._escapes[block], lambda: run(*args, **kwargs))
        return list(tensors_in(result)), escaped

    def _check_finite(self, cut: Cut, micro_batch: int, unit: int) -> None:
        for gradient in cut.input_gradients():
            if not math.isfinite(float(gradient.sum())) and not bool(torch.isfinite(gradient).all()):
                name = self.layouts[unit].spec.name
                raise NonFinite(
                    f"A gradient of step {self._step}, micro-batch {micro_batch} is not finite below {name}. It was "
                    "not committed. Lower learning_rate, or look at this batch's data.",
                    step=self._step, micro_batch=micro_batch, unit=name,
                )  # fmt: skip

    def take_gradient(self, unit: int, into: Tensor) -> frozenset[int]:
        """Cast the unit's summed gradients to the wire dtype into device memory; returns the tensors without one."""
        layout, missing = self.layouts[unit], set()
        leaves = self._leaves.pop(unit, {})
        for index, param in enumerate(layout.spec.params):
            if not param.trainable:
                continue
            gradient = leaves[param.name].grad if param.name in leaves else None
            tied = self._tied_leaves.pop(param.name, None) if unit == 0 else None
            if tied is not None and tied.grad is not None:
                gradient = tied.grad if gradient is None else tied.grad + gradient  # head's sum first
            if gradient is None:
                missing.add(index)
            else:
                layout.tensor(into, index).copy_(gradient)
        if unit == 0:
            self._end()
        return frozenset(missing)


def _param_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN


def cast_memory_bytes(
    units: Units, layouts: Sequence[UnitLayout], compute_dtype: torch.dtype, wire: torch.dtype
) -> int:
    """Memory that a unit's weights are widened into while it runs; none where they are used as they travel."""
    if compute_dtype == wire:
        return 0
    sizes = [sum(_param_bytes(param.shape, compute_dtype) for param in layout.spec.params) for layout in layouts]
    tied = sum(_param_bytes(p.shape, compute_dtype) for p in units.embedding.params if p.name in units.tied)
    return max(ALIGN, sizes[-1] + tied, *sizes[:-1])


def _without_graph(run: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return run(*args, **kwargs)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError("The model's forward returned no loss. Pass labels in every micro-batch.")
    return loss
