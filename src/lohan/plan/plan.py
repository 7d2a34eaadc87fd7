"""The Plan: every decision of a run, as data. The engine never weighs two options; it reads them here."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.profiles import OperatorProfile

TIERS = ("device", "host", "ssd")
CLIP_MODES = ("immediate", "deferred", "speculative")


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit, as far as scheduling it needs to know."""

    kind: str
    """embedding, block or head."""

    weights_bytes: int
    piece_weights_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    """Of each piece; 0 for a frozen one."""

    num_parameters: int
    forward_flops: float = 0.0
    """For one step's tokens, all micro-batches."""

    input_bytes: int = 0
    """A block's input, for one micro-batch."""

    operators: tuple[OperatorProfile, ...] = ()
    """The heavy ones, for one micro-batch; empty where they are not known."""

    @property
    def trained_pieces(self) -> tuple[int, ...]:
        return tuple(index for index, size in enumerate(self.state_bytes) if size)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """All units in the order of the forward pass: embedding, blocks, head."""

    units: tuple[UnitSize, ...]
    tied: bool = False
    """The head also needs the embedding unit's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What goes where and when. Comparable, and saved as JSON beside the run."""

    strategy: str = "lohan"
    separate_memory: bool = False
    """The device has memory of its own: weights, gradients and block inputs are copied."""

    inputs: tuple[str, ...] = ()
    """Where each unit's input waits for backward: device, host or ssd. Left out: on the device."""

    kept: tuple[tuple[tuple[int, str], ...], ...] = ()
    """For each unit, the heavy operators whose outputs are kept for backward, and where: (number, tier). The others are
    computed again. On `cpu` device means the heap, and host the arena, where nothing gets into holes."""

    head_chunks: int = 1
    """Parts the head's loss is computed in, so that the logits are never whole in memory."""

    swap_window: int = 2
    """How many micro-batches' worth of activations may be on their way between device and host, each way."""

    device_units: int = 2
    """Units whose weights are on the device at once: one to compute with, one arriving."""

    transit_slabs: int = 0
    """Slabs for activations between device and SSD."""

    transit_bytes: int = 0
    """Of one: all that one micro-batch of one unit sends to SSD."""

    host_bytes: int = 0
    """Host memory for the activations that wait there."""

    resident_weights: frozenset[int] = frozenset()
    """Units whose wire weights stay in host memory."""

    resident_state: frozenset[int] = frozenset()
    """Units whose optimizer state stays in host memory; their weights do too."""

    clip: str = "immediate"
    """When the update may use a gradient: at once; when the global norm is known; or at once, kept only if the
    norm allows it."""

    left_units: frozenset[int] = frozenset()
    """Units whose update is left for the next forward, to spread the drives' work over the whole step. Empty is
    LoHan's published behaviour. With clip = deferred it is every unit."""

    gradients_on_ssd: bool = False
    """Gradients that must be held wait on SSD because RAM cannot hold them."""

    separate_stage: bool = False
    """For comparison: no update before backward is over."""

    barrier: bool = False
    """For comparison: a step begins when everything of the step before is done. Updates that wait for the norm are a
    stage of their own then, between two steps."""

    blocks_in_flight: int = 0
    """For comparison: units whose state is in host memory at once, each read whole, then updated, then written. 0: as
    many pieces of it as there are slabs, each on its own way."""

    device_waits: bool = False
    """For comparison: a gradient's arrival starts the reading of its state, and the device waits for the update."""

    weights_slabs: int = 4
    """Units in flight between SSD and device. Three is the least that cannot stall itself: one being computed
    with, one being updated, one being read."""

    state_slabs: int = 8
    """Pieces of state between SSD and update, and back."""

    gradient_slabs: int = 2

    def __post_init__(self) -> None:
        if self.clip not in CLIP_MODES:
            raise ValueError(f"clip is {self.clip!r}; it is one of {', '.join(CLIP_MODES)}")
        tiers = {*self.inputs, *(tier for unit in self.kept for _, tier in unit)}
        if not tiers <= set(TIERS):
            raise ValueError(f"activations go to {', '.join(TIERS)}, not to {', '.join(sorted(tiers - set(TIERS)))}")
        if not self.resident_state <= self.resident_weights:
            raise ValueError("a unit whose state is resident has resident weights too")

    def keeps(self, unit: int) -> dict[int, str]:
        """The heavy operators of this unit whose outputs are kept, and where."""
        return dict(self.kept[unit]) if unit < len(self.kept) else {}

    def input_tier(self, unit: int) -> str:
        return self.inputs[unit] if unit < len(self.inputs) else "device"

    def tiers(self, unit: int) -> frozenset[str]:
        """Where this unit's activations go that leave the device's memory (on `cpu`: the C library's heap)."""
        return frozenset({self.input_tier(unit), *self.keeps(unit).values()} - {"device"})

    def leaves(self, unit: int) -> bool:
        """Whether this unit's update waits for the next forward."""
        return self.clip == "deferred" or unit in self.left_units

    def holds_gradient(self, unit: int) -> bool:
        """Whether this unit's gradient outlives its own backward."""
        return self.clip != "immediate" or self.separate_stage or unit in self.left_units
