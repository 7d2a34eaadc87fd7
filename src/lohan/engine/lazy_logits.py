"""Logits that are not there yet: a stand-in that looks like them and remembers what is done to them.

A model's own code treats it as a tensor of tokens x vocabulary. It has shape, dtype and device and no memory.
Elementwise operations and a choice of tokens are remembered, to be done again on a few tokens at a time;
cross-entropy is handed to whoever made it. Everything else is refused by name: an answer it gives is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor
from torch.nn import functional

from lohan.errors import ModelError

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LossCall:
    """A cross-entropy that the model asked for."""

    logits: LazyLogits
    target: Tensor
    ignore_index: int
    reduction: str
    label_smoothing: float


# What may be done to a few tokens' logits as well as to all of them: no number depends on a neighbour.
_ELEMENTWISE_NAMES = ("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "sigmoid", "clamp", "clip")
_CAST_NAMES = ("float", "half", "bfloat16", "double", "to", "type_as", "clone")
_ELEMENTWISE: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in (*_ELEMENTWISE_NAMES, *_CAST_NAMES, "__rdiv__", "__rsub__")]
    + [getattr(torch, name) for name in (*_ELEMENTWISE_NAMES, "clone")]
)
_DESCRIBING: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__", "get_device")]
    + [torch.is_floating_point, torch.numel]
    # A getter is another object each time it is asked for, but all of them are equal.
    + [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")]
)
_SHAPING: frozenset[Any] = frozenset([torch.Tensor.view, torch.Tensor.reshape, torch.reshape])
_FLATTENING: frozenset[Any] = frozenset([torch.Tensor.flatten, torch.flatten])


class LazyLogits(Tensor):
    """What the output embedding returns while its loss is computed in chunks. One thread at a time."""

    hidden: Tensor
    """(tokens, hidden size): what the logits would be computed from, with its graph."""

    rows: Tensor
    """The rows of `hidden` that are left, in the logits' shape without its last dimension; in order, each once."""

    steps: tuple[Step, ...]
    """What the model did to the logits since, elementwise."""

    _take_loss: Callable[[LossCall], Tensor]

    @staticmethod
    def make(
        hidden: Tensor,
        rows: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
        steps: tuple[Step, ...],
        take_loss: Callable[[LossCall], Tensor],
    ) -> LazyLogits:
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, (*rows.shape, vocabulary), dtype=dtype, device=hidden.device
        )
        made.hidden, made.rows, made.steps, made._take_loss = hidden, rows, steps, take_loss
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(tokens={self.rows.numel()}, steps={len(self.steps)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else None
        if func in _ELEMENTWISE:
            return _elementwise(func, args, kwargs)
        if lazy is None:
            _refuse(func)
        if func is functional.cross_entropy:
            return lazy._take_loss(_loss_call(*args, **kwargs))
        if func is torch.Tensor.contiguous:
            return lazy
        if func in _SHAPING:
            return _reshaped(lazy, func, args[1:], kwargs)
        if func in _FLATTENING:
            return _flattened(lazy, func, *args[1:], **kwargs)
        if func is torch.Tensor.__getitem__:
            return _picked(lazy, func, args[1])
        return _refuse(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(func)


def _refuse(func: Any, why: str = "") -> Never:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    raise ModelError(
        f"The model's forward uses its logits in {name}{why}, which cannot be "
        "computed for a few tokens at a time.\nSet head_chunks=1: whole logits, tokens x vocabulary, are then held."
    )


def _like(lazy: LazyLogits, rows: Tensor) -> LazyLogits:
    return LazyLogits.make(lazy.hidden, rows, _vocabulary(lazy), lazy.dtype, lazy.steps, lazy._take_loss)


def _vocabulary(lazy: LazyLogits) -> int:
    return int(lazy.shape[-1])


class _Argument:
    """Stands for the logits among the arguments of a remembered operation."""


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyLogits:
    """Remember an operation whose other arguments are the same for every token."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, LazyLogits)]
    lazy = found[0]
    if len(found) != 1 or not any(value is lazy for value in args):
        _refuse(func, " together with themselves")
    vocabulary = _vocabulary(lazy)
    fixed = [_Argument if value is lazy else _broadcast(func, value, vocabulary) for value in args]
    named = {name: _broadcast(func, value, vocabulary) for name, value in kwargs.items()}

    def step(logits: Tensor) -> Tensor:
        result: Tensor = func(*(logits if value is _Argument else value for value in fixed), **named)
        return result

    result = step(torch.empty(0, vocabulary, dtype=lazy.dtype, device=lazy.device))
    if tuple(result.shape) != (0, vocabulary) or result.device != lazy.device:
        _refuse(func, f" with a result of shape {list(result.shape)} per token on {result.device}")
    return LazyLogits.make(lazy.hidden, lazy.rows, vocabulary, result.dtype, (*lazy.steps, step), lazy._take_loss)


def _broadcast(func: Any, value: Any, vocabulary: int) -> Any:
    """An argument in the shape that fits any number of tokens."""
    if not isinstance(value, Tensor):
        return value
    if func is torch.Tensor.type_as:
        return torch.empty(0, dtype=value.dtype, device=value.device)
    if value.requires_grad:
        _refuse(func, " with a tensor that needs a gradient")
    if value.ndim == 0:
        return value
    if value.shape[-1] not in (1, vocabulary) or value.numel() != value.shape[-1]:
        _refuse(func, f" with a tensor of shape {list(value.shape)}")
    return value.reshape(-1)


def _reshaped(lazy: LazyLogits, func: Any, shape: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyLogits:
    given = kwargs.get("shape", shape[0] if len(shape) == 1 else shape)
    sizes = list(given) if isinstance(given, (tuple, list)) else [given]
    if not all(isinstance(size, int) for size in sizes):
        _refuse(func, " to another dtype")
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = lazy.numel() // max(1, -math.prod(sizes))
    if not sizes or sizes[-1] != _vocabulary(lazy) or math.prod(sizes) != lazy.numel():
        _refuse(func, f" from {list(lazy.shape)} to {sizes}")
    return _like(lazy, lazy.rows.reshape(sizes[:-1]))


def _flattened(lazy: LazyLogits, func: Any, start_dim: int = 0, end_dim: int = -1) -> LazyLogits:
    last = end_dim if end_dim >= 0 else end_dim + lazy.dim()
    if last >= lazy.dim() - 1:
        _refuse(func, " over the vocabulary")
    return _like(lazy, lazy.rows.flatten(start_dim if start_dim >= 0 else start_dim + lazy.dim(), last))


def _picked(lazy: LazyLogits, func: Any, index: Any) -> LazyLogits:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, (int, slice)) for part in parts) or parts.count(Ellipsis) > 1:
        _refuse(func, " by a tensor, a list or None")
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (lazy.dim() - len(parts) + 1)
    if len(parts) == lazy.dim():
        words = parts.pop()
        if words not in (slice(None), slice(0, None), slice(0, _vocabulary(lazy)), slice(None, _vocabulary(lazy))):
            _refuse(func, " by word")
    return _like(lazy, lazy.rows[tuple(parts)])


def _loss_call(
    input: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> LossCall:
    """The arguments of torch.nn.functional.cross_entropy, by its names."""
    func = functional.cross_entropy
    if weight is not None or size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
        _refuse(func, " with weights of words, or without a sum over tokens")
    if not isinstance(target, Tensor) or isinstance(target, LazyLogits) or target.is_floating_point():
        _refuse(func, " with targets that are not words")
    if input.dim() != 2 or target.dim() != 1 or target.shape[0] != input.shape[0]:
        _refuse(func, f" of shape {list(input.shape)} with targets of shape {list(target.shape)}")
    return LossCall(input, target, ignore_index, reduction, label_smoothing)
