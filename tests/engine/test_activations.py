"""Any choice of what is kept, where it waits and what is computed again gives the same bits."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan.engine.devices import VirtualOptions
from lohan.plan.activations import Activations
from lohan.testing import parity, zoo

MODELS = {
    "llama": {},
    "gpt2": {},  # with dropout
    "mixtral": {},
    "mixtral with router losses": {"output_router_logits": True},
    "gemma3": {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
}
MAX_OPERATORS = 12  # of one block; numbers beyond what a block has mean nothing
tiers = st.sampled_from(["device", "host", "ssd"])


@st.composite
def choices(draw):
    units = 8
    return Activations(
        inputs=tuple(draw(tiers) for _ in range(units)),
        kept=tuple(
            tuple(sorted(draw(st.dictionaries(st.integers(0, MAX_OPERATORS - 1), tiers)).items())) for _ in range(units)
        ),
        transit_bytes=1 << 20,
        host_bytes=8 << 20,
    )


@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("model", MODELS)
@given(activations=choices(), micro_batches=st.integers(1, 3), seed=st.integers(0, 1000))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_choice_gives_the_same_bits(model, device, tmp_path, activations, micro_batches, seed):
    run = {"activations": activations, "device": device}
    if device == "virtual":
        run |= {"gpu_memory": "64MB", "virtual": VirtualOptions(delay_seed=seed, max_delay_seconds=0.001)}
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    difference = parity.compare(
        zoo.tiny_model(model.split()[0], **MODELS[model]),
        parity.batches(2, micro_batches),
        directory=folder,
        run=run,
    )
    assert difference is None, str(difference)
