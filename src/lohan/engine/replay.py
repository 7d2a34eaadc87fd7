"""One run of a block, operator by operator: recorded in forward, replayed in backward.

Forward runs the block with a graph whose saved tensors are thrown away, under a mode that numbers every operator,
notes which memory it reads and writes, and keeps the outputs of the heavy operators that the Plan names. From that
follows what backward needs: the tensors autograd would have saved, and whatever computes them. The replay runs the
block again with a real graph: a kept operator returns what was kept, one whose value nobody needs returns memory that
was never filled, the rest compute as before.

What is needed is worked out on whole storages, so views and in-place changes need no rules of their own. Always
computed: random operators (their state moves on), integers and booleans (routing, which Python may read), operators
without a schema, and everything in a block that uses a custom autograd function or hands numbers to Python, because
what those look at cannot be seen from here. A kept output that is changed in place later is copied before.
The order of operators must be the same in both runs; if it is not, the block is refused by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.engine.trees import tensors_in
from lohan.errors import ModelError

OnHeavy = Callable[[Any, Any, Any, Any], None]

_HEAVY = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution",
    "aten::_grouped_mm", "aten::_scaled_mm", "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an operator's schema says about it."""

    name: str
    view: bool
    """Computes nothing: all it returns are views."""
    heavy: bool
    fresh: bool
    """All it returns is new memory."""
    always: bool
    """Never skipped."""
    writes: tuple[int, ...] = ()
    """Positional arguments it changes."""
    writes_names: tuple[str, ...] = ()


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    known = _kinds.get(func)
    if known is None:
        known = _kinds[func] = _read_schema(func)
    return known


def _read_schema(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _Kind(str(func), view=False, heavy=False, fresh=False, always=True)
    aliases = [value.alias_info for value in schema.returns]
    fresh = bool(aliases) and all(alias is None for alias in aliases)
    view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    view = view or schema.name.startswith("prim::")  # questions about a tensor
    changed = [index for index, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _Kind(
        schema.name,
        view=view,
        heavy=fresh and not changed and schema.name in _HEAVY,
        fresh=fresh and not changed,
        always=random or not aliases or schema.name == "aten::_local_scalar_dense",
        writes=tuple(changed),
        writes_names=tuple(schema.arguments[index].name for index in changed),
    )


@dataclass(slots=True)
class OpRecord:
    """One operator of a block's run that is not a mere view."""

    func: Any
    reads: tuple[int, ...]
    """Storages, by number."""
    makes: tuple[int, ...]
    """Storages it fills or changes."""
    heavy: int = -1
    """Its number among the heavy operators; -1 for the others."""
    output_bytes: int = 0
    """Of a heavy operator."""
    always: bool = False
    blank: tuple[Any, ...] | None = None
    """Shape, strides, dtype and device of its one output, if it can be left out."""


@dataclass(slots=True)
class Kept:
    """One output of a kept operator, here or elsewhere."""

    tensor: Tensor | None
    tier: str
    """device, host or ssd."""
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, tier: str) -> Kept:
        return cls(tensor, tier, tensor.shape, tensor.stride(), tensor.dtype)


@dataclass(slots=True)
class Recording:
    """What forward leaves for the replay."""

    ops: list[OpRecord] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    """Storages that autograd would have saved."""
    kept: dict[int, Any] = field(default_factory=dict)
    """Results by the operator's number, each tensor in them replaced by a Kept."""
    random_state: dict[int, Tensor] = field(default_factory=dict)
    """The generator after a kept random operator."""
    opaque: bool = False
    """Something here cannot be seen, so all that is not kept is computed again."""
    needed: set[int] = field(default_factory=set)

    def finish(self) -> None:
        """Work out what the replay computes, and let go of kept outputs that nobody will read."""
        self.needed = set(range(len(self.ops))) if self.opaque else needed_ops(self.ops, self.saved, self.kept)
        for number in [n for n in self.kept if n not in self.needed]:
            del self.kept[number]

    def parcels(self) -> Iterator[Kept]:
        """Every kept tensor, in a fixed order."""
        for number in sorted(self.kept):
            yield from _kept_in(self.kept[number])


def _kept_in(result: Any) -> Iterator[Kept]:
    if isinstance(result, Kept):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _kept_in(item)


def needed_ops(ops: Sequence[OpRecord], saved: Iterable[int], kept: Iterable[int]) -> set[int]:
    """The operators whose values backward needs, kept ones included; what a kept one read is not needed for it."""
    storages, held = set(saved), set(kept)
    needed: set[int] = set()
    makers: dict[int, list[int]] = {}
    for number, op in enumerate(ops):
        for storage in op.makes:
            makers.setdefault(storage, []).append(number)
    waiting = [number for number, op in enumerate(ops) if op.always]
    waiting += [number for storage in storages for number in makers.get(storage, ())]
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        if number in held:
            continue
        for storage in ops[number].reads:
            if storage not in storages:
                storages.add(storage)
                waiting += makers.get(storage, ())
    return needed


def heavy_sources(ops: Sequence[OpRecord], storages: Iterable[int]) -> set[int]:
    """The heavy operators, by their number among them, whose values are in these storages or were made into them."""
    makers: dict[int, list[int]] = {}
    for number, op in enumerate(ops):
        for storage in op.makes:
            makers.setdefault(storage, []).append(number)
    found: set[int] = set()
    seen: set[int] = set()
    waiting = list(storages)
    while waiting:
        storage = waiting.pop()
        if storage in seen:
            continue
        seen.add(storage)
        for number in makers.get(storage, ()):
            if ops[number].heavy >= 0:
                found.add(ops[number].heavy)
            else:
                waiting += ops[number].reads
    return found


class _Storages:
    """Numbers for storages, never used twice although memory is."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = 0

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._numbers.get(key)
        if known is not None and known[0]() is storage:
            return known[1]
        self._next += 1
        self._numbers[key] = (weakref.ref(storage), self._next)
        return self._next


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, keep: dict[int, str], random_state: Callable[[], Tensor], on_heavy: OnHeavy | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = Recording()
        self._on_heavy = on_heavy
        self._keep, self._random_state = keep, random_state
        self._storages = _Storages()
        self._held: dict[int, list[Kept]] = {}
        """Kept outputs by storage, to be copied before somebody changes them."""
        self._num_heavy = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see devices/budget.py

    def save(self, tensor: Tensor) -> None:
        """What autograd does with a tensor it would save: nothing is kept."""
        self.made.saved.add(self._storages.number(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind.view:
            return func(*args, **kwargs)
        number = self._storages.number
        ops = self.made.ops
        reads = tuple(number(tensor) for tensor in _tensors_of(args, kwargs))
        changed = [args[index] for index in kind.writes if index < len(args)]
        changed += [kwargs[name] for name in kind.writes_names if name in kwargs]
        written = tuple(number(tensor) for tensor in tensors_in(changed))
        for storage in written:
            for one in self._held.pop(storage, ()):
                assert one.tensor is not None
                one.tensor = one.tensor.clone()
        result = func(*args, **kwargs)
        if kind.fresh and isinstance(result, Tensor):
            record = OpRecord(func, reads, (number(result),), always=kind.always or not result.is_floating_point())
            if not record.always:
                record.blank = (result.shape, result.stride(), result.dtype, result.device)
        else:
            outputs = list(tensors_in(result))
            always = kind.always or not all(tensor.is_floating_point() for tensor in outputs)
            record = OpRecord(
                func, reads, tuple(number(t) for t in outputs) + written, always=always and not kind.heavy
            )
        if kind.heavy:
            record.heavy = self._num_heavy
            record.output_bytes = sum(tensor.nbytes for tensor in tensors_in(result))
            if self._on_heavy is not None:
                self._on_heavy(func, args, kwargs, result)
            tier = self._keep.get(self._num_heavy)
            if tier is not None:
                self._hold(len(ops), result, tier)
                if kind.always:
                    self.made.random_state[len(ops)] = self._random_state()
            self._num_heavy += 1
        ops.append(record)
        return result

    def _hold(self, op: int, result: Any, tier: str) -> None:
        def hold(value: Any) -> Any:
            if isinstance(value, Tensor):
                kept = Kept.of(value.detach(), tier)
                self._held.setdefault(self._storages.number(value), []).append(kept)
                return kept
            return value

        self.made.kept[op] = tuple(hold(v) for v in result) if isinstance(result, (tuple, list)) else hold(result)


def _tensors_of(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_of(value, {})
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, recording: Recording, name: str, set_random_state: Callable[[Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._name = recording, name
        self._set_random_state = set_random_state
        self.position = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see devices/budget.py

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _kind(func).view:
            return func(*args, **(kwargs or {}))
        recording, number = self._recording, self.position
        self.position += 1
        if number >= len(recording.ops) or recording.ops[number].func is not func:
            expected = str(recording.ops[number].func) if number < len(recording.ops) else "its end"
            raise ModelError(
                f"{self._name} ran {func} as operator {number} where its forward ran {expected}. A block that does "
                "not repeat itself cannot be recomputed: remove what makes it change between two runs."
            )
        kept = recording.kept.get(number)
        if kept is not None:
            if number in recording.random_state:
                self._set_random_state(recording.random_state[number])
            return _unwrap(kept)
        if number not in recording.needed:
            blank = recording.ops[number].blank
            if blank is not None:
                shape, stride, dtype, device = blank
                return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return func(*args, **(kwargs or {}))


def _unwrap(kept: Any) -> Any:
    if isinstance(kept, Kept):
        assert kept.tensor is not None, "kept outputs are back before backward needs them"
        return kept.tensor.detach()
    if isinstance(kept, tuple):
        return tuple(_unwrap(item) for item in kept)
    return kept


class _Peeks(TorchFunctionMode):
    """Sees Python read a tensor's numbers past the dispatcher."""

    _READS = frozenset({"tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"})

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._READS:
            self.seen = True
        return func(*args, **(kwargs or {}))


class Replayer:
    """Records and replays the blocks of a model, and remembers which of them cannot be seen through."""

    def __init__(self, random_state: Callable[[], Tensor], set_random_state: Callable[[Tensor], None]):
        self._random_state, self._set_random_state = random_state, set_random_state
        self._opaque: dict[int, bool] = {}

    def record(
        self, block: int, keep: dict[int, str], run: Callable[[], Any], on_heavy: OnHeavy | None = None
    ) -> tuple[Any, Recording]:
        """Run a block's forward. Its result still has its graph, which holds no tensors.

        `on_heavy(operator, args, kwargs, result)` is told of every heavy operator, in order.
        """
        mode = _Record(keep, self._random_state, on_heavy)
        peeks = None if block in self._opaque else _Peeks()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(mode.save, _gone))
            stack.enter_context(mode)
            if peeks is not None:
                stack.enter_context(peeks)
            result = run()
        if peeks is not None:
            self._opaque[block] = peeks.seen or _has_custom_function(tensors_in(result))
        recording = mode.made
        recording.opaque = self._opaque[block]
        recording.finish()
        return result, recording

    @contextmanager
    def replay(self, recording: Recording, name: str) -> Iterator[None]:
        """The block runs inside, with a graph."""
        with torch.enable_grad(), _Replay(recording, name, self._set_random_state):
            yield


def _gone(_: Any) -> Tensor:
    raise RuntimeError("A graph that was only recorded was used for backward.")


def _has_custom_function(tensors: Iterable[Tensor]) -> bool:
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        waiting += [below for below, _ in node.next_functions if below is not None]
    return False
