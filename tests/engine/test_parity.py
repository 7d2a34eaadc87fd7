"""A run is plain PyTorch, to the bit, whatever the settings. The full product: lohan.testing.campaign parity."""

import itertools
from collections import Counter

import pytest

from lohan.plan.strategies import ONE_MICRO_BATCH
from lohan.testing import parity, zoo
from lohan.testing.parity import FACTORS, PROMISED, Case

COVER = parity.pairwise_cover()


@pytest.mark.parametrize("case", COVER, ids=str)
def test_a_run_is_plain_pytorch_to_the_bit(case, models, folder_in_memory):
    assert parity.run_case(case, models, folder_in_memory) is None


def test_the_cover_has_every_two_values_together():
    for one, other in itertools.combinations([name for name in FACTORS if name != "model"], 2):
        for a, b in itertools.product(FACTORS[one], FACTORS[other]):
            if (one, a, other, b) in {("clip", "off", "gradients", "ssd"), ("gradients", "ssd", "left_units", 0)}:
                continue  # only together with something else that holds gradients
            if (one, a, other) == ("micro_batches", 4, "strategy") and b in ONE_MICRO_BATCH:
                continue  # refused
            assert any(getattr(c, one) == a and getattr(c, other) == b for c in COVER), (one, a, other, b)


def test_every_model_meets_every_value_that_is_promised_for_it():
    for name, factor in itertools.product(zoo.NAMES, PROMISED[1:]):
        wanted = parity.PROMISED_PRECISIONS if factor == "precision" else FACTORS[factor]
        assert set(wanted) <= {getattr(case, factor) for case in COVER if case.model == name}, (name, factor)
    assert min(Counter(case.model for case in COVER).values()) >= 2


def test_the_cases_clip_some_steps_and_skip_some(folder_in_memory):
    clipped, updates = [], []
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model")
    data = parity.batches(5, 2)
    settings = parity.training_settings(Case(precision="fp16 fp32"))
    limit, scale = parity.look_ahead(folder, data, settings)
    settings["max_grad_norm"] = limit
    for mode in ("deferred", "speculative"):
        found = parity.compare(
            folder, data, directory=folder_in_memory / mode, settings=settings, run={"clip": mode}, first_scale=scale,
            watch=lambda run: (clipped.append(run._recent[-1]), updates.append(run._updates)),
        )  # fmt: skip
        assert found is None
    assert {True, False} <= set(clipped)
    assert 0 < updates[4] == updates[9] < 5


@pytest.mark.parametrize("clip", ["deferred", "speculative"])
def test_a_static_loss_scale_skips_what_overflows_and_only_that(clip, folder_in_memory):
    folder = zoo.tiny_model_folder("qwen3", folder_in_memory / "model")
    data = parity.batches(5, 2)
    settings = parity.training_settings(Case(precision="fp16 fp32"))
    limit, scale = parity.look_ahead(folder, data, settings)
    updates = []
    for power in (1, 2):  # somewhere between no step and every step
        settings |= {"max_grad_norm": limit, "loss_scale": scale / 2**power}
        found = parity.compare(
            folder, data, directory=folder_in_memory / str(power), settings=settings,
            run={"clip": clip, "commit_every": 3, "versions": 3}, watch=lambda run: updates.append(run._updates),
        )  # fmt: skip
        assert found is None
    assert 0 < updates[4] + updates[9] < 10


def test_the_comparison_sees_a_single_bit(folder_in_memory):
    """Otherwise none of the above means anything."""
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model")
    data = parity.batches(2, 1)

    def flip(run):
        if run.step_number == 2:
            run._engine.wait_all()
            buffer = next(iter(run._engine._resident_state.values()))
            buffer.tensor[0] ^= 1

    found = parity.compare(folder, data, directory=folder_in_memory / "run", run={"commit_every": 3}, watch=flip)
    assert found is not None
    assert "1 of" in found.what
