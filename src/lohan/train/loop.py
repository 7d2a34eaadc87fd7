"""The training loop: a config in, a trained model out, stopped and gone on with at any step.

Everything that can be wrong with config, data and model is said before the run's store is made. All that a run needs to
go on (its config, what its data was, what evaluations found) is kept with every commit, so weights and memory never
disagree. metrics.jsonl and the exported folders in output_dir are for people and can be deleted.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.engine.devices import open_device
from lohan.engine.memory import resident_bytes
from lohan.engine.run import Run, StepResult, open_run
from lohan.errors import ConfigError, PlanInfeasible
from lohan.generate.generator import free_memory
from lohan.hardware import load_machine
from lohan.optim import make_schedule
from lohan.report.record import RunRecord
from lohan.report.spans import measured_lanes
from lohan.sizes import format_bytes, parse_size
from lohan.store import has_store, open_store
from lohan.train.config import AUTO, TrainConfig
from lohan.train.config_example import all_ram, free_ram
from lohan.train.config_file import dump_config
from lohan.train.data.packed_model import check_packing
from lohan.train.data.splits import Splits, open_data
from lohan.train.data.tokenizer import load_tokenizer
from lohan.train.display import Display, in_a_line, make_display
from lohan.train.evaluation import Evaluations, evaluate, is_due
from lohan.train.fitness import check_model
from lohan.train.interrupt import Interrupt
from lohan.train.metrics import MetricsFile, read_metrics
from lohan.train.places import check_places, output_folder
from lohan.train.preview import Preview, largest_batches, preview
from lohan.train.replanning import Replanning
from lohan.train.reporters import Reporters, make_reporters
from lohan.train.resume import Memory, check_same, memory_of, recall
from lohan.train.samples import write_samples
from lohan.train.status import CONFIG_NAME, note_status

MODEL_NAME, BEST_NAME = "model", "best"
_FREE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a training ended."""

    step: int
    total_steps: int
    stopped: str | None
    """None: it came to its end. "interrupted" or "early"."""

    loss: float | None
    """Of the last step taken; None if there was none to take."""

    eval_loss: float | None
    best_step: int | None
    model: Path | None
    """The exported folder."""


def train(
    config: TrainConfig,
    *,
    resume: bool | None = None,
    accept_changes: bool = False,
    live: bool | None = None,
    say: Callable[[str], None] = print,
    on_run: Callable[[Run], None] | None = None,
    on_preview: Callable[[Preview], None] | None = None,
) -> TrainResult:
    """Train to the end of the config, from the last commit if there is a run in `ssd`.

    `resume`: True insists that there is one, False that there is none. `accept_changes` goes on although settings that
    change the result differ. `live` forces the display on a terminal or plain lines. `on_run` is told the open run,
    `on_preview` what it will take, before its store is made or opened; raising there calls it off.
    """
    going_on = _going_on(config, resume)
    folder = _model_folder(config, going_on)
    if not going_on:
        check_places(config)
    check_machine(config)
    check_model(folder, config)
    reporters = make_reporters(config)
    with output_folder(Path(config.output_dir)), ExitStack() as owned:
        data, tokenizer = _open_data(config, folder)
        for sentence in data.report:
            say(sentence)
        total = total_steps(config, data.train.steps_per_epoch)
        arguments = run_arguments(config, total)
        done = None
        if going_on:
            done, saved = look_at_run(config)
            check_same(saved, config, data.train.fingerprint, accept=accept_changes, say=say)
        ahead = preview(arguments, folder, data, total_steps=total, done_steps=done)
        if on_preview is not None:
            on_preview(ahead)
        run = owned.enter_context(open_run(model=folder, **arguments))
        if on_run is not None:
            on_run(run)
        saved = recall(run.store.metadata)
        (Path(config.output_dir) / CONFIG_NAME).write_text(dump_config(config), encoding="utf-8")
        note_status(Path(config.output_dir), "running", total_steps=total)
        if run.step_number:
            say(f"Going on after step {run.step_number} of {total}.")
        loop = _Loop(
            config=config, run=run, data=data, total=total, evaluations=saved.evaluations, tokenizer=tokenizer,
            host_bytes=parse_size(arguments["host_memory"], name="host_memory"),
            metrics=owned.enter_context(
                MetricsFile(
                    Path(config.output_dir), after_step=run.step_number, after_evaluation=saved.evaluations.last_step
                )
            ),
            reporters=owned.enter_context(reporters),
            display=owned.enter_context(make_display(total, every=config.logging_steps, live=live)),
            replanning=None if arguments["machine"] is None else Replanning(run, arguments["machine"]),
            wear_of=ahead.wear_of,
        )  # fmt: skip
        run.reserve(loop.largest)
        if run.step_number < total:
            loop.record.begin(run, ahead, machine=arguments["machine"], shapes=loop.largest, total_steps=total)
        with Interrupt(loop.display.stopping) as interrupt:
            loop.interrupt = interrupt
            stopped = loop.run_to_the_end()
        run.commit(loop.memory())
        loop.record.end(run)
        model = None
        if config.export_at_end and stopped != "interrupted":
            model = Path(config.output_dir) / MODEL_NAME
            if loop.loss is not None or not model.exists():  # else nothing has changed since it was written
                loop.export(MODEL_NAME)
            loop.display.say(f"The trained model is in {model}.")
        note_status(Path(config.output_dir), stopped or "finished", total_steps=total)
        found = loop.evaluations
        return TrainResult(
            step=run.step_number,
            total_steps=total,
            stopped=stopped,
            loss=loop.loss,
            eval_loss=found.last_loss,
            best_step=found.best_step if found.best_loss is not None else None,
            model=model,
        )


class _Loop:
    """One pass of train(): steps, evaluations, and what is told of them."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        run: Run,
        data: Splits,
        total: int,
        evaluations: Evaluations,
        metrics: MetricsFile,
        reporters: Reporters,
        display: Display,
        tokenizer: Any,
        host_bytes: int,
        replanning: Replanning | None,
        wear_of: Callable[[float], float],
    ):
        self.config, self.run, self.data, self.total = config, run, data, total
        self.evaluations, self.display = evaluations, display
        self.loss: float | None = None
        self.interrupt = Interrupt()
        self.record = RunRecord(Path(config.output_dir))
        self.largest = largest_batches(data, total)
        self._metrics, self._reporters = metrics, reporters
        self._tokenizer, self._host_bytes = tokenizer, host_bytes
        self._replanning = replanning
        self._busy: dict[str, float] = {}
        self._ssd_bytes, self._ssd_written = run.ssd_bytes, run.ssd_written_bytes
        self._wear_of = wear_of
        self._total_written = sum(line.get("ssd_written_bytes") or 0 for line in read_metrics(Path(config.output_dir)))

    def run_to_the_end(self) -> str | None:
        """All steps that are left. Returns why it stopped before the end, if it did."""
        # A run that was killed between a commit and the evaluation of that step catches up on it.
        if self._evaluate_if_due(self.run.step_number):
            return "early"
        while self.run.step_number < self.total:
            if self.interrupt.asked:
                return "interrupted"
            step = self.run.step_number + 1
            out = self.run.step(self.data.train.micro_batches(step), metadata=self.memory())
            self._tell(out)
            if self._replanning is not None:
                for sentence in self._replanning.after_step(out):
                    self.display.say(sentence)
            if self._evaluate_if_due(step):
                return "early"
        return None

    def memory(self) -> dict[str, Any]:
        """What is kept with a commit."""
        return memory_of(self.config, self.data.train.fingerprint, self.evaluations)

    def _tell(self, out: StepResult) -> None:
        train = self.data.train
        tokens = train.tokens_of(out.step)
        if out.step == self.total or self.interrupt.asked:
            self.run.drain()  # no later step's line would have what it still writes
        busy, moved, written = self.run.busy_seconds, self.run.ssd_bytes, self.run.ssd_written_bytes
        # A new plan makes a new engine, whose clocks begin at 0.
        spent = {lane: t - self._busy[lane] if t >= self._busy.get(lane, 1e99) else t for lane, t in busy.items()}
        record: dict[str, Any] = {
            "step": out.step,
            "epoch": train.epoch_of(out.step),
            "loss": out.loss,
            "grad_norm": out.grad_norm,
            "skipped": out.skipped,
            "learning_rate": out.learning_rate,
            "tokens": tokens,
            "seconds": out.seconds,
            "tokens_per_second": tokens / out.seconds,
            "busy_seconds": spent,
            "ssd_bytes": moved - self._ssd_bytes,
            "ssd_written_bytes": written - self._ssd_written,
            "rss_bytes": resident_bytes(),
            "time": time.time(),
        }
        if self.run.device.separate_memory:
            record["device_bytes"] = self.run.device.peak_bytes
        self._total_written += record["ssd_written_bytes"]
        self._busy, self._ssd_bytes, self._ssd_written, self.loss = busy, moved, written, out.loss
        self._metrics.write(record)
        self.record.step(self.run)
        shown = record | {
            "run_bytes": max(0, record["rss_bytes"] - self.run.base_bytes),
            "host_bytes": self._host_bytes,
            "total_written_bytes": self._total_written,
            "wear": self._wear_of(self._total_written),
        }
        if self.display.shows_lanes:
            taken = self.run.step_spans()
            shown["lanes"] = {} if taken is None else measured_lanes(taken[1], taken[0].start, taken[0].end)
        self.display.show(shown)
        if out.step % self.config.logging_steps == 0 or out.step == self.total:
            names = ("loss", "grad_norm", "learning_rate", "epoch", "tokens_per_second")
            self._reporters.log(out.step, {name: record[name] for name in names})

    def _evaluate_if_due(self, step: int) -> bool:
        """Evaluate where it is time to. True if the run should stop because nothing gets better."""
        held_out, steps = self.data.held_out, self.data.train.steps_per_epoch
        patience = self.config.early_stopping_patience
        due = is_due(self.config, step, steps_per_epoch=steps, total_steps=self.total)
        if held_out is not None and due and self.evaluations.last_step != step:
            self.run.drain()  # what the step still moves is the step's
            started, read = time.perf_counter(), self._read_bytes
            loss = evaluate(
                self.run,
                held_out,
                at_once=self.config.gradient_accumulation_steps,
                stop=lambda: self.interrupt.asked,
            )
            if loss is None:
                return False  # the run that goes on will do it
            seconds = time.perf_counter() - started
            best = self.evaluations.record(step, loss, self.config.early_stopping_threshold)
            record = {"step": step, "eval_loss": loss, "best": best, "eval_seconds": seconds}
            self.display.say(f"step {step}/{self.total}  held-out loss {loss:.4f}{', the best so far' if best else ''}")
            self._metrics.write(record | self._samples())
            self._reporters.log(step, {"eval_loss": loss})
            if best and self.config.load_best_model_at_end:
                self.export(BEST_NAME)
            self._ssd_bytes += self._read_bytes - read  # not the next step's
        stop = patience is not None and self.evaluations.num_worse >= patience and step < self.total
        if stop:
            self.display.say(f"Stopping: {patience} evaluations were no better than step {self.evaluations.best_step}.")
        return stop

    @property
    def _read_bytes(self) -> int:
        return self.run.ssd_bytes - self.run.ssd_written_bytes

    def _samples(self) -> dict[str, Any]:
        """What the model writes now, told and for the metrics."""
        if not self.config.sample_prompts:
            return {}
        device, budget = self.run.device, self._host_bytes
        if device.separate_memory:
            budget = device.memory_budget or free_memory(device.torch_device)
        try:
            samples = write_samples(
                self.run,
                self._tokenizer,
                self.config.sample_prompts,
                max_new_tokens=self.config.sample_max_new_tokens,
                memory_bytes=budget,
                raw=not self.config.apply_chat_template,
                stop=lambda: self.interrupt.asked,
            )
        except PlanInfeasible as error:
            self.display.say(f"No samples: {error}")
            samples = []
        self.run.reserve(self.largest)
        for sample in samples:
            self.display.say(f"  {in_a_line(sample['prompt'])} -> {in_a_line(sample['text'])}")
        return {"samples": samples}

    def export(self, name: str) -> Path:
        """Write the weights as a folder of output_dir; the one that was there stays until the new one is complete."""
        target = Path(self.config.output_dir) / name
        new, old = target.with_name(f".{name}.new"), target.with_name(f".{name}.old")
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        self.run.commit(self.memory())
        self.run.export(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        return target


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """As transformers' Trainer counts them."""
    return config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * steps_per_epoch)


def run_arguments(config: TrainConfig, total: int) -> dict[str, Any]:
    """The config as open_run() takes it, for so many steps in all."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    schedule = make_schedule(
        config.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total,
        learning_rate=config.learning_rate,
        min_lr_rate=config.min_lr_rate,
    )
    host = int(_FREE_SHARE * free_ram()) if config.host_memory == AUTO else config.host_memory
    return {
        "ssd": list(config.ssd),
        "host_memory": host,
        "gpu_memory": config.gpu_memory,
        "device": config.device,
        "commit_every": config.save_steps,
        "clip": config.clip,
        "strategy": config.strategy,
        "machine": None if config.machine is None else load_machine(config.machine),
        "trust_remote_code": config.trust_remote_code,
        "learning_rate": config.learning_rate,
        "optimizer": "adamw" if config.optim.startswith("adamw") else config.optim,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm or None,
        "lr_schedule": schedule,
        "state_format": config.state_format,
        "wire_dtype": config.wire_dtype,
        "compute_dtype": config.compute_dtype,
        "frozen": config.frozen,
        "seed": config.seed,
    }


def _going_on(config: TrainConfig, resume: bool | None) -> bool:
    there = any(has_store(Path(directory)) for directory in config.ssd)
    if resume is True and not there:
        raise ConfigError(f"There is no run in {', '.join(config.ssd)} to go on with. Check ssd, or start a new one.")
    if resume is False and there:
        raise ConfigError(
            f"There is a run in {', '.join(config.ssd)} already. Go on with it, or name other directories."
        )
    return there


def check_machine(config: TrainConfig) -> None:
    """Refuse a device, a measured machine or an amount of RAM that is not there."""
    if config.machine is not None:
        load_machine(config.machine)
    if config.device != AUTO:
        gpu = None if config.gpu_memory is None else parse_size(config.gpu_memory, name="gpu_memory")
        open_device(config.device, memory_bytes=gpu).close()
    if config.host_memory != AUTO:
        wanted, there = parse_size(config.host_memory, name="host_memory"), all_ram()
        if wanted > there:
            raise ConfigError(
                f"host_memory is {format_bytes(wanted)} and this machine has {format_bytes(there)}. Set host_memory: "
                f"{int(_FREE_SHARE * free_ram() / 1e6)}MB, three quarters of what is free now, or less."
            )


def look_at_run(config: TrainConfig) -> tuple[int, Memory]:
    """The steps that are done of the run that is there and what it remembers, asked without its lock."""
    with open_store(config.ssd, read_only=True) as store:
        return int(store.committed_step or 0), recall(store.metadata)


def _model_folder(config: TrainConfig, going_on: bool) -> Path:
    """The model's folder; for a run that goes on the run's own copy of its small files will do."""
    folder = Path(config.model_name_or_path)
    if folder.is_dir() or not going_on:
        return folder
    return next((Path(each) / "model" for each in config.ssd if (Path(each) / "model").is_dir()), folder)


def _open_data(config: TrainConfig, folder: Path) -> tuple[Splits, Any]:
    tokenizer = load_tokenizer(
        folder, chat_template_path=config.chat_template_path, trust_remote_code=config.trust_remote_code
    )
    packing = check_packing(folder, trust_remote_code=config.trust_remote_code) if config.packing else None
    data = open_data(config, tokenizer, block_mask=packing == "block_mask")
    check_model(folder, config, max_token=data.max_token, longest=data.train.longest_row)
    return data, tokenizer
