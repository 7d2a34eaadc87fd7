"""The parts of a model that are streamed one after another: embedding, every block, head.

Pure structure: nothing here holds or moves weights, and the model may be on meta or real. The blocks are the
ModuleList that holds most parameters. An outer parameter (one that no block holds) belongs to the embedding when
forward uses it before the first block, to the head when it is used only after the last one or never; used both
before and after (tied) it belongs to the embedding and is listed in Units.tied. What cannot be streamed this way
is refused by name. Not safe while another thread runs the same model: the usage run swaps its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.models.usage import Usage, UsageUnknown, observe_usage

Kind = Literal["embedding", "block", "head"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    name: str
    """The first name of the tensor in named_parameters(); the other names of a tied tensor are only in places."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    places: tuple[tuple[str, str], ...]
    """Every (module path, attribute) that holds this tensor."""

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class UnitSpec:
    index: int
    name: str
    kind: Kind
    params: tuple[ParamSpec, ...]
    block_index: int | None

    @property
    def num_elements(self) -> int:
        return sum(param.num_elements for param in self.params)


@dataclass(frozen=True, slots=True)
class Units:
    units: tuple[UnitSpec, ...]
    """In the order of forward: embedding, blocks, head. Embedding and head exist even when they hold nothing."""

    blocks_name: str
    tied: tuple[str, ...]
    """Parameters of the embedding unit that the head needs too."""

    @property
    def embedding(self) -> UnitSpec:
        return self.units[0]

    @property
    def blocks(self) -> tuple[UnitSpec, ...]:
        return self.units[1:-1]

    @property
    def head(self) -> UnitSpec:
        return self.units[-1]

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """Every parameter once, unit by unit."""
        return tuple(param for unit in self.units for param in unit.params)

    def __iter__(self) -> Iterator[UnitSpec]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)


def find_blocks(model: nn.Module, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """The list of blocks and its path: the ModuleList that holds most parameters, or the one called `name`."""
    candidates = [
        (path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and path
    ]
    if name is not None:
        for path, module in candidates:
            if path == name:
                return path, module
        raise ModelError(
            f"There is no ModuleList called {name!r} in {type(model).__name__}.\n"
            f"It has {_listed([path for path, _ in candidates])}."
        )
    runnable = [(path, blocks) for path, blocks in candidates if all(_has_forward(block) for block in blocks)]
    if not runnable:
        raise ModelError(
            f"{type(model).__name__} has no ModuleList of blocks, so there is nothing to stream one after another.\n"
            f"Put its repeated layers in an nn.ModuleList that forward calls in order."
        )
    sizes = {path: _num_held(blocks) for path, blocks in runnable}
    largest = max(sizes.values())
    best = [(path, blocks) for path, blocks in runnable if sizes[path] == largest]
    if len(best) > 1:
        raise ModelError(
            f"{type(model).__name__} has {len(best)} block lists of {largest:,} parameters each: "
            f"{_listed([path for path, _ in best])}.\nSay by name which one to stream."
        )
    return best[0]


def partition(model: nn.Module, blocks: str | None = None, example_inputs: Mapping[str, Any] | None = None) -> Units:
    """Every parameter in exactly one unit. example_inputs are keyword arguments of forward, for unusual models."""
    blocks_name, block_list = find_blocks(model, blocks)
    _refuse_unusable_modules(model, blocks_name, block_list)
    held = _held_parameters(model, blocks_name, block_list)
    places = {one.spec.name: [(model.get_submodule(path), attr) for path, attr in one.spec.places] for one in held}
    outer = {one.spec.name: one.spec for one in held if one.block is None}
    try:
        usage = observe_usage(model, blocks_name, list(block_list), places, example_inputs)
    except UsageUnknown as unknown:
        usage = _usage_by_names(model, blocks_name, outer, str(unknown))
    _refuse_unstreamable_usage(usage, held, blocks_name)

    before = [spec for name, spec in outer.items() if usage[name].before]
    after = [spec for name, spec in outer.items() if not usage[name].before]
    tied = [spec.name for spec in before if usage[spec.name].after]
    units = [UnitSpec(0, "embedding", "embedding", tuple(before), None)]
    for index in range(len(block_list)):
        own = tuple(one.spec for one in held if one.block == index)
        units.append(UnitSpec(index + 1, f"{blocks_name}.{index}", "block", own, index))
    units.append(UnitSpec(len(units), "head", "head", tuple(after), None))
    return Units(tuple(units), blocks_name, tuple(tied))


@dataclass(frozen=True, slots=True)
class _Held:
    spec: ParamSpec
    block: int | None
    """The block that holds the parameter; None for an outer one."""


def _held_parameters(model: nn.Module, blocks_name: str, blocks: nn.ModuleList) -> list[_Held]:
    block_of = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    places: dict[int, list[tuple[str, str]]] = {}
    holders: dict[int, set[int | None]] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, attribute))
                holders.setdefault(id(parameter), set()).add(block_of.get(id(module)))
    held = []
    for name, parameter in model.named_parameters():
        blocks_holding = holders[id(parameter)]
        if len(blocks_holding) > 1:
            where = ", ".join(_join(path, attribute) for path, attribute in places[id(parameter)])
            raise ModelError(
                f"One parameter is shared by {_listed_owners(blocks_holding, blocks_name)}: {where}.\n"
                f"A block is updated as soon as its own gradient is complete, so it cannot share a parameter. "
                f"Give each of them a parameter of its own."
            )
        spec = ParamSpec(
            name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, tuple(places[id(parameter)])
        )
        held.append(_Held(spec, next(iter(blocks_holding))))
    return held


def _refuse_unusable_modules(model: nn.Module, blocks_name: str, blocks: nn.ModuleList) -> None:
    if len(blocks) == 0:
        raise ModelError(
            f"{blocks_name} is empty, so there is nothing to stream.\n"
            f"Check the number of layers in the config, or name another list of blocks."
        )
    first_block: dict[int, int] = {}
    first_module: dict[int, str] = {}
    for index, block in enumerate(blocks):
        if id(block) in first_block:
            raise ModelError(
                f"{blocks_name}.{index} is the same block as {blocks_name}.{first_block[id(block)]}. A streamed block "
                f"is used once in a forward.\nGive each place in the list its own block (copy.deepcopy)."
            )
        first_block[id(block)] = index
        for path, module in block.named_modules():
            here = _join(f"{blocks_name}.{index}", path)
            there = first_module.setdefault(id(module), here)
            if not there.startswith(f"{blocks_name}.{index}") and module._parameters:
                raise ModelError(
                    f"{here} is the same module as {there}, so two blocks share its parameters.\n"
                    f"Give each block a module of its own (copy.deepcopy)."
                )
    for path, module in model.named_modules():
        if _is_compiled(module):
            raise ModelError(
                f"{path or 'The model'} is compiled with torch.compile, which fixes where its weights are; streamed "
                f"weights arrive in new memory each time.\nPass the model before torch.compile."
            )
        if isinstance(module, nn.RNNBase):
            raise ModelError(
                f"{path} is an nn.{type(module).__name__}, which keeps its weights in a private list that streaming "
                f"cannot reach.\nOnly models without nn.RNN, nn.LSTM and nn.GRU can be streamed."
            )


def _refuse_unstreamable_usage(usage: Mapping[str, Usage], held: list[_Held], blocks_name: str) -> None:
    for one in held:
        used, name = usage[one.spec.name], one.spec.name
        foreign = sorted(used.inside - {one.block})
        if foreign:
            raise ModelError(
                f"{name} is used inside {blocks_name}.{foreign[0]}, which does not hold it.\n"
                f"A block can only use its own parameters. Move the parameter into the block, or pass what is "
                f"computed from it to the block as an argument."
            )
        if one.block is None and used.between:
            raise ModelError(
                f"{name} is used between blocks: after {min(used.between)} of the blocks in {blocks_name} have run.\n"
                f"Parameters outside the blocks can be used before the first block and after the last. Move the "
                f"module that holds it into a block, or compute what the blocks need of it before the first one."
            )
        if one.block is not None and (used.before or used.between or used.after):
            raise ModelError(
                f"{name} belongs to {blocks_name}.{one.block} and is used outside of it.\n"
                f"The parameters of a block are only there while the block runs. Move the parameter out of the block."
            )


def _usage_by_names(
    model: nn.Module, blocks_name: str, outer: Mapping[str, ParamSpec], failure: str
) -> dict[str, Usage]:
    """The rule when forward cannot be tried: what is registered before the block list is used before it, what is
    registered after it is used after it. It holds only if embeddings and nothing else come before the list, so
    anything else is refused."""
    order = {path: position for position, (path, _) in enumerate(model.named_modules())}
    usage = {name: Usage() for name, _ in model.named_parameters()}
    for name, spec in outer.items():
        for path, attribute in spec.places:
            is_before = order[path] < order[blocks_name]
            is_embedding = _looks_like_embedding(model.get_submodule(path), _join(path, attribute))
            # A tied tensor may sit in the embedding and in the head; a table that is only in the head may not.
            if is_before != is_embedding:
                raise ModelError(
                    f"It is not known whether {name} is used before the first block or after the last.\n"
                    f"Trying forward without data failed ({failure}), and {_join(path, attribute)} is registered "
                    f"{'before' if is_before else 'after'} {blocks_name}, where only "
                    f"{'embeddings' if is_before else 'norms and heads'} are expected. Pass example_inputs with which "
                    f"forward works."
                )
            usage[name].before |= is_before
            usage[name].after |= not is_before
    return usage


def _looks_like_embedding(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or any(
        "emb" in part.lower() or part in ("wte", "wpe") for part in name.split(".")
    )


def _is_compiled(module: nn.Module) -> bool:
    # OptimizedModule is what torch.compile(module) returns; module.compile() leaves its call in the attribute.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _num_held(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _listed_owners(owners: set[int | None], blocks_name: str) -> str:
    named = [f"{blocks_name}.{owner}" for owner in sorted(owner for owner in owners if owner is not None)]
    return " and ".join(named + (["a module outside the blocks"] if None in owners else []))
