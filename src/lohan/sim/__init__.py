"""Runs a Schedule on a virtual clock: Schedule and MachineProfile -> Timeline. No torch, no files, no clock."""

from lohan.sim.op import SimOp
from lohan.sim.run import simulate, simulate_steps
from lohan.sim.sizes import size_model
from lohan.sim.timeline import Timeline

__all__ = ["SimOp", "Timeline", "simulate", "simulate_steps", "size_model"]
