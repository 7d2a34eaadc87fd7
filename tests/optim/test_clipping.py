"""Norms and the clip coefficient are those of torch.nn.utils.clip_grad_norm_, to the bit."""

from __future__ import annotations

import pytest
import torch

from lohan.optim import GradNorm

SHAPES = [(1,), (64,), (300, 257), (1_000_003,), (2, 3, 5, 7)]


def clipped_by_torch(grads: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return total, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spoil", [None, float("inf"), float("nan")])
def test_it_clips_exactly_as_torch_does(max_norm, threads, spoil):
    torch.manual_seed(0)
    grads = [torch.randn(shape) for shape in SHAPES]
    if spoil is not None:
        grads[2][5, 5] = spoil
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected_total, expected = clipped_by_torch(grads, max_norm)
        total = GradNorm.total_norm([GradNorm.tensor_norm(grad.flatten()) for grad in grads])
        coefficient = GradNorm.clip_coefficient(total, max_norm)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad * coefficient, want, rtol=0, atol=0, equal_nan=True)


def test_a_gradient_on_the_wire_has_the_norm_of_its_f32_copy():
    grad = torch.randn(100_003).to(torch.bfloat16)
    assert torch.equal(GradNorm.tensor_norm(grad), GradNorm.tensor_norm(grad.float()))


def test_no_gradients_have_norm_zero():
    assert GradNorm.total_norm([]) == 0
