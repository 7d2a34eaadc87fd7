"""Any legal chunking of any rule gives the bits of torch.optim with fused=True on the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lohan.errors import ConfigError
from lohan.optim import CHUNK_ALIGNMENT, SGD, Adam, AdamW, Optimizer, decays

STEPS = 4
LR = 3e-3


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def torch_twin(ours: Optimizer, parameter: torch.nn.Parameter, weight_decay: float) -> torch.optim.Optimizer:
    if isinstance(ours, SGD):
        return torch.optim.SGD(
            [parameter], lr=LR, momentum=ours.momentum, nesterov=ours.nesterov, weight_decay=weight_decay, fused=True
        )
    kind = torch.optim.AdamW if isinstance(ours, AdamW) else torch.optim.Adam
    return kind([parameter], lr=LR, betas=ours.betas, eps=ours.eps, weight_decay=weight_decay, fused=True)


OPTIMIZERS = [
    AdamW(),
    AdamW(betas=(0.9, 0.95), eps=1e-6),
    Adam(),
    SGD(),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("num", [1, 63, 64, 100_003])
def test_chunks_give_the_bits_of_the_whole(optimizer, num, weight_decay, threads):
    generator = torch.Generator().manual_seed(num)
    start = torch.randn(num, generator=generator)
    grads = [torch.randn(num, generator=generator) * 0.01 for _ in range(STEPS)]
    grads[0][::7] = -0.0  # the first momentum must keep the sign of zero

    whole = torch.nn.Parameter(start.clone())
    twin = torch_twin(optimizer, whole, weight_decay)
    for grad in grads:
        whole.grad = grad.clone()
        twin.step()

    for chunk in (CHUNK_ALIGNMENT, 17 * CHUNK_ALIGNMENT, 1 << 16, num):
        if num // chunk > 500:
            continue
        master = start.clone()
        moments = {name: torch.zeros(num) for name in optimizer.moments}
        for step, grad in enumerate(grads, start=1):
            for at in range(0, num, chunk):
                piece = slice(at, at + chunk)
                views = {name: values[piece] for name, values in moments.items()}
                optimizer.update(master[piece], grad[piece], views, step=step, lr=LR, weight_decay=weight_decay)
        same_bits(master, whole.detach())
        for name in optimizer.moments:
            same_bits(moments[name], twin.state[whole][name])


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("make", [lambda: AdamW(betas=(1.0, 0.9)), lambda: Adam(eps=-1.0), lambda: SGD(nesterov=True)])
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_norms_and_biases_do_not_decay():
    assert decays("layers.0.mlp.weight", (8, 4))
    assert not decays("layers.0.norm.weight", (8,))
    assert not decays("scale", ())
