"""A config is read as it was meant, or refused in one sentence with the line and the fix."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.optim.schedules import SCHEDULES
from lohan.train.config import CHOICES, TrainConfig
from lohan.train.config_changes import FREE, changes_result
from lohan.train.config_example import DriveFact, GpuFact, MachineFacts, find_machine, write_example
from lohan.train.config_file import dump_config, load_config, parse_config

BASE = "model_name_or_path: /m\noutput_dir: out\nssd: [/a]\ntrain_file: d.jsonl\n"
DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def refusal(text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, name="c.yaml")
    return str(caught.value)


def test_values_are_read_as_people_write_them():
    config = parse_config(
        BASE + "learning_rate: 2e-5\nwarmup_steps: 1e2\nhost_memory: 24GB\ngpu_memory: 20000000000\neval_strategy: no\n"
        "report_to: none\nmax_grad_norm: null\nrun_name: 17\nnum_train_epochs: 2\n"
    )
    assert (config.learning_rate, config.warmup_steps, config.host_memory) == (2e-5, 100, "24GB")
    assert (config.gpu_memory, config.eval_strategy, config.report_to) == ("20000000000", "no", ())
    assert (config.max_grad_norm, config.run_name, config.num_train_epochs) == (None, "17", 2.0)
    assert (config.ssd, config.train_file) == (("/a",), ("d.jsonl",))


def test_one_path_and_a_list_of_paths_are_both_lists():
    config = parse_config(BASE.replace("ssd: [/a]", "ssd: /a").replace("d.jsonl", "[x.jsonl, y.csv]"))
    assert (config.ssd, config.train_file) == (("/a",), ("x.jsonl", "y.csv"))


def test_overrides_win_and_are_read_as_yaml():
    config = parse_config(
        BASE + "seed: 1\n", ["seed=2", "packing=true", "ssd=[/x, /y]", "frozen=a=b", "eval_steps=null"]
    )
    assert (config.seed, config.packing, config.ssd, config.frozen) == (2, True, ("/x", "/y"), "a=b")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learnig_rate: 1e-5", "c.yaml, line 5: there is no key 'learnig_rate'. Did you mean learning_rate?"),
        ("Learning_Rate: 1", "Did you mean learning_rate?"),
        ("lr: 1e-5", "line 5: there is no key 'lr'. Here it is called learning_rate."),
        ("zzz: 1", "line 5: there is no key 'zzz'. All keys are in docs/config.md."),
        ("output_dir: again", "c.yaml, line 5: output_dir is set a second time; the first is in c.yaml, line 2."),
        ("learning_rate: fast", "line 5: learning_rate is 'fast'. Write a number, like 1e-5."),
        ("learning_rate: .nan", "line 5: learning_rate is nan. Write a number"),
        ("learning_rate: -1", "line 5: learning_rate is -1.0; it must be at least 0."),
        ("max_length: 10.5", "line 5: max_length is 10.5. Write a whole number, like 8."),
        ("max_length: true", "line 5: max_length is True. Write a whole number"),
        ("max_length: 1", "line 5: max_length is 1; it must be at least 2."),
        ("packing: maybe", "line 5: packing is 'maybe'. Write true or false."),
        ("packing: 1", "line 5: packing is 1. Write true or false."),
        ("optim: {name: adamw}", "line 5: optim is {'name': 'adamw'}. Write one value"),
        ("optim: adamww", "line 5: optim is 'adamww'. Did you mean adamw? Write one of: adamw,"),
        ("lr_scheduler_type: cosin", "Did you mean cosine?"),
        ("lr_scheduler_type: cosine_with_min_lr", "line 5: cosine_with_min_lr needs min_lr_rate. Add min_lr_rate: 0.1"),
        ("dataset_format: chatml", "dataset_format is 'chatml'. Write one of: auto, messages"),
        ("report_to: [tensorboard, mlflow]", "report_to is 'mlflow'"),
        ("report_to: [none, wandb]", "Remove none."),
        ("host_memory: lots", "line 5: host_memory is 'lots', which is not a size. Write it like 24GB or 512MiB."),
        ("host_memory: 0", "host_memory is 0. Write how much"),
        ("device: gpu", "line 5: device is 'gpu'. Write auto, cuda"),
        ("device: cpu\ngpu_memory: 8GB", "line 6: gpu_memory has no meaning on device: cpu"),
        ("fp16: true", "line 5: bf16 and fp16 are both true"),
        ("warmup_ratio: 0.1\nwarmup_steps: 3", "warmup_ratio and warmup_steps are both set. Remove one of them."),
        ("lr_scheduler_type: constant\nwarmup_steps: 3", "line 6: warmup_steps has no effect with constant."),
        ("max_steps: 5\nwarmup_steps: 30", "line 6: warmup_steps is 30 and max_steps is 5."),
        ("warmup_ratio: 1.5", "warmup_ratio is 1.5; it must be at most 1."),
        ("eval_share: 1", "eval_share is 1.0; it must be below 1."),
        ("max_steps: 0", "line 5: max_steps is 0. Write the number of steps, or -1"),
        ("num_train_epochs: 0", "nothing would be trained"),
        ("frozen: '('", "line 5: frozen is '(', not a regular expression"),
        ("eval_strategy: epoch", "line 5: eval_strategy is epoch and there is nothing to evaluate on. Add eval_share"),
        ("eval_share: 0.1\neval_file: e.jsonl", "eval_file and eval_share are both set."),
        ("early_stopping_patience: 3", "line 5: early_stopping_patience needs evaluations. Add eval_strategy: epoch"),
        ("eval_steps: 3", "line 5: eval_steps has no effect with eval_strategy: no. Write eval_strategy: steps."),
        ("apply_chat_template: false\nchat_template_path: t.jinja", "line 6: chat_template_path is set and"),
        ("strategy: separate-stage\nclip: speculative", "line 6: clip: speculative needs strategy: lohan"),
        ("train_file: []", "train_file is set a second time"),
        ("eval_file: [[a]]", "line 5: eval_file has ['a'] in it. Write a name"),
        ("a: b: c", "line 5: this is not YAML"),
        ("x: [1", "this is not YAML"),
        ("? [a]\n: b", "line 5: a key must be one word."),
        ("x: 2024-02-31", "this is not YAML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_line_and_the_fix(line, expected):
    message = refusal(BASE + line + "\n")
    assert expected in message
    assert message.startswith("c.yaml")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "c.yaml does not set model_name_or_path or output_dir or ssd or train_file. Add `model_name_or_path:"),
        ("- a\n- b\n", "c.yaml is not a list of `key: value` lines."),
        (BASE.replace("ssd: [/a]\n", ""), "c.yaml does not set ssd. Add `ssd: [/mnt/nvme0/run]`."),
        (BASE.replace("[/a]", "[]"), "c.yaml, line 3: ssd is empty. Write a path."),
        (BASE.replace("[/a]", "[/a, /a]"), "c.yaml, line 3: ssd names a directory twice."),
        (BASE.replace("d.jsonl", "[x, '']"), "line 4: train_file is empty."),
    ],
)
def test_a_config_that_is_not_complete_says_what_to_add(text, expected):
    assert expected in refusal(text)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "--set sed=1: there is no key 'sed'. Did you mean seed?"),
        ("seed", "--set seed: write it as key=value"),
        ("seed=x", "--set seed=x: seed is 'x'. Write a whole number"),
        ("seed=[1", "--set seed=[1: '[1' is not a YAML value."),
        ("seed=-1", "--set seed=-1: seed is -1; it must be at least 0."),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(override, expected):
    assert refusal(BASE, (override,)).startswith(expected)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.yaml cannot be read: No such file"):
        load_config(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 6"):
        load_config(tmp_path / "bad.yaml")


def test_a_config_survives_being_written_and_read():
    config = parse_config(BASE + "eval_share: 0.1\neval_strategy: steps\nreport_to: wandb\nrun_name: 'yes'\n")
    assert parse_config(dump_config(config)) == config


@given(
    rate=st.floats(0, 1e3), words=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)
)
def test_any_text_and_number_survive_being_written_and_read(rate, words):
    config = replace(parse_config(BASE), learning_rate=rate, run_name=words, train_file=(words, "b"))
    assert parse_config(dump_config(config)) == config


def test_a_run_may_be_gone_on_with_where_only_the_machine_or_the_reports_changed():
    old = parse_config(BASE)
    new = replace(old, host_memory="8GB", ssd=("/b",), logging_steps=10, save_steps=5, output_dir="moved")
    changes = changes_result(old, new)
    assert changes.breaking == ()
    assert {change.key for change in changes.free} == {
        "host_memory", "ssd", "logging_steps", "save_steps", "output_dir",
    }  # fmt: skip
    assert changes_result(old, old) == changes_result(new, new)


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 1e-4}, {"seed": 1}, {"max_length": 10}, {"packing": True}, {"eval_share": 0.1},
        {"gradient_accumulation_steps": 2}, {"num_train_epochs": 5.0}, {"max_steps": 9}, {"device": "cuda"},
        {"weight_decay": 0.1}, {"dataloader_drop_last": True},
    ],
)  # fmt: skip
def test_what_would_change_the_bits_is_told(changed):
    old = parse_config(BASE)
    changes = changes_result(old, replace(old, **changed))
    assert set(changed) <= {change.key for change in changes.breaking}


def test_two_ways_to_write_the_same_are_no_change():
    old = parse_config(BASE + "seed: 3\nmax_grad_norm: 0\noptim: adamw\n")
    new = replace(old, data_seed=3, max_grad_norm=None, optim="adamw_torch", momentum=0.5, state_format="split")
    assert changes_result(old, new).breaking == ()


def test_training_longer_is_free_where_the_schedule_has_no_end():
    old = parse_config(BASE + "lr_scheduler_type: constant\nmax_steps: 10\n")
    assert changes_result(old, replace(old, max_steps=20)).breaking == ()
    linear = replace(old, lr_scheduler_type="linear")
    [change] = changes_result(linear, replace(linear, max_steps=20)).breaking
    assert str(change) == "max_steps was 10 and is 20"


def test_every_free_key_exists():
    assert {f.name for f in fields(TrainConfig)} >= FREE


def test_the_names_are_those_the_engine_knows():
    from lohan.optim import get_format

    assert CHOICES["lr_scheduler_type"] == SCHEDULES
    for name in CHOICES["state_format"]:
        assert get_format(name).name == name


MACHINES = [
    MachineFacts((), 16 * 10**9),
    MachineFacts(
        (DriveFact("/mnt/nvme 0", 10**12), DriveFact("/mnt/b", 10**11)), 10**9, (GpuFact("RTX 4090", 24 * 10**9),)
    ),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_example_is_a_config_for_the_machine(machine):
    config = parse_config(write_example(machine, name="here"))
    assert config.device == ("cuda" if machine.gpus else "cpu")
    assert config.gpu_memory == ("21GB" if machine.gpus else None)
    assert config.host_memory == ("12GB" if machine.free_ram_bytes > 10**10 else "750MB")
    assert len(config.ssd) == max(1, len(machine.drives))
    for drive, path in zip(machine.drives, config.ssd, strict=False):
        assert path == f"{drive.path}/here"


def test_the_example_for_this_machine_is_a_config():
    assert parse_config(write_example(find_machine())).max_length == 2048


def test_the_docs_list_every_key_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    told = {name: (default.strip("`"), resume) for name, default, _, resume in rows}
    assert list(told) == [f.name for f in fields(TrainConfig)]
    for each in fields(TrainConfig):
        default, resume = told[each.name]
        assert default == _written(each.default), each.name
        assert resume == ("free" if each.name in FREE else "fixed"), each.name


def _written(value: object) -> str:
    if value is MISSING:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "[]" if value == () else str(value)
