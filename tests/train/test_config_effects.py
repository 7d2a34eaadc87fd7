"""Every key of a config does what it is there for: changed alone, it changes what it should.

One line per key: what is set to both runs, what only to the second, and what must be true of the two. A key without a
line, or without a test elsewhere that is named here, fails the suite.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import EXAMPLES, make_config, make_model, weights
from tiny_tokenizers import CHATML, byte_level
from torch import Tensor

from lohan.cli_profile import write_machine
from lohan.engine.run import Run
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig
from lohan.train.loop import TrainResult, train
from lohan.train.metrics import read_metrics
from lohan.train.preview import Preview

MACHINE = MachineProfile(
    name="desk", gpu_name="cpu", gpu_flops_per_second=4e9, gpu_memory_bytes=8 * 10**9, separate_memory=False,
    to_gpu_bytes_per_second=1e12, to_host_bytes_per_second=1e12, host_memory_bytes=8 * 10**9,
    drives=(DriveProfile(read_bytes_per_second=2e9, write_bytes_per_second=1e9),), update_parameters_per_second=2e8,
)  # fmt: skip


@dataclass(kw_only=True)
class Seen:
    """A run that has ended, and what could be seen of it."""

    config: TrainConfig
    result: TrainResult
    preview: Preview
    run: Run
    lines: list[str]
    """What was printed."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for line in read_metrics(Path(self.config.output_dir)):
            (self.steps if "loss" in line else self.evaluations).append(line)

    def of(self, key: str) -> list[Any]:
        """This value of every step."""
        return [line[key] for line in self.steps]

    @property
    def out(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def weights(self) -> dict[str, Tensor]:
        return weights(self.config)

    @property
    def evaluated(self) -> list[int]:
        return [line["step"] for line in self.evaluations]

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)


Claim = Callable[[Seen, Seen], bool]


def differ(one: Seen, two: Seen) -> bool:
    """Other weights, under the same names."""
    return any(not torch.equal(value, two.weights[name]) for name, value in one.weights.items())


def other(key: str) -> Claim:
    """The metrics of the steps differ in this."""
    return lambda one, two: one.of(key) != two.of(key)


def only_order(one: Seen, two: Seen) -> bool:
    """Other batches of the same data: over an epoch the tokens are the same."""
    return one.of("loss") != two.of("loss") and sum(one.of("tokens")) == sum(two.of("tokens"))


def norms_stay(one: Seen, two: Seen) -> bool:
    """After a step: weight_decay is not for norms."""
    norms = [name for name in one.weights if "norm" in name]
    return bool(norms) and differ(one, two) and all(torch.equal(one.weights[n], two.weights[n]) for n in norms)


def embedding_stays(one: Seen, two: Seen) -> bool:
    from safetensors.torch import load_file

    name = "model.embed_tokens.weight"
    old = load_file(Path(two.config.model_name_or_path) / "model.safetensors")[name]
    return torch.equal(two.weights[name], old.to(two.weights[name])) and not torch.equal(one.weights[name], old)


def same_bits(one: Seen, two: Seen) -> bool:
    return not differ(one, two) and one.of("loss") == two.of("loss")


EVAL = {"eval_share": 0.25, "eval_strategy": "steps", "eval_steps": 2}
STUCK = EVAL | {"eval_steps": 1, "learning_rate": 0.0}
"""Nothing ever gets better."""

VIRTUAL = {"device": "virtual"}
SGD = {"optim": "sgd"}
EPOCHS = {"max_steps": -1, "num_train_epochs": 1.0}

# key: (set for both, set for the second, what is true of the two). {x} is replaced by a path.
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any], Claim]] = {
    "model_name_or_path": ({}, {"model_name_or_path": "{wide}"},
        lambda one, two: one.preview.num_parameters < two.preview.num_parameters),
    "output_dir": ({}, {}, lambda one, two: one.out != two.out and (two.out / "metrics.jsonl").exists()),
    "ssd": ({}, {"ssd": ("{fresh}-a", "{fresh}-b")},
        lambda one, two: (len(one.run.store.drives), len(two.run.store.drives)) == (1, 2) and same_bits(one, two)),
    "host_memory": ({}, {"host_memory": "{least}"},
        lambda one, two: one.preview.resident_units > two.preview.resident_units
        and one.of("ssd_bytes")[-1] < two.of("ssd_bytes")[-1] and same_bits(one, two)),
    "gpu_memory": (VIRTUAL, {"gpu_memory": "3MB"},
        lambda one, two: two.run.device.memory_budget == 3_000_000 != one.run.device.memory_budget),
    "device": ({}, VIRTUAL, lambda one, two: (one.preview.device_bytes, one.run.device.name) == (None, "cpu")
        and two.preview.device_bytes > 0),
    "machine": ({}, {"machine": "{machine}"},
        lambda one, two: one.preview.seconds_per_step is None and two.preview.seconds_per_step > 0),
    "train_file": ({}, {"train_file": ("{other}",)}, other("tokens")),
    "eval_file": ({"eval_strategy": "epoch", "eval_share": 0.25}, {"eval_share": 0.0, "eval_file": ("{other}",)},
        lambda one, two: two.said("eval_file: 36 examples") and not one.said("eval_file:")
        and one.evaluations[0]["eval_loss"] != two.evaluations[0]["eval_loss"]),
    "eval_share": (EVAL, {"eval_share": 0.5},
        lambda one, two: one.said("9 examples are held out") and two.said("18 examples are held out")),
    "max_eval_samples": (EVAL, {"max_eval_samples": 2},
        lambda one, two: two.said("2 examples are held out") and one.of("loss") == two.of("loss")
        and one.evaluations[0]["eval_loss"] != two.evaluations[0]["eval_loss"]),
    "dataset_format": ({"train_file": ("{both}",)}, {"dataset_format": "text"}, other("tokens")),
    "dataset_text_field": ({"train_file": ("{both}",), "dataset_format": "text"}, {"dataset_text_field": "prompt"},
        other("tokens")),
    "max_length": ({}, {"max_length": 22},
        lambda one, two: max(two.of("tokens")) <= 8 * 22 < max(one.of("tokens")) and two.said("cut")),
    "packing": (EPOCHS, {"packing": True},
        lambda one, two: two.said("packed into") and len(two.steps) < len(one.steps)),
    "assistant_only_loss": ({}, {"assistant_only_loss": False},
        lambda one, two: one.of("tokens") == two.of("tokens") and one.of("loss") != two.of("loss")),
    "apply_chat_template": ({"train_file": ("{messages}",)}, {"apply_chat_template": False}, other("tokens")),
    "chat_template_path": ({"train_file": ("{messages}",)}, {"chat_template_path": "{template}"}, other("tokens")),
    "dataset_cache_dir": ({}, {"dataset_cache_dir": "{fresh}-cache"},
        lambda one, two: (one.out / "data").is_dir() and not (two.out / "data").exists()
        and any(Path(two.config.dataset_cache_dir).iterdir())),
    "per_device_train_batch_size": (EPOCHS, {"per_device_train_batch_size": 6},
        lambda one, two: (len(one.steps), len(two.steps)) == (5, 3)),
    "gradient_accumulation_steps": (EPOCHS, {"gradient_accumulation_steps": 3},
        lambda one, two: (len(one.steps), len(two.steps)) == (5, 3)),
    "per_device_eval_batch_size": (EVAL, {"per_device_eval_batch_size": 40, "max_length": 64},
        lambda one, two: two.preview.compute_bytes >= one.preview.compute_bytes
        and two.preview.tokens_per_step > one.preview.tokens_per_step and one.of("loss") == two.of("loss")),
    "dataloader_drop_last": (EPOCHS, {"dataloader_drop_last": True},
        lambda one, two: (len(one.steps), len(two.steps)) == (5, 4)),
    "num_train_epochs": (EPOCHS, {"num_train_epochs": 1.5},
        lambda one, two: (len(one.steps), len(two.steps)) == (5, 8)),
    "max_steps": ({}, {"max_steps": 2}, lambda one, two: (len(one.steps), len(two.steps)) == (3, 2)),
    "learning_rate": ({}, {"learning_rate": 2e-3},
        lambda one, two: [2 * lr for lr in one.of("learning_rate")] == pytest.approx(two.of("learning_rate"))
        and differ(one, two)),
    "lr_scheduler_type": ({}, {"lr_scheduler_type": "constant"},
        lambda one, two: len(set(one.of("learning_rate"))) == 3 and set(two.of("learning_rate")) == {1e-3}
        and differ(one, two)),
    "warmup_ratio": ({}, {"warmup_ratio": 0.5},
        lambda one, two: two.of("learning_rate")[0] < one.of("learning_rate")[0] and differ(one, two)),
    "warmup_steps": ({}, {"warmup_steps": 2},
        lambda one, two: two.of("learning_rate")[0] < one.of("learning_rate")[0] and differ(one, two)),
    "min_lr_rate": ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr_rate": 0.1}, {"min_lr_rate": 0.9},
        lambda one, two: two.of("learning_rate")[-1] > one.of("learning_rate")[-1] and differ(one, two)),
    "optim": ({}, SGD, lambda one, two: two.preview.ssd_bytes < one.preview.ssd_bytes and differ(one, two)),
    "adam_beta1": ({}, {"adam_beta1": 0.5}, differ),
    "adam_beta2": ({}, {"adam_beta2": 0.5}, differ),
    "adam_epsilon": ({}, {"adam_epsilon": 1e-2}, differ),
    "momentum": (SGD, {"momentum": 0.1}, differ),
    "weight_decay": ({"max_steps": 1}, {"weight_decay": 0.5}, norms_stay),
    "max_grad_norm": (SGD, {"max_grad_norm": 1e-3},
        lambda one, two: one.of("grad_norm")[0] == two.of("grad_norm")[0] > 1 and differ(one, two)),
    "frozen": ({}, {"frozen": "embed_tokens"}, embedding_stays),
    "seed": (EPOCHS, {"seed": 4}, only_order),
    "data_seed": (EPOCHS, {"data_seed": 4}, only_order),
    "bf16": ({}, {"bf16": False},
        lambda one, two: {value.dtype for value in one.weights.values()} == {torch.bfloat16}
        and {value.dtype for value in two.weights.values()} == {torch.float32}),
    "fp16": ({"bf16": False}, {"fp16": True},
        lambda one, two: {value.dtype for value in two.weights.values()} == {torch.float16}),
    "compute_dtype": ({}, {"compute_dtype": "bf16"}, other("loss")),
    "state_format": ({}, {"state_format": "fp32"},
        lambda one, two: one.preview.ssd_bytes < two.preview.ssd_bytes and same_bits(one, two)),
    "strategy": ({}, {"strategy": "separate-stage"},
        lambda one, two: (one.run.plan.strategy, two.run.plan.strategy) == ("lohan", "separate-stage")
        and same_bits(one, two)),
    "clip": ({"clip": "speculative"}, {"clip": "deferred"},
        lambda one, two: (one.preview.write_bytes_per_step, one.run.plan.clip, two.run.plan.clip)[1:]
        == ("speculative", "deferred") and same_bits(one, two)),
    "export_at_end": ({}, {"export_at_end": False},
        lambda one, two: one.result.model is not None and two.result.model is None
        and not (two.out / "model").exists()),
    "eval_strategy": (EVAL, {"eval_strategy": "epoch", "eval_steps": None},
        lambda one, two: (one.evaluated, two.evaluated) == ([2, 3], [3])),
    "eval_steps": (EVAL, {"eval_steps": 1}, lambda one, two: (one.evaluated, two.evaluated) == ([2, 3], [1, 2, 3])),
    "eval_on_start": (EVAL, {"eval_on_start": True},
        lambda one, two: (one.evaluated, two.evaluated) == ([2, 3], [0, 2, 3])),
    "load_best_model_at_end": (EVAL, {"load_best_model_at_end": True},
        lambda one, two: not (one.out / "best").exists() and (two.out / "best" / "model.safetensors").exists()),
    "early_stopping_patience": (STUCK, {"early_stopping_patience": 1},
        lambda one, two: (one.result.stopped, one.result.step) == (None, 3)
        and (two.result.stopped, two.result.step) == ("early", 2)),
    "early_stopping_threshold": (EVAL | {"eval_steps": 1, "early_stopping_patience": 1},
        {"early_stopping_threshold": 100.0}, lambda one, two: (one.result.step, two.result.step) == (3, 2)),
    "sample_prompts": (EVAL, {"sample_prompts": ("What is two four?",)},
        lambda one, two: [each["prompt"] for each in two.evaluations[0]["samples"]] == ["What is two four?"]),
    "sample_max_new_tokens": (EVAL | {"sample_prompts": ("What is",)}, {"sample_max_new_tokens": 1},
        lambda one, two: len(one.evaluations[0]["samples"][0]["text"]) > len(two.evaluations[0]["samples"][0]["text"])),
    "report_to": ({}, {"report_to": ("tensorboard",)},
        lambda one, two: not (one.out / "tensorboard").exists() and any((two.out / "tensorboard").iterdir())),
}  # fmt: skip

ELSEWHERE = {
    "trust_remote_code": "test_train_loop.py::test_code_that_comes_with_a_model_runs_only_if_it_is_trusted",
    "save_steps": "test_train_loop.py::test_rare_commits_lose_no_more_than_they_say",
    "logging_steps": "test_train_loop.py::test_a_line_is_printed_every_so_many_steps",
    "run_name": "test_reporters_read_back.py::test_wandb_knows_the_run_by_its_name_and_config",
}
"""Keys whose effect another test shows."""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """What the table's paths stand for."""
    root = tmp_path_factory.mktemp("effects")
    model = make_model(root / "model")
    tiny_model_folder("llama", root / "wide", vocab_size=640)
    byte_level(CHATML).save_pretrained(root / "wide")
    write_machine(MACHINE, root / "machine.yaml")
    (root / "template.jinja").write_text(f"Hello there! {CHATML}")

    def write(name: str, examples: list[dict[str, Any]]) -> str:
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, examples)))
        return str(root / f"{name}.jsonl")

    def chat(each: dict[str, str]) -> dict[str, Any]:
        asked, answered = each["prompt"], each["completion"]
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}

    return {
        "root": str(root), "model": str(model), "wide": str(root / "wide"), "machine": str(root / "machine.yaml"),
        "template": str(root / "template.jinja"),
        "other": write("other", [each | {"completion": "No, it is not."} for each in EXAMPLES]),
        "both": write("both", [each | {"text": "The quick brown fox."} for each in EXAMPLES]),
        "messages": write("messages", [chat(each) for each in EXAMPLES]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def see(places):
    """Train three steps with these settings, once however often it is asked for."""
    seen: dict[str, Seen] = {}
    root = Path(places["root"])

    def put(value: Any, fresh: str) -> Any:
        if isinstance(value, tuple):
            return tuple(put(each, fresh) for each in value)
        if value == "{least}":
            from lohan.first_training import least_memory

            return least_memory(make_config(Path(places["model"]), root))
        return value.format(fresh=fresh, **places) if isinstance(value, str) else value

    def see(changed: dict[str, Any]) -> Seen:
        name = json.dumps(changed, sort_keys=True)
        if name not in seen:
            fresh = str(root / f"run{len(seen)}")
            config = make_config(
                Path(places["model"]), root, max_steps=3, output_dir=fresh, ssd=(f"{fresh}-ssd",),
                logging_steps=1,
            )  # fmt: skip
            config = replace(config, **{key: put(value, fresh) for key, value in changed.items()})
            runs: list[Run] = []
            previews: list[Preview] = []
            lines: list[str] = []
            result = train(config, live=False, say=lines.append, on_run=runs.append, on_preview=previews.append)
            seen[name] = Seen(config=config, result=result, preview=previews[0], run=runs[0], lines=lines)
        return seen[name]

    return see


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_changes_what_it_is_there_for(see, key):
    both, second, claim = EFFECTS[key]
    one = see(both)
    two = see(both | second) if second else see({"logging_steps": 2})
    assert claim(one, two)


def test_no_key_is_without_a_test():
    keys = {each.name for each in fields(TrainConfig)}
    assert keys == EFFECTS.keys() | ELSEWHERE.keys()
    assert not EFFECTS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_test_that_is_said_to_be_elsewhere_is_there(key):
    file, name = ELSEWHERE[key].split("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_table_changes_the_key_it_names():
    for key, (_, second, _) in EFFECTS.items():
        assert key in second or key == "output_dir", key
