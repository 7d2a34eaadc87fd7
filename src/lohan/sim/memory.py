"""How much memory a strategy takes, by rules that reproduce which models the publication could train.

At most two rules per system, on block parameters B, all parameters P and the activations S that backward of one block
of the whole batch needs:

    lohan-paper (and its ablations)   host 6 x 16 B: six blocks of master, moments, weights and gradient under way
                                      device 4 x 2 B + S: weights and gradient of two blocks
    zero-infinity                     host 90 GB + 4 P: pinned buffers, and weights and gradients on their way
    zero-offload, in-memory           host 16 P: master, moments, weights, gradients
    flashneuron                       device 16 P
    g10                               device 2 x 16 B + S: two blocks' full state, updated on the device

With these 412B fails on a 24 GiB card whatever the RAM: its four block buffers alone are 25.8 GB. The publication does
not say why that run fails; this is our assumption. What `lohan` takes is counted from its Plan elsewhere; here it
counts as lohan-paper with one micro-batch's S.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan.profiles import MachineProfile, ModelProfile
from lohan.sizes import format_bytes

_PAPER = ("lohan", "lohan-paper", "lohan-paper-naive", "separate-stage")
ZERO_INFINITY_HOST_BYTES = 90e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes a run takes, activations that may go elsewhere not counted."""

    gpu_bytes: float
    host_bytes: float
    ssd_bytes: float

    def misfit(self, machine: MachineProfile) -> str:
        """Why this does not fit the machine; empty if it does."""
        if self.gpu_bytes > machine.gpu_memory_bytes:
            return (
                f"needs {format_bytes(self.gpu_bytes)} of device memory and the device has "
                f"{format_bytes(machine.gpu_memory_bytes)}"
            )
        if self.host_bytes > machine.host_memory_bytes:
            return (
                f"needs {format_bytes(self.host_bytes)} of RAM and the machine has "
                f"{format_bytes(machine.host_memory_bytes)}"
            )
        capacities = [drive.capacity_bytes for drive in machine.drives if drive.capacity_bytes is not None]
        if len(capacities) == len(machine.drives) and self.ssd_bytes > sum(capacities):
            return f"needs {format_bytes(self.ssd_bytes)} on SSD and the drives hold {format_bytes(sum(capacities))}"
        return ""


def memory_needs(strategy: str, profile: ModelProfile, machine: MachineProfile, num_micro_batches: int = 1) -> Needs:
    """By the rules above."""
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    block = max(unit.num_parameters for unit in blocks)
    saved = max(unit.saved_bytes for unit in blocks) * (1 if strategy == "lohan" else num_micro_batches)
    parameters = profile.num_parameters
    inputs = sum(unit.input_bytes for unit in blocks) * num_micro_batches * machine.gpus
    ssd = 14.0 * parameters
    if strategy in _PAPER:
        return Needs(gpu_bytes=8.0 * block + saved, host_bytes=96.0 * block, ssd_bytes=ssd)
    if strategy == "zero-infinity":
        host = ZERO_INFINITY_HOST_BYTES + 4.0 * parameters + inputs
        return Needs(gpu_bytes=8.0 * block + saved, host_bytes=host, ssd_bytes=16.0 * parameters)
    if strategy in ("zero-offload", "in-memory"):
        return Needs(gpu_bytes=8.0 * block + saved, host_bytes=16.0 * parameters + inputs, ssd_bytes=0.0)
    if strategy == "flashneuron":
        return Needs(gpu_bytes=16.0 * parameters, host_bytes=0.0, ssd_bytes=float(inputs))
    return Needs(gpu_bytes=32.0 * block + saved, host_bytes=0.0, ssd_bytes=ssd)


def paper_free_host_bytes(needs: Needs, machine: MachineProfile) -> float:
    """RAM left for the activations of one device."""
    return max(0.0, machine.host_memory_bytes - needs.host_bytes) / machine.gpus
