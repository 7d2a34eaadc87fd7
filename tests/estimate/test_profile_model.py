"""Model profiles from config.json alone, against the models themselves and against the presets."""

import json

import pytest
from transformers import Gemma3TextConfig, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config

from lohan.errors import ConfigError, ModelError
from lohan.measure.model import profile_model
from lohan.presets import preset_profile
from lohan.testing import zoo

CONFIGS = {
    "gpt-13b": GPT2Config(n_embd=5120, n_layer=40, n_head=40, n_positions=1024, vocab_size=50257),
    "llama-3-8b": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256,
    ),
    "qwen3-4b": Qwen3Config(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True,
    ),
    "mixtral-8x7b": MixtralConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    ),
    "gemma-3-1b": Gemma3TextConfig(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        intermediate_size=6912, vocab_size=262144, sliding_window=512,
    ),
    "gpt-oss-20b": GptOssConfig(
        hidden_size=2880, num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=2880, vocab_size=201088, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    ),
}  # fmt: skip


def flops(profile):
    return sum(unit.forward_flops for unit in profile.units)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_and_its_preset_agree(name):
    rehearsed = profile_model(CONFIGS[name], micro_batch_size=2, sequence_length=512)
    preset = preset_profile(name, micro_batch_size=2, sequence_length=512)
    assert rehearsed.num_parameters == preset.num_parameters
    assert [unit.num_parameters for unit in rehearsed.units] == [unit.num_parameters for unit in preset.units]
    assert flops(rehearsed) == pytest.approx(flops(preset), rel=0.04)
    assert rehearsed.tied == preset.tied
    assert (rehearsed.hidden_size, rehearsed.vocabulary) == (preset.hidden_size, preset.vocabulary)
    assert [unit.input_bytes for unit in rehearsed.units] == [unit.input_bytes for unit in preset.units]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_architecture_has_a_profile_with_its_own_parameters(name):
    profile = profile_model(zoo.tiny_config(name), micro_batch_size=2, sequence_length=32, dtype="fp32")
    assert profile.num_parameters == sum(p.numel() for p in zoo.tiny_model(name).parameters())
    for unit in profile.units:
        assert sum(unit.tensor_elements) == unit.num_parameters
    for block in profile.units[1:-1]:
        assert block.input_bytes == 2 * 32 * 64 * 4
        assert block.forward_flops > 0
        assert len(block.operators) >= 5
        assert block.working_bytes >= block.saved_bytes > block.input_bytes


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_everything_of_a_micro_batch_grows_with_its_sequences(name):
    one = profile_model(zoo.tiny_config(name), micro_batch_size=1, sequence_length=64)
    four = profile_model(zoo.tiny_config(name), micro_batch_size=4, sequence_length=64)
    assert flops(four) == pytest.approx(4 * flops(one))
    for small, large in zip(one.units, four.units, strict=True):
        assert large.input_bytes == 4 * small.input_bytes
        assert [o.output_bytes for o in large.operators] == pytest.approx(
            [4 * o.output_bytes for o in small.operators], rel=0.01
        )


def test_a_folder_needs_only_its_config(tmp_path):
    zoo.tiny_config("llama").save_pretrained(tmp_path / "little")
    profile = profile_model(tmp_path / "little", sequence_length=16)
    assert profile.name == "little"
    assert profile.num_parameters == profile_model(zoo.tiny_config("llama"), sequence_length=16).num_parameters


def test_equal_blocks_are_one_object():
    profile = profile_model(zoo.tiny_config("llama"), sequence_length=16)
    assert len({id(unit) for unit in profile.units}) == 3


def test_what_cannot_be_rehearsed_says_so():
    profile = profile_model(zoo.tiny_config("opt"), sequence_length=16)
    assert "worked out from the config" in profile.notes[0]
    assert profile_model(zoo.tiny_config("llama"), sequence_length=16).notes == ()


def test_a_preset_is_itself():
    assert profile_model("gpt-13b", micro_batch_size=4) == preset_profile("gpt-13b", micro_batch_size=4)


def test_what_is_neither_folder_nor_preset_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"no preset. Presets are: gpt-1.55b"):
        profile_model(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError) as caught:
        profile_model(tmp_path)
    assert "lohan-config" not in str(caught.value)
