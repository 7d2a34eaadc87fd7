"""The global gradient norm and the factor that clips it, to the bit as torch.nn.utils.clip_grad_norm_ finds them.

A norm is taken of each whole tensor and then of those norms, in parameter order: the sum inside a tensor runs in
float32 from its first element to its last, so neither order nor pieces can be chosen freely. Measured: the number of
threads and the shape do not change the bits, cutting a tensor does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lohan.optim.native import find_norm


def _norm_by_torch(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad.detach().to(torch.float32), 2.0)
    return norm


class GradNorm:
    """The three steps of clip_grad_norm_ before it multiplies. Nothing is kept between calls."""

    @staticmethod
    def tensor_norm(grad: Tensor) -> Tensor:
        """2-norm of one whole gradient as a 0-dim f32 tensor. A 16-bit gradient is widened first: in registers by
        lohan.optim.native, or without that in a copy that takes 4 bytes per element for the time of the call."""
        norm = find_norm(grad, _norm_by_torch)
        return _norm_by_torch(grad) if norm is None else norm

    @staticmethod
    def total_norm(norms: list[Tensor]) -> Tensor:
        """2-norm over all tensors from the norms of each, given in parameter order."""
        if not norms:
            return torch.tensor(0.0)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
        return norm

    @staticmethod
    def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
        """What every gradient is multiplied by, also when it is 1. A NaN total gives NaN, an infinite one 0."""
        return torch.clamp(max_norm / (total + 1e-6), max=1.0)
