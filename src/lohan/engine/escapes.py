"""Tensors that leave a block by another way than its return.

transformers records router logits with hooks on modules inside a block, and the loss uses them. Such a tensor is
an output of the block like any other: it has to become a leaf in forward and to be found again when the block is
recomputed. We know it by the submodule that returned it. The first time a block runs, everything made inside it is
watched; what is still alive afterwards has left. A floating tensor that has left and is no submodule's output
cannot be followed, and its gradient would be lost without a word, so that model is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.engine.operators import Storages
from lohan.engine.trees import map_tensors, tensors_in
from lohan.errors import ModelError

Escape = tuple[str, int, int]
"""Submodule path, which of its calls in one run of the block, which tensor of what it returned."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers, weakly, every floating tensor that operators return, and refuses what cannot be done twice."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, weakref.ref[Tensor]]] = []
        self._storages = Storages(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # a constant from Python is the block's own
            self._storages.read(args, kwargs)
            self._storages.written(func, args, kwargs)
        result = func(*args, **kwargs)
        self._storages.made(result)
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.made.append((str(func), weakref.ref(tensor)))
        return result


@contextmanager
def _hooks(block: nn.Module, paths: list[str], seen: Callable[[Escape, Tensor], Tensor]) -> Iterator[None]:
    """`seen` gets every tensor these submodules return, and says what is returned in its place."""
    calls: dict[str, int] = {}

    def hook(path: str) -> Callable[..., Any]:
        def record(module: nn.Module, args: Any, output: Any) -> Any:
            call = calls[path] = calls.get(path, -1) + 1
            position = -1

            def look(tensor: Tensor) -> Tensor:
                nonlocal position
                position += 1
                return seen((path, call, position), tensor)

            return map_tensors(output, look)

        return record

    # First in line, so that whoever records outputs by a hook gets what we return.
    handles = [block.get_submodule(path).register_forward_hook(hook(path), prepend=True) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_escapes(
    block: nn.Module, name: str, run: Callable[[], Any], arguments: Iterable[Tensor]
) -> tuple[Any, list[Tensor], list[Escape]]:
    """Run the block once, watched. Returns its result, the escaped tensors and how to find them again."""
    returned: list[tuple[Escape, weakref.ref[Tensor]]] = []
    paths = [path for path, _ in block.named_modules() if path]

    def watch_module(escape: Escape, tensor: Tensor) -> Tensor:
        returned.append((escape, weakref.ref(tensor)))
        return tensor

    with _hooks(block, paths, watch_module):
        with _Watch(name) as watch:
            result = run()
    known = {id(tensor) for tensor in (*tensors_in(result), *arguments)}
    known |= {id(tensor._base) for tensor in tensors_in(result)}  # a result that is a view keeps what it is a view of
    escapes: dict[int, Escape] = {}
    escaped: list[Tensor] = []
    for escape, reference in returned:
        tensor = reference()
        if tensor is None or not tensor.is_floating_point() or id(tensor) in known or id(tensor) in escapes:
            continue
        escapes[id(tensor)] = escape
        escaped.append(tensor)
    for operator, reference in watch.made:
        tensor = reference()
        if tensor is not None and id(tensor) not in known and id(tensor) not in escapes:
            raise ModelError(
                f"A tensor made by {operator} inside {name} (shape {tuple(tensor.shape)}) is kept outside, and it "
                "is not the output of any module there. Its gradient could not be followed, so this model cannot be "
                "streamed. Return the tensor from the block, or let a module of its own compute it."
            )
    return result, escaped, list(escapes.values())


def run_with_escapes(
    block: nn.Module,
    escapes: list[Escape],
    run: Callable[[], Any],
    follow: Callable[[int, Tensor], Tensor] | None = None,
) -> tuple[Any, list[Tensor]]:
    """Run the block and return its result and its escaped tensors, in the order of `escapes`.

    With `follow(number, tensor)` what it returns goes on in the tensor's place, inside the block and out of it.
    """
    if not escapes:
        return run(), []
    found: dict[Escape, Tensor] = {}
    numbers = {escape: number for number, escape in enumerate(escapes)}

    def seen(escape: Escape, tensor: Tensor) -> Tensor:
        if escape not in numbers:
            return tensor
        found[escape] = tensor
        return tensor if follow is None else follow(numbers[escape], tensor)

    with _hooks(block, sorted({path for path, _, _ in escapes}), seen):
        result = run()
    return result, [found[escape] for escape in escapes]
