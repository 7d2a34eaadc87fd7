"""Presets: sizes as published, and FLOPs and bytes that follow from them."""

import pytest

from lohan.errors import ConfigError
from lohan.preset_shapes import SHAPES
from lohan.presets import find_preset, preset_profile

PUBLISHED = {"gpt-13b": 12.84e9, "gpt-70b": 64.8e9, "gpt-175b": 174.6e9}
PUBLIC = {
    "llama-3.2-1b": 1.236e9,
    "llama-3-8b": 8.030e9,
    "llama-3-70b": 70.55e9,
    "llama-3.1-405b": 405.9e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-4b": 4.02e9,
    "qwen3-32b": 32.76e9,
    "qwen3-30b-a3b": 30.53e9,
    "mistral-7b": 7.248e9,
    "mixtral-8x7b": 46.70e9,
    "gemma-3-1b": 1.000e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "phi-3-mini": 3.82e9,
    "phi-3-medium": 13.96e9,
}


@pytest.mark.parametrize(("name", "parameters"), [*PUBLISHED.items(), *PUBLIC.items()])
def test_a_preset_has_as_many_parameters_as_the_model_is_known_to_have(name, parameters):
    assert preset_profile(name).num_parameters == pytest.approx(parameters, rel=0.002)


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("gpt-") and "oss" not in name])
def test_a_published_size_is_what_its_name_says(name):
    billions = float(name.removeprefix("gpt-").removesuffix("b"))
    assert preset_profile(name).num_parameters == pytest.approx(billions * 1e9, rel=0.08)


@pytest.mark.parametrize("name", SHAPES)
def test_a_profile_adds_up(name):
    profile = preset_profile(name, micro_batch_size=2, sequence_length=512)
    assert profile.tokens == 1024
    for unit in profile.units:
        assert unit.num_parameters == sum(unit.tensor_elements)
        assert unit.forward_flops >= sum(operator.flops for operator in unit.operators)
        assert unit.working_bytes >= unit.saved_bytes >= unit.input_bytes
    kinds = [unit.kind for unit in profile.units]
    assert kinds == ["embedding", *["block"] * SHAPES[name].layers, "head"]


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.experts])
def test_forward_is_two_flops_per_parameter_and_token_and_attention(name):
    shape = SHAPES[name]
    profile = preset_profile(name, micro_batch_size=1, sequence_length=64)
    blocks = sum(unit.num_parameters for unit in profile.units if unit.kind == "block")
    flops = sum(unit.forward_flops for unit in profile.units)
    expected = 2 * 64 * (blocks + shape.vocabulary * shape.hidden) + 4 * 64 * 64 * shape.query * shape.layers
    assert flops == pytest.approx(expected, rel=0.003)


def test_everything_of_a_block_grows_with_the_tokens():
    small, large = (preset_profile("llama-3-8b", micro_batch_size=size, sequence_length=128) for size in (1, 4))
    for one, four in zip(small.units, large.units, strict=True):
        assert four.forward_flops == pytest.approx(4 * one.forward_flops)
        assert four.saved_bytes == 4 * one.saved_bytes
        assert four.num_parameters == one.num_parameters


def test_experts_see_their_share_and_the_profile_says_so():
    profile = preset_profile("mixtral-8x7b", sequence_length=4096)
    assert "1024 tokens" in profile.notes[0]
    dense = preset_profile("mistral-7b", sequence_length=4096)
    ratio = profile.units[1].forward_flops / dense.units[1].forward_flops
    assert 1.5 < ratio < 2.0  # two of eight experts, one attention


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="gpt-13b"):
        find_preset("gpt-14b")
