"""A model's profile from config.json alone: nothing is downloaded, allocated or computed, whatever its size.

The skeleton is built on the meta device, cut into the engine's own units, and one block of each kind is rehearsed on
tensors without data (rehearsal.py), so operators, FLOPs and bytes are those of the code that will run. Attention
dropout is set to nothing for that: with it the CPU would take another attention than a GPU does. Where a model cannot
be rehearsed (its forward looks at values), its parameters are still exact, operators and bytes are worked out from the
config as for a preset, and the profile's notes say so. A preset's name gives the preset.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lohan.engine.settings import dtype_of
from lohan.engine.trees import tensors_in
from lohan.errors import ConfigError, ModelError
from lohan.measure.rehearsal import BlockTrace, Rehearsal, Unrehearsable, rehearse
from lohan.models.installer import Installer
from lohan.models.skeleton import build_skeleton
from lohan.models.units import Units, UnitSpec, partition
from lohan.preset_shapes import SHAPES
from lohan.presets import Shape, preset_profile, profile_shape
from lohan.profiles import ModelProfile, UnitProfile

_NO_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_DEFAULT_SEQUENCE = 4096
"""What an estimate takes if nobody says otherwise, or less where the model's positions end before."""


def profile_model(
    source: str | Path | Mapping[str, Any] | Any,
    *,
    micro_batch_size: int = 1,
    sequence_length: int | None = None,
    dtype: str | torch.dtype = "bf16",
) -> ModelProfile:
    """The profile of a folder with a config.json, of a config (transformers' object or a dict), or of a preset."""
    compute = dtype_of(dtype, "dtype")
    if isinstance(source, str) and source.lower() in SHAPES and not Path(source).is_dir():
        return preset_profile(
            source, micro_batch_size=micro_batch_size, sequence_length=sequence_length, compute_bytes=compute.itemsize
        )
    values, name = _read(source)
    sequence = sequence_length or min(_DEFAULT_SEQUENCE, _number(values, "max_position_embeddings", "n_positions") or 0)
    with tempfile.TemporaryDirectory(prefix="lohan-config-") as folder:
        # The auxiliary loss of routers counts tokens per expert, which only data can do; it costs next to nothing.
        changes = {key: 0.0 for key in _NO_DROPOUT if key in values} | {"output_router_logits": False}
        (Path(folder) / "config.json").write_text(json.dumps({**values, **changes}))
        try:
            model = build_skeleton(Path(folder), compute_dtype=compute)
        except ModelError as error:
            raise ModelError(str(error).replace(folder, name)) from None
    units = partition(model)
    make = _Make(model, units, micro_batch_size, sequence or _DEFAULT_SEQUENCE, compute, name)
    try:
        rehearsal = rehearse(
            model, units, rows=micro_batch_size, tokens=make.sequence, dtype=compute, device=torch.device("cpu")
        )
        return make.rehearsed(rehearsal)
    except Unrehearsable as error:
        return make.on_paper(values, str(error))


def profile_rehearsed(
    model: nn.Module, units: Units, rehearsal: Rehearsal, *, rows: int, tokens: int, dtype: torch.dtype
) -> ModelProfile:
    """The profile of a model that is there and was rehearsed, for micro-batches of `rows` sequences of `tokens`."""
    return _Make(model, units, rows, tokens, dtype, "this model").rehearsed(rehearsal)


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """The values of config.json, and what to call the model."""
    if isinstance(source, Mapping):
        values, name = dict(source), str(source.get("_name_or_path") or source.get("model_type", "model"))
    elif hasattr(source, "to_dict"):
        values, name = json.loads(source.to_json_string(use_diff=False)), str(source.model_type)
    else:
        path = Path(source)
        file = path if path.name == "config.json" else path / "config.json"
        if not file.is_file():
            raise ConfigError(
                f"{source} is no folder with a config.json and no preset. Presets are: {', '.join(SHAPES)}."
            )
        try:
            values, name = json.loads(file.read_text()), str(path.resolve().name if file != path else path.parent.name)
        except ValueError as error:
            raise ModelError(f"{file} is not JSON: {error}") from None
    # A saved config may name code of its own, which is never run here.
    values.pop("auto_map", None)
    return values, name


class _Make:
    """Profiles of one model at one size of micro-batch."""

    def __init__(self, model: nn.Module, units: Units, rows: int, sequence: int, dtype: torch.dtype, name: str) -> None:
        self._model, self._units, self._rows, self.sequence, self._dtype = model, units, rows, sequence, dtype
        self._name, self._tokens = name, rows * sequence
        tables = [p.shape for p in (*units.embedding.params, *units.head.params) if len(p.shape) == 2]
        self._vocabulary, self._hidden = max(tables, default=(0, 0))
        config = getattr(model, "config", None)
        text = config.get_text_config() if config is not None else None
        self._hidden = int(getattr(text, "hidden_size", self._hidden))

    def rehearsed(self, rehearsal: Rehearsal) -> ModelProfile:
        """From the operators that ran."""
        made: list[UnitProfile | None] = [None] * len(self._units)
        for kind in rehearsal.kinds:
            specs = [self._units.blocks[block] for block in kind.blocks]
            first = self._block(kind, rehearsal, specs[0])
            for spec in specs:
                same = spec.num_elements == first.num_parameters
                made[spec.index] = first if same else replace(first, **_elements(spec))
        hidden = max(kind.input_bytes for kind in rehearsal.kinds)
        head = self._head(hidden, rehearsal.head_bytes)
        units = (self._embedding(hidden), *(unit for unit in made[1:-1] if unit is not None), head)
        if len(units) != len(self._units):
            raise Unrehearsable("not every block was run")
        experts = _experts(self._model)
        notes = (f"experts are taken to share a micro-batch's tokens evenly ({experts[1]} of {experts[0]} each)",)
        return self._profile(units, notes if experts[0] else ())

    def on_paper(self, values: Mapping[str, Any], reason: str) -> ModelProfile:
        """From the config, where the model's own code cannot run without data."""
        shape = self._shape(values)
        whole = profile_shape(
            shape, name=self._name, micro_batch_size=self._rows, sequence_length=self.sequence,
            compute_bytes=self._dtype.itemsize,
        )  # fmt: skip
        profiles = [whole.units[0], *[whole.units[1]] * len(self._units.blocks), whole.units[-1]]
        units = tuple(replace(one, **_elements(spec)) for one, spec in zip(profiles, self._units, strict=True))
        # Equal blocks share one object: what comes after is quick for them.
        shared: dict[UnitProfile, UnitProfile] = {}
        units = tuple(shared.setdefault(unit, unit) for unit in units)
        note = f"operators worked out from the config: the model cannot run without data ({reason.splitlines()[0]})"
        return self._profile(units, (note, *whole.notes))

    def _profile(self, units: tuple[UnitProfile, ...], notes: tuple[str, ...]) -> ModelProfile:
        return ModelProfile(
            name=self._name,
            units=units,
            tied=bool(self._units.tied),
            hidden_size=self._hidden,
            vocabulary=self._vocabulary,
            sequence_length=self.sequence,
            micro_batch_size=self._rows,
            compute_bytes=self._dtype.itemsize,
            notes=notes,
        )

    def _block(self, kind: BlockTrace, rehearsal: Rehearsal, spec: UnitSpec) -> UnitProfile:
        peaks = rehearsal.peaks(kind, ())
        saved = self._saved_bytes(kind, spec)
        return UnitProfile(
            kind="block",
            forward_flops=sum(operator.flops for operator in kind.operators),
            input_bytes=kind.input_bytes,
            operators=kind.operators,
            saved_bytes=saved,
            working_bytes=max(peaks.forward, peaks.later_backward - kind.weights_bytes, saved),
            shared_bytes=kind.shared_bytes,
            **_elements(spec),
        )

    def _saved_bytes(self, kind: BlockTrace, spec: UnitSpec) -> int:
        """What autograd holds after a whole forward of the block, weights and arguments not counted."""
        example = next(tensor for tensor in tensors_in(kind.call) if isinstance(tensor, FakeTensor))
        block = self._model.get_submodule(spec.name)
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held[storage._cdata] = storage.nbytes()
            return tensor

        args, kwargs = kind.call
        with example.fake_mode, Installer(self._model, self._units) as installer, torch.enable_grad():
            for param in spec.params:
                empty = torch.empty(param.shape, dtype=example.dtype, device=example.device)
                installer.install_param(param.name, empty.requires_grad_(True))
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in(kind.call)}
            given |= {parameter.untyped_storage()._cdata for parameter in block.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = block.forward(*args, **kwargs)
            del result
        total = sum(size for storage, size in held.items() if storage not in given)
        return total * self._dtype.itemsize // example.dtype.itemsize

    def _embedding(self, hidden_bytes: int) -> UnitProfile:
        ids = 8 * self._tokens
        return UnitProfile(
            kind="embedding", forward_flops=0.0, input_bytes=ids, saved_bytes=ids, working_bytes=ids + hidden_bytes,
            **_elements(self._units.embedding),
        )  # fmt: skip

    def _head(self, hidden_bytes: int, peak_bytes: int) -> UnitProfile:
        gradients = self._units.head.num_elements * self._dtype.itemsize
        logits = self._tokens * self._vocabulary
        return UnitProfile(
            kind="head",
            forward_flops=2.0 * logits * self._hidden,
            input_bytes=hidden_bytes,
            saved_bytes=hidden_bytes + logits * self._dtype.itemsize,
            working_bytes=max(0, peak_bytes - gradients),
            **_elements(self._units.head),
        )

    def _shape(self, values: Mapping[str, Any]) -> Shape:
        heads = _number(values, "num_attention_heads", "n_head") or 1
        experts, routed = _experts(self._model)
        matrices = [p.shape for p in self._units.blocks[0].params if len(p.shape) >= 2]
        inner = _number(values, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner") or 4 * self._hidden
        size = _number(values, "head_dim") or self._hidden // heads
        # Gated MLPs have three matrices of that size, or two with one twice as wide.
        elements = sum(prod(shape) for shape in matrices if inner in shape or 2 * inner in shape) // max(experts, 1)
        return Shape(
            layers=len(self._units.blocks), hidden=self._hidden, heads=heads, head_size=size, intermediate=inner,
            kv_heads=_number(values, "num_key_value_heads") or heads, vocabulary=self._vocabulary,
            gated=elements > 2.5 * inner * self._hidden, tied=bool(self._units.tied), experts=experts,
            experts_per_token=routed,
        )  # fmt: skip


def _elements(spec: UnitSpec) -> dict[str, Any]:
    return {
        "num_parameters": spec.num_elements,
        "tensor_elements": tuple(param.num_elements for param in spec.params),
    }


def _experts(model: nn.Module) -> tuple[int, int]:
    """How many experts a block has, and how many of them a token sees; 0, 0 where there are none."""
    config = getattr(model, "config", None)
    values = config.get_text_config().to_dict() if config is not None else {}
    count = _number(values, "num_local_experts", "num_experts", "n_routed_experts") or 0
    return (count, _number(values, "num_experts_per_tok", "top_k") or 1) if count > 1 else (0, 0)


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if isinstance(values.get(name), int):
            return int(values[name])
    text = values.get("text_config")
    return _number(text, *names) if isinstance(text, Mapping) else None
