"""What is remembered of the folder a model came from, so that nothing of it is needed again.

Names, dtypes and shapes of the stored tensors and which of their elements make up which parameter, as plain JSON;
and the values of persistent buffers, as one small safetensors file. recall() turns both back into a Checkpoint that
can fill buffers and write weights in the layout they came in. The weights themselves are not kept here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lohan.errors import ModelError
from lohan.models.checkpoint import Checkpoint, Stored
from lohan.models.folder import Folder
from lohan.models.layout import Run
from lohan.models.tensor_file import DTYPES, TensorEntry, dtype_name, read_entries
from lohan.models.units import Units


def remember(checkpoint: Checkpoint, buffers_file: Path) -> dict[str, Any]:
    """The checkpoint as JSON; its buffers are written to `buffers_file`."""
    sources = checkpoint.all_sources()
    used = {run.entry.name: run.entry for stored in sources.values() for one in stored for run in one.runs}
    # In the order of the files they came in, which is the order an export writes them in.
    entries = sorted(used.values(), key=lambda entry: (entry.file.name, entry.offset))
    number = {entry.name: index for index, entry in enumerate(entries)}
    values = {}
    for stored in checkpoint.buffers.values():
        for run in stored.runs:
            raw = torch.empty(run.entry.num_bytes, dtype=torch.uint8)
            checkpoint.folder.read(run.entry, raw.numpy())
            values[run.entry.name] = raw.view(run.entry.dtype).view(run.entry.shape)
    _write_buffers(values, buffers_file)
    return {
        "stored": [[entry.name, dtype_name(entry.dtype), list(entry.shape)] for entry in entries],
        "params": {name: _sources_to_json(sources[name], number) for name in checkpoint.params},
        "buffers": {name: _sources_to_json(sources[name], number) for name in checkpoint.buffers},
    }


def remember_module(module: nn.Module, units: Units, buffers_file: Path) -> dict[str, Any]:
    """The same for a model that came as a module: what it calls its tensors is what they are stored as."""
    params = {param.name: (param.dtype, param.shape) for param in units.params}
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in module.state_dict(keep_vars=True).items()
        if name not in names and isinstance(value, Tensor) and not value.is_meta
    }
    _write_buffers(buffers, buffers_file)
    tensors = params | {name: (value.dtype, tuple(value.shape)) for name, value in buffers.items()}
    number = {name: index for index, name in enumerate(tensors)}

    def whole(name: str) -> list[dict[str, Any]]:
        shape = list(tensors[name][1])
        return [{"name": name, "shape": shape, "runs": [[number[name], 0, 0, prod(shape)]]}]

    return {
        "stored": [[name, dtype_name(dtype), list(shape)] for name, (dtype, shape) in tensors.items()],
        "params": {name: whole(name) for name in params},
        "buffers": {name: whole(name) for name in buffers},
    }


def recall(memory: Mapping[str, Any], buffers_file: Path) -> Checkpoint:
    """The checkpoint again, without its weights."""
    held = read_entries(buffers_file)[0] if buffers_file.exists() else {}
    entries = []
    for index, (name, dtype, shape) in enumerate(memory["stored"]):
        # Only buffers have bytes here; of the others the file is never opened and the offset only keeps the order.
        size = prod(shape) * DTYPES[dtype].itemsize
        entries.append(held.get(name) or TensorEntry(name, Path(), DTYPES[dtype], tuple(shape), index, size))
    lost = [name for name in memory["buffers"] if not all(e.name in held for e in _entries_of(memory, entries, name))]
    if lost:
        raise ModelError(f"{buffers_file} lacks the values of {', '.join(lost)}. Restore the file, or start a new run.")
    params = {name: _sources_from_json(sources, entries) for name, sources in memory["params"].items()}
    buffers = {name: _sources_from_json(sources, entries)[0] for name, sources in memory["buffers"].items()}
    return Checkpoint(
        Folder(buffers_file.parent, {entry.name: entry for entry in entries}, ()),
        {name: sources[0] for name, sources in params.items()},
        buffers,
        {name: sources[1:] for name, sources in params.items() if sources[1:]},
    )


def _entries_of(memory: Mapping[str, Any], entries: list[TensorEntry], buffer: str) -> list[TensorEntry]:
    return [entries[run[0]] for source in memory["buffers"][buffer] for run in source["runs"]]


def _write_buffers(values: dict[str, Tensor], path: Path) -> None:
    if values:
        save_file(values, path, metadata={"format": "pt"})


def _sources_to_json(sources: Iterable[Stored], number: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "name": source.name,
            "shape": list(source.shape),
            "runs": [
                [number[run.entry.name], run.source_element, run.target_element, run.num_elements]
                for run in source.runs
            ],
        }
        for source in sources
    ]


def _sources_from_json(sources: list[dict[str, Any]], entries: list[TensorEntry]) -> list[Stored]:
    return [
        Stored(
            source["name"],
            tuple(source["shape"]),
            tuple(Run(entries[entry], start, target, count) for entry, start, target, count in source["runs"]),
        )
        for source in sources
    ]
