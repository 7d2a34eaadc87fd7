"""What a plan takes on the device: predicted before it runs, never too little, and enforced."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lohan.engine.devices import VirtualOptions
from lohan.engine.run import open_run
from lohan.errors import PlanInfeasible
from lohan.plan.activations import Activations

BLOCKS, VOCABULARY = 4, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def choice(inputs, kept):
    """The same for every block."""
    return Activations(
        inputs=("device", *[inputs] * BLOCKS, "device"), kept=((), *[tuple(sorted(kept.items()))] * BLOCKS, ())
    )


def batches(num, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(0, VOCABULARY, (rows, 256), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


CHOICES = {
    "inputs on the device": choice("device", {}),
    "inputs in host memory": choice("host", {}),
    "inputs on ssd": choice("ssd", {}),
    "attention on the device": choice("host", {3: "device"}),
    "everything on the device": choice("device", dict.fromkeys(range(8), "device")),
    "everything in host memory": choice("host", dict.fromkeys(range(8), "host")),
    "everything on ssd": choice("ssd", dict.fromkeys(range(8), "ssd")),
    "one of each": choice("host", {0: "ssd", 3: "device", 5: "host"}),
}


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("name", CHOICES)
def test_the_predicted_peak_is_within_five_percent_and_never_too_little(name, num, model, tmp_path):
    with open_run(
        model=model, ssd=[tmp_path / "run"], host_memory="600MB", gpu_memory="1GB", device="virtual",
        activations=CHOICES[name], max_grad_norm=None, virtual=VirtualOptions(poison=False),
    ) as run:  # fmt: skip
        run.step(batches(num, 4, seed=1))
        run.device.reset_peak()
        run.step(batches(num, 4, seed=2))
        real, predicted = run.device.peak_bytes, run.planned.needs.total_bytes
    assert real <= predicted <= 1.05 * real, f"predicted {predicted:,}, real {real:,}"


def test_nothing_of_a_step_stays_on_the_device(model, tmp_path):
    with open_run(
        model=model, ssd=[tmp_path / "run"], host_memory="600MB", gpu_memory="1GB", device="virtual",
        activations=CHOICES["one of each"], max_grad_norm=None,
    ) as run:  # fmt: skip
        live = []
        for seed in range(3):
            run.step(batches(2, 2, seed=seed))
            run.drain()
            live.append(run.device.live_bytes)
    assert live[0] == live[1] == live[2]


def test_a_micro_batch_that_cannot_fit_is_refused_with_the_largest_that_can(model, tmp_path):
    with open_run(
        model=model, ssd=[tmp_path / "run"], host_memory="600MB", gpu_memory="24MB", device="virtual",
        max_grad_norm=None,
    ) as run:  # fmt: skip
        with pytest.raises(PlanInfeasible, match="Use micro-batches of") as refused:
            run.step(batches(1, 16, seed=1))
        rows = int(str(refused.value).split("Use micro-batches of ")[1].split()[0])
        assert 1 <= rows < 16
        with pytest.raises(PlanInfeasible):
            run.step(batches(1, rows + 1, seed=1))
        run.step(batches(1, rows, seed=1))  # and this one really fits
        assert run.device.peak_bytes <= 24e6
