"""The loss scale moves as torch.amp.GradScaler moves it."""

from __future__ import annotations

import json
import random

import pytest
import torch

from lohan.errors import ConfigError
from lohan.optim import LossScale


def step_of_torch(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, overflow: bool) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    scaler.scale(parameter.sum())
    parameter.grad = torch.full((1,), torch.inf if overflow else 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(("start", "growth", "backoff"), [(65536.0, 2.0, 0.5), (2.0**126, 2.0, 0.5), (1e4, 1.7, 0.3)])
def test_it_moves_as_grad_scaler_does(start, growth, backoff):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=5
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
    ours = LossScale(scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=5)
    chance = random.Random(0)
    for step in range(200):
        overflow = chance.random() < (0.02 if step < 100 else 0.3)
        step_of_torch(scaler, optimizer, overflow=overflow)
        ours.record(overflow=overflow)
        assert ours.scale == scaler.get_scale()
        assert ours.inverse == torch.tensor(scaler.get_scale()).double().reciprocal().float().item()


def test_defaults_are_those_of_grad_scaler():
    scaler, ours = torch.amp.GradScaler("cpu"), LossScale()
    assert ours.scale == scaler.get_scale()
    assert ours.growth_factor == scaler.get_growth_factor()
    assert ours.backoff_factor == scaler.get_backoff_factor()
    assert ours.growth_interval == scaler.get_growth_interval()


def test_a_static_scale_never_moves():
    ours = LossScale.static(128.0)
    for overflow in (True, False) * 3000:
        ours.record(overflow=overflow)
    assert ours.scale == 128.0


def test_it_continues_from_a_plain_dict():
    ours = LossScale(growth_interval=3)
    for overflow in (True, False, False):
        ours.record(overflow=overflow)
    again = LossScale.from_dict(json.loads(json.dumps(ours.to_dict())))
    again.record(overflow=False)
    assert again.scale == 65536.0
    with pytest.raises(ConfigError, match="another version"):
        LossScale.from_dict({"scale": 1.0})


@pytest.mark.parametrize("settings", [{"scale": 0.0}, {"scale": float("inf")}, {"growth_factor": 1.0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        LossScale(**settings)
