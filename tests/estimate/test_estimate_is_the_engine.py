"""What `lohan estimate` says of a model folder on a machine is the plan the engine would run there, and its time."""

import pytest
import torch
from transformers import LlamaConfig

from lohan.engine.create import build_model
from lohan.engine.devices import open_device
from lohan.engine.planning import Planning
from lohan.engine.settings import Settings
from lohan.estimate import Question
from lohan.estimate.estimate import simulate_question
from lohan.hardware import load_machine, resize
from lohan.measure.model import profile_model
from lohan.plan.fit import Wishes
from lohan.plan.memory import budgets_of
from lohan.plan.pieces import PIECE_ELEMENTS

DECIDED = ("inputs", "kept", "head_chunks", "clip", "left_units", "gradients_on_ssd")
STAYS = ("resident_weights", "resident_state")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("1b")
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=2048, num_hidden_layers=16, intermediate_size=5504,
        num_attention_heads=32, num_key_value_heads=32, vocab_size=32000, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def engine_plan(folder, machine, rows, count, sequence):
    settings = Settings(compute_dtype="bf16")
    with open_device("virtual", memory_bytes=budgets_of(machine).gpu_bytes) as device:
        built = build_model(
            folder, settings, [], device="virtual", blocks=None, piece_elements=PIECE_ELEMENTS, trust_remote_code=False
        )
        planning = Planning(
            model=built.module, units=built.units, layouts=built.layouts, device=device, settings=settings,
            wishes=Wishes(separate_memory=True, clip="auto", versions=2, commit_every=1),
            host_bytes=machine.host_memory_bytes, machine=machine, head_chunks=None,
        )  # fmt: skip
        planned = planning.plan([{"labels": torch.empty(rows, sequence, dtype=torch.int64, device="meta")}] * count)
        return planned.plan, planning.predict(planned)


@pytest.mark.parametrize(
    ("host", "gpu", "drives", "rows", "count", "sequence"),
    [(64, 24, 1, 4, 4, 1024), (16, 8, 2, 2, 8, 512), (6, 16, 1, 1, 2, 2048)],
    ids=["much memory", "writes pile up", "little memory"],
)
def test_an_estimate_is_the_engine_s_plan(host, gpu, drives, rows, count, sequence, folder):
    machine = resize(
        load_machine("lohan-testbed"), ssds=drives, host_memory_bytes=host * 10**9, gpu_memory_bytes=gpu * 10**9
    )
    profile = profile_model(folder, sequence_length=sequence, dtype="bf16")
    question = Question(profile=profile, machine=machine, batch_size=rows * count, micro_batch_size=rows)
    estimated = simulate_question(question).planned
    plan, seconds = engine_plan(folder, machine, rows, count, sequence)
    for name in DECIDED:
        assert getattr(estimated.plan, name) == getattr(plan, name), name
    for name in STAYS:  # an estimate knows units, the engine their pieces: the last of what fits can be another
        assert len(getattr(estimated.plan, name) ^ getattr(plan, name)) <= (3 if host == 6 else 0), name
    assert estimated.seconds_per_step == pytest.approx(seconds, rel=0.03)
