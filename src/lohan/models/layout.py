"""Stored names and shapes to the module's: transformers' conversion table, followed without touching a weight.

transformers 5 stacks what checkpoints store apart (experts) and renames as it loads. Its table says how, as
renamings and chains of operations. Here each chain runs on shapes alone and yields runs: so many contiguous
elements of this stored tensor go to that place in the parameter. Operations that only move whole slices are
followed; one that mixes elements (a transpose, a permutation for rotary) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from torch import nn

from lohan.models.tensor_file import TensorEntry


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous elements of a stored tensor that are contiguous in the parameter too."""

    entry: TensorEntry
    source_element: int
    target_element: int
    num_elements: int


@dataclass(slots=True)
class Placed:
    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    """By the module's name; each covers its tensor exactly."""
    refused: set[str] = field(default_factory=set)
    """Names whose stored tensors are there and do not fit. They are in problems, and are not missing."""
    problems: list[str] = field(default_factory=list)


def place_tensors(
    model: nn.Module, tensors: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> Placed:
    """Give every stored tensor its place among the model's tensors, as from_pretrained would."""
    table = _Table(model, shapes)
    placed = Placed()
    direct: dict[str, TensorEntry] = {}
    groups: dict[str, tuple[Any, dict[str, list[TensorEntry]]]] = {}
    for key in sorted(tensors, key=natural_key):
        name, converter, pattern = table.target_of(key)
        if name not in shapes:
            if not table.is_ignored(key, name):
                placed.problems.append(f"unexpected: {key} {list(tensors[key].shape)}")
        elif converter is not None:
            groups.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(tensors[key])
        elif name in direct:
            placed.problems.append(f"duplicate: {key} and {direct[name].name} are both {name}")
        else:
            direct[name] = tensors[key]

    results: dict[str, _Virtual] = {name: _Virtual.of(entry) for name, entry in direct.items()}
    for name, (converter, collected) in groups.items():
        targets = table.targets_of(converter, name)
        try:
            made = _convert(converter, collected, targets, shapes)
        except _CannotFollow as reason:
            stored = [entry.name for entries in collected.values() for entry in entries]
            placed.problems.append(
                f"layout: {name} is made of {stored[0]}{f' and {len(stored) - 1} more' if stored[1:] else ''}: {reason}"
            )
            placed.refused.update(targets)
            continue
        for target, virtual in made.items():
            if target in results:
                placed.problems.append(f"duplicate: {target} is stored whole and in parts")
            results[target] = virtual

    for name, virtual in results.items():
        if name not in shapes:
            placed.problems.append(f"unexpected: {name} {list(virtual.shape)}")
        elif virtual.shape != shapes[name]:
            placed.refused.add(name)
            stored = sorted({piece.entry.name for piece in virtual.pieces}, key=natural_key)
            where = "" if stored == [name] else f" (stored as {stored[0]}{', ...' if stored[1:] else ''})"
            placed.problems.append(
                f"wrong shape: {name} has {list(virtual.shape)} and the model needs {list(shapes[name])}{where}"
            )
        else:
            placed.runs[name] = virtual.runs()
    return placed


def natural_key(name: str) -> list[tuple[int, str, int]]:
    """experts.2 before experts.10: the order in which transformers collects what it stacks."""
    parts: list[tuple[int, str, int]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        digits = part[len(text) :]
        parts.append((1 if text else 0, text, int(digits) if digits else -1))
    return parts


class _CannotFollow(Exception):
    """The message ends a line of the error."""


class _Table:
    """transformers' renamings and converters for one model; none for a module of no library."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]):
        self._shapes = shapes
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._prefix: str = getattr(model, "base_model_prefix", "") or ""
        self._ignored: list[str] = []
        if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
            from transformers.conversion_mapping import get_model_conversion_mapping

            for transform in get_model_conversion_mapping(model):
                (self._converters if hasattr(transform, "operations") else self._renamings).append(transform)
            self._ignored = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
            # Tables that old versions stored and the modules now compute, as from_pretrained forgives them.
            buffers = [name for name, _ in model.named_buffers()]
            if any(name.endswith("inv_freq") for name in buffers):
                self._ignored.append(r"rotary_emb\.inv_freq")
            if any(name.endswith("position_ids") for name in buffers):
                self._ignored.append(r"(^|\.)position_ids$")

    def target_of(self, key: str) -> tuple[str, Any, str]:
        """(name in the module, converter or None, which of the converter's patterns it matched)."""
        name, converter, pattern = key, None, ""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        for candidate in self._converters:
            renamed, matched = candidate.rename_source_key(name)
            if matched is not None:
                name, converter, pattern = renamed, candidate, matched
                break
        name = self._with_prefix(name)
        if name not in self._shapes and self._with_prefix(key) in self._shapes:
            return self._with_prefix(key), None, ""
        return name, converter, pattern

    def targets_of(self, converter: Any, first: str) -> list[str]:
        """The full names of everything a converter makes, given the name of the first."""
        patterns: list[str] = converter.target_patterns
        if len(patterns) == 1:
            return [first]
        return [first.replace(patterns[0], pattern, 1) for pattern in patterns]

    def is_ignored(self, *names: str) -> bool:
        return any(re.search(pattern, name) for pattern in self._ignored for name in names)

    def _with_prefix(self, name: str) -> str:
        if not self._prefix:
            return name
        bare = name.removeprefix(f"{self._prefix}.")
        if bare != name and bare in self._shapes:
            return bare
        return f"{self._prefix}.{name}" if f"{self._prefix}.{name}" in self._shapes else name


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a stored tensor and where it lies in a virtual one. All have the rank of the virtual tensor."""

    entry: TensorEntry
    source_shape: tuple[int, ...]
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Virtual:
    """A tensor that is nowhere: a shape, and which boxes of stored tensors fill it."""

    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    @staticmethod
    def of(entry: TensorEntry) -> _Virtual:
        zeros = (0,) * len(entry.shape)
        return _Virtual(entry.shape, (_Piece(entry, entry.shape, zeros, zeros, entry.shape),))

    def stacked_at(self, dim: int) -> _Virtual:
        """With a new dimension of size 1."""
        dim = dim % (len(self.shape) + 1)

        def insert(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim:])

        pieces = tuple(
            _Piece(
                piece.entry,
                insert(piece.source_shape, 1),
                insert(piece.source_start, 0),
                insert(piece.target_start, 0),
                insert(piece.size, 1),
            )
            for piece in self.pieces
        )
        return _Virtual(insert(self.shape, 1), pieces)

    def part(self, dim: int, start: int, length: int) -> _Virtual:
        """The slice start:start+length along a dimension."""
        pieces = []
        for piece in self.pieces:
            begin = max(piece.target_start[dim], start)
            end = min(piece.target_start[dim] + piece.size[dim], start + length)
            if begin < end:
                skipped = begin - piece.target_start[dim]
                pieces.append(
                    _Piece(
                        piece.entry,
                        piece.source_shape,
                        _with(piece.source_start, dim, piece.source_start[dim] + skipped),
                        _with(piece.target_start, dim, begin - start),
                        _with(piece.size, dim, end - begin),
                    )
                )
        return _Virtual(_with(self.shape, dim, length), tuple(pieces))

    def runs(self) -> tuple[Run, ...]:
        """The pieces as contiguous elements, in order of their target, joined where both sides go on."""
        found = sorted(
            (run for piece in self.pieces for run in _runs_of(piece, self.shape)), key=lambda run: run.target_element
        )
        joined: list[Run] = []
        reached = 0
        for run in found:
            if run.target_element != reached:
                raise AssertionError(f"the pieces do not tile {self.shape}: {run}")
            reached += run.num_elements
            last = joined[-1] if joined else None
            if last and last.entry is run.entry and last.source_element + last.num_elements == run.source_element:
                joined[-1] = Run(
                    last.entry, last.source_element, last.target_element, last.num_elements + run.num_elements
                )
            else:
                joined.append(run)
        if reached != prod(self.shape):
            raise AssertionError(f"the pieces fill {reached} elements of {self.shape}")
        return tuple(joined)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _runs_of(piece: _Piece, shape: tuple[int, ...]) -> Iterator[Run]:
    if 0 in piece.size:
        return
    # Trailing dimensions that the box covers fully on both sides are contiguous together.
    split = len(shape)
    while split > 0 and piece.size[split - 1] == shape[split - 1] == piece.source_shape[split - 1]:
        split -= 1
    outer = max(split - 1, 0)
    length = prod(piece.size[outer:])
    for index in product(*(range(count) for count in piece.size[:outer])):
        position = index + (0,) * (len(shape) - outer)
        yield Run(
            piece.entry,
            _flat(piece.source_start, position, piece.source_shape),
            _flat(piece.target_start, position, shape),
            length,
        )


def _flat(start: Sequence[int], position: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for begin, step, size in zip(start, position, shape, strict=True):
        flat = flat * size + begin + step
    return flat


def _convert(
    converter: Any,
    collected: dict[str, list[TensorEntry]],
    targets: list[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, _Virtual]:
    """Follow the chain of a converter. Lists of tensors per source pattern go in, one tensor per target comes out."""
    patterns: list[str] = converter.source_patterns
    absent = [pattern for pattern in patterns if pattern not in collected]
    if absent:
        raise _CannotFollow(f"nothing stored matches {', '.join(absent)}")
    lists = [[_Virtual.of(entry) for entry in collected[pattern]] for pattern in patterns]
    results: list[_Virtual] | None = None
    for operation in converter.operations:
        kind = type(operation).__name__
        if results is not None:
            raise _CannotFollow(f"{kind} after a split cannot be followed without loading it. {_HOW_TO_CONVERT}")
        if kind == "MergeModulelist":
            lists = [[_joined([one.stacked_at(operation.dim) for one in tensors], operation.dim)] for tensors in lists]
        elif kind == "Concatenate":
            lists = [[_joined([one for tensors in lists for one in tensors], operation.dim)]]
        elif kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None:
            results = _chunks(_only(lists), operation.dim, len(targets))
        elif kind == "Split":
            results = _split(_only(lists), operation.dim, [shapes.get(target, ()) for target in targets])
        elif (
            kind == "Transpose" and getattr(operation, "check_dims", False) and _only(lists).shape == shapes[targets[0]]
        ):
            continue
        else:
            raise _CannotFollow(f"{kind} cannot be followed without loading it. {_HOW_TO_CONVERT}")
    if results is None:
        results = [_only(lists)]
    if len(results) != len(targets):
        raise _CannotFollow(f"{len(targets)} tensors are expected of it and {len(results)} come out")
    return dict(zip(targets, results, strict=True))


_HOW_TO_CONVERT = "Load it once with transformers and save it with save_pretrained(folder, save_original_format=False)"


def _only(lists: list[list[_Virtual]]) -> _Virtual:
    if len(lists) != 1 or len(lists[0]) != 1:
        raise _CannotFollow(f"{sum(map(len, lists))} tensors are stored for it and one is expected")
    return lists[0][0]


def _joined(tensors: list[_Virtual], dim: int) -> _Virtual:
    first = tensors[0].shape
    dim = dim % len(first)
    reached, pieces = 0, []
    for one in tensors:
        if len(one.shape) != len(first) or _with(one.shape, dim, 0) != _with(first, dim, 0):
            raise _CannotFollow(f"its parts have unlike shapes {list(first)} and {list(one.shape)}")
        pieces += [
            _Piece(
                piece.entry,
                piece.source_shape,
                piece.source_start,
                _with(piece.target_start, dim, piece.target_start[dim] + reached),
                piece.size,
            )
            for piece in one.pieces
        ]
        reached += one.shape[dim]
    return _Virtual(_with(first, dim, reached), tuple(pieces))


def _chunks(tensor: _Virtual, dim: int, count: int) -> list[_Virtual]:
    dim = dim % len(tensor.shape)
    if tensor.shape[dim] % count:
        raise _CannotFollow(f"its shape {list(tensor.shape)} cannot be cut into {count} equal parts")
    length = tensor.shape[dim] // count
    return [tensor.part(dim, index * length, length) for index in range(count)]


def _split(tensor: _Virtual, dim: int, shapes: list[tuple[int, ...]]) -> list[_Virtual]:
    dim = dim % len(tensor.shape)
    sizes = [shape[dim] if len(shape) == len(tensor.shape) else 0 for shape in shapes]
    if sum(sizes) != tensor.shape[dim]:
        raise _CannotFollow(f"its shape {list(tensor.shape)} cannot be cut into parts of {sizes}")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.part(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
