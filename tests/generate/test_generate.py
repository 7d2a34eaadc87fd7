"""Streamed text is the text of the model in RAM, whatever of it stays in memory and wherever it comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_tokenizers import CHATML, byte_level
from transformers import AutoModelForCausalLM

import lohan
from lohan.errors import ConfigError, ModelError, PlanInfeasible, StoreLocked
from lohan.generate import Sampling, open_generator
from lohan.generate.live_text import LiveText
from lohan.generate.streamed import choose_residency
from lohan.models import load
from lohan.store import open_store
from lohan.testing.zoo import NAMES, tiny_model_folder

PROMPT = "The quick brown fox jumps over"
GREEDY = Sampling(max_new_tokens=12)


def make_folder(name: str, at: Path, template: str | None = None, **settings) -> Path:
    folder = tiny_model_folder(name, at, vocab_size=512, dtype=torch.bfloat16, **settings)
    byte_level(template, bos=True).save_pretrained(folder)
    return folder


def in_ram(folder: Path, ids: list[int], dtype=torch.float32, **settings) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokens = torch.tensor([ids])
    options = {"do_sample": False, "pad_token_id": 0, **settings}
    with torch.no_grad():
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(ids) :].tolist()


def written(place: Path, memory: str, **options):
    with open_generator(place, memory=memory, **options) as generator:
        ids = generator.encode(PROMPT, raw=True)
        return ids, generator.write(PROMPT, GREEDY, raw=True).tokens, generator.streamed.residency


def smallest(folder: Path) -> str:
    """The least memory with which reading runs ahead."""
    with pytest.raises(PlanInfeasible) as refused, open_generator(folder, memory=1):
        pass
    return str(refused.value).split("; with ")[1].split(" reading")[0]


def test_a_folder_that_is_read_for_every_token_stays_in_the_page_cache(tmp_path, monkeypatch):
    folder, asked, opened = make_folder("llama", tmp_path / "llama"), [], os.open

    def open_file(path, flags, *args, **options):
        if str(path).endswith(".safetensors"):
            asked.append(bool(flags & os.O_DIRECT))
        return opened(path, flags, *args, **options)

    memory = smallest(folder)
    monkeypatch.setattr(os, "open", open_file)
    written(folder, memory)
    assert asked == [False]


@pytest.mark.parametrize("name", NAMES)
def test_every_model_writes_what_it_writes_in_ram(tmp_path, name):
    folder = make_folder(name, tmp_path / name)
    ids, tokens, residency = written(folder, smallest(folder))
    assert residency.slots == 2
    assert len(residency.resident) < 4
    assert tokens == in_ram(folder, ids, max_new_tokens=12)
    assert len(tokens) > 1


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("memory", ["1GB", "300kB", "140kB"])
def test_what_stays_in_memory_does_not_change_the_text(tmp_path, memory, dtype):
    folder = make_folder("qwen3", tmp_path / "model")
    real = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    ids, tokens, residency = written(folder, memory, dtype=dtype)
    assert (len(residency.resident) == 5) == (memory == "1GB")
    assert tokens == in_ram(folder, ids, dtype=real, max_new_tokens=12)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma3"])
def test_a_run_writes_what_its_export_writes(tmp_path, name):
    folder = make_folder(name, tmp_path / "model")
    with lohan.open_run(
        model=folder, ssd=[tmp_path / "a", tmp_path / "b"], host_memory="500MB", device="cpu", learning_rate=1e-2
    ) as run:
        tokens = torch.arange(40).view(2, 20) + 5
        run.step([{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}])
        run.export(tmp_path / "export")
    ids, tokens, _ = written(tmp_path / "a", "2MB")
    assert tokens == in_ram(tmp_path / "export", ids, max_new_tokens=12)
    assert tokens == written(tmp_path / "export", "2MB")[1]


def test_a_run_that_is_open_elsewhere_is_left_alone(tmp_path):
    folder = make_folder("llama", tmp_path / "model")
    load(folder, ssd=tmp_path / "ssd")
    code = f"""
from lohan.errors import StoreLocked
from lohan.generate import open_generator
try:
    with open_generator({str(tmp_path / "ssd")!r}):
        print("opened")
except StoreLocked as error:
    print(error)
"""
    with open_store([tmp_path / "ssd"]):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100).stdout
    assert "sample_prompts" in said
    with open_generator(tmp_path / "ssd") as generator:
        assert generator.write("a", Sampling(max_new_tokens=1)).tokens
    assert issubclass(StoreLocked, lohan.errors.LohanError)


def test_text_is_shown_as_it_comes_and_the_template_is_used(tmp_path):
    folder = make_folder("llama", tmp_path / "model", CHATML)
    heard: list[str] = []
    with open_generator(folder, memory="1GB") as generator:
        asked = generator.tokenizer.decode(generator.encode("Hello there!", raw=False))
        assert asked == "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n"
        assert generator.tokenizer.decode(generator.encode("Hello", raw=True)) == "<s>Hello"
        answer = generator.write("Hello there!", Sampling(max_new_tokens=20), show=heard.append)
        assert "".join(heard) == answer.text
        assert len(heard) > 1


def test_half_a_character_waits_for_its_other_half():
    tokenizer, heard = byte_level(), []
    live = LiveText(tokenizer, heard.append)
    tokens = tokenizer("a\u00e9\nb c\n\nd", add_special_tokens=False)["input_ids"]
    live.put(torch.tensor([[1, 2, 3]]))
    for token in tokens:
        live.put(torch.tensor([token]))
    live.end()
    assert "".join(heard) == "a\u00e9\nb c\n\nd"
    assert heard[:2] == ["a", "\u00e9"]


def test_sampling_is_a_matter_of_the_seed_and_leaves_the_random_state_alone(tmp_path):
    folder = make_folder("llama", tmp_path / "model")
    with open_generator(folder, memory="600kB") as generator:
        before = torch.random.get_rng_state()
        texts = [
            generator.write(PROMPT, Sampling(max_new_tokens=12, temperature=1.5, top_p=0.9, seed=seed), raw=True).tokens
            for seed in (1, 1, 2)
        ]
        assert torch.equal(before, torch.random.get_rng_state())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p")],
)
def test_sampling_that_cannot_be_is_refused(settings, expected):
    with pytest.raises(ConfigError, match=expected):
        Sampling(**settings)


def test_places_that_hold_no_model_are_named(tmp_path):
    with pytest.raises(ModelError, match="neither a run nor a Hugging Face folder"), open_generator(tmp_path):
        pass
    folder = make_folder("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="Write auto, cpu, cuda"), open_generator(folder, device="tpu"):
        pass
    with pytest.raises(PlanInfeasible, match=r"Set memory to [\d.]+ kB or more"), open_generator(folder, memory="10kB"):
        pass


def test_an_error_in_a_part_reaches_the_caller_and_the_model_is_left_as_it_was(tmp_path):
    folder = make_folder("llama", tmp_path / "model")
    with open_generator(folder, memory="600kB") as generator:
        model = generator.streamed.model
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(ModelError, match="cut short"):
            generator.write(PROMPT, GREEDY, raw=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(model).__module__.startswith("transformers.")


def test_residency_never_exceeds_the_budget_and_uses_it():
    sizes = [50, 10, 10, 10, 10, 60]
    for budget in range(60, 200):
        chosen = choose_residency(sizes, budget)
        assert chosen.total_bytes <= budget
        assert chosen.slots == (0 if budget >= 150 else 2 if budget >= 120 else 1)
    assert sum(sizes[part] for part in choose_residency(sizes, 140).resident) == 120
    with pytest.raises(PlanInfeasible):
        choose_residency(sizes, 59)


def test_memory_stays_in_the_budget_for_a_model_that_is_larger(tmp_path):
    folder = make_folder(
        "llama", tmp_path / "big", num_hidden_layers=12, hidden_size=768, intermediate_size=2048
    )  # 170 MB as stored, 340 MB in fp32
    code = f"""
import json, torch
torch.set_num_threads(1)
from pathlib import Path
from lohan.engine.memory import resident_bytes
from lohan.generate import Sampling, open_generator
import transformers, transformers.generation.utils, transformers.models.llama.modeling_llama
sampling = Sampling(max_new_tokens=4)
for warm_up in ({str(tmp_path / "tiny")!r}, {str(folder)!r}):
    base = resident_bytes()
    with open_generator(warm_up, memory="70MB") as generator:
        streamed = generator.streamed.residency.slots
        tokens = generator.write("Hello", sampling, raw=True).tokens
    peak = int(next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l).split()[1]) * 1024
print(json.dumps([peak - base, streamed, tokens]))
"""
    make_folder("llama", tmp_path / "tiny")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    grown, slots, tokens = json.loads(done.stdout.splitlines()[-1])
    assert slots == 2
    assert len(tokens) >= 1
    assert grown < 110e6
