"""One run of a block, operator by operator: recorded in forward, replayed in backward.

Forward runs the block with a graph whose saved tensors are thrown away, under a mode that numbers every operator,
notes which memory it reads and writes, and keeps the outputs of the heavy operators that the Plan names. From that
follows what backward needs: the tensors autograd would have saved, and whatever computes them. The replay runs the
block again with a real graph: a kept operator returns what was kept, one whose value nobody needs returns memory that
was never filled, the rest compute as before.

What is needed is worked out on whole storages, so views and in-place changes need no rules of their own. Always
computed: random operators (their state moves on), integers and booleans (routing, which Python may read), operators
without a schema, and everything in a block that uses a custom autograd function, hooks on gradients or on saved
tensors, or hands a tensor's memory to Python, because what those look at cannot be seen from here. A kept output that
is changed in place later is copied before.

Both runs must be the same: the same operators on the same shapes and numbers. A block that differs, that changes
memory it did not make (its inputs, buffers, weights) or draws from a generator of its own is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.engine.operators import Storages, given, given_to_view, kind_of, says_nothing
from lohan.engine.trees import tensors_in
from lohan.errors import ModelError

OnHeavy = Callable[[Any, Any, Any, Any], None]


@dataclass(slots=True)
class OpRecord:
    """One operator of a block's run."""

    func: Any
    given: tuple[Any, ...]
    """Its arguments, tensors replaced by their shapes: what both runs must agree on."""
    reads: tuple[int, ...]
    """Storages, by number."""
    makes: tuple[int, ...]
    """Storages it fills or changes."""
    heavy: int = -1
    """Its number among the heavy operators; -1 for the others."""
    output_bytes: int = 0
    """Of a heavy operator."""
    always: bool = False
    blank: Any = None
    """What its outputs look like, if they can be left out: one _Blank, or several."""


@dataclass(frozen=True, slots=True)
class _Blank:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, result: Any) -> Any:
        if isinstance(result, Tensor):
            return cls(result.shape, result.stride(), result.dtype, result.device)
        return type(result)(map(cls.of, result)) if isinstance(result, (tuple, list)) else None

    def make(self, poison: bool) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.fill_(float("nan")) if poison else tensor


def _fill_in(blank: Any, poison: bool) -> Any:
    if isinstance(blank, (tuple, list)):
        return type(blank)(_fill_in(item, poison) for item in blank)
    return None if blank is None else blank.make(poison)


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


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(
        self, name: str, keep: dict[int, str], random_state: Callable[[], Tensor], on_heavy: OnHeavy | None = None
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = Recording()
        self._on_heavy = on_heavy
        self._keep, self._random_state = keep, random_state
        self._storages = Storages(name)
        self._held: dict[int, list[Kept]] = {}
        """Kept outputs by storage, to be copied before somebody changes them."""
        self._num_heavy = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _gone)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see devices/budget.py

    def finish(self) -> Recording:
        """What was recorded; nothing of it is held here any more (the hooks and this mode hold each other)."""
        made, self.made = self.made, Recording()
        self._held.clear()
        return made

    def _save(self, tensor: Tensor) -> None:
        """What autograd does with a tensor it would save: nothing is kept."""
        with torch._C.DisableTorchFunction():  # inside a custom function _Peeks would take this for somebody else
            self.made.saved.add(self._storages.number(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        ops = self.made.ops
        if kind.view:
            result = func(*args, **kwargs)
            if kind.name == "aten::lift_fresh":
                self._storages.made(result)
            if not says_nothing(kind, args, result):
                ops.append(OpRecord(func, given_to_view(kind, args, kwargs), (), ()))
            return result
        if torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is not self.hooks.pack_hook:
            self.made.opaque = True  # somebody else takes what is saved here
        storages, shown = self._storages, given(args, kwargs)
        reads, written = storages.read(args, kwargs), storages.written(func, args, kwargs)
        for storage in written:
            for one in self._held.pop(storage, ()):
                assert one.tensor is not None
                one.tensor = one.tensor.clone()
        result = func(*args, **kwargs)
        makes = storages.made(result) + written
        outputs = list(tensors_in(result))
        always = kind.always or not all(tensor.is_floating_point() for tensor in outputs)
        record = OpRecord(func, shown, reads, makes, always=always and not (kind.heavy and len(outputs) > 1))
        if kind.fresh and not always:
            record.blank = _Blank.of(result)
        if kind.heavy:
            record.heavy = self._num_heavy
            record.output_bytes = sum(tensor.nbytes for tensor in outputs)
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


class _Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, recording: Recording, name: str, set_random_state: Callable[[Tensor], None], poison: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._name, self._poison = recording, name, poison
        self._set_random_state = set_random_state
        self.position = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see devices/budget.py

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, kind_of(func)
        if kind.view:
            result = func(*args, **kwargs)
            if not says_nothing(kind, args, result):
                self._next(func, given_to_view(kind, args, kwargs))
            return result
        recording, number = self._recording, self._next(func, given(args, kwargs))
        kept = recording.kept.get(number)
        if kept is not None:
            if number in recording.random_state:
                self._set_random_state(recording.random_state[number])
            return _unwrap(kept)
        blank = recording.ops[number].blank
        if blank is not None and number not in recording.needed:
            return _fill_in(blank, self._poison)
        return func(*args, **kwargs)

    def _next(self, func: Any, given: tuple[Any, ...]) -> int:
        """The number of the operator that runs now, which must be the one that ran in forward."""
        ops, number = self._recording.ops, self.position
        self.position += 1
        expected = ops[number] if number < len(ops) else None
        if expected is None or expected.func is not func or not _equal(expected.given, given):
            before = "its end" if expected is None else f"{expected.func}{expected.given}"
            self._refuse(f"{func}{given} as operator {number} where its forward ran {before}")
        return number

    def finish(self) -> None:
        if self.position < len(self._recording.ops):
            self._refuse(f"{self.position} operators where its forward ran {len(self._recording.ops)}")

    def _refuse(self, what: str) -> None:
        raise ModelError(
            f"{self._name} ran {what}. A block that does not repeat itself cannot be recomputed: remove what makes it "
            "change between two runs."
        )


def _equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one == other or repr(one) == repr(other)  # NaN is not equal to itself


def _unwrap(kept: Any) -> Any:
    if isinstance(kept, Kept):
        assert kept.tensor is not None, "kept outputs are back before backward needs them"
        return kept.tensor.detach()
    if isinstance(kept, tuple):
        return tuple(_unwrap(item) for item in kept)
    return kept


class _Peeks(TorchFunctionMode):
    """Sees Python get at a tensor's memory past the dispatcher, or at the graph."""

    _READS = frozenset({"tolist", "register_hook", "register_post_accumulate_grad_hook"})
    _CHANGES = frozenset({"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "_to_dlpack"})
    _ATTRIBUTES = frozenset({"grad_fn"})

    def __init__(self) -> None:
        super().__init__()
        self.read = False
        self.changed = False
        """Perhaps: somebody has the address."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            self.read = self.read or getattr(func.__self__, "__name__", "") in self._ATTRIBUTES
        elif name in self._READS:
            self.read = True
        elif name in self._CHANGES:
            self.changed = True
        return func(*args, **(kwargs or {}))


class Replayer:
    """Records and replays the blocks of a model."""

    def __init__(
        self,
        random_state: Callable[[], Tensor],
        set_random_state: Callable[[Tensor], None],
        *,
        poison: bool = False,
    ):
        """With `poison`, what a replay leaves out holds NaN, so that reading it cannot pass by luck."""
        self._random_state, self._set_random_state, self._poison = random_state, set_random_state, poison

    def record(
        self, name: str, keep: dict[int, str], run: Callable[[], Any], on_heavy: OnHeavy | None = None
    ) -> tuple[Any, Recording]:
        """Run a block's forward. Its result still has its graph, which holds no tensors. `name` is for refusals.

        `on_heavy(operator, args, kwargs, result)` is told of every heavy operator, in order.
        """
        mode, peeks = _Record(name, keep, self._random_state, on_heavy), _Peeks()
        with torch.enable_grad(), mode.hooks, mode, peeks:
            result = run()
        recording = mode.finish()
        if peeks.changed:
            recording.kept.clear()  # it may have been changed behind our back
        if peeks.read or peeks.changed or _has_custom_function(tensors_in(result)):
            recording.opaque = True
        recording.finish()
        return result, recording

    @contextmanager
    def replay(self, recording: Recording, name: str) -> Iterator[None]:
        """The block runs inside, with a graph."""
        with torch.enable_grad(), _Replay(recording, name, self._set_random_state, self._poison) as mode:
            yield
        mode.finish()


def _gone(_: Any) -> Tensor:
    raise RuntimeError("A graph that was only recorded was used for backward.")


def _has_custom_function(tensors: Iterable[Tensor]) -> bool:
    """Whether a node of the graph may hold tensors that autograd does not know of."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            if not getattr(node, "holds_nothing", False):
                return True
        elif type(node).__name__ == "CppFunction":  # written in C++ outside of torch, or a scripted function
            return True
        waiting += [below for below, _ in node.next_functions if below is not None]
    return False
