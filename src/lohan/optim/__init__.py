"""The update arithmetic on the CPU, in blocks that stay in cache, with the bits of torch's fused optimizers.

rounding: master <-> wire.  formats: what is stored.  optimizers: the rules.  update: all three, block by block.
clipping, schedules, loss_scale: the numbers an update is called with. Knows no model, no file and no device.
"""

from __future__ import annotations

from lohan.optim.clipping import GradNorm
from lohan.optim.formats import ArraySpec, StateFormat, bytes_per_parameter, default_format, get_format
from lohan.optim.loss_scale import LossScale
from lohan.optim.optimizers import CHUNK_ALIGNMENT, SGD, Adam, AdamW, Optimizer, decays
from lohan.optim.schedules import SCHEDULES, make_schedule
from lohan.optim.update import Updater

__all__ = [
    "CHUNK_ALIGNMENT",
    "SCHEDULES",
    "SGD",
    "Adam",
    "AdamW",
    "ArraySpec",
    "GradNorm",
    "LossScale",
    "Optimizer",
    "StateFormat",
    "Updater",
    "bytes_per_parameter",
    "decays",
    "default_format",
    "get_format",
    "make_schedule",
]
