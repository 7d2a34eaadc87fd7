"""The zoo: folders that transformers opens, and batches that depend on nothing but their arguments."""

import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from lohan.testing.zoo import NAMES, random_batches, tiny_config, tiny_model, tiny_model_folder


@pytest.fixture(autouse=True)
def _one_thread():
    """Operators this small lose far more to waking a second thread than they gain, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_opens_in_transformers_and_holds_the_models_weights(name, tmp_path):
    folder = tiny_model_folder(name, tmp_path, seed=3)
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    expected = tiny_model(name, seed=3).state_dict()
    assert opened.keys() == expected.keys()
    assert all(torch.equal(opened[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_random_everywhere_and_exact_in_bf16(name):
    for parameter in tiny_model(name).parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float())
        assert parameter.std() > 0


def test_a_sharded_bf16_folder_means_the_same_numbers(tmp_path):
    folder = tiny_model_folder("llama", tmp_path / "sharded", dtype=torch.bfloat16, shards=3)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()) == {
        f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)
    }
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(opened[key], value) for key, value in tiny_model("llama").state_dict().items())


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("qwen3", False), ("gpt2", False)])
def test_tying_can_be_forced(name, tied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder(name, tmp_path, tied=tied))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_an_override_reaches_the_config():
    assert tiny_config("llama", num_hidden_layers=2).num_hidden_layers == 2


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="llama, qwen3"):
        tiny_config("lama")


def test_the_global_random_state_is_not_touched(tmp_path):
    before = torch.get_rng_state()
    tiny_model_folder("gpt2", tmp_path)
    random_batches(257, num_micro_batches=2, batch=2, seq=8, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_repeat_under_the_same_seed_and_differ_between_steps():
    def ids(seed, step):
        (only,) = random_batches(257, num_micro_batches=1, batch=2, seq=16, seed=seed, step=step)
        return only["input_ids"]

    assert torch.equal(ids(1, 2), ids(1, 2))
    assert not torch.equal(ids(1, 2), ids(1, 3))
    assert not torch.equal(ids(1, 2), ids(2, 2))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_neighbouring_micro_batches_have_unlike_numbers_of_labels_and_never_none(seed, ragged):
    batches = random_batches(257, num_micro_batches=6, batch=2, seq=12, seed=seed, ragged=ragged)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert all(counts)
    assert all(a != b for a, b in pairwise(counts))
    assert any((batch["labels"] == -100).any() for batch in batches)


def test_ragged_rows_are_padded_on_both_sides_without_labels():
    (batch,) = random_batches(257, num_micro_batches=1, batch=2, seq=12, seed=0, ragged=True)
    mask = batch["attention_mask"]
    assert mask[0, 0] == 0
    assert mask[0, -1] == 1
    assert mask[1, 0] == 1
    assert mask[1, -1] == 0
    assert (batch["labels"][mask == 0] == -100).all()
