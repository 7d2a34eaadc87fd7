"""The graph of one micro-batch, cut at every block, and the gradients that cross the cuts.

Forward runs each block without a graph and gives the model detached leaves for its outputs. Backward goes from the
top: recompute a block from its saved inputs, push the gradients of its outputs through it, and hand what arrives
at its inputs to whoever made them: a leaf of a block below, or the glue between blocks (a small ordinary graph).
Glue that several blocks use is pushed once, when the lowest of them has given its share.

Gradients are kept by name, not on tensors, so that a leaf's memory can go while its gradient is awaited.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lohan.engine.replay import Recording
from lohan.engine.trees import map_tensors
from lohan.errors import ModelError

Leaf = tuple[int, int]
"""Block, and which of its outputs: 0, 1, ... returned, -1, -2, ... escaped."""


@dataclass(slots=True)
class Input:
    """A tensor argument of a block that takes part in backward, or that is worth sending off the device."""

    tensor: Tensor | None
    """Detached; None while it is elsewhere."""

    leaf: Leaf | None = None
    glue: int | None = None
    needs_grad: bool = False
    shape: torch.Size | None = None
    """What it looks like, while it is elsewhere."""
    dtype: torch.dtype | None = None
    version: int | None = None
    """How often it had been changed in place when it was saved; None where torch does not count."""

    def check(self, block: int) -> None:
        """Refuse a tensor that somebody has changed since: what the block saw is gone."""
        if self.tensor is not None and self.version is not None and self.tensor._version != self.version:
            raise ModelError(
                f"An argument of block {block} (shape {tuple(self.tensor.shape)}) was changed in place after the block "
                "had used it. Backward needs it as it was: let the model change a copy."
            )


@dataclass(slots=True)
class SavedCall:
    """All that is needed to run a block again: its arguments, tensors replaced by their number in `inputs`."""

    args: Any
    kwargs: Any
    inputs: list[Input]
    recording: Recording | None = None
    """What forward kept; None when the block is to be computed again from end to end."""

    def fill(self) -> tuple[Any, Any, list[Tensor]]:
        """Arguments for a run of the block with a graph of its own, and the tensors in them that it starts from."""
        tensors = []
        for one in self.inputs:
            assert one.tensor is not None, "the inputs are back before backward needs them"
            tensors.append(one.tensor.detach().requires_grad_(True) if one.needs_grad else one.tensor)
        return _fill(self.args, tensors), _fill(self.kwargs, tensors), tensors


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for an input in saved arguments."""

    index: int


def _fill(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree.index]
    if isinstance(tree, tuple):
        items = [_fill(item, tensors) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [_fill(item, tensors) for item in tree]
    if isinstance(tree, dict):
        return {key: _fill(item, tensors) for key, item in tree.items()}
    return tree


@dataclass(slots=True)
class _Glue:
    tensor: Tensor
    first_block: int
    gradient: Tensor | None = None


@dataclass(slots=True)
class Cut:
    """One micro-batch's cuts."""

    saved: dict[int, SavedCall] = field(default_factory=dict)
    _leaves: dict[int, tuple[weakref.ref[Tensor], Leaf]] = field(default_factory=dict)
    _gradients: dict[Leaf, Tensor] = field(default_factory=dict)
    _glue: dict[int, _Glue] = field(default_factory=dict)

    def save(self, block: int, args: Any, kwargs: Any) -> SavedCall:
        """Take a block's arguments apart. The result runs the block; kept, it runs it again."""
        inputs: list[Input] = []
        numbers: dict[int, int] = {}

        def take(tensor: Tensor) -> _Slot:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(inputs)
                inputs.append(self._input(block, tensor))
            return _Slot(numbers[id(tensor)])

        call = SavedCall(map_tensors(args, take), map_tensors(kwargs, take), inputs)
        self.saved[block] = call
        return call

    def _input(self, block: int, tensor: Tensor) -> Input:
        known = self._leaves.get(id(tensor))
        version = None if tensor.is_inference() else tensor._version
        if known is not None and known[0]() is tensor:
            return Input(tensor.detach(), leaf=known[1], needs_grad=True, version=version)
        if tensor.requires_grad:
            self._glue.setdefault(id(tensor), _Glue(tensor, block))  # the first block that uses it
            return Input(tensor.detach(), glue=id(tensor), needs_grad=True, version=version)
        return Input(tensor, version=version)

    def make_leaves(self, block: int, result: Any, escaped: Sequence[Tensor], trainable: bool) -> Any:
        """The block's result as the model gets it: leaves that will collect a gradient."""
        needs_grad = trainable or any(one.needs_grad for one in self.saved[block].inputs)
        position = 0

        def leaf(tensor: Tensor) -> Tensor:
            nonlocal position
            number, position = position, position + 1
            if not needs_grad or not tensor.is_floating_point():
                return tensor
            made = tensor.detach().requires_grad_(True)
            self._leaves[id(made)] = (weakref.ref(made), (block, number))
            return made

        changed = map_tensors(result, leaf)
        for number, tensor in enumerate(escaped):
            # Made without a graph, so it can become a leaf in place: whoever kept it holds this very object.
            if needs_grad:
                tensor.requires_grad_(True)
                self._leaves[id(tensor)] = (weakref.ref(tensor), (block, -1 - number))
        return changed

    def follow(self, block: int, number: int, tensor: Tensor) -> Tensor:
        """A tensor that is about to escape from a recorded block, as it may leave: its gradient comes back here."""
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_(True)
        return cast(Tensor, _Escape.apply(leaf, self, (block, -1 - number)))  # type: ignore[no-untyped-call]

    def collect(self) -> None:
        """Take the gradients that a backward through glue left on leaves."""
        for reference, leaf in self._leaves.values():
            tensor = reference()
            if tensor is not None and tensor.grad is not None:
                self.add(leaf, tensor.grad)
                tensor.grad = None

    def add(self, leaf: Leaf, gradient: Tensor) -> None:
        """A gradient that a block's output is owed."""
        self._gradients[leaf] = self._gradients[leaf] + gradient if leaf in self._gradients else gradient

    def backward(self, block: int, run: Callable[[SavedCall, Any, Any], tuple[list[Tensor], list[Tensor]]]) -> None:
        """Recompute a block and send its outputs' gradients through it.

        `run(call, args, kwargs)` runs the block with a graph and returns its result's tensors and its escaped ones.
        """
        call = self.saved.pop(block)
        for one in call.inputs:
            one.check(block)
        args, kwargs, tensors = call.fill()
        returned, escaped = run(call, args, kwargs)
        del args, kwargs
        call.recording = None
        outputs, gradients = [], []
        numbered = [*enumerate(returned), *((-1 - number, tensor) for number, tensor in enumerate(escaped))]
        for number, tensor in numbered:
            gradient = self._gradients.pop((block, number), None)
            if gradient is not None:
                outputs.append(tensor)
                gradients.append(gradient)
        del returned, escaped, numbered
        if outputs:
            torch.autograd.backward(outputs, gradients)
        del outputs, gradients
        for one, tensor in zip(call.inputs, tensors, strict=True):
            if not one.needs_grad or tensor.grad is None:
                continue
            if one.leaf is not None:
                self.add(one.leaf, tensor.grad)
            elif one.glue is not None:
                glue = self._glue[one.glue]
                glue.gradient = tensor.grad if glue.gradient is None else glue.gradient + tensor.grad
        if block > 0:
            self._push_glue(block)

    def push_rest(self) -> None:
        """Push what the first block's inputs came from: the embedding."""
        self._push_glue(0)

    def _push_glue(self, block: int) -> None:
        ready = [key for key, glue in self._glue.items() if glue.first_block == block]
        pushed = [glue for key in ready if (glue := self._glue.pop(key)).gradient is not None]
        if pushed:
            # Glue of blocks below may share parts of this graph, so it is kept; it goes with its tensors.
            torch.autograd.backward(
                [g.tensor for g in pushed], [g.gradient for g in pushed], retain_graph=bool(self._glue)
            )
            self.collect()

    def input_gradients(self) -> list[Tensor]:
        """The gradients that wait for blocks below, for a look at whether they are finite."""
        return list(self._gradients.values())


class _Escape(torch.autograd.Function):
    """Passes a tensor on and takes its gradient to the cut it belongs to; nothing flows further."""

    holds_nothing = True  # see replay.py

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: Cut, leaf: Leaf) -> Tensor:
        ctx.cut, ctx.leaf = cut, leaf
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.cut.add(ctx.leaf, gradient)
        return None, None, None
