"""Where a run's first weights come from: a checkpoint on disk (checkpoint.Checkpoint) or a module in memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class MasterSource(Protocol):
    """Gives any stretch of any parameter as fp32, exactly."""

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (1-D, fp32) with the elements of `name` from `start` on."""


class ModuleSource:
    """The parameters of a module that has them."""

    def __init__(self, module: nn.Module):
        self._params = dict(module.named_parameters())

    def read(self, name: str, start: int, out: Tensor) -> None:
        with torch.no_grad():
            out.copy_(self._params[name].detach().reshape(-1)[start : start + out.numel()])
