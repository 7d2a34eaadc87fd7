"""The chains of transformers' conversion table, followed on shapes, against the same chains run on tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from lohan.models.layout import _CannotFollow, _convert, natural_key, place_tensors
from lohan.models.tensor_file import TensorEntry


def entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, Path("file"), torch.float32, shape, 0, 4 * torch.Size(shape).numel())


def followed(runs, values: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.full((torch.Size(shape).numel(),), float("nan"))
    for run in runs:
        stored = values[run.entry.name].flatten()
        flat[run.target_element : run.target_element + run.num_elements] = stored[
            run.source_element : run.source_element + run.num_elements
        ]
    return flat.view(shape)


@pytest.mark.parametrize(
    ("operations", "sources", "targets", "shape"),
    [
        ([MergeModulelist(0)], {"a": 3}, ["x"], (4, 5)),
        ([MergeModulelist(1)], {"a": 3}, ["x"], (4, 5)),
        ([MergeModulelist(0), Concatenate(1)], {"a": 3, "b": 3}, ["x"], (4, 5)),
        ([MergeModulelist(0), Concatenate(2)], {"a": 3, "b": 3}, ["x"], (4, 5)),
        ([Concatenate(0)], {"a": 1, "b": 1, "c": 1}, ["x"], (4, 5)),
        ([Concatenate(-1)], {"a": 1, "b": 1}, ["x"], (2, 4, 5)),
        ([Chunk(0)], {"a": 1}, ["x", "y"], (4, 5)),
        ([Chunk(1)], {"a": 1}, ["x", "y", "z"], (4, 6, 2)),
        ([Concatenate(0), Chunk(1)], {"a": 1, "b": 1}, ["x"], (4, 6)),
    ],
    ids=str,
)
def test_a_chain_moves_the_elements_transformers_moves(operations, sources, targets, shape) -> None:
    entries = {pattern: [entry(f"{pattern}{i}", *shape) for i in range(n)] for pattern, n in sources.items()}
    values = {one.name: torch.randn(shape) for several in entries.values() for one in several}
    converter = WeightConverter(list(sources), list(targets), operations)
    for pattern, several in entries.items():
        for one in several:
            converter.add_tensor(targets[0], one.name, pattern, values[one.name])
    expected = {
        name: value[0] if isinstance(value, list) else value for name, value in converter.convert(targets[0]).items()
    }
    actual = _convert(converter, entries, targets, {})
    assert actual.keys() == expected.keys()
    for name, virtual in actual.items():
        assert virtual.shape == tuple(expected[name].shape)
        assert torch.equal(followed(virtual.runs(), values, virtual.shape), expected[name])


def test_whole_slices_are_one_run_each() -> None:
    """Experts of billions of elements must not become a run per row."""
    entries = {pattern: [entry(f"{pattern}{i}", 400, 500) for i in range(3)] for pattern in "ab"}
    converter = WeightConverter(["a", "b"], ["x"], [MergeModulelist(0), Concatenate(1)])
    runs = _convert(converter, entries, ["x"], {})["x"].runs()
    assert [(run.entry.name, run.num_elements) for run in runs] == [
        (f"{pattern}{i}", 200_000) for i in range(3) for pattern in "ab"
    ]


def test_a_transpose_is_followed_only_where_there_is_nothing_to_do() -> None:
    converter = WeightConverter(["a"], ["x"], [Transpose(0, 1, check_dims=True)])
    made = _convert(converter, {"a": [entry("a0", 4, 5)]}, ["x"], {"x": (4, 5)})
    assert made["x"].runs()[0].num_elements == 20
    with pytest.raises(_CannotFollow, match=r"Transpose cannot be followed .* save_original_format=False"):
        _convert(converter, {"a": [entry("a0", 4, 5)]}, ["x"], {"x": (5, 4)})


def test_numbers_in_names_are_ordered_as_numbers() -> None:
    names = ["a.10.w", "a.9.w", "a.b.w", "a.shard_11", "a.shard_2"]
    assert sorted(names, key=natural_key) == ["a.9.w", "a.10.w", "a.b.w", "a.shard_2", "a.shard_11"]


def test_a_module_of_no_library_takes_names_as_they_are() -> None:
    placed = place_tensors(nn.Linear(2, 3), {"weight": entry("weight", 3, 2)}, {"weight": (3, 2), "bias": (3,)})
    assert list(placed.runs) == ["weight"]
    assert not placed.problems
