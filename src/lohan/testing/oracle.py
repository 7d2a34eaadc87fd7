"""The oracle: plain PyTorch training with every tensor in RAM. What it computes is what a run must compute, to the bit.

It is slow and simple on purpose, and shares no code with the engine or the optimizers it judges.
This page is the specification.

Weights
    A master weight is fp32 and starts as the file's value, exactly. The wire weight is the master
    rounded to the wire dtype: for bf16 `(bits + 0x8000) >> 16` (nearest, ties away from zero, NaN stays
    NaN, infinity stays); for fp16 `.to(float16)`; for fp32 the master itself. The compute weight is the
    wire weight cast to the compute dtype. Buffers keep the dtype of a model built in fp32. Parameters
    that `frozen` names never change; their compute weight is the rounded file value all the same.

A step
    Steps count from 1; a skipped step counts too. Each micro-batch in order: forward and backward of the
    unmodified model in training mode, `use_cache` and `output_hidden_states` off. Gradients are summed
    over micro-batches in order, in `grad_dtype` (the compute dtype unless said otherwise): the first one
    is taken as it is, the others are added to it.

    A tied weight is one parameter with several uses. Each use sums its own gradients over the
    micro-batches; then the sums are added, the last use in module order first: head + embedding.

Loss
    `num_items_in_batch` is the number of labels that are predicted, `labels[..., 1:] != -100`, over all
    micro-batches of the step, as an int64 tensor without dimensions. A model takes it by the rule of
    transformers' Trainer: `model.accepts_loss_kwargs` where that exists, else whether forward has
    `**kwargs`; a parameter of that very name counts too. The step's loss is then the sum of the
    micro-batch losses. A model that does not take it has its loss multiplied by the micro-batch's
    labels over the step's labels. (Trainer counts the first label of a row too where it cannot tell
    that the loss shifts, which in 5.22 includes GPT-2. We always leave it out: it predicts nothing.)

    What else the model's forward adds to its loss is neither scaled nor averaged, as in Trainer:
    Mixtral's load balancing loss is added once per micro-batch, so four micro-batches weigh it four
    times as much as one batch of the same tokens.

    The reported loss is the sum, in order, of the micro-batch losses as Python floats, before loss scaling.

The head in chunks
    With `head_chunks` = n above 1 the tokens of a micro-batch, batch and sequence flattened, are cut by
    `torch.chunk(n)`. Each chunk has its own logits, all that the model does to them, and the sum of its
    cross-entropies; these sums are added in order and the whole is divided and weighed as above. Each
    chunk has its own backward, with the factor that it has in the loss: `scale / num_items_in_batch`, or
    `scale * share / labels of the micro-batch`. The hidden states' gradients are put together again. The
    output weight's gradient is summed over chunks as over micro-batches: the first chunk of the first
    micro-batch is a product, `mm`, the others are added to it by `addmm_`.

Random numbers
    `torch.manual_seed(unit_seed(seed, step, micro_batch, unit))` before each unit. Unit 0 is everything
    before the first block and is seeded at the start of the model's forward, unit i + 1 is block i and
    is seeded as it is called, unit n + 1 is everything after the last block and is seeded as that
    returns. What runs between two blocks continues the first one's stream. Micro-batches and blocks
    count from 0. The global random state is the same after a step as before it.

Gradients as the update receives them
    The sum, `.to(wire dtype)` by torch's own rounding (ties to even, also for bf16), then to fp32.

    With loss scaling the loss is multiplied by the scale before backward. If any wire gradient is not
    finite the step is skipped: no weight, moment or update count changes, and the dynamic scale is
    halved. Otherwise the fp32 gradients are multiplied by fp32(1 / scale), and the dynamic scale doubles
    after 2000 such steps in a row; it starts at 65536. Without loss scaling a loss or gradient that is
    not finite raises FloatingPointError.

    Then `clip_grad_norm_` over the parameters in the model's order, tied ones once. The norm is
    reported whether or not there is a limit; a skipped step has none.

Update
    `AdamW`, `Adam` or `SGD` of torch, `fused=True`, on the fp32 masters; weight decay only where the
    parameter has two dimensions or more. The learning rate of step t is `learning_rate * schedule(t)`.
    A schedule given by name is transformers' own, whose first step is its step 0. A parameter without a
    gradient is left alone, and its update count with it.

    State formats: `fp32` and `split` hold the same numbers. With `bf16-moments` every moment is rounded
    by `.to(bfloat16)` after each update.
"""

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_scheduler

from lohan.testing.oracle_head import balancing_loss, head_in_chunks

MicroBatch = Mapping[str, Any]

_INITIAL_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000  # torch.amp.GradScaler's defaults


@dataclass(frozen=True, slots=True)
class OracleStep:
    """What one step reports."""

    loss: float
    grad_norm: float | None
    """Norm of the whole gradient before clipping. None when the step was skipped."""
    skipped: bool


class Oracle:
    """Trains a Hugging Face folder, or a copy of a module, as the module docstring above specifies."""

    def __init__(
        self,
        model: Path | str | nn.Module,
        *,
        wire_dtype: torch.dtype = torch.bfloat16,
        compute_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype | None = None,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        max_grad_norm: float | None = None,
        loss_scale: float | Literal["dynamic"] | None = None,
        lr_schedule: Callable[[int], float] | str = "constant",
        warmup_steps: int = 0,
        total_steps: int | None = None,
        state_format: Literal["fp32", "split", "bf16-moments"] = "fp32",
        frozen: Callable[[str], bool] | str | None = None,
        decays: Callable[[str, Tensor], bool] | None = None,
        seed: int = 0,
        head_chunks: int = 1,
    ) -> None:
        """`frozen` is a predicate or a regular expression searched in the parameter's name."""
        if wire_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"wire_dtype is {wire_dtype}. Choose bfloat16, float16 or float32.")
        if state_format not in ("fp32", "split", "bf16-moments"):
            raise ValueError(f"state_format is {state_format!r}. Choose fp32, split or bf16-moments.")
        if state_format == "split" and wire_dtype != torch.bfloat16:
            raise ValueError(f"state_format 'split' needs a bfloat16 wire, and wire_dtype is {wire_dtype}.")
        if head_chunks > 1 and grad_dtype not in (None, compute_dtype):
            raise ValueError(f"head_chunks sums in the compute dtype {compute_dtype}, and grad_dtype is {grad_dtype}.")
        self.model = _own_copy(model)
        self.num_steps = 0
        """Steps taken so far, skipped ones included."""
        self.scale = _INITIAL_SCALE if loss_scale == "dynamic" else loss_scale
        """The loss scale the next step will use; None without loss scaling."""
        self.last_gradients: dict[str, Tensor] = {}
        """The wire gradients of the last step in fp32, before unscaling and clipping: where two runs part."""

        self._wire_dtype = wire_dtype
        self._grad_dtype = compute_dtype if grad_dtype is None else grad_dtype
        self._max_grad_norm = max_grad_norm
        self._dynamic_scale = loss_scale == "dynamic"
        self._steps_since_scale_changed = 0
        self._learning_rate = learning_rate
        self._schedule = _named_schedule(lr_schedule, warmup_steps, total_steps)
        self._round_moments = state_format == "bf16-moments"
        self._seed = seed
        self._head_chunks = head_chunks
        self._takes_num_items = _takes_num_items(self.model)
        self._blocks = find_blocks(self.model)

        self._uses = _untie(self.model)
        is_frozen = _predicate(frozen)
        self._masters: dict[str, nn.Parameter] = {}
        for name, uses in self._uses.items():
            trained = uses[0].requires_grad and not is_frozen(name)
            self._masters[name] = nn.Parameter(uses[0].detach().to(torch.float32).clone(), requires_grad=trained)
            for use in uses:
                use.requires_grad_(trained)
                use.data = use.data.to(compute_dtype)
        self._optimizer = self._make_optimizer(optimizer, betas, eps, weight_decay, momentum, decays)
        self._load_compute_weights()

    def step(self, micro_batches: Sequence[MicroBatch]) -> OracleStep:
        """One optimizer step over all micro-batches."""
        self.num_steps += 1
        num_labels = _num_labels(micro_batches)
        with torch.random.fork_rng():
            losses = []
            sums: dict[nn.Parameter, Tensor] = {}
            self.model.train()
            for index, micro_batch in enumerate(micro_batches):
                with self._seeding(index):
                    if self._head_chunks == 1:
                        loss = self._loss(micro_batch, num_labels)
                        to_push, gradients = [loss if self.scale is None else loss * self.scale], None
                    else:
                        loss, to_push, gradients = self._chunked_loss(micro_batch, num_labels, sums)
                losses.append(loss.item())
                if self.scale is None and not math.isfinite(losses[-1]):
                    raise FloatingPointError(f"Step {self.num_steps}, micro-batch {index}: the loss is {losses[-1]}.")
                torch.autograd.backward(to_push, gradients)
                self._add_gradients(sums)
            grad_norm = self._update(sums)
        return OracleStep(loss=_ordered_sum(losses), grad_norm=grad_norm, skipped=grad_norm is None)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of the same micro-batches in evaluation mode. Training goes on as if this had not been called."""
        num_labels = _num_labels(micro_batches)
        self.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            if self._head_chunks == 1:
                losses = [self._loss(micro_batch, num_labels).item() for micro_batch in micro_batches]
            else:
                losses = [self._chunked_loss(one, num_labels, None)[0].item() for one in micro_batches]
        return _ordered_sum(losses)

    def weights(self) -> dict[str, Tensor]:
        """Wire weights by parameter name, tied ones once under their first name."""
        return {name: round_to_wire(master.detach(), self._wire_dtype) for name, master in self._masters.items()}

    def masters(self) -> dict[str, Tensor]:
        """fp32 master weights of what is trained."""
        return {name: master.detach().clone() for name, master in self._masters.items() if master.requires_grad}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """fp32 moments of what has been updated: exp_avg and exp_avg_sq, or momentum_buffer for SGD."""
        return {
            name: {key: value.clone() for key, value in _moments_of(self._optimizer.state[master])}
            for name, master in self._masters.items()
            if master in self._optimizer.state
        }

    def num_updates(self) -> dict[str, int]:
        """How often Adam has updated each parameter. Bias correction uses this, not the number of steps."""
        return {
            name: int(self._optimizer.state[master]["step"])
            for name, master in self._masters.items()
            if "step" in self._optimizer.state.get(master, {})
        }

    def _loss(self, micro_batch: MicroBatch, num_labels: Tensor) -> Tensor:
        extra = {"num_items_in_batch": num_labels} if self._takes_num_items else {}
        outputs = self.model(**micro_batch, **extra)
        loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if self._takes_num_items:
            return loss
        return loss * (_num_labels([micro_batch]).item() / num_labels.item())

    def _chunked_loss(
        self, micro_batch: MicroBatch, num_labels: Tensor, sums: dict[nn.Parameter, Tensor] | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """The loss, and what to send backward with which gradients. The head's own gradients are in `sums` by then."""
        model: Any = self.model
        extra = {"output_router_logits": True} if getattr(model.config, "output_router_logits", False) else {}
        outputs = model.base_model(**{key: value for key, value in micro_batch.items() if key != "labels"}, **extra)
        hidden = outputs.last_hidden_state
        factor = torch.ones(()) if self.scale is None else torch.ones(()) * self.scale
        if self._takes_num_items:
            share, divisor = 1.0, num_labels
        else:
            divisor = _num_labels([micro_batch])
            share = divisor.item() / num_labels.item()
        factor = factor * share / divisor
        labels = nn.functional.pad(micro_batch["labels"], (0, 1), value=-100)[..., 1:].flatten()
        rows = hidden.detach().flatten(0, -2)
        total, gradient = head_in_chunks(model, rows, labels, factor, self._head_chunks, sums)
        loss = total / divisor * share
        to_push: list[Tensor] = [hidden] if hidden.requires_grad else []
        gradients: list[Tensor | None] = [gradient.view_as(hidden)] if to_push else []
        if extra:
            added = balancing_loss(model.config, outputs.router_logits, micro_batch.get("attention_mask"))
            loss = loss + added.detach()
            to_push.append(added if self.scale is None else added * self.scale)
            gradients.append(None)
        return loss, to_push, gradients

    @contextmanager
    def _seeding(self, micro_batch: int) -> Iterator[None]:
        """Seed every unit of one forward as it begins."""

        def seed(unit: int) -> None:
            torch.manual_seed(unit_seed(self._seed, self.num_steps, micro_batch, unit))

        hooks = [
            block.register_forward_pre_hook(lambda module, args, unit=index + 1: seed(unit))
            for index, block in enumerate(self._blocks)
        ]
        after = len(self._blocks) + 1
        hooks.append(self._blocks[-1].register_forward_hook(lambda module, args, output: seed(after)))
        seed(0)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add_gradients(self, sums: dict[nn.Parameter, Tensor]) -> None:
        for uses in self._uses.values():
            for use in uses:
                if use.grad is None:
                    continue
                gradient = use.grad.to(self._grad_dtype)
                use.grad = None
                if use in sums:
                    sums[use] += gradient
                else:
                    sums[use] = gradient

    def _update(self, sums: dict[nn.Parameter, Tensor]) -> float | None:
        """Update the masters from the summed gradients. Returns the gradient's norm, or None if skipped."""
        for name, uses in self._uses.items():
            parts = [sums[use] for use in reversed(uses) if use in sums]
            self._masters[name].grad = None
            if parts:
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                self._masters[name].grad = total.to(self._wire_dtype).to(torch.float32)
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self.last_gradients = {name: gradient.clone() for name, gradient in gradients.items()}

        overflowed = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        if overflowed and self.scale is None:
            raise FloatingPointError(f"Step {self.num_steps}: the gradient of {overflowed[0]} is not finite.")
        if self.scale is not None:
            scale = self.scale
            self._adjust_scale(bool(overflowed))
            if overflowed:
                return None
            for gradient in gradients.values():
                gradient.mul_(1.0 / scale)

        if self._max_grad_norm is None:
            norm = nn.utils.get_total_norm(gradients.values()).item()
        else:
            norm = nn.utils.clip_grad_norm_(self._masters.values(), self._max_grad_norm).item()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * self._schedule(self.num_steps)
        self._optimizer.step()
        if self._round_moments:
            for state in self._optimizer.state.values():
                for _, moment in _moments_of(state):
                    moment.copy_(moment.to(torch.bfloat16))
        self._load_compute_weights()
        return norm

    def _adjust_scale(self, overflowed: bool) -> None:
        if not self._dynamic_scale:
            return
        assert self.scale is not None
        if overflowed:
            self.scale *= _BACKOFF
            self._steps_since_scale_changed = 0
            return
        self._steps_since_scale_changed += 1
        if self._steps_since_scale_changed == _GROWTH_INTERVAL:
            self.scale *= _GROWTH
            self._steps_since_scale_changed = 0

    def _load_compute_weights(self) -> None:
        with torch.no_grad():
            for name, uses in self._uses.items():
                wire = round_to_wire(self._masters[name].detach(), self._wire_dtype)
                for use in uses:
                    use.copy_(wire)

    def _make_optimizer(
        self,
        kind: str,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        momentum: float,
        decays: Callable[[str, Tensor], bool] | None,
    ) -> torch.optim.Optimizer:
        def decayed(name: str, master: Tensor) -> bool:
            return master.ndim >= 2 if decays is None else decays(name, master)

        trained = [(name, master) for name, master in self._masters.items() if master.requires_grad]
        with_decay = [master for name, master in trained if decayed(name, master)]
        without_decay = [master for name, master in trained if not decayed(name, master)]
        groups = [
            {"params": with_decay, "weight_decay": weight_decay},
            {"params": without_decay, "weight_decay": 0.0},
        ]
        lr = self._learning_rate
        if kind == "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        if kind == "adam":
            return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=True)
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
        raise ValueError(f"optimizer is {kind!r}. Choose adamw, adam or sgd.")


def unit_seed(seed: int, step: int, micro_batch: int, unit: int) -> int:
    """The seed of one unit's forward in one micro-batch of one step."""
    return (((seed * 1_000_003 + step) * 1_000_003 + micro_batch) * 1_000_003 + unit) % 2**63


def round_to_wire(master: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """A new tensor: fp32 values rounded to the wire dtype, for bf16 by `(bits + 0x8000) >> 16`."""
    if wire_dtype != torch.bfloat16:
        return master.to(wire_dtype, copy=True)
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    rounded = (bits + 0x8000) >> 16
    # The quiet bit keeps a NaN whose payload lies in the lost half from becoming an infinity.
    rounded = torch.where(master.isnan(), (bits >> 16) | 0x0040, rounded)
    return (rounded & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks: the members of the ModuleList that holds most parameters, the outermost of equals."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no ModuleList, so it has no blocks.")
    largest = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    return list(largest)


def _own_copy(source: Path | str | nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        model: nn.Module = (
            copy.deepcopy(source)
            if isinstance(source, nn.Module)
            else AutoModelForCausalLM.from_pretrained(Path(source), dtype=torch.float32, local_files_only=True)
        )
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
        config.output_hidden_states = False
    return model


def _untie(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Give every use of a shared parameter a leaf of its own. Returns the uses, in order, by the first one's name."""
    first_names: dict[nn.Parameter, str] = {}
    uses: dict[str, list[nn.Parameter]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter not in first_names:
            first_names[parameter] = name
            uses[name] = [parameter]
            continue
        use = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, use)
        uses[first_names[parameter]].append(use)
    return uses


def _takes_num_items(model: nn.Module) -> bool:
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _num_labels(micro_batches: Sequence[MicroBatch]) -> Tensor:
    count = sum((micro_batch["labels"][..., 1:] != -100).sum() for micro_batch in micro_batches)
    if not isinstance(count, Tensor) or count == 0:
        raise ValueError("The step has no token with a label, so its loss is not defined.")
    return count


def _ordered_sum(losses: Iterable[float]) -> float:
    # Not sum(): from Python 3.12 on it compensates for rounding.
    total = 0.0
    for loss in losses:
        total += loss
    return total


def _moments_of(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(key, value) for key, value in state.items() if key != "step" and isinstance(value, Tensor)]


def _predicate(frozen: Callable[[str], bool] | str | None) -> Callable[[str], bool]:
    if frozen is None:
        return lambda name: False
    if isinstance(frozen, str):
        pattern = re.compile(frozen)
        return lambda name: pattern.search(name) is not None
    return frozen


def _named_schedule(
    schedule: Callable[[int], float] | str, warmup_steps: int, total_steps: int | None
) -> Callable[[int], float]:
    if not isinstance(schedule, str):
        return schedule
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = get_scheduler(schedule, unused, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    factor = scheduler.lr_lambdas[0]
    return lambda step: float(factor(step - 1))
