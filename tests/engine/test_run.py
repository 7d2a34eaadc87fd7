"""A run from outside: stopped and gone on with, evaluated, refused, failed."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace

import pytest
import small_models
import torch
from torch import nn

from lohan.engine.devices import VirtualOptions
from lohan.engine.engine import Engine
from lohan.engine.lanes import Lanes
from lohan.engine.pools import Pool
from lohan.engine.run import open_run
from lohan.errors import ConfigError, LohanError, ModelError, NonFinite, PlanInfeasible
from lohan.optim import LossScale, Updater
from lohan.testing import parity, zoo
from lohan.testing.late_files import LateFiles, QuickFiles
from lohan.testing.oracle import Oracle


def options(model, directory, **changes):
    directory.mkdir(exist_ok=True)
    return {
        "model": model, "ssd": [directory], "host_memory": 112 << 20, "weights": [1.0], "device": "cpu",
        "piece_elements": 4096, "store_files": QuickFiles(), "learning_rate": 1e-3, "max_grad_norm": None, **changes,
    }  # fmt: skip


def everything(run):
    found = {name: weight.view(-1).view(torch.uint8) for name, weight in run.read_weights()}
    for name, master, moments in run.read_state():
        for key, value in {"master": master, **moments}.items():
            found[f"{name} {key}"] = value.reshape(-1).view(torch.uint8)
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.fixture
def zoo_folder(models):
    def make(name):
        folder = models / name
        return folder if folder.exists() else zoo.tiny_model_folder(name, folder)

    return make


# -- on the caller's thread ---------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_slabs", [1, 3])
def test_on_shared_cores_the_thread_that_computes_also_updates(zoo_folder, tmp_path, monkeypatch, gradient_slabs):
    """With one slab for gradients it can only go on computing once it has updated: it must not wait for itself."""
    threads, plain = [], Updater.update

    def spy(self, *args, in_team=False, **kwargs):
        threads.append((threading.current_thread(), in_team))
        plain(self, *args, in_team=in_team, **kwargs)

    monkeypatch.setattr(Updater, "update", spy)
    read_state = Engine._read_state

    def late(engine, op):  # so that the next gradient is made before this one's update can run
        time.sleep(0.02)
        return read_state(engine, op)

    monkeypatch.setattr(Engine, "_read_state", late)
    with open_run(**options(zoo_folder("llama"), tmp_path / "run", keep_nothing_in_memory=True)) as run:
        run.reserve(parity.batches(1, 2)[0])
        run._ready(parity.batches(1, 2)[0])._gradient_pool._free = deque(
            list(run._engine._gradient_pool._free)[:gradient_slabs]
        )
        for step in parity.batches(2, 2):
            run.step(step)
        during = list(threads)
    assert during
    here = sum(one == (threading.current_thread(), True) for one in during)
    assert here > len(during) / 2  # what is left between two steps is the lane's own thread's
    assert all((thread is threading.current_thread()) == in_team for thread, in_team in threads)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("clip", ["auto", "speculative"])
def test_updates_let_into_a_blocks_backward_change_no_bit(zoo_folder, folder_in_memory, monkeypatch, name, clip):
    inside, updates, plain_let, plain_update = [False], [], Engine._let_updates_in, Engine._update

    def let(engine):
        lane = engine.lanes._lanes["cpu_update"]
        until = time.monotonic() + 0.02  # long enough for a piece's state to arrive, mostly
        while not (lane._tasks and lane._tasks[0].can_run()) and time.monotonic() < until:
            time.sleep(0.001)
        inside[0] = True
        plain_let(engine)
        inside[0] = False

    def update(engine, op):
        updates.append((inside[0], op.key.unit))
        plain_update(engine, op)

    monkeypatch.setattr(Engine, "_let_updates_in", let)
    monkeypatch.setattr(Engine, "_update", update)
    paths = []
    difference = parity.compare(
        zoo_folder(name), parity.batches(3, 2), directory=folder_in_memory,
        run={"keep_nothing_in_memory": True, "clip": clip}, plan=lambda size, plan: replace(plan, state_slabs=2),
        settings={"max_grad_norm": None if clip == "auto" else 1.0},
        watch=lambda run: paths.append(run._updater.path),
    )  # fmt: skip
    assert difference is None
    if paths[-1] == "native":  # where there is no compiler nothing is let in
        assert sum(within for within, _ in updates) > len(updates) / 10


@pytest.mark.parametrize("why", ["room for state", "a loss scale", "no native kernel", "memory of its own"])
def test_nothing_is_let_in_where_it_does_not_pay_or_needs_memory(zoo_folder, tmp_path, monkeypatch, why):
    inside = []
    monkeypatch.setattr(Lanes, "serve_ready", lambda lanes: inside.append(1))
    changes = {"wire_dtype": "fp16"} if why == "a loss scale" else {}
    if why == "no native kernel":
        monkeypatch.setattr(Updater, "path", "torch: no compiler")
    if why == "memory of its own":
        changes = {"device": "virtual"}
    monkeypatch.setattr(Pool, "is_exhausted", lambda pool: why != "room for state")
    with open_run(**options(zoo_folder("llama"), tmp_path / "run", keep_nothing_in_memory=True, **changes)) as run:
        run.step(parity.batches(1, 2)[0])
    assert not inside


def test_a_step_inside_no_grad_and_autocast_is_the_same_step(zoo_folder, tmp_path):
    found, (one, two) = [], parity.batches(2, 2)
    for name in ("plainly", "inside"):
        with open_run(**options(zoo_folder("llama"), tmp_path / name)) as run:
            if name == "inside":
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                    run.step(one)
                with torch.inference_mode():
                    run.step(two)
            else:
                run.step(one)
                run.step(two)
            found.append(everything(run))
    assert_same(*found)


HELPERS = """
import os, threading, time, torch
from lohan.engine.run import open_run
from lohan.testing import zoo

def native_threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
folder = zoo.tiny_model_folder("llama", {folder!r}, hidden_size=256)
data = zoo.random_batches(64, num_micro_batches=3, batch=2, seq=200, seed=1)
before = native_threads()
with open_run(model=folder, ssd=[{folder!r} + "/run"], host_memory="400MB", device="cpu", learning_rate=1e-3) as run:
    for _ in range(2):
        run.step(data)
    run.drain()  # an update's own threads live as long as its call, a micro-batch's helpers a moment longer
    for _ in range(100):
        during = native_threads()
        if during == before:
            break
        time.sleep(0.05)
assert during == before, (before, during)
"""


def test_a_run_on_the_cpu_brings_no_helpers_of_its_own(tmp_path):
    code = HELPERS.format(folder=str(tmp_path / "model"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# -- stopping and going on ----------------------------------------------------------------------------


def train(data, segments, **opened):
    """Train in segments of so many steps, each a run of its own. Returns all results and the final state."""
    results = []
    for number, count in enumerate(segments):
        with open_run(**opened) as run:
            assert run.step_number == len(results)
            if number == 0 and run._scale is not None:
                run._scale = LossScale(scale=2.0**22)  # overflows a few times
            for step in data[len(results) : len(results) + count]:
                out = run.step(step)
                results.append((out.loss, out.grad_norm, out.skipped))
            final = everything(run)
    return results, final


@pytest.mark.parametrize(
    ("commit_every", "clip", "device", "wire"),
    [
        (1, "deferred", "cpu", "bf16"),
        (3, "deferred", "virtual", "bf16"),
        (1, "speculative", "virtual", "fp16"),
        (3, "speculative", "cpu", "bf16"),
        (3, "deferred", "cpu", "fp16"),
    ],
)
def test_a_run_that_is_stopped_and_gone_on_with_is_the_same_run(
    commit_every, clip, device, wire, zoo_folder, folder_in_memory
):
    folder, data = zoo_folder("gpt2"), parity.batches(6, 2)  # with dropout: random numbers must go on too
    settings = {
        "commit_every": commit_every, "clip": clip, "device": device, "wire_dtype": wire, "max_grad_norm": 2.5,
        "lr_schedule": "linear", "warmup_steps": 2, "total_steps": 8,
        "keep_nothing_in_memory": device == "cpu",
    }  # fmt: skip
    expected = train(data, [6], **options(folder, folder_in_memory / "whole", **settings))
    actual = train(data, [2, 3, 1], **options(folder, folder_in_memory / "parts", **settings))
    assert actual[0] == expected[0]
    assert_same(actual[1], expected[1])
    assert wire != "fp16" or {True, False} == {skipped for _, _, skipped in expected[0]}


def _train_until_killed(data, opened, seconds):
    torch.set_num_threads(1)

    def kill():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    with open_run(**opened) as run:
        threading.Thread(target=kill, daemon=True).start()
        while True:
            for step in data[run.step_number :]:
                run.step(step)
            time.sleep(60)


@pytest.mark.parametrize(("commit_every", "clip"), [(1, "speculative"), (3, "deferred")])
def test_a_run_that_is_killed_goes_on_from_its_last_commit_with_the_same_bits(
    commit_every, clip, zoo_folder, folder_in_memory
):
    folder, data = zoo_folder("gpt2"), parity.batches(8, 1)
    settings = {"commit_every": commit_every, "clip": clip, "max_grad_norm": 2.5}
    expected = train(data, [8], **options(folder, folder_in_memory / "whole", **settings))
    killed = options(folder, folder_in_memory / "killed", **settings)
    late = {**killed, "store_files": LateFiles(0, 0.02), "device": "virtual"}
    late["virtual"] = VirtualOptions(delay_seed=0, max_delay_seconds=0.02)
    context = multiprocessing.get_context("fork")
    found = []
    for seconds in (0.35, 0.8):
        child = context.Process(target=_train_until_killed, args=(data, late, seconds))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        with open_run(**killed) as run:
            found.append(run.step_number)
            assert run.step_number % commit_every == 0
    with open_run(**killed) as run:
        for step in data[run.step_number :]:
            run.step(step)
        assert_same(everything(run), expected[1])


def test_other_settings_or_another_model_are_refused_with_both_values(zoo_folder, folder_in_memory):
    opened = options(zoo_folder("llama"), folder_in_memory / "run")
    with open_run(**opened) as run:
        run.step(parity.batches(1, 1)[0])
    with (
        pytest.raises(ConfigError, match=r"optimizer.*'adamw'.*'sgd'|state"),
        open_run(**{**opened, "optimizer": "sgd"}),
    ):
        pass
    with pytest.raises(ConfigError, match="fp32"), open_run(**{**opened, "state_format": "fp32"}):
        pass
    with pytest.raises(LohanError, match=r"another|was made"), open_run(**{**opened, "model": zoo_folder("gpt_neox")}):
        pass
    with open_run(**opened) as run:
        assert run.step_number == 1


# -- evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "device", "clip", "memory"),
    [
        ("gpt2", "cpu", "deferred", True),
        ("qwen3", "virtual", "speculative", False),
        ("opt", "virtual", "deferred", True),
    ],
)
def test_evaluation_equals_plain_pytorch_and_leaves_training_alone(
    model, device, clip, memory, zoo_folder, folder_in_memory
):
    folder, data = zoo_folder(model), parity.batches(3, 2)
    other = parity.batches(1, 3, seed=9)[0]
    settings = {"learning_rate": 1e-3, "max_grad_norm": 2.0}
    oracle = Oracle(folder, **parity.oracle_settings(settings))
    opened = options(folder, folder_in_memory / "run", device=device, clip=clip, keep_nothing_in_memory=memory)
    with open_run(**{**opened, **settings, "versions": 3, "commit_every": 2}) as run:
        assert run.evaluate(other) == oracle.evaluate(other)
        for step in data:
            expected, actual = oracle.step(step), run.step(step)
            assert (actual.loss, actual.grad_norm) == (expected.loss, expected.grad_norm)
            assert run.evaluate(other) == oracle.evaluate(other)
            assert run.evaluate(step[:1]) == oracle.evaluate(step[:1])
        assert parity.compare_state(oracle, run) is None


# -- memory -------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_names_one_that_works(zoo_folder, folder_in_memory):
    opened = options(zoo_folder("llama"), folder_in_memory / "run")
    step = parity.batches(1, 2)[0]
    with pytest.raises(PlanInfeasible) as caught, open_run(**{**opened, "host_memory": "40MB"}) as run:
        run.step(step)
    needed = re.search(r"Set host_memory to ([\d.]+ ?[KMGi]*B)", str(caught.value))
    assert needed is not None
    with open_run(**{**opened, "host_memory": needed[1].replace(" ", "")}) as run:
        assert run.step(step).step == 1


def test_block_inputs_wait_on_ssd_where_host_memory_is_short(zoo_folder, folder_in_memory):
    folder = zoo_folder("llama")
    data = [zoo.random_batches(257, num_micro_batches=16, batch=2, seq=256, seed=3, step=step) for step in (1, 2)]
    opened = options(folder, folder_in_memory / "run")
    with pytest.raises(PlanInfeasible) as refused, open_run(**{**opened, "host_memory": "1MB"}) as run:
        run.step(data[0])
    least = round(1.02 * refused.value.least_bytes)  # other needs grow a little with it
    with open_run(**{**opened, "host_memory": least}) as run:
        run.step(data[0])
        assert set(run.plan.inputs) == {"device", "ssd"}
    assert parity.compare(folder, data, directory=folder_in_memory / "other", run={"host_memory": least}) is None


@pytest.mark.parametrize("clip", ["deferred", "speculative"])
def test_micro_batches_may_grow_and_shrink_between_steps(clip, zoo_folder, folder_in_memory):
    sizes = [(1, 8), (2, 8), (1, 16), (3, 16), (1, 4)]
    data = [
        zoo.random_batches(257, num_micro_batches=count, batch=2, seq=seq, seed=3, step=step)
        for step, (count, seq) in enumerate(sizes, 1)
    ]
    found = parity.compare(
        zoo_folder("llama"), data, directory=folder_in_memory / "run",
        run={"clip": clip, "commit_every": 3, "versions": 3}, settings={"max_grad_norm": 2.0},
    )  # fmt: skip
    assert found is None


# -- failures -----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_step_micro_batch_and_unit_and_is_not_committed(folder_in_memory):
    model = small_models.Small()
    with torch.no_grad():
        model.embedding.weight[5] = float("nan")
    data = parity.batches(3, 2)
    for step, micro_batches in enumerate(data, 1):
        for index, batch in enumerate(micro_batches):
            batch["input_ids"][batch["input_ids"] == 5] = 6
            if (step, index) == (2, 1):
                batch["input_ids"][0, 3] = 5
    opened = options(model, folder_in_memory / "run")
    with open_run(**opened) as run:
        run.step(data[0])
        with pytest.raises(NonFinite, match=r"step 2, micro-batch 1") as caught:
            run.step(data[1])
    assert (caught.value.step, caught.value.micro_batch, caught.value.unit) == (2, 1, "head")
    with open_run(**options(small_models.Small(), folder_in_memory / "run")) as run:
        assert run.step_number == 1
        assert run.step(data[2]).step == 2


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_an_exception_in_the_models_code_reaches_the_caller_and_leaves_no_thread(device, folder_in_memory):
    before = set(threading.enumerate())
    small_models.Failing.calls = 0
    data = parity.batches(3, 2)
    opened = options(small_models.Failing(), folder_in_memory / "run", device=device)
    with open_run(**opened) as run:
        run.step(data[0])
        with pytest.raises(ZeroDivisionError, match="own code"):
            run.step(data[1])
        for call in (lambda: run.step(data[2]), lambda: run.evaluate(data[2]), run.commit):
            with pytest.raises(LohanError, match=r"stopped after step 1.*ZeroDivisionError(.|\n)*goes on from step 1"):
                call()
    assert [t for t in threading.enumerate() if t not in before and t.name.startswith("lohan")] == []
    with open_run(**options(small_models.Small(), folder_in_memory / "run")) as run:
        assert run.step_number == 1


def test_threads_end_with_the_run(zoo_folder, folder_in_memory):
    before = set(threading.enumerate())
    with open_run(**options(zoo_folder("llama"), folder_in_memory / "run")) as run:
        run.step(parity.batches(1, 4)[0])
        assert any(thread.name.startswith("lohan") for thread in threading.enumerate())
    assert set(threading.enumerate()) <= before


def test_the_model_is_as_before_when_the_run_is_over(folder_in_memory):
    model = small_models.Small()
    forward = [block.forward.__func__ for block in model.blocks]
    with open_run(**options(model, folder_in_memory / "run")) as run:
        run.step(parity.batches(1, 1)[0])
    assert [block.forward.__func__ for block in model.blocks] == forward
    assert all("forward" not in block.__dict__ for block in model.blocks)


# -- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("model", [small_models.SharedArgument, small_models.TuplesAndDicts, small_models.NeverUsed])
def test_awkward_models_get_all_their_gradients(model, device, folder_in_memory):
    found = parity.compare(
        model(), parity.batches(3, 3), directory=folder_in_memory / "run", run={"device": device},
        settings={"max_grad_norm": 0.5, "weight_decay": 0.1},
    )  # fmt: skip
    assert found is None


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_an_argument_that_joins_embedding_and_blocks_gets_its_gradient_up_to_rounding(device, folder_in_memory):
    """Its parts reach the embedding at two times, so they are not added in the order of plain PyTorch."""
    data, settings = parity.batches(4, 2), {"learning_rate": 1e-3, "wire_dtype": "fp32", "max_grad_norm": None}
    oracle = Oracle(small_models.JoinedArgument(), **parity.oracle_settings(settings))
    opened = options(small_models.JoinedArgument(), folder_in_memory / "run", device=device, **settings)
    with open_run(**opened) as run:
        for step in data:
            expected, actual = oracle.step(step), run.step(step)
            assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
            assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: small_models.BlockTwice(), r"blocks\.2 is called 2 times"),
        (lambda: small_models.OutOfOrder(), r"blocks\[2\].*where blocks\[0\] was expected|order"),
        (lambda: small_models.Small(small_models.KeepsInside), r"blocks\.0.*not the output of any module"),
    ],
)
def test_what_cannot_be_streamed_is_refused_by_name(model, message, folder_in_memory):
    with pytest.raises(ModelError, match=message), open_run(**options(model(), folder_in_memory / "run")) as run:
        run.step(parity.batches(1, 1)[0])


def test_layers_that_are_skipped_are_refused(folder_in_memory):
    folder = zoo.tiny_model_folder("opt", folder_in_memory / "model", layerdrop=0.9)
    step = parity.batches(1, 8)[0]
    with pytest.raises(ModelError, match=r"skipped \(layer drop\)"):
        with open_run(**options(folder, folder_in_memory / "run")) as run:
            run.step(step)


def test_a_model_without_anything_to_train_is_refused(folder_in_memory):
    with pytest.raises(ConfigError, match=r"frozen is '\.' and nothing is left to train"):
        with open_run(**options(small_models.Small(), folder_in_memory / "run", frozen=".")):
            pass


def test_a_step_without_labels_or_micro_batches_is_refused_and_the_run_goes_on(folder_in_memory):
    step = parity.batches(1, 1)[0]
    with open_run(**options(small_models.Small(), folder_in_memory / "run")) as run:
        with pytest.raises(ConfigError, match="at least one micro-batch"):
            run.step([])
        with pytest.raises(ConfigError, match="Micro-batch 0 has no labels"):
            run.step([{"input_ids": step[0]["input_ids"]}])
        assert run.step(step).step == 1


def test_a_module_that_is_given_is_trained_from_its_own_weights(folder_in_memory):
    model = small_models.Small()
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with open_run(**options(model, folder_in_memory / "run", wire_dtype="fp32", state_format="fp32")) as run:
        for name, weight in run.read_weights():
            assert torch.equal(weight, expected[name])
    assert isinstance(model, nn.Module)


def test_python_s_search_for_garbage_leaves_a_long_run_alone_and_nothing_is_left_behind(zoo_folder, folder_in_memory):
    folder = zoo_folder("llama")
    assert gc.get_freeze_count() == 0
    data = parity.batches(5, 1)
    with open_run(**options(folder, folder_in_memory / "run")) as run:
        run.step(data[0])
        assert gc.get_freeze_count() == 0  # most of what lasts is not made yet
        for one in data[1:]:
            run.step(one)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()  # somebody else's wish stays theirs
    try:
        with open_run(**options(folder, folder_in_memory / "other")) as run:
            for one in data:
                run.step(one)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
