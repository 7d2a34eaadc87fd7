"""A packed example gets the logits it gets alone, or packing is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from lohan.errors import ConfigError
from lohan.testing.zoo import tiny_config, tiny_model, tiny_model_folder
from lohan.train.data.batches import pad_packed
from lohan.train.data.encode import Tokens
from lohan.train.data.packed_model import check_packing, packing_of

REFUSED = ("gpt_oss",)
PACKABLE = ("llama", "qwen3", "mistral", "mixtral", "gemma3", "gpt2", "opt", "gpt_neox", "phi3")


def example(length: int, seed: int) -> Tokens:
    ids = np.random.default_rng(seed).integers(3, 257, length).astype(np.int32)
    return Tokens(ids, np.arange(length) > 0)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_examples_get_the_logits_they_get_alone(name):
    model = tiny_model(name).eval()
    rows = [[example(13, 1), example(21, 2), example(9, 3)], [example(30, 4), example(3, 5)]]
    batch = pad_packed(rows, 0, block_mask=packing_of(model.config) == "block_mask")
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits
        for row, examples in enumerate(rows):
            at = 0
            for one in examples:
                alone = model(input_ids=torch.from_numpy(one.ids.astype(np.int64))[None], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row, at : at + len(one.ids)], alone, rtol=1e-4, atol=1e-5)
                at += len(one.ids)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_packing_changes_no_loss(name):
    model = tiny_model(name).eval()
    examples = [example(13, 1), example(21, 2)]
    packed = pad_packed([examples], 0, block_mask=packing_of(model.config) == "block_mask")
    settings = {"num_items_in_batch": torch.tensor(1), "use_cache": False}
    with torch.no_grad():
        together = model(**packed, **settings).loss
        apart = [model(**pad_packed([[one]], 0, block_mask=False), **settings).loss for one in examples]
    torch.testing.assert_close(together, sum(apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_let_examples_see_each_other_are_refused(name):
    with pytest.raises(ConfigError, match=r"packing: true cannot be used .* see each other. Set packing: false."):
        packing_of(tiny_config(name))


def test_layers_with_a_memory_are_refused():
    config = transformers.Lfm2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=257, layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"\(lfm2\): .* Set packing: false."):
        packing_of(config)


def test_a_model_of_any_size_is_asked_in_a_moment():
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip
    before = torch.get_rng_state()
    assert packing_of(config) == "position_ids"
    assert torch.equal(before, torch.get_rng_state())
    assert config.hidden_size == 8192


def test_a_folder_is_enough(tmp_path):
    assert check_packing(tiny_model_folder("opt", tmp_path)) == "block_mask"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its config.json cannot be read"):
        check_packing(tmp_path)
