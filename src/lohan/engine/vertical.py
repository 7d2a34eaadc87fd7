"""A model's own forward, run for each micro-batch in a thread of its own and stopped at every block.

The unmodified `model.forward` does not know that it is interrupted. Each block's `forward` is replaced, on the
instance, by a stop: it hands the call to the engine and waits for the result. So the engine can run block i for
every micro-batch before block i + 1 is reached by any. Only one of these threads ever runs at a time, and only
while the thread that computes stands still in advance(): they hold the glue between blocks, no more, and keep to one
core for it. The last stretch, behind the last block, has the head in it and takes all cores; the thread ends with it.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.engine.cores import use_cores
from lohan.errors import ModelError

_current: contextvars.ContextVar[PausedForward | None] = contextvars.ContextVar("lohan_paused_forward", default=None)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A block that a micro-batch has reached."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: contextvars.Context
    """The micro-batch's own context variables at this point."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the model's forward returned."""

    value: Any


class _Cancelled(BaseException):
    """Unwinds a paused forward that nobody will finish."""


class PausedForward:
    """One micro-batch's forward. advance() runs it to its next block, or to its end."""

    def __init__(self, call: Callable[[], Any], enter: Callable[[ExitStack], None]):
        """`enter` puts the thread into the device's state (stream, memory accounting) for as long as it lives."""
        self._call, self._enter = call, enter
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._num_cores = torch.get_num_threads()
        self._to_the_end = False
        self._reached: BlockCall | Finished | None = None
        self._error: BaseException | None = None
        self._result: Any = None
        self._cancelled = False
        self._context = contextvars.copy_context()
        # A new thread starts with torch's defaults, not with its creator's settings.
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def advance(self, result: Any = None, *, to_the_end: bool = False) -> BlockCall | Finished:
        """Give the last block's result and run on. Raises what the model's code raised."""
        self._result, self._to_the_end = result, to_the_end
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lohan-micro-batch", daemon=True)
            self._thread.start()
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        reached, self._reached = self._reached, None
        assert reached is not None
        return reached

    def cancel(self) -> None:
        """Unwind the model's code where it stands."""
        if self._thread is not None and self._thread.is_alive():
            self._cancelled = True
            self._go.release()
            self._thread.join()

    def stop_at(self, call: BlockCall) -> Any:
        """On the micro-batch's thread: wait here until the engine has run this block."""
        self._reached = call
        self._stopped.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled
        if self._to_the_end:
            use_cores(self._num_cores)
        result, self._result = self._result, None
        return result

    def _run(self) -> None:
        self._context.run(self._body)
        self._stopped.release()

    def _body(self) -> None:
        self._go.acquire()
        use_cores(1)
        _current.set(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(self._grad))
                if self._autocast[0]:
                    stack.enter_context(torch.autocast("cpu", dtype=self._autocast[1]))
                self._enter(stack)
                self._reached = Finished(self._call())
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        self._call = _nothing


def _nothing() -> None:
    """What a finished forward would call: its inputs are let go."""


class Stops:
    """The replaced forwards of a model's blocks, for as long as it is open."""

    def __init__(self, blocks: nn.ModuleList):
        self._blocks = list(blocks)
        self.originals = [block.forward for block in self._blocks]
        for index, block in enumerate(self._blocks):
            # An attribute of the instance hides the method of its class; hooks and __call__ stay as they are.
            block.__dict__["forward"] = self._stop(index)

    def _stop(self, index: int) -> Callable[..., Any]:
        original = self.originals[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            paused = _current.get()
            if paused is None:
                return original(*args, **kwargs)
            return paused.stop_at(BlockCall(index, args, kwargs, contextvars.copy_context()))

        return forward

    def close(self) -> None:
        for block in self._blocks:
            block.__dict__.pop("forward", None)


def check_order(call: BlockCall | Finished, expected: int, num_blocks: int, names: str) -> None:
    """Refuse a model that does not call its blocks once each, in order."""
    if isinstance(call, BlockCall) and call.index == expected:
        return
    if isinstance(call, BlockCall):
        where = f"after {names}[{expected - 1}]" if expected else "first"
        raise ModelError(
            f"{names}[{call.index}] is called {where}, where {names}[{expected}] was expected. Only models that "
            "call every block once and in order can be streamed; name another list with `blocks`."
            if expected < num_blocks
            else f"{names}[{call.index}] is called a second time. A block that is used twice cannot be streamed."
        )
    raise ModelError(
        f"The model's forward ended without calling {names}[{expected}] of {num_blocks} blocks. Layers that are "
        "skipped (layer drop) cannot be streamed: switch that off in the model's config."
    )
