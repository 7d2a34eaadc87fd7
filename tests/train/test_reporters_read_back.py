"""What TensorBoard and W&B would show is what metrics.jsonl says, step for step, read back with their own readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import make_config, make_model

from lohan.train.loop import train
from lohan.train.metrics import read_metrics

TRAINED = ("loss", "grad_norm", "learning_rate", "epoch", "tokens_per_second")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A finished run that told both, every second step and three evaluations."""
    folder = tmp_path_factory.mktemp("told")
    config = make_config(
        make_model(folder / "model"), folder, report_to=("tensorboard", "wandb"), run_name="a name", logging_steps=2,
        max_steps=5, eval_share=0.2, eval_strategy="steps", eval_steps=2, export_at_end=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "TENSORBOARD_LOGGING_DIR"):
            patched.delenv(name, raising=False)
        patched.setenv("WANDB_SILENT", "true")
        train(config, live=False, say=lambda text: None)
    return config


def expected(config) -> dict[str, list[tuple[int, float]]]:
    """Curves as both name them, from metrics.jsonl."""
    lines = read_metrics(Path(config.output_dir))
    logged = [line for line in lines if "loss" in line and line["step"] in (2, 4, 5)]
    curves = {f"train/{name}": [(line["step"], line[name]) for line in logged] for name in TRAINED}
    curves["eval/loss"] = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert [step for step, _ in curves["eval/loss"]] == [2, 4, 5]
    return curves


def test_tensorboard_has_every_logged_value(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(Path(config.output_dir) / "tensorboard"))
    found.Reload()
    curves = expected(config)
    assert set(found.Tags()["scalars"]) == curves.keys()
    for tag, points in curves.items():
        events = found.Scalars(tag)
        assert [event.step for event in events] == [step for step, _ in points], tag
        # Event files hold fp32.
        assert [event.value for event in events] == pytest.approx([value for _, value in points], rel=1e-6), tag
    assert json.loads(found.Tensors("args/text_summary")[0].tensor_proto.string_val[0])["max_steps"] == 5


def records(config) -> list[Any]:
    """All that the one offline run in output_dir holds."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = Path(config.output_dir).glob("wandb/offline-run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    found = []
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def test_wandb_has_every_logged_value(config):
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records(config):
        line = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in line.items():
            if not name.startswith("_") and name != "train/global_step":
                curves.setdefault(name, []).append((line["train/global_step"], value))
    assert curves == expected(config)


def test_wandb_knows_the_run_by_its_name_and_config(config):
    found = records(config)
    assert {record.run.display_name for record in found if record.HasField("run")} == {"a name"}
    values = {item.key: json.loads(item.value_json) for record in found for item in record.config.update}
    assert (values["max_steps"], values["learning_rate"]) == (config.max_steps, config.learning_rate)


def test_a_run_that_goes_on_adds_to_its_curves(config):
    """Last: it changes the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        replace(config, report_to=("tensorboard",), max_steps=7), accept_changes=True, live=False,
        say=lambda text: None,
    )  # fmt: skip
    found = EventAccumulator(str(Path(config.output_dir) / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [2, 4, 5, 6, 7]
