"""From a config to a trained model; stopped anywhere and gone on with, the result is the same to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import elsewhere, make_config, make_model, told, weights
from tiny_tokenizers import CHATML, byte_level
from transformers import AutoModelForCausalLM

from lohan.errors import ConfigError, ModelError
from lohan.testing.zoo import tiny_model_folder
from lohan.train import loop
from lohan.train.config_file import dump_config, load_config
from lohan.train.data.packed_model import check_packing
from lohan.train.data.splits import open_data
from lohan.train.data.tokenizer import load_tokenizer
from lohan.train.display import LiveDisplay, clock
from lohan.train.evaluation import evaluate
from lohan.train.loop import total_steps, train
from lohan.train.metrics import read_metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(model, tmp_path):
    return make_config(model, tmp_path)


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """The same run, never stopped."""
    config = make_config(model, tmp_path_factory.mktemp("straight"))
    train(config)
    return config


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def interrupt_after(monkeypatch, step: int, times: int = 1, by: int = signal.SIGINT) -> None:
    tell = loop._Loop._tell

    def told(self, out):
        tell(self, out)
        if out.step == step:
            for _ in range(times):
                os.kill(os.getpid(), by)

    monkeypatch.setattr(loop._Loop, "_tell", told)


def test_a_model_is_trained_and_exported(config, capsys):
    result = train(replace(config, max_steps=-1, num_train_epochs=4))
    assert (result.step, result.total_steps, result.stopped) == (20, 20, None)
    metrics = read_metrics(Path(config.output_dir))
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[-1]["epoch"] == 4.0
    assert set(metrics[0]) >= {"grad_norm", "learning_rate", "tokens", "tokens_per_second", "busy_seconds", "rss_bytes"}
    opened = AutoModelForCausalLM.from_pretrained(result.model)
    assert opened.config.vocab_size == 512
    assert load_tokenizer(result.model).chat_template == CHATML
    printed = capsys.readouterr().out
    assert "36 examples" in printed
    assert "step 20/20  epoch 4.00  loss " in printed
    assert load_config(Path(config.output_dir) / "config.yaml").max_steps == -1


def test_tokens_are_counted_without_filling(config):
    train(replace(config, max_steps=5, export_at_end=False))
    data = open_data(config, load_tokenizer(config.model_name_or_path))
    assert sum(line["tokens"] for line in read_metrics(Path(config.output_dir))) == data.train.num_tokens


@pytest.mark.parametrize(("stop", "by"), [(1, signal.SIGINT), (4, signal.SIGTERM)])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(config, straight, monkeypatch, stop, by):
    with monkeypatch.context() as patched:
        interrupt_after(patched, stop, by=by)
        result = train(config)
    assert (result.step, result.stopped, result.model) == (stop, "interrupted", None)
    assert train(config).step == 6
    assert same(weights(config), weights(straight))
    assert told(config, "step", "loss", "grad_norm", "learning_rate") == told(
        straight, "step", "loss", "grad_norm", "learning_rate"
    )


def test_a_second_interrupt_stops_at_once_and_can_be_gone_on_from(config, straight, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3, times=2)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert train(config).step == 6
    assert same(weights(config), weights(straight))


def test_rare_commits_lose_no_more_than_they_say(config, straight, monkeypatch):
    config = replace(config, save_steps=4)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3, times=2)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    started = []
    train(config, on_run=lambda run: started.append(run.step_number))
    assert started == [0]
    assert [line["step"] for line in read_metrics(Path(config.output_dir))] == list(range(1, 7))
    assert same(weights(config), weights(straight))


def test_a_run_that_was_killed_goes_on_to_the_same_bits(config, straight, tmp_path):
    (tmp_path / "c.yaml").write_text(dump_config(config))
    code = f"""
import torch; torch.set_num_threads(1)
from lohan.train.config_file import load_config
from lohan.train.loop import train
train(load_config({str(tmp_path / "c.yaml")!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGKILL)
                break
    started = []
    assert train(config, on_run=lambda run: started.append(run.step_number)).step == 6
    assert 1 <= started[0] < 6
    assert same(weights(config), weights(straight))


def test_a_finished_run_is_left_as_it_is(config):
    train(config)
    before = weights(config)
    result = train(config)
    assert (result.step, result.loss) == (6, None)
    assert same(weights(config), before)


def test_a_change_that_would_change_the_result_is_refused_or_accepted(config, capsys):
    train(replace(config, max_steps=2, lr_scheduler_type="constant", export_at_end=False))
    longer = replace(config, max_steps=4, lr_scheduler_type="constant", export_at_end=False)
    with pytest.raises(ConfigError, match=r"learning_rate was 0.001 and is 0.1\. Set it back, accept"):
        train(replace(longer, learning_rate=0.1))
    assert train(replace(longer, logging_steps=2)).step == 4
    assert "with the same result: logging_steps was 1 and is 2" in capsys.readouterr().out
    assert train(replace(longer, learning_rate=0.1, max_steps=5), accept_changes=True).step == 5


def test_other_data_under_the_same_name_is_refused(config):
    train(replace(config, max_steps=2, lr_scheduler_type="constant", export_at_end=False))
    with open(config.train_file[0], "a") as file:
        file.write('\n{"prompt": "a", "completion": "b"}')
    with pytest.raises(ConfigError, match=r"the content of train_file, the tokenizer or its template is another one"):
        train(replace(config, max_steps=4, lr_scheduler_type="constant", export_at_end=False))


def test_a_run_goes_on_when_the_original_model_is_gone(config):
    train(replace(config, max_steps=2, lr_scheduler_type="constant", export_at_end=False))
    gone = replace(config, model_name_or_path="/nowhere", max_steps=3, lr_scheduler_type="constant")
    assert train(gone, accept_changes=True).step == 3


def test_resume_can_be_insisted_on_or_ruled_out(config):
    with pytest.raises(ConfigError, match=r"There is no run in .* to go on with"):
        train(config, resume=True)
    assert not Path(config.output_dir).exists()
    train(replace(config, max_steps=1, export_at_end=False), resume=False)
    with pytest.raises(ConfigError, match=r"There is a run in .* already"):
        train(config, resume=False)


def test_evaluations_find_the_best_and_stop_when_nothing_gets_better(config, monkeypatch, capsys):
    losses = iter([3.0, 2.0, 2.5, 2.6, 1.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: next(losses))
    config = replace(
        config,
        eval_share=0.2,
        eval_strategy="steps",
        eval_steps=1,
        early_stopping_patience=2,
        load_best_model_at_end=True,
    )
    result = train(config)
    assert (result.step, result.stopped, result.best_step, result.eval_loss) == (4, "early", 2, 2.6)
    assert "no better than step 2" in capsys.readouterr().out
    best = load_file(Path(config.output_dir) / "best" / "model.safetensors")
    assert not same(best, weights(config))
    monkeypatch.undo()
    two_steps = elsewhere(config, "two", load_best_model_at_end=False, early_stopping_patience=None)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        train(two_steps)
    train(replace(two_steps, max_steps=2), accept_changes=True)
    assert same(best, weights(two_steps))


def test_evaluations_go_on_where_they_were(config, monkeypatch):
    config = replace(config, eval_share=0.2, eval_strategy="steps", eval_steps=2, max_steps=4)
    straight = elsewhere(config, "straight")
    train(straight)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        train(config)
    result = train(config)
    found = told(config, "step", "eval_loss", "best")
    assert found == told(straight, "step", "eval_loss", "best")
    assert [step for step, _, _ in found] == [2, 4]
    assert result.best_step == 4


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("mistral", 3), ("opt", 2)])
def test_packed_and_padded_data_have_the_same_loss_in_the_engine(config, tmp_path, name, rows):
    tokenizer = load_tokenizer(config.model_name_or_path)
    folder = tiny_model_folder(name, tmp_path / name, vocab_size=512)
    tokenizer.save_pretrained(folder)
    config = replace(config, model_name_or_path=str(folder))
    losses = []

    def measure(run):
        for packing in (False, True):
            split = open_data(
                replace(config, packing=packing, eval_share=0.5, per_device_eval_batch_size=rows),
                tokenizer,
                block_mask=packing and check_packing(folder) == "block_mask",
            )
            losses.append(evaluate(run, split.held_out, at_once=2))

    train(replace(config, max_steps=1, export_at_end=False), on_run=measure)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_packed_data_trains(config):
    result = train(replace(config, packing=True, per_device_train_batch_size=1, max_steps=8))
    metrics = read_metrics(Path(config.output_dir))
    assert result.step == 8
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"max_length": 4096, "packing": True}, r"max_length is 4096 and the model has 128 positions. Set max_l"),
        ({"model_name_or_path": "/nowhere"}, r"/nowhere is not a folder. Set model_name_or_path"),
        ({"output_dir": "/proc/nothing"}, r"output_dir: /proc/nothing cannot be written to"),
        ({"train_file": ("/nowhere.jsonl",)}, r"/nowhere.jsonl does not exist"),
        ({"report_to": ("tensorboard",)}, r"report_to has tensorboard, which is not installed."),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_the_store_is_made(config, monkeypatch, changed, expected):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    with pytest.raises(Exception, match=expected):
        train(replace(config, **changed))
    assert not Path(config.ssd[0]).exists()


def test_a_tokenizer_of_another_model_is_refused(config, tmp_path):
    folder = tiny_model_folder("llama", tmp_path / "small", vocab_size=64)
    byte_level(CHATML).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"The tokenizer gives token \d+ and the model has 64"):
        train(replace(config, model_name_or_path=str(folder)))
    assert not Path(config.ssd[0]).exists()


def test_reporters_hear_what_the_metrics_say(config, monkeypatch):
    heard = []

    class Fake:
        def on_train_begin(self, args, state, control):
            heard.append(("begin", args.run_name, json.loads(args.to_json_string())["max_steps"]))

        def on_log(self, args, state, control, logs):
            heard.append((state.global_step, logs))

        def on_train_end(self, args, state, control):
            heard.append(("end",))

    monkeypatch.setattr("lohan.train.reporters._make", lambda name, config: Fake())
    train(replace(config, report_to=("wandb",), logging_steps=4, export_at_end=False))
    assert heard[0] == ("begin", "out", 6)
    assert [each[0] for each in heard[1:]] == [4, 6, "end"]
    metrics = read_metrics(Path(config.output_dir))
    assert heard[1][1]["loss"] == metrics[3]["loss"]


def test_steps_are_counted_as_transformers_counts_them(config):
    assert total_steps(replace(config, max_steps=7), 10) == 7
    assert total_steps(replace(config, max_steps=-1, num_train_epochs=1.55), 10) == 16


def test_the_live_display_shows_a_step():
    from rich.console import Console

    console = Console(record=True, width=80, force_terminal=True)
    record = {
        "step": 3, "epoch": 0.5, "loss": 1.25, "grad_norm": None, "learning_rate": 1e-5, "tokens_per_second": 1234.0,
        "seconds": 2.0, "busy_seconds": {"compute": 1.0, "update": 3.0}, "rss_bytes": 10**9, "ssd_bytes": 10**6,
        "run_bytes": 6 * 10**8, "host_bytes": 8 * 10**8,
        "device_bytes": 2 * 10**9, "total_written_bytes": 12 * 10**12, "wear": 0.01,
        "lanes": {"gpu": 1.0, "cpu_update": 3.0, "drives read": 0.5, "ssd": 0.9},
    }  # fmt: skip
    with LiveDisplay(10, console) as display:
        display.show(record)
        display.say("[a sentence]")
        display.stopping()
        display.show(record | {"step": 4})
    text = console.export_text()
    for part in (
        "step 3/10", "30%", "step 4/10", "Stopping after this step. Once more stops at once", "loss 1.2500", "skipped",
        "1,234 tokens/s", "computing", "50%", "SSD read", "25%", "RAM 600 MB of 800 MB, 1 GB with", "[a sentence]",
        "device memory 2 GB", "12 TB written so far (1.00% of its life)",
    ):  # fmt: skip
        assert part in text
    assert (clock(59), clock(3723)) == ("0:59", "1:02:03")


def test_a_line_is_printed_every_so_many_steps(config, capsys):
    train(replace(config, logging_steps=4, export_at_end=False))
    printed = capsys.readouterr().out
    assert [step for step in range(1, 7) if f"step {step}/6" in printed] == [4, 6]
    assert len(read_metrics(Path(config.output_dir))) == 6


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(config, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make_model(tmp_path / "own")
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'mine'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "mine", "architectures": ["Model"]}
    described["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps(described))
    own = replace(config, model_name_or_path=str(folder), max_steps=2)
    with pytest.raises(ModelError, match=r"set trust_remote_code: true"):
        train(own)
    assert not Path(own.ssd[0]).exists()
    train(replace(own, trust_remote_code=True))
    known = elsewhere(config, "known", max_steps=2)
    train(known)
    assert same(weights(own), weights(known))
