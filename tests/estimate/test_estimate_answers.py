"""Estimates: what they say, what they refuse, and that they agree with what they are made of."""

import json
from dataclasses import replace

import pytest

from lohan.errors import ConfigError
from lohan.estimate import Question, answer, compare
from lohan.estimate.costs import costs_of
from lohan.estimate.estimate import simulate_question, worth_buying
from lohan.estimate.page import lanes_page
from lohan.hardware import load_machine, resize
from lohan.presets import preset_profile
from lohan.sim.strategies import SIMULATED_ONLY, STRATEGIES, build_scenario

TESTBED = load_machine("lohan-testbed")
DOCUMENTED = {
    "seconds_per_step", "tokens_per_second", "tflops_6n", "fits", "reason", "gpu_bytes", "host_bytes", "ssd_bytes",
    "ssd_read_bytes_per_step", "ssd_write_bytes_per_step", "endurance_share", "bottleneck", "lanes", "plan",
}  # fmt: skip


def ask(model="gpt-13b", machine=TESTBED, **more):
    return Question(profile=preset_profile(model), machine=machine, **more)


@pytest.fixture(scope="module")
def one_drive():
    return answer(ask(machine=resize(TESTBED, ssds=1, host_memory_bytes=64 * 10**9), batch_size=64, steps=500))


def test_numbers_follow_from_each_other(one_drive):
    assert one_drive.fits
    assert one_drive.tokens_per_step == 64 * 1024
    assert one_drive.tokens_per_second == pytest.approx(one_drive.tokens_per_step / one_drive.seconds_per_step)
    assert one_drive.tflops_6n == pytest.approx(6 * one_drive.parameters * one_drive.tokens_per_second / 1e12)
    assert one_drive.hours == pytest.approx(one_drive.seconds_per_step * 500 / 3600)
    assert one_drive.gpu_bytes <= TESTBED.gpu_memory_bytes
    assert one_drive.host_bytes <= 64 * 10**9
    assert one_drive.endurance_share == pytest.approx(one_drive.ssd_write_bytes_per_step * 500 / 7e15)
    assert one_drive.batch_size == one_drive.micro_batch_size * one_drive.num_micro_batches


def test_json_has_the_documented_keys(one_drive):
    values = json.loads(json.dumps(one_drive.to_dict()))
    assert set(values) >= DOCUMENTED
    assert values["lanes"]["ssd"] <= values["seconds_per_step"] * 1.001
    assert values["plan"]["clip"] == "speculative"


def test_the_upgrade_worth_buying_is_the_one_that_gives_most(one_drive):
    best = worth_buying(one_drive)
    assert best is not None
    assert best["gain"] == max(one["gain"] for one in one_drive.upgrades if "tokens" not in one["name"])


def test_what_does_not_fit_is_an_answer_with_a_reason():
    estimate = answer(ask("gpt-412b"))
    assert not estimate.fits
    assert estimate.reason.startswith("gpu_memory is 25.2 GB and this run needs at least")
    assert estimate.seconds_per_step is None


@pytest.mark.parametrize("strategy", ["lohan-paper", "zero-infinity", "in-memory"])
def test_a_published_strategy_is_the_simulators_own(strategy):
    estimate = answer(ask(batch_size=32, strategy=strategy))
    scenario = build_scenario(strategy, preset_profile("gpt-13b", micro_batch_size=32), TESTBED)
    assert estimate.seconds_per_step == scenario.run().seconds_per_step
    assert estimate.simulated_only == SIMULATED_ONLY[strategy]
    assert any("simulated only" in note for note in estimate.notes) == SIMULATED_ONLY[strategy]


def test_all_strategies_compare_and_lohan_is_fastest():
    estimates = {one.strategy: one for one in compare(ask(machine=resize(TESTBED, ssds=4), batch_size=32))}
    assert tuple(estimates) == STRATEGIES
    assert not estimates["flashneuron"].fits
    rates = {name: one.tokens_per_second for name, one in estimates.items() if one.fits}
    assert max(rates, key=rates.get) == "lohan"


def test_a_published_strategy_without_a_batch_takes_the_smallest_that_is_nearly_best():
    machine = resize(TESTBED, ssds=1)
    chosen = answer(ask(machine=machine, strategy="lohan-paper"))
    half = answer(ask(machine=machine, strategy="lohan-paper", batch_size=chosen.batch_size // 2))
    assert half.tokens_per_second < 0.97 * chosen.tokens_per_second


def test_several_gpus_are_simulated_only_and_share_the_batch():
    estimate = answer(ask(machine=resize(TESTBED, gpus=2), batch_size=32), upgrades=False)
    assert estimate.simulated_only
    assert any("several GPUs are simulated only" in note for note in estimate.notes)
    assert estimate.tokens_per_step == 32 * 1024
    with pytest.raises(ConfigError, match="cannot share evenly"):
        ask(machine=resize(TESTBED, gpus=2), batch_size=31)


def test_an_unknown_strategy_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="Known are: lohan, lohan-paper"):
        ask(strategy="nonsense")


def test_what_is_not_known_costs_nothing_but_stays_unknown():
    asked = {"seconds_per_step": 10.0, "tokens_per_step": 1000, "written_bytes": 7e12, "steps": 360}
    known = costs_of(TESTBED, **asked)
    assert known.hours == pytest.approx(1)
    assert known.energy_kwh == pytest.approx(1.5)
    assert known.endurance_share == pytest.approx(360 * 7e12 / 12 / 7e15)
    assert known.per_billion_tokens > 0
    bare = replace(TESTBED, power_watts=None, drives=(replace(TESTBED.drives[0], endurance_bytes=None),))
    unknown = costs_of(bare, **asked)
    assert (unknown.energy_kwh, unknown.endurance_share, unknown.per_billion_tokens) == (None, None, None)


def test_the_page_is_whole_and_safe():
    profile = replace(preset_profile("gpt-1.55b"), name="</script><b>&")
    question = Question(profile=profile, machine=TESTBED, batch_size=8)
    simulated = simulate_question(question, detailed=True)
    page = lanes_page(simulated.estimate, simulated.timeline)
    assert page.count("</script>") == 1
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    data = json.loads(page.split("const d = ")[1].split(";\n")[0].replace("<\\/", "</"))
    assert {"gpu", "to_gpu", "ssd_write", "cpu_update"} <= set(data["lanes"])
    for lane, kind, start, end, name in data["spans"]:
        assert 0 <= lane < len(data["lanes"])
        assert 0 <= kind < len(data["kinds"])
        assert start < end
        assert data["names"][name]
