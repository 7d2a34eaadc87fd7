"""Which bytes of a folder make up each parameter of a model, and the way back.

match_folder() pairs every parameter with its stored tensors once, and says everything that is wrong in one error.
A parameter may be made of several stored tensors (experts stored one by one) and a stored tensor may be spread
over several parameters; both are runs of contiguous elements, so nothing is ever assembled in memory. The names
and layouts follow transformers' own conversion table (layout.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter

import numpy as np
import torch
from torch import nn

from lohan.errors import ModelError
from lohan.models.export import ExportTensor
from lohan.models.folder import LENT_BYTES, Folder
from lohan.models.layout import Run, place_tensors
from lohan.models.tensor_file import TensorEntry
from lohan.models.units import Units

_COMPARED_ELEMENTS = 1 << 20
"""At once, of two stored tensors that should be equal."""

_EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)
_LISTED_PER_KIND = 40


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor of the model comes from: runs in order of their target, without gaps."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {run.entry.dtype for run in self.runs}

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Checkpoint:
    """A folder that fits a model. Lives no longer than its Folder."""

    def __init__(
        self,
        folder: Folder,
        params: dict[str, Stored],
        buffers: dict[str, Stored],
        copies: dict[str, list[Stored]],
    ):
        self.folder = folder
        self.params = params
        self.buffers = buffers
        self._copies = copies
        """Other stored tensors that hold the same values as a (tied) parameter."""

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill a 1-D float32 tensor in RAM with elements of a parameter, from `start` on. Exact; from any thread."""
        if out.dtype != torch.float32 or out.dim() != 1 or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"{name}: out must be a contiguous 1-D float32 tensor in RAM")
        read_elements(self.folder, self.params[name], out, start)

    def load_buffers(self, model: nn.Module) -> None:
        """Give the model's persistent buffers their stored values."""
        for name, source in self.buffers.items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            buffer = module._buffers[attribute]
            if buffer is None:
                raise AssertionError(f"{name} has gone from its module")
            value = torch.empty(buffer.numel(), dtype=buffer.dtype)
            read_elements(self.folder, source, value, 0)
            module._buffers[attribute] = value.view(buffer.shape)

    def as_stored(self, tensors: Iterable[ExportTensor]) -> list[ExportTensor]:
        """The same weights under the names and in the layout of the folder they came from.

        Buffers that are not given are copied from the folder.
        """
        given = {tensor.name: tensor for tensor in tensors}
        absent = self.params.keys() - given.keys()
        if absent:
            raise ValueError(f"not given: {', '.join(sorted(absent))}")
        parts: dict[str, list[_Part]] = {}
        entries: dict[str, TensorEntry] = {}
        for name, sources in self.all_sources().items():
            if name not in given:
                continue
            for source in sources:
                for run in source.runs:
                    entries[run.entry.name] = run.entry
                    part = _Part(run.source_element, run.target_element, run.num_elements, given[name])
                    parts.setdefault(run.entry.name, []).append(part)
        stored = [_stored_tensor(entries[name], parts[name]) for name in parts]
        for name, source in self.buffers.items():
            if name not in given:
                stored += [_copied(self.folder, run.entry) for run in source.runs]
        return sorted(stored, key=lambda tensor: _natural(self.folder.tensors, tensor.name))

    def all_sources(self) -> dict[str, list[Stored]]:
        """Every parameter and buffer with the stored tensors that hold its values; the first is the one read."""
        single = {name: [source] for name, source in (self.params | self.buffers).items()}
        return {name: sources + self._copies.get(name, []) for name, sources in single.items()}


def match_folder(folder: Folder, model: nn.Module, units: Units) -> Checkpoint:
    """Pair every parameter and persistent buffer with its stored tensors. Everything that is wrong is one error."""
    params = {param.name: param for param in units.params}
    canonical = {_join(path, attribute): param.name for param in units.params for path, attribute in param.places}
    persistent = {
        name: buffer
        for name, buffer in model.state_dict(keep_vars=True).items()
        if name not in canonical and isinstance(buffer, torch.Tensor)
    }
    shapes: dict[str, tuple[int, ...]] = {name: params[canonical[name]].shape for name in canonical}
    shapes |= {name: tuple(buffer.shape) for name, buffer in persistent.items()}

    placed = place_tensors(model, folder.tensors, shapes)
    problems = [*folder.problems, *placed.problems]
    sources = {name: Stored(name, shapes[name], runs) for name, runs in placed.runs.items()}

    found: dict[str, Stored] = {}
    copies: dict[str, list[Stored]] = {}
    for name in sorted(sources, key=lambda name: name not in params):  # the first name of a tied tensor is the main one
        if name not in canonical:
            continue
        source = sources[name]
        first = found.setdefault(canonical[name], source)
        if first is not source:
            copies.setdefault(canonical[name], []).append(source)
        problems += [
            f"dtype: {run.entry.name} is {_short(run.entry.dtype)}, and weights are loaded from float32, bfloat16 or "
            f"float16" for run in source.runs if run.entry.dtype not in _EXACT_IN_FP32
        ]  # fmt: skip
    missing = [name for name in params if name not in found and name not in placed.refused]
    if folder.unread:  # what is in a file that cannot be read is no news beside it
        missing = []
    # A buffer the model has computed by itself stays as it is, as in from_pretrained.
    missing += [
        name for name, buffer in persistent.items()
        if buffer.is_meta and name not in sources and name not in placed.refused and not folder.unread
    ]  # fmt: skip
    problems += [f"missing: {name} {list(shapes[name])}" for name in missing]
    if not problems:
        problems += _differing_copies(folder, found, copies)
    if problems:
        raise ModelError(_one_error(folder, model, problems))
    buffers = {name: sources[name] for name in persistent if name in sources}
    return Checkpoint(folder, {name: found[name] for name in params}, buffers, copies)


def read_elements(folder: Folder, source: Stored, into: torch.Tensor, start_element: int) -> None:
    """Fill a contiguous 1-D tensor, converting from the stored dtype on the way."""
    end = start_element + into.numel()
    if start_element < 0 or end > source.num_elements:
        raise ValueError(f"{source.name} has {source.num_elements} elements; {start_element}:{end} is outside")
    index = bisect_right(source.runs, start_element, key=attrgetter("target_element")) - 1
    reached = start_element
    while reached < end:
        run = source.runs[index]
        inside = reached - run.target_element
        size = run.entry.dtype.itemsize
        count = min(run.num_elements - inside, end - reached, LENT_BYTES // size)
        target = into[reached - start_element : reached - start_element + count]
        lent = folder.lend(run.entry, (run.source_element + inside) * size, count * size)
        _copy(lent, run.entry.dtype, target)
        reached += count
        if reached == run.target_element + run.num_elements:
            index += 1


def _copy(stored: memoryview, dtype: torch.dtype, target: torch.Tensor) -> None:
    given = np.frombuffer(stored, np.uint8)
    if given.ctypes.data % dtype.itemsize:
        given = given.copy()  # a header of odd length; torch wants elements at whole multiples of their size
    target.copy_(torch.from_numpy(given).view(dtype))


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a stored tensor that come from a tensor of the model."""

    stored_element: int
    model_element: int
    num_elements: int
    tensor: ExportTensor


def _stored_tensor(entry: TensorEntry, parts: list[_Part]) -> ExportTensor:
    parts = sorted(parts, key=attrgetter("stored_element"))
    dtypes = {part.tensor.dtype for part in parts}
    if len(dtypes) > 1:
        raise ModelError(
            f"{entry.name} is made of parameters of different dtypes: {', '.join(sorted(map(_short, dtypes)))}.\n"
            f"Export with one dtype."
        )
    dtype = dtypes.pop()
    size = dtype.itemsize

    def read(into: memoryview, start_byte: int, num_bytes: int) -> None:
        start, end = start_byte // size, (start_byte + num_bytes) // size
        index = bisect_right(parts, start, key=attrgetter("stored_element")) - 1
        reached = start
        while reached < end:
            part = parts[index]
            inside = reached - part.stored_element
            count = min(part.num_elements - inside, end - reached)
            target = into[(reached - start) * size : (reached - start + count) * size]
            part.tensor.reader(target, (part.model_element + inside) * size, count * size)
            reached += count
            index += 1

    return ExportTensor(entry.name, dtype, entry.shape, read)


def _copied(folder: Folder, entry: TensorEntry) -> ExportTensor:
    return ExportTensor(
        entry.name, entry.dtype, entry.shape, lambda into, start, count: folder.read(entry, into, start, count)
    )


def _differing_copies(folder: Folder, found: Mapping[str, Stored], copies: Mapping[str, list[Stored]]) -> list[str]:
    """transformers ties two stored tensors only when they are equal; unequal ones mean that the config is wrong."""
    problems = []
    for name, others in copies.items():
        first = found[name]
        for other in others:
            if not _are_equal(folder, first, other):
                problems.append(
                    f"differ: {other.name} and {first.name} are one tied weight in the model and have different "
                    f"values; set tie_word_embeddings to false in config.json"
                )
    return problems


def _are_equal(folder: Folder, one: Stored, other: Stored) -> bool:
    for start in range(0, one.num_elements, _COMPARED_ELEMENTS):
        count = min(_COMPARED_ELEMENTS, one.num_elements - start)
        pair = [torch.empty(count), torch.empty(count)]
        for source, values in zip((one, other), pair, strict=True):
            read_elements(folder, source, values, start)
        if not torch.equal(pair[0].view(torch.int32), pair[1].view(torch.int32)):
            return False
    return True


def _one_error(folder: Folder, model: nn.Module, problems: list[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(problem.partition(":")[0], []).append(problem)
    lines = []
    for listed in kinds.values():
        lines += listed[:_LISTED_PER_KIND]
        if len(listed) > _LISTED_PER_KIND:
            lines.append(f"... and {len(listed) - _LISTED_PER_KIND:,} more of this kind")
    return (
        f"{folder.path} does not fit the {type(model).__name__} its config.json describes "
        f"({len(problems):,} problem{'s' if len(problems) > 1 else ''}):\n  "
        + "\n  ".join(lines)
        + "\nDownload the folder again, or load it with transformers and save it with save_pretrained."
    )


def _natural(tensors: Mapping[str, TensorEntry], name: str) -> tuple[str, int]:
    entry = tensors[name]
    return entry.file.name, entry.offset


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
