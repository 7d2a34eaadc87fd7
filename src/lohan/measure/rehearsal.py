"""A model's blocks, run once on tensors without data: operators, FLOPs, bytes, and the memory a block takes.

The model's own forward runs on fake tensors that claim to be on the device, so the operators are the very ones that
will run there, numbered as the engine numbers them; nothing is computed and nothing is allocated. Blocks of the same
make (class, parameter shapes, arguments) are run once. Memory is counted as devices/budget.py counts it on `virtual`:
the live storages of a forward, and of a replay with its backward.

What cannot run without data (an operator whose result's shape depends on values) raises Unrehearsable.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from lohan.engine.create import without_caches
from lohan.engine.devices.budget import MemoryBudget
from lohan.engine.replay import Recording, Replayer, heavy_sources
from lohan.engine.trees import map_tensors, tensors_in
from lohan.models.installer import Installer
from lohan.models.units import Units
from lohan.profiles import OperatorProfile


class Unrehearsable(Exception):
    """This model cannot be run without data; the reason is in the text."""


class Peaks(NamedTuple):
    """Live bytes that one micro-batch of a block takes at most."""

    forward: int
    first_backward: int
    """Of a step's first micro-batch, which makes the weights' gradients."""

    later_backward: int
    """Of the others, which find them there; they are counted."""


@dataclass(slots=True)
class BlockTrace:
    """One kind of block, for one micro-batch."""

    blocks: list[int]
    """The blocks of this kind."""

    operators: tuple[OperatorProfile, ...]
    input_bytes: int
    """Of the arguments that other blocks made: what is saved for backward."""

    shared_bytes: int
    """Masks, tables and whatever else the block is given."""

    output_bytes: int
    weights_bytes: int
    """Parameters in the compute dtype."""

    call: tuple[Any, Any] = field(repr=False, default=((), {}))
    peaks: dict[frozenset[int], Peaks] = field(default_factory=dict)


class Rehearsal:
    """The blocks of one model at one size of micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        *,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ):
        """A micro-batch of `rows` sequences of `tokens` each. All bytes are multiplied by `scale`."""
        self._scale = scale
        self._model, self._units, self._dtype, self._device = model, units, dtype, device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        blocks = model.get_submodule(units.blocks_name)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = list(blocks)
        self._replayer = Replayer(torch.get_rng_state, torch.set_rng_state)
        self.kinds: list[BlockTrace] = []
        self._known: dict[Any, tuple[BlockTrace, Any]] = {}
        self.head_bytes = 0
        """Live bytes that the head, its loss and its backward take at most, for the first micro-batch of a step."""
        self.later_head_bytes = 0
        """For the others, which find the head's gradients there."""
        budget = self._budget = MemoryBudget(None, device_types=(device.type, "meta"))
        was_training = model.training
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # it shouts about what is answered here
        level = logger.level
        try:
            logger.setLevel(logging.CRITICAL)
            with ExitStack() as owned:
                for context in (
                    torch.random.fork_rng(devices=[]),
                    self._mode,
                    self._installed(),
                    self._wrapped(),
                    without_caches(model),
                    torch.enable_grad(),
                ):
                    owned.enter_context(context)
                model.train()
                ids = torch.zeros((rows, tokens), dtype=torch.long, device=device)
                for later in (False, True):  # the second micro-batch finds the first one's gradients there
                    with budget.watch():
                        loss = model(input_ids=ids, labels=ids)["loss"]  # as in a run, its logits are let go
                        torch.autograd.backward(loss)
                        del loss
                    if not later:
                        start = self._before_head
                        self.head_bytes = round((budget.peak_bytes - start) * scale)
                    self.later_head_bytes = round((budget.peak_bytes - start) * scale)
        except Exception as error:
            raise Unrehearsable(f"{type(error).__name__}: {error}") from error
        finally:
            logger.setLevel(level)
            model.train(was_training)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as owned:
            installer = owned.enter_context(Installer(self._model, self._units))
            for unit in self._units:
                for param in unit.params:
                    made = torch.empty(param.shape, dtype=self._dtype, device=self._device)
                    installer.install_param(param.name, made.requires_grad_(param.trainable))
            yield

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        hidden = [block.__dict__.get("forward") for block in self._blocks]
        for index, block in enumerate(self._blocks):
            block.__dict__["forward"] = self._wrap(index, block.forward)
        try:
            yield
        finally:
            for block, before in zip(self._blocks, hidden, strict=True):
                block.__dict__.pop("forward", None)
                if before is not None:
                    block.__dict__["forward"] = before

    def _wrap(self, index: int, run: Any) -> Any:
        block = self._blocks[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._no_mask(block, kwargs.get("attention_mask")):
                kwargs["attention_mask"] = None
            signature = _signature(block, args, kwargs)
            known = self._known.get(signature)
            if known is None:
                trace, result = self._trace(index, run, args, kwargs)
                self.kinds.append(trace)
                known = self._known[signature] = (trace, result)
            if index not in known[0].blocks:
                known[0].blocks.append(index)
            self._budget.reset_peak()  # what comes behind the last block is the head's
            self._before_head = self._budget.live_bytes
            return map_tensors(known[1], lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))

        return forward

    def _no_mask(self, block: nn.Module, mask: Any) -> bool:
        """Whether a run without padding would have no mask here: transformers always makes one for fake tensors."""
        config: Any = getattr(self._model, "config", None)
        if not isinstance(mask, Tensor) or mask.dim() != 4 or getattr(config, "_attn_implementation", "") != "sdpa":
            return False
        sliding = getattr(block, "attention_type", getattr(getattr(block, "self_attn", None), "layer_type", ""))
        window = getattr(config, "sliding_window", None)
        return window is None or sliding == "full_attention" or mask.shape[-1] <= int(window)

    def _trace(self, index: int, run: Any, args: Any, kwargs: Any) -> tuple[BlockTrace, Any]:
        block = self._blocks[index]
        names: list[str] = []
        flops: list[float] = []
        with _module_paths(block) as where:

            def heavy(func: Any, op_args: Any, op_kwargs: Any, result: Any) -> None:
                names.append(".".join([*where, func._schema.name.removeprefix("aten::").strip("_")]))
                flops.append(_flops(func, op_args, op_kwargs, result))

            result, recording = self._replayer.record(
                f"{self._units.blocks_name}.{index}", {}, lambda: run(*args, **kwargs), heavy
            )
        weights = sum(p.numel() for p in block.parameters()) * self._dtype.itemsize
        passed = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        shared = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.requires_grad]
        trace = BlockTrace(
            blocks=[],
            operators=operators_of(recording, names, flops, self._scale),
            input_bytes=self._bytes(passed),
            shared_bytes=self._bytes(shared),
            output_bytes=self._bytes(tensors_in(result)),
            weights_bytes=round(weights * self._scale),
            call=(args, kwargs),
        )
        return trace, map_tensors(result, lambda tensor: tensor.detach())

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        return round(sum(tensor.nbytes for tensor in tensors) * self._scale)

    def peaks(self, kind: BlockTrace, kept: Sequence[int]) -> Peaks:
        """Live bytes that forward and backward of one micro-batch take at most, these operators being kept.

        Counted from what is there before: arguments, weights, kept outputs and the gradient of the output are not in
        it; in forward kept outputs and the result are, in backward the gradients of weights and input.
        """
        key = frozenset(kept)
        if key not in kind.peaks:
            with torch.random.fork_rng(devices=[]), self._mode, self._installed(), torch.enable_grad():
                self._model.train()
                kind.peaks[key] = self._measure(kind, dict.fromkeys(key, "device"))
        return kind.peaks[key]

    def _measure(self, kind: BlockTrace, keep: dict[int, str]) -> Peaks:
        index = kind.blocks[0]
        block = self._blocks[index]
        budget = MemoryBudget(None, device_types=(self._device.type, "meta"))

        def again(tensor: Tensor) -> Tensor:
            made = torch.empty_like(tensor)
            return made.requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(kind.call, again)
        with budget.watch():
            result, recording = self._replayer.record(
                f"{self._units.blocks_name}.{index}", keep, lambda: block.forward(*args, **kwargs)
            )
            result = map_tensors(result, lambda tensor: tensor.detach())
            forward = budget.peak_bytes
        gradients = [torch.empty_like(tensor) for tensor in tensors_in(result) if tensor.is_floating_point()]
        del result
        before = budget.live_bytes
        backward = []
        for _ in range(2):  # the second micro-batch finds the first one's gradients there
            budget.reset_peak()
            with budget.watch():
                with self._replayer.replay(recording, f"{self._units.blocks_name}.{index}"):
                    outputs = [t for t in tensors_in(block.forward(*args, **kwargs)) if t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, gradients[: len(outputs)])
                del outputs
            backward.append(round((budget.peak_bytes - before) * self._scale))
            for tensor in tensors_in((args, kwargs)):
                tensor.grad = None
        return Peaks(round(forward * self._scale), backward[0], backward[1])


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    if "attention" in func._schema.name:  # two matmuls over every pair of tokens; half the pairs when causal
        names = [one.name for one in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key = args[0], args[1]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return float(4.0 * pairs * query.shape[3] * (0.5 if given.get("is_causal") else 1.0))
    if "grouped_mm" in func._schema.name:  # each row meets one expert's matrix; torch does not count these
        return float(2.0 * args[0].numel() * args[1].shape[-1])
    count: Any = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def rehearse(
    model: nn.Module, units: Units, *, rows: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Rehearsal:
    """A rehearsal in this dtype, or in bf16 where torch knows an operator's shapes only for that (expert matmuls)."""
    try:
        return Rehearsal(model, units, rows=rows, tokens=tokens, dtype=dtype, device=device)
    except Unrehearsable as error:
        if dtype == torch.bfloat16 or "BF16" not in str(error):
            raise
    return Rehearsal(
        model, units, rows=rows, tokens=tokens, dtype=torch.bfloat16, device=device, scale=dtype.itemsize / 2
    )


def operators_of(
    recording: Recording, names: Sequence[str], flops: Sequence[float], scale: float = 1.0
) -> tuple[OperatorProfile, ...]:
    """The heavy operators of a recorded block, with what each needs to be computed again."""
    ops = recording.ops
    roots = set(recording.saved)
    for op in ops:
        if op.always or recording.opaque:
            roots.update(op.reads if op.heavy < 0 else op.makes)
    needed = heavy_sources(ops, roots)
    return tuple(
        OperatorProfile(
            name=names[op.heavy],
            flops=flops[op.heavy],
            output_bytes=round(op.output_bytes * scale),
            needed=op.heavy in needed,
            inputs=tuple(sorted(heavy_sources(ops, op.reads) - {op.heavy})),
        )
        for op in ops
        if op.heavy >= 0
    )


@contextmanager
def _module_paths(block: nn.Module) -> Iterator[list[str]]:
    """The path of the innermost submodule that is running, as a list that changes."""
    where: list[str] = []
    stack: list[list[str]] = []
    handles = []

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            stack.append(list(where))
            where[:] = [path]

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        where[:] = stack.pop()

    for path, module in block.named_modules():
        if path:
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield where
    finally:
        for handle in handles:
            handle.remove()


def _signature(block: nn.Module, args: Any, kwargs: Any) -> Any:
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_in((args, kwargs)))
    plain = tuple(sorted((k, v) for k, v in kwargs.items() if isinstance(v, (int, float, str, bool))))
    own = tuple(sorted((k, v) for k, v in vars(block).items() if isinstance(v, (int, float, str)) and k != "layer_idx"))
    return type(block), shapes, tensors, plain, own
