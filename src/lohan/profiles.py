"""What was measured, as plain numbers: a machine's rates, a model's operators. Everything that plans starts here.

Rates are per second, sizes in bytes. A ModelProfile is made for one size of micro-batch; identical blocks share one
UnitProfile object. No torch, no files, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveProfile:
    """One SSD."""

    name: str = "ssd"
    read_bytes_per_second: float
    write_bytes_per_second: float
    """Sustained: what it still does when its fast cache is full."""

    mixed_bytes_per_second: float | None = None
    """Reads and writes together, at once; None: as if they took turns."""

    capacity_bytes: int | None = None
    burst_write_bytes_per_second: float | None = None
    """While its fast cache lasts; None where there is no cliff."""

    burst_bytes: int = 0
    endurance_bytes: float | None = None
    """Bytes it may be written in its life, as rated."""

    price: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """One computer with one device to compute on (`gpus` of the same kind when simulated)."""

    name: str
    gpu_name: str = ""
    gpus: int = 1
    gpu_flops_per_second: float
    """What a real block reaches at the dtype in use, not the data sheet's peak."""

    gpu_memory_bytes: int
    separate_memory: bool = True
    """False on `cpu`: nothing is copied, and computing and updating take turns on the same cores."""

    to_gpu_bytes_per_second: float
    to_host_bytes_per_second: float
    duplex_share: float = 1.0
    """Of each direction's rate that is left when both copy at once."""

    host_memory_bytes: int
    drives: tuple[DriveProfile, ...]
    array_bytes_per_second: float | None = None
    """What all drives together reach, reads and writes added, where something before the drives is the limit."""

    update_parameters_per_second: float
    """The CPU's optimizer step, all threads, state already in RAM."""

    norm_share: float | None = None
    """Of an update's time, what the norm of the same gradient takes; None: not measured."""

    weights_seconds_per_parameter: float = 0.0
    """Of each unit, in forward and again in backward, beside its arithmetic and whatever the number of micro-batches:
    widening weights to the compute dtype, casting the gradient back."""

    saved_by_keeping: float = 1.0
    """Of the time its FLOPs would say, what keeping an operator's output saves in backward: the light ones between kept
    ones (norms, activations, rotations) are computed again all the same."""

    checksum_bytes_per_second: float | None = None
    """What the drives would move if all cores did nothing but serve them: checksums, copies, system calls."""

    compute_beside_drives: float | None = None
    """Of its rate, what computing keeps while the drives are busy, where it runs on the same cores; None: reckoned from
    `checksum_bytes_per_second`, as the three below."""

    drives_beside_compute: float | None = None
    """Of their rate, what the drives keep meanwhile."""

    update_beside_drives: float | None = None
    drives_beside_update: float | None = None
    single_read_bytes_per_second: float | None = None
    """What the drives reach when there is only one record to read at a time; None: as much as with many."""

    single_write_bytes_per_second: float | None = None
    single_mixed_bytes_per_second: float | None = None
    """With one record to read and one to write at a time, both together; None: as much as with many."""

    commit_seconds: float = 0.0
    """What a commit takes when all its writes are done: making them durable, and the manifest."""

    op_seconds: float = 0.0
    """Host work per scheduled operation: starting it, waking its lane."""

    power_watts: float | None = None
    price: float | None = None
    """Without the drives."""

    notes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorProfile:
    """One heavy operator of a block (matmul, attention, expert matmul), for one micro-batch."""

    name: str
    """Where it stands in the block: `self_attn.q_proj.mm`."""

    flops: float
    output_bytes: int
    """All its outputs: what keeping it costs."""

    needed: bool
    """Whether backward uses its value, directly or through lighter operators. If not, keeping it saves nothing."""

    inputs: tuple[int, ...] = ()
    """Heavy operators whose values are needed to compute it again (their positions in the unit)."""

    always: bool = False
    """Recomputed whatever is kept: something that is always computed reads its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProfile:
    """One unit: the embedding, a block, or final norm and head with the loss."""

    kind: str
    """embedding, block or head."""

    num_parameters: int
    tensor_elements: tuple[int, ...]
    """Of each parameter tensor, in order."""

    forward_flops: float
    """One micro-batch, all operators."""

    input_bytes: int = 0
    """The block's input for one micro-batch, in the compute dtype."""

    operators: tuple[OperatorProfile, ...] = ()
    saved_bytes: int = 0
    """All that backward of one micro-batch needs at once, after a full recompute."""

    working_bytes: int = 0
    """Peak of temporary memory in forward or backward of one micro-batch, `saved_bytes` included, weights and their
    gradients not."""

    shared_bytes: int = 0
    """Masks and tables that a micro-batch brings for all blocks of this kind, held until its backward is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model at one micro-batch size."""

    name: str
    units: tuple[UnitProfile, ...]
    tied: bool
    hidden_size: int
    vocabulary: int
    sequence_length: int
    micro_batch_size: int
    compute_bytes: int = 2
    """Bytes of an element in the compute dtype."""

    notes: tuple[str, ...] = field(default=())
    """Assumptions, for example how many tokens an expert sees."""

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_parameters for unit in self.units)

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.sequence_length * self.micro_batch_size
