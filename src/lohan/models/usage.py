"""Which parameters does forward use before, between and after the blocks? Found by running it, on no data.

observe_usage() runs model.forward once with fake tensors (shapes and dtypes, no memory) in place of every
parameter, and a dispatch mode notes which parameter each operator reads. A block really runs once per class, to
learn what it returns; after that, and where it cannot run on fake tensors (routing that depends on values), a
stand-in answers for it. The model is left exactly as it was, also when forward fails. No other thread may use the
model meanwhile.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from lohan.errors import ModelError

_EXAMPLE_SHAPE = (1, 8)


class UsageUnknown(Exception):
    """forward cannot run on fake tensors. The message holds why; the caller decides by names instead."""


@dataclass(slots=True)
class Usage:
    """Where one parameter was read."""

    before: bool = False
    after: bool = False
    between: set[int] = field(default_factory=set)
    """Read outside the blocks when this many of them had run, neither none nor all."""
    inside: set[int] = field(default_factory=set)
    """Read while this block ran."""


Places = Mapping[str, Sequence[tuple[nn.Module, str]]]
"""Parameter name -> every (module, attribute) that holds the tensor."""


def observe_usage(
    model: nn.Module,
    blocks_name: str,
    blocks: Sequence[nn.Module],
    places: Places,
    example_inputs: Mapping[str, Any] | None = None,
) -> dict[str, Usage]:
    """Parameter name -> where it was read. Raises UsageUnknown when no attempt at running forward succeeds."""
    failures: list[str] = []
    for inputs in _input_attempts(model, example_inputs):
        for stand_in, training in product(("block", "tensor", "tuple"), (True, False)):
            run = _Run(blocks, places)
            try:
                run.forward(model, inputs, stand_in, training)
            except ModelError:
                raise
            except Exception as error:  # forward is the user's code, so anything may come out of it
                failures.append(f"{type(error).__name__}: {error}".split("\n", 1)[0])
                continue
            _refuse_wrong_order(blocks_name, len(blocks), run.calls)
            return run.usage
    raise UsageUnknown(failures[0])


class _Run:
    """One attempt: fake parameters in, forward, everything back."""

    def __init__(self, blocks: Sequence[nn.Module], places: Places):
        self.blocks = blocks
        self.places = places
        self.usage = {name: Usage() for name in places}
        self.calls: list[int] = []
        self._inside: int | None = None
        self._arguments: set[int] = set()
        self._names: dict[int, str] = {}
        self._outputs: dict[type, Any] = {}

    def forward(self, model: nn.Module, inputs: Mapping[str, Any], stand_in: str, training: bool) -> None:
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _left_as_it_was(model), torch.no_grad(), _no_log_of_failures():
            with fake_mode:
                fakes = self._put_fakes()
                for index, block in enumerate(self.blocks):
                    block.forward = self._answer_for(index, block, stand_in)
                for module in model.modules():
                    # Training is what will be run, but stochastic depth asks for the value of a random number.
                    module.training = training
                fake_inputs = tree_map(lambda value: _as_fake(fake_mode, value), dict(inputs))
                with _Observer(self._note):
                    model(**fake_inputs)
            del fakes  # held until here: their ids are the keys of self._names

    def _put_fakes(self) -> list[torch.Tensor]:
        fakes = []
        for name, held_by in self.places.items():
            module, attribute = held_by[0]
            like = module._parameters[attribute]
            if like is None:
                raise AssertionError(f"{name} has gone from its module")
            fake = torch.empty(like.shape, dtype=like.dtype)
            fakes.append(fake)
            self._names[id(fake)] = name
            for module, attribute in held_by:
                module._parameters[attribute] = fake  # type: ignore[assignment]  # a plain tensor serves as well
        return fakes

    def _answer_for(self, index: int, block: nn.Module, stand_in: str) -> Callable[..., Any]:
        real_forward = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A parameter handed to a block as it is counts as used by the one who hands it over.
            self._arguments = {id(argument) for argument in tree_iter((args, kwargs))}
            for argument in tree_iter((args, kwargs)):
                self._note(argument)
            self.calls.append(index)
            if stand_in == "block":
                if type(block) not in self._outputs:
                    self._inside = index
                    try:
                        self._outputs[type(block)] = real_forward(*args, **kwargs)
                    finally:
                        self._inside = None
                return tree_map(_another, self._outputs[type(block)])
            hidden = next(value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor))
            return hidden if stand_in == "tensor" else (hidden,)

        return forward

    def _note(self, argument: object) -> None:
        name = self._names.get(id(argument))
        if name is None:
            return
        usage = self.usage[name]
        if self._inside is not None:
            if id(argument) not in self._arguments:
                usage.inside.add(self._inside)
        elif not self.calls:
            usage.before = True
        elif len(self.calls) < len(self.blocks):
            usage.between.add(len(self.calls))
        else:
            usage.after = True


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    def __init__(self, note: Callable[[object], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for argument in tree_iter((args, kwargs)):
            self._note(argument)
        return func(*args, **(kwargs or {}))


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back every attribute, parameter and buffer. A model may cache a table it computed, and a fake one left
    behind would surface as a wrong result much later."""
    saved = [
        (module, dict(module.__dict__), dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def _no_log_of_failures() -> Iterator[None]:
    """torch logs a stack trace for every operator that cannot run on fake tensors. Here that is an expected answer."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _another(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def _input_attempts(model: nn.Module, example_inputs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if example_inputs is not None:
        return [dict(example_inputs)]
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    ids = "input_ids" if "input_ids" in named or not named else named[0]
    tokens = torch.zeros(_EXAMPLE_SHAPE, dtype=torch.int64)
    plain: dict[str, Any] = {ids: tokens}
    # A stand-in records no router logits, and the loss on them reads no outer parameter.
    plain |= {name: False for name in ("use_cache", "output_router_logits") if name in named}
    if "labels" in named or takes_any:
        return [plain | {"labels": tokens.clone()}, plain]
    return [plain]


def _refuse_wrong_order(blocks_name: str, num_blocks: int, calls: list[int]) -> None:
    if calls == list(range(num_blocks)):
        return
    for index in range(num_blocks):
        times = calls.count(index)
        if times != 1:
            raise ModelError(
                f"{blocks_name}.{index} is called {times} times in one forward, and a streamed block has to be called "
                f"exactly once.\nGive the model one block for each call, or name another list of blocks."
            )
    raise ModelError(
        f"The blocks of {blocks_name} are called in the order {', '.join(map(str, calls))}, and they are streamed in "
        f"the order of the list.\nPut them in the list in the order in which forward calls them."
    )
