"""Tensors inside the arguments and results of a block: nested tuples, lists and dicts, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tree with every tensor replaced by change(tensor), depth first, in order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        changed = [map_tensors(item, change) for item in tree]
        return type(tree)(*changed) if hasattr(tree, "_fields") else tuple(changed)
    if isinstance(tree, list):
        return [map_tensors(item, change) for item in tree]
    if isinstance(tree, dict):
        changed_items = {key: map_tensors(item, change) for key, item in tree.items()}
        return changed_items if type(tree) is dict else type(tree)(changed_items)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor of the tree, in the order map_tensors() meets them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
