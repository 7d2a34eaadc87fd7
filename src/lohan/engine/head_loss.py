"""The head's loss, a few tokens at a time: logits of tokens x vocabulary are never whole in memory.

While chunked() is entered the output embedding returns LazyLogits, and the model's own code, unmodified, goes on to
its cross-entropy with them. That is computed here chunk by chunk: logits, what the model did to them, loss, and right
away backward into the hidden states' gradient and the weight's, so that a chunk's logits are gone before the next.
Weight gradients are added where they are summed over micro-batches, without a copy of that size.

Backward of a chunk needs the factor its loss has in the whole loss, which is only known once the model has returned.
The engine says what it expects (loss scale over labels). The first micro-batch does not rely on it: its chunks' logits
are computed a second time, in backward. If the factor was as expected, later ones take it for granted and are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lohan.engine.lazy_logits import LazyLogits, LossCall
from lohan.errors import ConfigError, ModelError


def why_not_chunked(model: nn.Module) -> str | None:
    """What keeps this model's head from being computed in chunks; None where nothing does."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is None:
        return f"{type(model).__name__} does not say which module makes its logits (get_output_embeddings)"
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return f"the output embedding of {type(model).__name__} is a {type(head).__name__}, not a plain nn.Linear"
    return None


@dataclass(frozen=True, slots=True)
class Expected:
    """What the engine does with a micro-batch's loss after the model has returned it."""

    scale: float | None
    """Loss scale."""

    share: float | None
    """The micro-batch's share of the step's labels, for a model that does not divide by num_items itself."""

    num_items: int

    def factor(self, loss: Tensor, count: Tensor | None) -> Tensor:
        """The gradient that will arrive at a sum over tokens, by the operations that autograd would do.

        `count` is what a mean divides by; None where the model itself divides by num_items.
        """
        factor = torch.ones((), dtype=loss.dtype, device=loss.device)
        if self.scale is not None:
            factor = factor * self.scale
        if self.share is not None:
            factor = factor * self.share
        if count is not None:
            return factor / count
        return factor if self.share is not None else factor / torch.tensor(self.num_items, device=loss.device)


class HeadLoss:
    """A model's head, its loss in `num_chunks` parts. One thread at a time."""

    def __init__(self, model: nn.Module, num_chunks: int):
        if num_chunks < 1:
            raise ConfigError(f"head_chunks is {num_chunks}; it must be 1 or more.")
        self._num_chunks = num_chunks
        self._head: nn.Linear | None = None
        self._expected: Expected | None = None
        self._trusted: bool | None = None
        """Whether the expected factor was right the first time; None before that."""
        self._open: list[_Sum] = []
        if num_chunks > 1:
            why = why_not_chunked(model)
            if why is not None:
                raise ModelError(f"head_chunks is {num_chunks}, and {why}.\nSet head_chunks=1.")
            head = model.get_output_embeddings()  # type: ignore[operator]
            assert isinstance(head, nn.Linear)
            self._head = head

    @contextmanager
    def chunked(self, *, scale: float | None, share: float | None, num_items: int) -> Iterator[None]:
        """Around one micro-batch's head: the rest of the model's forward, and backward of its loss."""
        if self._head is None:
            yield
            return
        self._expected, self._open = Expected(scale, share, num_items), []
        # An attribute of the instance hides the method of its class; hooks and __call__ stay as they are.
        self._head.__dict__["forward"] = self._stand_in
        try:
            yield
            self._check_all_used()
        finally:
            self._head.__dict__.pop("forward", None)
            self._expected, self._open = None, []

    def _stand_in(self, hidden: Tensor) -> LazyLogits:
        assert self._head is not None
        if torch.is_autocast_enabled(hidden.device.type):
            raise ModelError("The head's loss cannot be computed in chunks under autocast.\nSet head_chunks=1.")
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows = torch.arange(flat.shape[0]).view(hidden.shape[:-1])
        return LazyLogits.make(flat, rows, self._head.out_features, hidden.dtype, (), self._take_loss)

    def _take_loss(self, call: LossCall) -> Tensor:
        assert self._head is not None
        assert self._expected is not None
        weight, bias = self._head.weight, self._head.bias
        count = (call.target != call.ignore_index).sum() if call.reduction == "mean" else None
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (call.logits.hidden, weight, bias)
        )
        part = _Sum(call, weight, bias, self._num_chunks)
        if not needs_grad:
            total = part.loss()
        else:
            part.expect = lambda loss, expected=self._expected: expected.factor(loss, count)
            part.eager = self._trusted is True
            self._open.append(part)
            total = _ChunkedSum.apply(part, call.logits.hidden, weight, bias)  # type: ignore[no-untyped-call]
        return total if count is None else total / count

    def _check_all_used(self) -> None:
        """After backward: was every loss used, and as it was expected to be?"""
        if not self._open:
            return
        as_expected = all(part.as_expected is True for part in self._open)
        if self._trusted is None:
            self._trusted = as_expected
        elif self._trusted and not as_expected:
            raise ModelError(
                "The model weighs its cross-entropy otherwise than in its first micro-batch, or did not use it at all, "
                "so the gradients computed with its logits would be wrong.\nSet head_chunks=1."
            )


class _Sum:
    """The sum of the tokens' losses, and its gradients, chunk by chunk."""

    def __init__(self, call: LossCall, weight: Tensor, bias: Tensor | None, num_chunks: int):
        self._call, self.weight, self.bias = call, weight, bias
        self._hidden = call.logits.hidden.detach()
        rows = call.logits.rows.flatten()
        # The usual case: all tokens, in order. Then no row is copied on its way in or out.
        self._rows = None if rows.numel() == self._hidden.shape[0] else rows.to(self._hidden.device)
        self._length = rows.numel()
        self._size = max(1, -(-self._length // num_chunks))
        self.expect: Callable[[Tensor], Tensor] | None = None
        self.eager = False
        self.needs_hidden = call.logits.hidden.requires_grad
        self.as_expected: bool | None = None
        """Known after backward."""
        self._gradient: Tensor | None = None
        self._factor: Tensor | None = None

    def loss(self) -> Tensor:
        """Without gradients."""
        total = None
        with torch.no_grad():
            for begin in range(0, self._length, self._size):
                one = self._chunk_loss(functional.linear(self._part(begin), self.weight, self.bias), begin)
                total = one if total is None else total + one
        assert total is not None
        return total

    def loss_and_gradients(self, factor: Tensor) -> Tensor:
        """The same, and backward of every chunk with this factor."""
        total = None
        if self.needs_hidden:
            make = torch.empty_like if self._rows is None else torch.zeros_like
            self._gradient = make(self._hidden)
        for begin in range(0, self._length, self._size):
            with torch.enable_grad():
                part = self._part(begin).requires_grad_(True)
                # Nothing else holds the logits: those that no operation saves are freed before backward.
                one = self._chunk_loss(_ChunkLogits.apply(self, begin, part), begin)  # type: ignore[no-untyped-call]
                torch.autograd.backward(one, factor)
            total = one.detach() if total is None else total + one.detach()
        assert total is not None
        return total

    def run_forward(self) -> Tensor:
        assert self.expect is not None
        if not self.eager:
            return self.loss()
        self._factor = self.expect(torch.empty((), dtype=self._call.logits.dtype, device=self._hidden.device))
        return self.loss_and_gradients(self._factor)

    def run_backward(self, factor: Tensor) -> Tensor | None:
        """The hidden states' gradient."""
        assert self.expect is not None
        expected = self._factor if self._factor is not None else self.expect(factor)
        self.as_expected = torch.equal(expected, factor)
        if not self.eager:
            self.loss_and_gradients(factor)
        gradient, self._gradient = self._gradient, None
        return gradient

    def add_gradients(self, begin: int, part: Tensor, gradient: Tensor) -> None:
        """A chunk's share, given the gradient of its logits as the output embedding made them."""
        if self._gradient is not None:
            if self._rows is None:
                torch.mm(gradient, self.weight, out=self._gradient[begin : begin + self._size])
            else:
                self._gradient.index_copy_(0, self._rows[begin : begin + self._size], gradient @ self.weight)
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = torch.mm(gradient.t(), part)
            else:
                self.weight.grad.addmm_(gradient.t(), part)
        if self.bias is not None and self.bias.requires_grad:
            added = gradient.sum(0)
            self.bias.grad = added if self.bias.grad is None else self.bias.grad.add_(added)

    def _part(self, begin: int) -> Tensor:
        if self._rows is None:
            return self._hidden[begin : begin + self._size].detach()
        return self._hidden[self._rows[begin : begin + self._size]]

    def _chunk_loss(self, logits: Tensor, begin: int) -> Tensor:
        for step in self._call.logits.steps:
            logits = step(logits)
        return functional.cross_entropy(
            logits, self._call.target[begin : begin + self._size], ignore_index=self._call.ignore_index,
            reduction="sum", label_smoothing=self._call.label_smoothing,
        )  # fmt: skip


class _ChunkLogits(torch.autograd.Function):
    """One chunk's logits. Their gradient goes where the sum wants it."""

    @staticmethod
    def forward(ctx: Any, owner: _Sum, begin: int, part: Tensor) -> Tensor:
        ctx.owner, ctx.begin = owner, begin
        ctx.save_for_backward(part)
        return functional.linear(part, owner.weight, owner.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (part,) = ctx.saved_tensors
        ctx.owner.add_gradients(ctx.begin, part, gradient)
        return None, None, None


class _ChunkedSum(torch.autograd.Function):
    """The whole sum, in the model's graph. The weight is an input so that the loss needs a gradient because of it."""

    @staticmethod
    def forward(ctx: Any, part: _Sum, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.part = part
        return part.run_forward()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.part.run_backward(factor), None, None
