"""The systems that are compared: which worker runs each, with which options, and what had to be changed to make it run.

`CHANGES` is the one place where every option that is not the system's own default is written down with its reason;
the results quote it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HOST_BYTES = {"tiny": 300_000_000, "60M": 700_000_000, "250M": 1_300_000_000, "1B": 2_700_000_000}
"""host_memory of `lohan`: a little more than the least that 4,096 tokens need; at 1B as much as keeps the peak of the
process below 3.5 GB with 4,096 tokens. As keep_nothing_in_memory is set too, all weights and state cross the SSD in
every step; what is left of this buys room on the way, not residency."""

MORE_FOR_FEW_TOKENS = {"1B": 500_000_000}
"""On top with up to FEW_TOKENS a step, where computing needs less and the peak stays below 3.5 GB all the same. With
256 tokens it is room for the state of 8 pieces instead of 2, and 0.855 of the step (2026-11-18_updates_inside.md)."""

FEW_TOKENS = 256

IN_MEMORY_BYTES = {"tiny": 1_000_000_000, "60M": 4_000_000_000, "250M": 8_000_000_000, "1B": 18_000_000_000}
"""Enough for everything to stay in RAM: for the limit of the cores."""

MICRO_BATCH_TOKENS = {"1B": 512}
"""Of our runs, by shape, else 1,024: more would not fit below 3.5 GB at 1B. They take a step's micro-batches unit by
unit, so that weights cross once however many there are. Everybody else gets the step's tokens as one batch: more would
make the peers read every parameter again for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One row of the table."""

    name: str
    what: str
    worker: str
    """The module of this package that runs it."""

    peer: bool = False
    """Runs in the peers' own virtual environment."""

    exact: bool = True
    """Computes with fp32 weights, so that its update must be plain PyTorch's up to rounding."""

    whole_batch: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    host_bytes: dict[str, int] = field(default_factory=HOST_BYTES.copy)
    """host_memory of ours, by shape."""

    least_warm_up: int = 1
    """Steps after a start that must not count. DeepSpeed records the order of its parameters in the first two and
    prefetches from then on."""

    limit_only: bool = False
    """Not a system: a resource, measured alone."""

    def options_for(self, shape: str, tokens: int) -> dict[str, Any]:
        """Its options for a model of this shape and a step of so many tokens."""
        if self.worker != "lohan_worker":
            return dict(self.options)
        if self.options["strategy"] == "cores":
            return {"host_memory": IN_MEMORY_BYTES[shape], **self.options}
        more = MORE_FOR_FEW_TOKENS.get(shape, 0) if tokens <= FEW_TOKENS else 0
        return {"host_memory": self.host_bytes[shape] + more, **self.options}

    def micro_batch_tokens(self, shape: str, tokens: int) -> int:
        return tokens if self.whole_batch else min(tokens, MICRO_BATCH_TOKENS.get(shape, 1024))


def _memory(share: float, largest: int) -> dict[str, int]:
    """More than HOST_BYTES where a strategy needs more for the same step, and what it gets at 1B."""
    return {shape: round(share * size) for shape, size in HOST_BYTES.items()} | {"1B": largest}


def _ours(name: str, what: str, **more: Any) -> System:
    options = {"strategy": name, **more.pop("options", {})}
    return System(name=name, what=what, worker="lohan_worker", options=options, **more)


_ALL = (
    System(name="pytorch", what="plain PyTorch in RAM: AdamW(fused), gradient checkpointing", worker="plain_worker"),
    System(
        name="fsdp2-cpu",
        what="torch FSDP2 with CPUOffloadPolicy, one gloo rank",
        worker="plain_worker",
        options={"fsdp2": True},
    ),
    System(
        name="deepspeed-cpu", what="DeepSpeed ZeRO-3, parameters and optimizer offloaded to RAM",
        worker="deepspeed_worker", peer=True, options={"offload": "cpu"}, least_warm_up=2,
    ),
    System(
        name="deepspeed-nvme", what="DeepSpeed ZeRO-3, parameters and optimizer on SSD (ZeRO-Infinity)",
        worker="deepspeed_worker", peer=True, options={"offload": "nvme"}, least_warm_up=2,
    ),
    _ours("lohan", "this project: bf16 wire, split state", exact=False, whole_batch=False),
    _ours(
        "lohan-fp32", "the same with an fp32 wire: as many bytes for a weight as the peers", whole_batch=False,
        host_bytes=_memory(1.2, HOST_BYTES["1B"]), options={"strategy": "lohan", "wire_dtype": "fp32"},
    ),
    _ours(
        "lohan-paper", "LoHan as published, in our engine: one batch, one state at a time, a barrier", exact=False,
        host_bytes=_memory(1.8, 5_400_000_000),
    ),
    _ours(
        "separate-stage", "our engine with a separate optimizer stage", exact=False, whole_batch=False,
        host_bytes=_memory(1.2, 3_600_000_000),
    ),
    _ours("cores", "computing and updating with everything in RAM", limit_only=True, whole_batch=False),
    _ours("drive", "the bytes of a step, alone", limit_only=True),
)  # fmt: skip
SYSTEMS = {system.name: system for system in _ALL if not system.limit_only}
LIMITS = {system.name: system for system in _ALL if system.limit_only}
ALL = {**SYSTEMS, **LIMITS}


@dataclass(frozen=True, slots=True)
class Change:
    """An option that is not the system's own default, and why."""

    systems: str
    option: str
    reason: str


CHANGES: tuple[Change, ...] = (
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "installed after torch, `--no-build-isolation`, `DS_BUILD_OPS=0`, `DS_ACCELERATOR=cpu`; libaio-dev from Debian",
        "its setup asks the installed torch; without an accelerator it must be named; NVMe needs libaio's headers",
    ),
    Change(
        "deepspeed-cpu",
        "`offload_param` and `offload_optimizer`: `device: cpu`, `pin_memory: false`",
        "pinned memory needs an accelerator to be worth its cost: nothing is copied to a device here",
    ),
    Change(
        "deepspeed-nvme",
        "`offload_param.max_in_cpu: 0`",
        "the default, 1e9 elements, leaves every parameter of these models in RAM without a word",
    ),
    Change(
        "deepspeed-nvme",
        "`offload_param.buffer_size`: the largest parameter",
        "the default of 1e8 elements wastes memory on smaller ones; no parameter may be larger than a buffer",
    ),
    Change(
        "deepspeed-nvme",
        "repaired at run time: a gathered weight is cloned (`NoGatherHandle`, `NoGatherCoalescedHandle`)",
        "on one CPU rank it is a view of a swap buffer that is refilled while in use: 70 of 75 gradients were wrong",
    ),
    Change(
        "deepspeed-nvme",
        "repaired at run time: a request for parameters names each once (`AsyncPartitionedParameterSwapper.swap_in`)",
        "under gradient checkpointing the prefetcher can ask for one parameter twice, which is refused",
    ),
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "`torch._dynamo.polyfills.loader` is imported before `zero.Init`",
        "inside it transformers imports it, finds another signature of `Tensor.__new__`, and the model cannot be made",
    ),
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "`reduce_bucket_size: 20000000`; for NVMe `sub_group_size: 20000000`",
        "the fastest and smallest of a sweep (2026-11-17_peers_tuning.md): the defaults are buffers of gigabytes",
    ),
    Change(
        "deepspeed-nvme",
        "`stage3_max_reuse_distance: 0`",
        "with the default parameters stay gathered, each holds a swap buffer, and the run stops: Not enough buffers",
    ),
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "no `dtype` for `zero.Init`; fp32 is checked after loading",
        "`zero.Init(dtype=torch.float32)` gives bf16 on a machine without an accelerator",
    ),
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "weights are loaded one by one inside `GatheredParameters`",
        "the way its documentation gives; whole state dicts would be in RAM beside the model",
    ),
    Change(
        "deepspeed-cpu, deepspeed-nvme",
        "`stage3_gather_16bit_weights_on_model_save: true`",
        "without it `save_16bit_model`, which is its export (of fp32 weights here), writes nothing",
    ),
    Change(
        "fsdp2-cpu",
        "`CPUOffloadPolicy(pin_memory=False)`, one gloo rank, each block and the root sharded",
        "there is no page-locked memory without an accelerator: `pin_memory=True` fails",
    ),
    Change(
        "all but ours",
        "the step's tokens as one batch",
        "gradient accumulation would make the peers fetch every parameter once more for each micro-batch",
    ),
)


def changes_table() -> str:
    """For the results."""
    lines = ["| system | what is not its default | why |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {one.systems} | {one.option} | {one.reason} |" for one in CHANGES)])


def describe() -> str:
    """For the results."""
    lines = ["| system | what it is |", "|---|---|"]
    return "\n".join([*lines, *(f"| {one.name} | {one.what} |" for one in SYSTEMS.values())])
