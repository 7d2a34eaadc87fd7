"""What people get wrong, as a table: one clear message with a fix, exit code 2, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizers import CHATML, byte_level

from lohan.testing.zoo import tiny_model_folder
from lohan.train.config_file import parse_config
from lohan.train.loop import train

CONFIG = {
    "model_name_or_path": "model", "output_dir": "out", "ssd": "[ssd]", "train_file": "data.jsonl", "device": "cpu",
    "host_memory": "400MB", "max_length": "64", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "2",
    "learning_rate": "1e-3", "max_steps": "2",
}  # fmt: skip
EXAMPLES = [{"prompt": f"What is {a} {b}?", "completion": f"It is {b} {a}."} for a in "abcd" for b in "efgh"]
WEIGHTS = "model/model.safetensors"
INDEX = "model/model.safetensors.index.json"

# -- ways to spoil a folder -------------------------------------------------------------------------------

Spoil = Callable[[Path], Any]


def write(name: str, content: str | bytes) -> Spoil:
    data = content.encode() if isinstance(content, str) else content
    return lambda at: (at / name).write_bytes(data)


def example(**record: Any) -> Spoil:
    return write("data.jsonl", json.dumps(record) + "\n")


def says(role: str) -> Spoil:
    return example(messages=[{"role": role, "content": "hi"}, {"role": "assistant", "content": "yes"}])


def remove(*patterns: str) -> Spoil:
    return lambda at: [path.unlink() for pattern in patterns for path in at.glob(pattern)]


def rename(old: str, new: str) -> Spoil:
    return lambda at: (at / old).rename(at / new)


def cut(name: str, size: int) -> Spoil:
    return lambda at: os.truncate(at / name, size)


def make(folder: str) -> Spoil:
    return lambda at: (at / folder).mkdir(parents=True)


def link(name: str, target: str) -> Spoil:
    return lambda at: (at / name).symlink_to(target)


def both(*spoils: Spoil) -> Spoil:
    return lambda at: [spoil(at) for spoil in spoils]


def model_config(**changes: Any) -> Spoil:
    def spoil(at: Path) -> None:
        file = at / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    def spoil(at: Path) -> None:
        found = load_file(at / WEIGHTS)
        change(found)
        save_file(found, at / WEIGHTS, metadata={"format": "pt"})

    return spoil


def fewer_words(found: dict[str, torch.Tensor]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = found[name][:64].clone()


def another_model(name: str, **changes: Any) -> Spoil:
    def spoil(at: Path) -> None:
        shutil.rmtree(at / "model")
        tiny_model_folder(name, at / "model", vocab_size=512, **changes)
        byte_level(CHATML).save_pretrained(at / "model")

    return spoil


def flip_bits(at: Path) -> None:
    data = bytearray((at / "ssd" / "lohan.data").read_bytes())
    data[::4096] = bytes(byte ^ 1 for byte in data[::4096])
    (at / "ssd" / "lohan.data").write_bytes(data)


# -- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mistake, and words that its message must have: what is wrong, and what to do."""

    id: str
    wrong: str
    fix: str
    spoil: Spoil = lambda at: None
    config: dict[str, str] = field(default_factory=dict)
    """Lines of the config that are changed or added."""

    command: str = "train config.yaml"
    run: bool = False
    """There is a run of two steps in `ssd` and `out`."""

    tokenised: bool = False
    """It can only be seen after tokenising: the tokens are kept, whole."""


def bad(id: str, spoil: Spoil, wrong: str, fix: str, **more: Any) -> Case:
    return Case(id=id, spoil=spoil, wrong=wrong, fix=fix, **more)


def key(name: str, value: str, wrong: str, fix: str, **more: Any) -> Case:
    changed = more.pop("also", {}) | {name: value}
    return Case(id=f"{name}-{value}"[:48], config=changed, wrong=wrong, fix=fix, **more)


def resume(id: str, spoil: Spoil, wrong: str, fix: str, **more: Any) -> Case:
    return Case(id=f"resume-{id}", spoil=spoil, wrong=wrong, fix=fix, run=True, **more)


def changed(name: str, value: str, wrong: str) -> Case:
    return key(name, value, wrong, "Set it back, accept the change with --accept-changes, or start a new", run=True)


def command(line: str, wrong: str, fix: str, **more: Any) -> Case:
    return Case(id=line.replace(" ", "_"), command=line, wrong=wrong, fix=fix, **more)


def nothing(at: Path) -> None:
    pass


CONFIGS = [
    command("train nowhere.yaml", "nowhere.yaml cannot be read: No such file", "`lohan init` writes a config"),
    command("train model", "model cannot be read: Is a directory", "`lohan init` writes a config"),
    command("train", "Missing argument 'CONFIG.yaml'", "lohan train --help"),
    command("train config.yaml --resum", "No such option: --resum", "--resume"),
    command("train config.yaml --set seed", "--set seed", "write it as key=value"),
    command("train config.yaml --set sed=1", "there is no key 'sed'", "Did you mean seed?"),
    command("train config.yaml --set ssd=", "ssd is empty", "Write a path"),
    command("train config.yaml --resume", "There is no run in ssd", "start a new one"),
    bad("config-empty", write("config.yaml", ""), "does not set model_name_or_path", "Add `model_name_or_path: /"),
    bad("config-binary", write("config.yaml", bytes(range(256))), "is not UTF-8 text", "Save it as UTF-8"),
    bad("config-nul", write("config.yaml", "seed: \0\n"), "this is not YAML", "`lohan init` writes"),
    bad("config-list", write("config.yaml", "- a\n- b\n"), "is not a list of `key: value` lines", "`lohan init`"),
    bad("config-tab", write("config.yaml", "seed: 1\n\tx: 2\n"), "line 2: this is not YAML", "Write `key: value`"),
    bad("config-nested", write("config.yaml", "training:\n  seed: 1\n"), "no key 'training'", "A config is flat"),
    key("learnig_rate", "1e-5", "line 12: there is no key 'learnig_rate'", "Did you mean learning_rate?"),
    key("lr", "1e-5", "there is no key 'lr'", "Here it is called learning_rate"),
    key("learning_rate", ".nan", "line 10: learning_rate is nan", "Write a number, like 1e-5"),
    key("learning_rate", "-1", "learning_rate is -1.0", "must be at least 0"),
    key("max_steps", "many", "max_steps is 'many'", "Write a whole number"),
    key("max_steps", "0", "max_steps is 0", "or -1 to go by num_train_epochs"),
    key("warmup_steps", "9", "warmup_steps is 9 and max_steps is 2", "Lower the first"),
    key("packing", "maybe", "packing is 'maybe'", "Write true or false"),
    key("fp16", "true", "bf16 and fp16 are both true", "Add bf16: false"),
    key("strategy", "zero-infinity", "strategy is 'zero-infinity'", "Write one of: lohan"),
    key("report_to", "tensorbord", "report_to is 'tensorbord'", "Did you mean tensorboard?"),
    key("eval_steps", "2", "eval_steps has no effect", "Write eval_strategy: steps"),
    key("eval_strategy", "epoch", "there is nothing to evaluate on", "Add eval_share: 0.01"),
    key("frozen", "'('", "not a regular expression", "Write one like embed_tokens"),
    key("frozen", ".*", "nothing is left to train", "Let it match fewer", tokenised=True),
]
BUDGETS = [
    key("host_memory", "lots", "host_memory is 'lots', which is not a size", "Write it like 24GB"),
    key("host_memory", "-4GB", "host_memory is '-4GB'", "Write it like 24GB"),
    key("host_memory", "0", "host_memory is 0", "like 24GB"),
    key("host_memory", "1MB", "host_memory is 1 MB and this run needs", "Set host_memory to", tokenised=True),
    key("host_memory", "900TB", "host_memory is 900 TB and this machine has", "three quarters of what is free now"),
    key("gpu_memory", "8GB", "gpu_memory has no meaning on device: cpu", "Remove it"),
    key("gpu_memory", "1MB", "gpu_memory is 1 MB", "Use micro-batches of", also={"device": "virtual"}, tokenised=True),
    key("device", "cuda", "device: cuda cannot be used", "set device: cpu",
        spoil=lambda at: torch.cuda.is_available() and pytest.skip("there is a GPU")),
    key("device", "tpu", "device is 'tpu'", "Write auto, cuda"),
    key("machine", "no.yaml", "There is no machine file 'no.yaml'", "lohan profile --ssd PATH --out machine.yaml"),
    key("machine", "m.yaml", "m.yaml, line 1: this is not YAML", "lohan profile", spoil=write("m.yaml", "a: [1")),
    key("machine", "n.yaml", "'gpu_memry', which is not known", "Did you mean gpu_memory",
        spoil=write("n.yaml", "gpu_memry: 1")),
]  # fmt: skip
DATA = [
    key("train_file", "no.jsonl", "no.jsonl does not exist", "Check train_file"),
    key("train_file", "data.txt", "has an unknown ending", "Files of examples end in", spoil=write("data.txt", "x")),
    key("train_file", "d.jsonl.gz", "has an unknown ending", "Unpack it first", spoil=write("d.jsonl.gz", "x")),
    key("train_file", "model", "is a folder that datasets' save_to_disk did not write", "Give a file"),
    key("train_file", "pipe.jsonl", "is not a file", "Write its content to a file",
        spoil=lambda at: os.mkfifo(at / "pipe.jsonl")),
    key("train_file", "d.json", "d.json, line 2: this is not JSON", "one whole list",
        spoil=write("d.json", '[{"text": "a"},\n{"text": ')),
    key("train_file", "d.csv", "d.csv, line 3: 3 values and 2 columns", 'needs "quotes"',
        spoil=write("d.csv", "prompt,completion\na,b\na,b,c\n")),
    key("train_file", "e.csv", "this is not CSV", "must be closed", spoil=write("e.csv", 'prompt,completion\n"a,b\n')),
    key("train_file", "d.parquet", "cannot be read as Parquet", "Download or write it again",
        spoil=write("d.parquet", "PAR1")),
    bad("data-empty", write("data.jsonl", ""), "data.jsonl: there are no examples", "Name a file that has some"),
    bad("data-binary", write("data.jsonl", bytes(range(256))), "line 1: this is not JSON", "one whole object"),
    bad("data-utf16", write("data.jsonl", '{"text": "a"}'.encode("utf-16")), "is not UTF-8", "Save the file as UTF-8"),
    bad("data-latin1", write("data.jsonl", '{"text": "ä"}'.encode("latin-1")), "byte 11 of", "Save the file as UTF-8"),
    bad("data-cut-line", write("data.jsonl", '{"text": "a"}\n{"text": "b\n{"text": "c"}\n'),
        "data.jsonl, line 2: this is not JSON: Unterminated string starting at character 10", "one whole object"),
    bad("data-list", write("data.jsonl", "[1]\n"), "and this is a list", 'must be an object, like {"text": "..."}'),
    bad("data-keys", example(question="a", answer="b"), "this one has question, answer", "Rename them"),
    bad("data-two-shapes", write("data.jsonl", json.dumps(EXAMPLES[0]) + '\n{"text": "a"}\n'),
        "line 2: there is no prompt", "move it to a file of its own"),
    bad("data-number", example(prompt=3, completion="a"), "it is int 3", "prompt must be text"),
    bad("data-half-character", write("data.jsonl", '{"text": "\\ud800"}'), "half a character", "again as UTF-8"),
    bad("data-role", says("wizard"), "has the role 'wizard'", "Write one of: user, assistant"),
    bad("data-role-typo", says("asistant"), "has the role 'asistant'", "Did you mean assistant?"),
    bad("data-role-sharegpt", says("human"), "has the role 'human'", "Here it is called user"),
    bad("data-no-role", example(messages=[{"content": "a"}]), "message 1 of messages has no role", "Write user,"),
    bad("data-no-content", example(messages=[{"role": "user"}]), "has no content", 'Write "content"'),
    bad("data-image", example(messages=[{"role": "user", "content": [{"type": "image"}]}]), "type 'image'",
        "remove it"),
    bad("data-no-answer", example(messages=[{"role": "user", "content": "a"}]),
        "none of the 1 examples can be learnt from", "Check that answers are there"),
    bad("data-empty-answer", example(prompt="a", completion=""), "1 are empty", "Check that answers are there"),
    key("max_length", "4", "none of the 16 examples can be learnt from", "Raise max_length (now 4)"),
    key("max_length", "999", "the model has 128 positions", "Set max_length: 128", tokenised=True,
        spoil=example(text="word " * 300)),
    key("packing", "true", "the model has 128 positions", "Set max_length: 128", also={"max_length": "999"}),
    key("dataloader_drop_last", "true", "A step has 400 rows and the data 16", "Set dataloader_drop_last: false",
        also={"gradient_accumulation_steps": "100"}, tokenised=True),
    key("eval_share", "0.99", "holds out all 16 examples", "Lower it, or give an eval_file",
        also={"eval_strategy": "epoch"}, tokenised=True),
    key("eval_file", "no.jsonl", "no.jsonl does not exist", "Check train_file and eval_file",
        also={"eval_strategy": "epoch"}),
    key("chat_template_path", "no.jinja", "no.jinja cannot be read: No such file", "Correct the path"),
    key("chat_template_path", "t.jinja", "the chat template refuses", "give another template",
        spoil=write("t.jinja", "{% for %}")),
    key("dataset_cache_dir", "data.jsonl", "data.jsonl cannot be written to", "Set dataset_cache_dir"),
]  # fmt: skip
MODELS = [
    key("model_name_or_path", "nowhere", "nowhere is not a folder", "local Hugging Face folder"),
    key("model_name_or_path", "meta-llama/Llama-3.1-8B", "is not a folder", "hf download NAME --local-dir FOLDER"),
    key("model_name_or_path", "data.jsonl", "data.jsonl is not a folder", "local Hugging Face folder"),
    bad("model-no-config", remove("model/config.json"), "has no config.json", "Give the folder that holds"),
    bad("model-config-cut", write("model/config.json", '{"a": '), "config.json cannot be read", "Download it again"),
    bad("model-config-list", write("model/config.json", "[]"), "does not describe a model", "Download it again"),
    bad("model-no-type", write("model/config.json", '{"a": 1}'), "names no model_type", "Download it again"),
    bad("model-unknown", model_config(model_type="marvin"), "'marvin', which transformers", "a newer transformers"),
    bad("model-heads", model_config(num_attention_heads=5), "not a multiple of the number of attention heads",
        "correct it"),
    bad("model-no-language", write("model/config.json", '{"model_type": "clip_vision_model"}'),
        "cannot be built as a causal language model", "check config.json", tokenised=True),
    bad("model-remote-code", model_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        "needs Python code that comes with it", "set trust_remote_code: true"),
    bad("model-quantised", model_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "holds quantized weights (gptq)", "save it with save_pretrained"),
    bad("model-no-tokenizer", remove("model/tokenizer*"), "has no tokenizer", "Put the model's tokenizer.json"),
    bad("model-tokenizer-cut", cut("model/tokenizer.json", 500), "has no tokenizer", "Put the model's tokenizer.json"),
    bad("model-small-vocabulary", both(model_config(vocab_size=64), tensors(fewer_words)),
        "and the model has 64: they do not belong together", "Use the model's own tokenizer", tokenised=True),
    bad("weights-none", remove(WEIGHTS), "has neither model.safetensors", "Download the weights", tokenised=True),
    bad("weights-pickled", rename(WEIGHTS, "model/pytorch_model.bin"), "It has pickled weights",
        "save it with save_pretrained", tokenised=True),
    bad("weights-adapter", rename(WEIGHTS, "model/adapter_model.safetensors"), "It has a PEFT adapter",
        "Merge it into its base model", tokenised=True),
    bad("weights-empty", write(WEIGHTS, ""), "truncated: 0 bytes", "Download the folder again", tokenised=True),
    bad("weights-lfs", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\nsize 9\n"), "Git LFS pointer",
        "git lfs pull", tokenised=True),
    bad("weights-cut", cut(WEIGHTS, 300_000), "truncated: model.norm.weight", "Download the folder again",
        tokenised=True),
    bad("weights-missing", tensors(lambda found: found.pop("model.norm.weight")), "missing: model.norm.weight [64]",
        "Download the folder again", tokenised=True),
    bad("weights-extra", tensors(lambda found: found.update(extra=torch.zeros(3))), "unexpected: extra [3]",
        "load it with transformers and save it", tokenised=True),
    bad("weights-shape", tensors(lambda found: found.update({"model.norm.weight": torch.zeros(3)})),
        "has [3] and the model needs [64]", "Download the folder again", tokenised=True),
    bad("weights-dtype", tensors(lambda found: found.update({"model.norm.weight": torch.zeros(64).to(torch.int8)})),
        "model.norm.weight is int8", "float32, bfloat16 or float16", tokenised=True),
    bad("weights-index-cut", both(remove(WEIGHTS), write(INDEX, '{"weight_map": ')), "index.json cannot be read",
        "Download or save the model again", tokenised=True),
    bad("weights-shard-gone", both(remove(WEIGHTS), write(INDEX, '{"weight_map": {"a": "b.safetensors"}}')),
        "missing file: b.safetensors", "Download the folder again", tokenised=True),
]  # fmt: skip
DRIVES = [
    bad("ssd-file", write("ssd", ""), "ssd is not a directory", "Correct the path in `ssd`"),
    bad("ssd-dangling-link", link("ssd", "gone"), "ssd is not a directory", "Correct the path in `ssd`"),
    bad("ssd-has-a-model", make("ssd/model"), "was not made by a run", "Give a directory of its own"),
    bad("ssd-has-a-run.json", both(make("ssd"), write("ssd/run.json", "{}")), "was not written by a run",
        "Give another directory"),
    key("ssd", "[a/b/c]", "a/b does not exist", "Mount the drive or make the directory"),
    key("ssd", "[data.jsonl/x]", "data.jsonl does not exist or is not a directory", "Mount the drive"),
    key("ssd", "[/proc/no/x]", "/proc/no does not exist", "Mount the drive"),
    key("ssd", "[/proc/no]", "The store needs", "add a drive to `ssd`", tokenised=True),
    key("ssd", "[ssd, ssd]", "ssd names a directory twice", "Name each drive once"),
    key("ssd", "[ssd, ./ssd/]", "ssd: ./ssd/ is named twice", "a directory of its own"),
    key("ssd", "[ssd, other]", "ssd: other is named twice", "a directory of its own",
        spoil=both(make("ssd"), link("other", "ssd"))),
    key("ssd", "[model]", "ssd: model is the model's folder", "like model/run"),
    key("ssd", "[out]", "ssd: out is output_dir", "like out/run"),
    bad("out-file", write("out", ""), "output_dir: out cannot be written to: File exists", "Set another one"),
    key("output_dir", "/proc/no", "output_dir: /proc/no cannot be written to", "Set another one"),
    key("output_dir", "data.jsonl/out", "cannot be written to: Not a directory", "Set another one"),
]  # fmt: skip
RESUMES = [
    changed("learning_rate", "5", "learning_rate was 0.001 and is 5.0"),
    changed("seed", "5", "begun for: seed was 42 and is 5."),
    changed("bf16", "false", "bf16 was True and is False"),
    changed("optim", "sgd", "optim was adamw and is sgd"),
    changed("state_format", "fp32", "state_format was not set and is fp32"),
    resume("other-data", example(text="other words"), "the content of train_file", "Set it back", tokenised=True),
    resume("other-size", another_model("llama", hidden_size=32), "made from another model", "Give the model it was"),
    resume("other-kind", another_model("gpt2"), "made from another model", "Give the model it was made from"),
    resume("more-drives", nothing, "other does not exist", "Mount the drive", config={"ssd": "[ssd, other]"}),
    resume("run.json-cut", write("ssd/run.json", "{"), "ssd/run.json cannot be read", "Restore the file"),
    resume("run.json-gone", remove("ssd/run.json"), "it has no run.json", "Give a run's output_dir"),
    resume("tensors.json-cut", write("ssd/tensors.json", "{"), "is not what this run wrote", "Restore the file"),
    resume("data-cut", cut("ssd/lohan.data", 1000), "is cut short: 1000 of", "Restore the file"),
    resume("data-gone", remove("ssd/lohan.data"), "ssd/lohan.data has vanished", "Mount the drive again"),
    resume("header-junk", both(*(write(f"ssd/lohan.header.{i}", "junk") for i in (0, 1))), "header in ssd is damaged",
           "Restore lohan.header.0"),
    resume("store-gone", remove("ssd/lohan.*"), "a run whose lohan.* files are not there", "Restore them"),
]  # fmt: skip
COMMANDS = [
    command("init --out config.yaml", "config.yaml exists", "name another file with --out"),
    command("init --out no/where.yaml", "no/where.yaml cannot be written", "Name another file with --out"),
    command("status nowhere", "nowhere holds no run", "Name its output_dir"),
    command("status model", "model holds no run", "Name its output_dir"),
    command("generate nowhere hi", "is neither a run nor a Hugging Face folder", "Give a run's SSD directory"),
    command("generate config.yaml hi", "has not begun", "Start it: lohan train"),
    command("generate model", "Missing argument", "lohan generate --help"),
    command("generate model hi --max-new-tokens 0", "Invalid value for '--max-new-tokens'", "greater than or equal"),
    command("generate model hi --top-p 0", "top_p is 0.0", "must be above 0"),
    command("generate model hi --device tpu", "device is 'tpu'", "Write auto, cpu"),
    command("generate model hi --dtype int8", "dtype is 'int8'", "Write bf16, fp16 or fp32"),
    command("generate model hi --memory lots", "memory is 'lots'", "Write it like 24GB"),
    command("generate model hi --memory 1kB", "memory is 1 kB and the largest part", "Set memory to"),
    command(f"generate model {'x' * 500} --raw", "tokens and the model 128 positions", "Shorten it"),
    command("export nowhere new", "nowhere holds no run", "Give a run's output_dir"),
    command("export ssd model", "model exists and is not empty", "name a new folder", run=True),
    command("export out /proc/no/new", "/proc/no/new cannot be written", "Name another folder", run=True),
    command("export ssd new --dtype int8", "dtype is 'int8'", "Write bf16, fp16 or fp32", run=True),
    command("export ssd new --ssd model", "model holds no store", "correct the path", run=True),
    command("export out new", "do not match their checksum", "create the store again", run=True, spoil=flip_bits),
    command("trian config.yaml", "No such command 'trian'", "Did you mean 'train'?"),
]
CASES = [*CONFIGS, *BUDGETS, *DATA, *MODELS, *DRIVES, *RESUMES, *COMMANDS]

# -- how a case is tried ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A folder with a model, data and a config; and the same after two steps."""
    new, done = tmp_path_factory.mktemp("wrong") / "new", tmp_path_factory.mktemp("wrong") / "done"
    tiny_model_folder("llama", new / "model", vocab_size=512)
    byte_level(CHATML).save_pretrained(new / "model")
    (new / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in EXAMPLES))
    (new / "config.yaml").write_text(config_text({}))
    shutil.copytree(new, done)
    before = Path.cwd()
    try:
        os.chdir(done)
        assert train(parse_config(config_text({})), say=lambda _: None).step == 2
    finally:
        os.chdir(before)
    return new, done


def config_text(changes: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in (CONFIG | changes).items())


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(case: Case, folders: tuple[Path, Path], at: Path) -> None:
    shutil.copytree(folders[case.run], at, dirs_exist_ok=True)
    (at / "config.yaml").write_text(config_text(case.config))
    if case.run:  # it was made elsewhere, and opening would note that it has moved
        info = json.loads((at / "ssd" / "run.json").read_text())
        (at / "ssd" / "run.json").write_text(json.dumps(info | {"directories": [str(at / "ssd")]}, indent=2) + "\n")
    case.spoil(at)


def files_in(folder: Path) -> dict[str, str]:
    """All that is there with its content, but for the file of hashes that saves reading data again."""

    def content(path: Path) -> str:
        if path.is_symlink() or path.is_dir() or not path.is_file():
            return "link" if path.is_symlink() else "folder" if path.is_dir() else "special"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.name != "seen.json"}


def check(case: Case, code: int, out: str, err: str, before: dict[str, str], after: dict[str, str]) -> None:
    """One message with what is wrong and what to do, exit code 2, and nothing but whole tokenised data left."""
    words = " ".join(err.replace("│", " ").split())
    assert code == 2, (code, out, err)
    assert case.wrong in words
    assert case.fix in words
    assert err.startswith(("lohan: ", "Usage: lohan"))
    assert err.count("lohan: ") == err.startswith("lohan: ")  # one message, not several
    assert "Traceback" not in out + err
    assert "step 1/" not in out  # nothing was trained
    new = {path for path in after if path not in before}
    if case.tokenised:
        kept = {path for path in new if path == "out" or path.startswith("out/data")}
        assert sum(path.endswith("meta.json") for path in kept) == 1
        assert not any("/." in path for path in kept)
        new -= kept
    assert new == set()
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_wrong_input_is_one_clear_message_and_nothing_is_half_written(case, folders, here, lohan):
    prepare(case, folders, here)
    before = files_in(here)
    code, out, err = lohan(*case.command.split())
    check(case, code, out, err, before, files_in(here))


def test_the_table_has_no_case_twice():
    assert len({case.id for case in CASES}) == len(CASES) >= 150


@pytest.mark.parametrize("id", ["max_steps-many", "weights-cut"])
def test_the_installed_command_says_the_same(id, folders, here):
    case = next(case for case in CASES if case.id == id)
    prepare(case, folders, here)
    before = files_in(here)
    line = [sys.executable, "-c", "from lohan.cli import main; main()", *case.command.split()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    check(case, done.returncode, done.stdout, done.stderr, before, files_in(here))


@pytest.fixture
def mounted(here):
    """A drive of 2 MB, for those who may mount one."""
    (here / "small").mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "lohan-test", here / "small"], capture_output=True)
    if done.returncode:
        pytest.skip("only root can mount a small drive")
    yield here / "small"
    subprocess.run(["umount", here / "small"], check=True)


def test_a_drive_that_is_too_small_is_refused_with_what_it_lacks(folders, here, mounted, lohan):
    case = key("ssd", "[small/ssd]", "The store needs 4.9", "or add a drive to `ssd`", tokenised=True)
    prepare(case, folders, here)
    before = files_in(here)
    check(case, *lohan("train", "config.yaml"), before, files_in(here))


def test_output_on_a_full_drive_is_refused_and_leaves_nothing_half_written(folders, here, mounted, lohan):
    case = key("output_dir", "small/out", "small/out", "Set dataset_cache_dir to another folder")
    prepare(case, folders, here)
    with open(mounted / "ballast", "wb") as ballast:
        ballast.write(bytes((2 << 20) - 2 * 4096))  # two pages are left, and the tokens take five
    before = files_in(here)
    check(case, *lohan("train", "config.yaml"), before, files_in(here))


def test_a_drive_in_ram_may_not_take_what_the_budget_counts_on(folders, here, mounted, lohan):
    from lohan.train.config_example import all_ram

    subprocess.run(["mount", "-o", "remount,size=100m", mounted], check=True)
    more = {"host_memory": str(all_ram() - 1_000_000)}
    case = key(
        "ssd", "[small/ssd]", "is in RAM, not on a drive", "Name a directory on a drive", also=more, tokenised=True
    )
    prepare(case, folders, here)
    before = files_in(here)
    check(case, *lohan("train", "config.yaml"), before, files_in(here))


def test_a_reporter_that_is_not_installed_is_refused(folders, here, lohan, monkeypatch):
    def absent(*_: Any) -> None:
        raise RuntimeError("WandbCallback requires wandb to be installed.")

    monkeypatch.setattr("transformers.integrations.WandbCallback.__init__", absent)
    case = key("report_to", "wandb", "report_to has wandb, which is not installed", "pip install wandb")
    prepare(case, folders, here)
    before = files_in(here)
    check(case, *lohan("train", "config.yaml"), before, files_in(here))
