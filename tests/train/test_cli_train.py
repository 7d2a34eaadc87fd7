"""`lohan init`, `train`, `status` and `generate`: what they do, what they say, and how they end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_tokenizers import CHATML, byte_level

from lohan.cli_profile import write_machine
from lohan.errors import PlanInfeasible
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import DriveProfile, MachineProfile
from lohan.sim.sizes import with_fewer_pieces
from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig
from lohan.train.config_file import dump_config, load_config
from lohan.train.data.splits import open_data
from lohan.train.data.tokenizer import load_tokenizer
from lohan.train.loop import run_arguments, train
from lohan.train.metrics import read_metrics
from lohan.train.preview import largest_batches, preview

WORDS = ["two", "four", "dog", "fox", "lazy", "quick"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model_folder("llama", tmp_path_factory.mktemp("model") / "tiny", vocab_size=512)
    byte_level(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def config(model, tmp_path) -> TrainConfig:
    lines = [json.dumps({"prompt": f"What is {a} {b}?", "completion": f"It is {b} {a}."}) for a in WORDS for b in WORDS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return TrainConfig(
        model_name_or_path=str(model), output_dir=str(tmp_path / "out"), ssd=(str(tmp_path / "ssd"),), device="cpu",
        host_memory="400MB", train_file=(str(tmp_path / "data.jsonl"),), max_length=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=4, seed=3,
    )  # fmt: skip


@pytest.fixture
def file(config, tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    return path


def test_a_config_becomes_a_model_that_writes(lohan, file, config, tmp_path):
    code, out, err = lohan("train", file, "--set", "max_steps=3", "--yes")
    assert (code, err) == (0, "")
    for words in ("million parameters, 3 steps", "RAM ", "free on SSD", "written per step", "wear ", "step 3/3"):
        assert words in out
    code, out, err = lohan("generate", tmp_path / "out" / "model", "What is two four?", "--max-new-tokens", 5)
    assert code == 0
    assert out.strip()
    assert "tokens/s" in err
    for place in (tmp_path / "ssd", tmp_path / "out", file):
        assert lohan("generate", place, "What is two four?", "--max-new-tokens", 5)[:2] == (0, out)


def test_status_tells_how_far_a_run_is(lohan, file, config, tmp_path):
    assert lohan("train", file)[0] == 0
    for place in (file, tmp_path / "out", tmp_path / "ssd"):
        code, out, _ = lohan("status", place, "--json")
        found = json.loads(out)
        assert code == 0
        assert (found["state"], found["step"], found["total_steps"], found["committed_step"]) == ("finished", 4, 4, 4)
        assert found["loss"] == read_metrics(tmp_path / "out")[-1]["loss"]
    out = lohan("status", file)[1]
    assert "finished" in out
    assert "step       4 of 4, epoch 0.80" in out
    code, out, err = lohan("status", tmp_path / "out" / "data")
    assert (code, out) == (2, "")
    assert "holds no run" in err


def test_status_can_be_asked_while_the_run_is_open(lohan, config, file, tmp_path):
    answers = []

    def ask(run):
        run.step = stepped(run.step)

    def stepped(step):
        def once(*arguments, **named):
            done = step(*arguments, **named)
            answers.append(json.loads(lohan("status", tmp_path / "out", "--json")[1]))
            return done

        return once

    train(config, on_run=ask)
    assert [answer["state"] for answer in answers] == ["running"] * 4
    assert [answer["step"] for answer in answers[1:]] == [1, 2, 3]  # the line of a step follows it
    assert answers[2]["seconds_left"] > 0
    assert answers[2]["tokens_per_second"] > 0


def test_a_run_that_was_killed_is_told_from_one_that_ended(lohan, config, tmp_path):
    train(config)
    (tmp_path / "out" / "status.json").write_text('{"state": "running", "pid": 1, "total_steps": 9}')
    assert json.loads(lohan("status", tmp_path / "out", "--json")[1])["state"] == "died"
    assert "it was killed" in lohan("status", tmp_path / "out")[1]


def test_init_writes_a_config_that_can_be_read_and_leaves_what_is_there(lohan, tmp_path):
    out = tmp_path / "new.yaml"
    assert lohan("init", "--out", out)[0] == 0
    assert load_config(out).learning_rate == 1e-5
    code, _, err = lohan("init", "--out", out)
    assert code == 2
    assert "exists" in err
    assert lohan("init", "--out", tmp_path / "no" / "where.yaml")[0] == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("learning_rat=1", "there is no key 'learning_rat'. Did you mean learning_rate?"),
        ("max_steps=many", "Write a whole number"),
        ("host_memory=1MB", "Set host_memory to"),
        ("device=virtual gpu_memory=1MB", "Use micro-batches of"),
        ("model_name_or_path=/nowhere", "/nowhere is not a folder"),
        ("train_file=/nowhere.jsonl", "/nowhere.jsonl does not exist"),
        ("output_dir=/proc/nothing", "cannot be written to"),
        ("ssd=/proc/nothing/ssd", "/proc/nothing"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2(lohan, file, tmp_path, change, expected):
    options = [word for part in change.split() for word in ("--set", part)]
    code, out, err = lohan("train", file, *options)
    assert code == 2
    assert expected in err
    assert err.startswith("lohan: ")
    assert "Traceback" not in out + err
    assert not (tmp_path / "ssd").exists()


def test_a_bad_line_is_named(lohan, file, config, tmp_path):
    with open(config.train_file[0], "a") as data:
        data.write('\n{"prompt": "What?"')
    code, _, err = lohan("train", file)
    assert code == 2
    assert "data.jsonl, line 37" in err
    assert not (tmp_path / "ssd").exists()


def test_resume_needs_a_run_and_changes_need_consent(lohan, file, tmp_path):
    code, _, err = lohan("train", file, "--resume")
    assert code == 2
    assert "There is no run in" in err
    assert lohan("train", file, "--set", "lr_scheduler_type=constant", "--set", "max_steps=2")[0] == 0
    again = ["train", file, "--set", "lr_scheduler_type=constant", "--set", "learning_rate=1e-2", "--resume"]
    code, _, err = lohan(*again)
    assert code == 2
    assert "--accept-changes" in err
    assert lohan(*again, "--accept-changes")[0] == 0


def test_a_person_at_a_terminal_is_asked_first(lohan, file, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    code, out, _ = lohan("train", file)
    assert code == 1
    assert "Nothing was begun" in out
    assert not (tmp_path / "ssd").exists()


def test_a_full_disk_outside_the_store_is_said(lohan, file, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("lohan.train.metrics.MetricsFile.write", full)
    code, _, err = lohan("train", file)
    assert code == 2
    assert err.startswith("lohan: metrics.jsonl: No space left on device. Make room")


def least_memory(config: TrainConfig, data) -> str:
    with pytest.raises(PlanInfeasible) as refused:
        foretold(replace(config, host_memory="1MB"), data)
    return re.search(r"Set host_memory to ([\d.]+ \w+) or more", str(refused.value))[1]


def foretold(config: TrainConfig, data):
    folder = Path(config.model_name_or_path)
    return preview(run_arguments(config, 4), folder, data, total_steps=4, done_steps=None)


@pytest.mark.parametrize("clip", ["deferred", "speculative"])
@pytest.mark.parametrize("memory", ["400MB", "least"])
def test_the_traffic_foretold_is_the_traffic_there_is(config, clip, memory, tmp_path):
    folder = tiny_model_folder("llama", tmp_path / "larger", vocab_size=512, hidden_size=256, intermediate_size=512)
    byte_level(CHATML).save_pretrained(folder)
    config = replace(config, model_name_or_path=str(folder), clip=clip, export_at_end=False, max_grad_norm=1e9)
    data = open_data(config, load_tokenizer(folder))
    if memory == "least":
        config = replace(config, host_memory=least_memory(config, data))
    ahead = foretold(config, data)
    assert (ahead.read_bytes_per_step > 0) == (memory == "least")

    def drained(run):
        step = run.step

        def once(*arguments, **named):
            done = step(*arguments, **named)
            run.drain()  # costs a deferred update a read of its own, and makes the count exact
            return done

        run.step = once

    assert train(config, on_run=drained).step == 4
    moved = [line["ssd_bytes"] for line in read_metrics(Path(config.output_dir))]
    assert moved[2] == pytest.approx(ahead.read_bytes_per_step + ahead.write_bytes_per_step, rel=0.1)
    taken = (Path(config.ssd[0]) / "lohan.data").stat().st_size
    assert taken == pytest.approx(ahead.ssd_bytes, rel=0.05)


def test_time_is_foretold_where_the_machine_was_measured(lohan, file, tmp_path):
    machine = MachineProfile(
        name="a", gpu_flops_per_second=1e10, gpu_memory_bytes=10**10, separate_memory=False,
        to_gpu_bytes_per_second=1e10, to_host_bytes_per_second=1e10, host_memory_bytes=10**10,
        drives=(DriveProfile(read_bytes_per_second=1e9, write_bytes_per_second=1e9, endurance_bytes=1e12),),
        update_parameters_per_second=1e7,
    )  # fmt: skip
    write_machine(machine, tmp_path / "machine.yaml")
    out = lohan("train", file, "--set", f"machine={tmp_path / 'machine.yaml'}")[1]
    assert re.search(r"time +[\d.]+ s per step, 0:0\d in all; the limit is ", out)
    assert "of the drives' rated endurance" in out
    code, _, err = lohan("train", file, "--set", "machine=/nowhere.yaml")
    assert code == 2
    assert "lohan profile" in err


def test_the_simulated_size_keeps_all_bytes():
    unit = UnitSize("block", 100, tuple(range(20)), tuple(range(20, 40)), 7)
    size, plan = with_fewer_pieces(ModelSize((unit,)), Plan(state_slabs=16))
    (made,) = size.units
    assert len(made.state_bytes) == 8
    assert plan.state_slabs == 16 * 39 // max(made.state_bytes)  # as many bytes
    assert (sum(made.piece_weights_bytes), sum(made.state_bytes)) == (190, 590)


def test_memory_is_planned_once_for_the_largest_step(config, monkeypatch):
    from lohan.engine.planning import Planning

    made = []
    plan = Planning.plan
    monkeypatch.setattr(Planning, "plan", lambda self, batches: made.append(batches) or plan(self, batches))
    config = replace(config, max_steps=12, export_at_end=False, eval_share=0.2, eval_strategy="epoch")
    train(config)
    assert len(made) == 2  # before the run, and for it
    data = open_data(config, load_tokenizer(config.model_name_or_path))
    largest = largest_batches(data, 12)
    for step in range(1, 13):
        sizes = [batch["labels"].numel() for batch in data.train.micro_batches(step)]
        assert max(sizes) <= max(batch["labels"].numel() for batch in largest)
        assert sum(sizes) <= sum(batch["labels"].numel() for batch in largest)
    assert [batch["labels"].numel() for batch in data.held_out.in_order()] == data.held_out.sizes_in_order()
    assert all(batch["labels"].device == torch.device("meta") for batch in largest)
