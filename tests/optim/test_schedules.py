"""Every schedule has the factors of transformers' own, step for step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from lohan.errors import ConfigError
from lohan.optim import SCHEDULES, make_schedule

LR = 2e-4
OPTIONS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_with_restarts": {"num_cycles": 3}}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 50), (7, 50), (1, 2)])
def test_factors_are_those_of_transformers(name, warmup, total):
    options = OPTIONS.get(name, {})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options)
    ours = make_schedule(name, warmup_steps=warmup, total_steps=total, learning_rate=LR, **options)
    for step in range(1, total + 10):
        assert LR * ours(step) == optimizer.param_groups[0]["lr"], f"step {step}"
        optimizer.step()
        theirs.step()


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="constant_with_warmup"):
        make_schedule("cosin", warmup_steps=0, total_steps=1)
    with pytest.raises(ConfigError, match="learning_rate"):
        make_schedule("polynomial", warmup_steps=0, total_steps=1, learning_rate=1e-8)
    with pytest.raises(ConfigError, match=r"min_lr_rate: 0\.1"):
        make_schedule("cosine_with_min_lr", warmup_steps=0, total_steps=1)
    with pytest.raises(ConfigError, match="negative"):
        make_schedule("linear", warmup_steps=-1, total_steps=1)
