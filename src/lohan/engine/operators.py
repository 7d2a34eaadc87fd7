"""What an operator is, is given, reads and changes, as far as running a block twice depends on it.

A block is run in forward and again for backward. Both runs must be the same, so an operator's arguments are noted; and
neither may leave traces outside, so a block that changes memory it did not make, or draws from a generator of its own,
is refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lohan.engine.trees import tensors_in
from lohan.errors import ModelError

_HEAVY = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution",
    "aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operator's schema says about it."""

    name: str
    view: bool
    """Computes nothing: all it returns are views."""
    same: bool
    """A view that may be of the whole tensor and its own shape: then it says nothing."""
    heavy: bool
    fresh: bool
    """All it returns is new memory."""
    always: bool
    """Never skipped."""
    writes: tuple[int, ...] = ()
    """Positional arguments it changes."""
    writes_names: tuple[str, ...] = ()
    random: bool = False


_kinds: dict[int, tuple[Any, Kind]] = {}
"""By identity, with the operator so that it lives: an operator's own hash is slow."""


def kind_of(func: Any) -> Kind:
    known = _kinds.get(id(func))
    if known is None:
        known = _kinds[id(func)] = (func, _read_schema(func))
    return known[1]


_STATISTICS = {"aten::native_batch_norm": 5, "aten::cudnn_batch_norm": 5, "aten::miopen_batch_norm": 5}
"""Operators that change their running statistics without saying so in their schema, and which argument says whether."""


def _read_schema(func: Any) -> Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return Kind(str(func), view=False, same=False, heavy=False, fresh=False, always=True)
    aliases = [value.alias_info for value in schema.returns]
    fresh = bool(aliases) and all(alias is None for alias in aliases)
    view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    # In inference mode reshape and the like arrive whole, and may be views or copies.
    view = view and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    view = view or schema.name.startswith("prim::")  # questions about a tensor
    changed = [index for index, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    random = torch.Tag.nondeterministic_seeded in func.tags
    # What returns numbers or truth values lets Python decide.
    numbers = any("Tensor" not in str(value.type) for value in schema.returns)
    return Kind(
        schema.name,
        view=view,
        same=schema.name in ("aten::view", "aten::detach", "aten::alias"),
        heavy=fresh and not changed and schema.name in _HEAVY,
        fresh=fresh and not changed,
        always=random or not aliases or numbers,
        writes=tuple(changed),
        writes_names=tuple(schema.arguments[index].name for index in changed),
        random=random,
    )


def given(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*map(_shown, args), *((name, _shown(value)) for name, value in kwargs.items()))


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shown, value)) if isinstance(value, (tuple, list)) else value


def says_nothing(kind: Kind, args: Any, result: Any) -> bool:
    """Views of the whole tensor in its own shape come and go, with hooks for example."""
    return kind.name.startswith("prim::") or (kind.same and result.shape == args[0].shape)


def given_to_view(kind: Kind, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    shown = given(args, kwargs)
    if kind.name == "aten::as_strided" and len(args) > 3:
        return (*shown, args[0].storage_offset())  # only from the same place does its offset lead to the same numbers
    if kind.name == "aten::lift_fresh" and type(args[0]) is Tensor and args[0].numel() <= _FEW:
        return (*shown, repr(args[0].tolist()))  # a constant that Python made
    return shown


_FEW = 64
"""Constants up to this many numbers are compared. Picked by feel."""


def _tensors_of(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_of(value, {})
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value


class Storages:
    """Numbers for the storages of a block's run, never used twice although memory is; and the rules for them."""

    def __init__(self, block: str) -> None:
        self._block = block
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = 0
        self._made: set[int] = set()
        """Those that the block made itself."""

    def read(self, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """What an operator is given."""
        return tuple(self.number(tensor) for tensor in _tensors_of(args, kwargs))

    def written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
        """What an operator is about to change, after read(). Refuses what cannot be done twice."""
        kind = kind_of(func)
        if not (kind.writes or kind.random or kind.name in _STATISTICS):
            return ()
        if kind.random and any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise ModelError(
                f"{self._block} draws random numbers from a generator of its own ({func}). It is run again for "
                "backward and would draw others: use torch's default generator."
            )
        changed = [args[index] for index in kind.writes if index < len(args)]
        changed += [kwargs[name] for name in kind.writes_names if name in kwargs]
        if kind.name in _STATISTICS and args[_STATISTICS[kind.name]]:
            changed += args[3:5]
        numbers = tuple(self.number(tensor) for tensor in tensors_in(changed))
        for number, tensor in zip(numbers, tensors_in(changed), strict=True):
            if number not in self._made:
                raise ModelError(
                    f"{self._block} changes memory it did not make: {func} on a tensor of shape {tuple(tensor.shape)} "
                    "(an argument, a buffer or a weight). It is run again for backward and would change it twice: "
                    "let it work on a copy."
                )
        return numbers

    def made(self, result: Any) -> tuple[int, ...]:
        """What an operator has returned. Storages not seen before are the block's own."""
        known = self._next
        numbers = tuple(self.number(tensor) for tensor in tensors_in(result))
        self._made.update(number for number in numbers if number > known)
        return numbers

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._numbers.get(key)
        if known is not None and known[0]() is storage:
            return known[1]
        self._next += 1
        self._numbers[key] = (weakref.ref(storage), self._next)
        return self._next
