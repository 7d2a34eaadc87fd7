"""The head in chunks is the oracle's head in chunks, to the bit, and close to the whole head."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, PhiConfig

from lohan.engine.compute import Compute
from lohan.engine.devices.budget import MemoryBudget
from lohan.engine.head_loss import HeadLoss
from lohan.engine.run import open_run
from lohan.errors import PlanInfeasible
from lohan.plan.head import CAPPED_BYTES_PER_LOGIT, LOSS_BYTES_PER_LOGIT, head_bytes, head_chunks_for
from lohan.testing import parity, zoo
from lohan.testing.late_files import QuickFiles
from lohan.testing.oracle import Oracle
from lohan.testing.parity import Case

SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@contextmanager
def in_chunks(num_chunks):
    """Runs and oracles made inside have so many chunks, whatever a plan says."""

    def compute(*args, **kwargs):
        return Compute(*args, **{**kwargs, "head_chunks": num_chunks})

    with mock.patch("lohan.engine.run.Compute", compute):
        with mock.patch("lohan.testing.parity.Oracle", partial(Oracle, head_chunks=num_chunks)):
            yield


def random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter + 0.05 * torch.randn(parameter.shape)).to(torch.bfloat16))
    return model


# -- to the bit ---------------------------------------------------------------------------------------

# 24 tokens: parts of 12, of 5 (the last has 4), of 4 (six instead of seven), of 1.
CHUNKS = (2, 5, 7, 100)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_run_in_chunks_is_the_oracle_in_chunks(name, tied, folder_in_memory):
    num_chunks = CHUNKS[(zoo.NAMES.index(name) + tied) % len(CHUNKS)]
    folder = zoo.tiny_model_folder(name, folder_in_memory / "model", tied=tied)
    data = parity.batches(3, 3, ragged=tied)
    with in_chunks(num_chunks):
        assert parity.compare(folder, data, directory=folder_in_memory / "run") is None


@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_any_number_of_chunks_and_either_device(num_chunks, device, models, folder_in_memory):
    case = Case(model="qwen3", device=device, clip="deferred", precision="fp32 fp32", frozen="a block")
    with in_chunks(num_chunks):
        assert parity.run_case(case, models, folder_in_memory) is None


@pytest.mark.parametrize(
    "config",
    [
        zoo.tiny_config("gemma3", final_logit_softcapping=5.0),
        GraniteConfig(**SIZES, logits_scaling=3.0),
        CohereConfig(**SIZES, logit_scale=0.0625),
        PhiConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    ],
    ids=["soft-cap", "divided", "multiplied", "bias"],
)
def test_what_models_do_to_their_logits_is_done_to_every_chunk(config, folder_in_memory):
    with in_chunks(5):
        assert parity.compare(random_model(config), parity.batches(3, 2), directory=folder_in_memory) is None


@pytest.mark.parametrize("name", ["llama", "mixtral-router", "gpt2"])
def test_fp16_with_loss_scale_that_overflows_at_first(name, models, folder_in_memory):
    case = Case(model=name, precision="fp16 fp32", clip="speculative", micro_batches=2)
    with in_chunks(3):
        assert parity.run_case(case, models, folder_in_memory) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_are_summed_in_the_compute_dtype(dtype, models, folder_in_memory):
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model")
    chosen = {"compute_dtype": dtype, "wire_dtype": "bf16" if dtype == torch.bfloat16 else "fp16"}
    chosen |= {"loss_scale": 64.0} if dtype == torch.float16 else {}
    with in_chunks(4):
        assert parity.compare(folder, parity.batches(2, 2), directory=folder_in_memory / "run", settings=chosen) is None


def test_a_model_that_does_not_take_the_number_of_labels(folder_in_memory):
    model = zoo.tiny_model("llama")
    model.accepts_loss_kwargs = False
    with in_chunks(5):
        assert parity.compare(model, parity.batches(3, 3), directory=folder_in_memory) is None


def test_frozen_heads_and_frozen_bodies(models, folder_in_memory):
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model")
    for number, frozen in enumerate(["lm_head", "model"]):
        with in_chunks(3):
            found = parity.compare(
                folder, parity.batches(2, 2), directory=folder_in_memory / str(number), settings={"frozen": frozen}
            )
        assert found is None


def test_a_chunk_and_a_whole_micro_batch_without_labels(folder_in_memory):
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model")
    data = parity.batches(2, 3)
    for step in data:
        step[0]["labels"][:, 2:9] = -100
        step[1]["labels"][:] = -100
    with in_chunks(6):
        assert parity.compare(folder, data, directory=folder_in_memory / "run") is None


@pytest.mark.parametrize("name", ["mixtral-router", "gpt2"])
def test_evaluation_is_chunked_too(name, folder_in_memory):
    folder = zoo.tiny_model_folder(name, folder_in_memory / "model")
    data = parity.batches(2, 2)
    oracle = Oracle(folder, head_chunks=5, learning_rate=1e-3, max_grad_norm=1.0)
    with in_chunks(5), open_run(
        model=folder, ssd=[folder_in_memory / "run"], host_memory=112 << 20, device="cpu", learning_rate=1e-3,
        piece_elements=4096, store_files=QuickFiles(),
    ) as run:  # fmt: skip
        for step in data:
            assert run.evaluate(step) == oracle.evaluate(step)
            assert run.step(step).loss == oracle.step(step).loss


# -- close to the whole head --------------------------------------------------------------------------


def head_pass(model, num_chunks, batch, *, scale=8.0, repeat=1):
    """Loss, gradient of the head's input and of all parameters, by plain autograd around the model."""
    model = copy.deepcopy(model)
    model.config.use_cache = False
    inputs = []

    def keep(module, args):
        args[0].retain_grad()
        inputs.append(args[0])

    model.get_output_embeddings().register_forward_pre_hook(keep)
    num_items = int((batch["labels"][:, 1:] != -100).sum())
    head, losses = HeadLoss(model, num_chunks), []
    for _ in range(repeat):
        with torch.random.fork_rng(), head.chunked(scale=scale, share=None, num_items=num_items):
            torch.manual_seed(5)
            loss = model(**batch, num_items_in_batch=torch.tensor(num_items)).loss
            (loss * scale).backward()
        losses.append(loss.item())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, [one.grad for one in inputs], gradients


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_whole_head_differs_by_rounding_and_only_in_its_own_gradient(name, tied):
    model = zoo.tiny_model(name, tied=tied).train()
    (batch,) = zoo.random_batches(257, num_micro_batches=1, batch=2, seq=12, seed=1)
    whole_loss, whole_hidden, whole = head_pass(model, 1, batch)
    loss, hidden, chunked = head_pass(model, 5, batch)
    assert loss[0] == pytest.approx(whole_loss[0], rel=4e-7)
    # One thread and few tokens: a row of a product does not depend on how many rows there are.
    assert torch.equal(hidden[0], whole_hidden[0])
    head_weight = next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    assert {n for n in whole if not torch.equal(whole[n], chunked[n])} <= {head_weight}
    difference = (whole[head_weight] - chunked[head_weight]).abs().max()
    assert difference <= 2e-6 * whole[head_weight].abs().max()


@pytest.mark.parametrize("num_chunks", [2, 5, 8])
def test_in_bf16_each_chunk_rounds_the_head_gradient_once_more(num_chunks):
    model = zoo.tiny_model("llama").to(torch.bfloat16).eval()
    (batch,) = zoo.random_batches(257, num_micro_batches=1, batch=2, seq=64, seed=1)
    whole_loss, whole_hidden, whole = head_pass(model, 1, batch)
    loss, hidden, chunked = head_pass(model, num_chunks, batch)
    assert loss[0] == pytest.approx(whole_loss[0], rel=4e-7)
    assert torch.equal(hidden[0], whole_hidden[0])
    difference = (whole["lm_head.weight"].float() - chunked["lm_head.weight"].float()).abs().max()
    assert difference <= num_chunks * 2**-8 * whole["lm_head.weight"].float().abs().max()


def test_the_expected_factor_saves_work_and_changes_no_bit():
    model = zoo.tiny_model("mixtral-router").eval()
    (batch,) = zoo.random_batches(257, num_micro_batches=1, batch=2, seq=12, seed=1)
    made = []
    linear = torch.nn.functional.linear

    def count(hidden, weight, bias=None):
        made.extend([hidden.shape[0]] if weight.shape[0] == 257 else [])
        return linear(hidden, weight, bias)

    with mock.patch("lohan.engine.head_loss.functional.linear", count):
        _, hidden, _ = head_pass(model, 4, batch, repeat=2)
    assert made == [6] * 12  # twice four for the first, whose factor is learned in backward; four for the second
    assert torch.equal(hidden[0], hidden[1])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    num_chunks=st.integers(2, 80),
    width=st.integers(1, 40),
    words=st.integers(2, 90),
    labelled=st.floats(0, 1),
    steps=st.lists(st.sampled_from(["cap", "divide", "multiply", "float", "shift"]), max_size=3),
    mean=st.booleans(),
    own_shift=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_any_head_in_any_chunks_is_close_to_the_whole(
    tokens, num_chunks, width, words, labelled, steps, mean, own_shift, smoothing, seed
):
    source = torch.Generator().manual_seed(seed)
    model = Head(width, words, steps, mean=mean, own_shift=own_shift, smoothing=smoothing, source=source)
    hidden = torch.randn(2, tokens, width, generator=source)
    labels = torch.randint(0, words, (2, tokens), generator=source)
    labels[torch.rand(2, tokens, generator=source) > labelled] = -100
    labels[0, -1] = 0
    if own_shift and tokens == 1:
        return
    results = []
    for chunks in (1, num_chunks):
        model.zero_grad()
        head, losses, gradients = HeadLoss(model, chunks), [], []
        for _ in range(3):
            given = hidden.clone().requires_grad_(True)
            with head.chunked(scale=None, share=1.0 if mean else None, num_items=7):
                loss = model(given, labels, 7)
                loss.backward()
            losses.append(loss.detach())
            gradients.append(given.grad)
        results.append((torch.stack(losses), torch.stack(gradients), model.head.weight.grad, model.head.bias.grad))
    for whole, chunked in zip(*results, strict=True):
        largest = float(whole.abs().max())
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6 + 1e-5 * largest, equal_nan=True)


class Head(torch.nn.Module):
    """Only a head, with one of the usual losses: summed and divided, or a mean over what it shifts itself."""

    def __init__(self, width, words, steps=(), *, mean=False, own_shift=False, smoothing=0.0, source=None):
        super().__init__()
        self.head = torch.nn.Linear(width, words)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) / width**0.5)
        self.steps, self.mean, self.own_shift, self.smoothing = steps, mean, own_shift, smoothing
        self.register_buffer("offset", torch.linspace(-1, 1, words))

    def get_output_embeddings(self):
        return self.head

    def forward(self, hidden, labels, num_items):
        logits = self.head(hidden)
        for step in self.steps:
            if step == "cap":
                logits = torch.tanh(logits / 3.0) * 3.0
            elif step == "float":
                logits = logits.float()
            elif step == "shift":
                logits = 1.0 - logits + self.offset[None, None]
            else:
                logits = logits / 1.7 if step == "divide" else torch.tensor(1.3) * logits
        if self.own_shift:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        if self.mean:
            loss = torch.nn.CrossEntropyLoss(label_smoothing=self.smoothing)
            return loss(logits.view(-1, logits.size(-1)), labels.view(-1))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "bytes_per_logit"), [((), LOSS_BYTES_PER_LOGIT), (("divide", "cap"), CAPPED_BYTES_PER_LOGIT)]
)
def test_the_head_holds_what_the_formula_says(steps, bytes_per_logit):
    tokens, words = 61, 5003
    model = Head(4, words, steps)
    labels = torch.randint(0, words, (1, tokens))
    for chunks in (2, 3, 8, 61):
        head, budget = HeadLoss(model, chunks), MemoryBudget(1 << 40)
        for _ in range(3):
            budget.reset_peak()
            hidden = torch.randn(1, tokens, 4, requires_grad=True)
            with budget.watch(), head.chunked(scale=None, share=None, num_items=tokens):
                model(hidden, labels, tokens).backward()
        predicted = head_bytes(tokens, words, chunks, bytes_per_logit=bytes_per_logit)
        held = (model.head.weight.numel() + model.head.bias.numel()) * 4
        assert predicted <= budget.peak_bytes <= predicted + held + words * 4 * 2 + 50_000


def test_a_run_on_a_device_holds_a_chunk_of_logits_and_no_more(folder_in_memory):
    tokens, words = 256, 20_000
    folder = zoo.tiny_model_folder("llama", folder_in_memory / "model", vocab_size=words, tied=True)
    batch = zoo.random_batches(words, num_micro_batches=2, batch=2, seq=tokens // 2, seed=1)
    peaks = {}
    for chunks in (1, 8):
        with in_chunks(chunks), open_run(
            model=folder, ssd=[folder_in_memory / str(chunks)], host_memory="1GB", device="virtual", gpu_memory="1GB",
            store_files=QuickFiles(),
        ) as run:  # fmt: skip
            run.step(batch)
            run.evaluate(batch)
            peaks[chunks] = run.device.peak_bytes
    whole, chunked = (head_bytes(tokens, words, n, bytes_per_logit=LOSS_BYTES_PER_LOGIT) for n in peaks)
    assert peaks[1] > whole
    assert peaks[1] - peaks[8] > 0.9 * (whole - chunked), peaks


@given(
    tokens=st.integers(1, 10**6), vocabulary=st.integers(1, 300_000), budget=st.integers(1, 1 << 36),
    bytes_per_logit=st.sampled_from([12, 14, 16]),
)  # fmt: skip
def test_the_fewest_chunks_that_fit(tokens, vocabulary, budget, bytes_per_logit):
    if budget < vocabulary * bytes_per_logit:
        with pytest.raises(PlanInfeasible, match="Raise the memory budget"):
            head_chunks_for(tokens, vocabulary, budget, bytes_per_logit=bytes_per_logit)
        return
    chunks = head_chunks_for(tokens, vocabulary, budget, bytes_per_logit=bytes_per_logit)
    assert 1 <= chunks <= tokens
    assert head_bytes(tokens, vocabulary, chunks, bytes_per_logit=bytes_per_logit) <= budget
    if chunks > 1:
        assert head_bytes(tokens, vocabulary, chunks - 1, bytes_per_logit=bytes_per_logit) > budget


_SCRIPT = """
import json, sys
peak_kib = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss has the parent's
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lohan.engine.head_loss import HeadLoss
from lohan.engine.memory import bound_allocator

bound_allocator()
torch.set_num_threads(2)
words, tokens, chunks = 152_000, 1024, int(sys.argv[1])
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=words,
                     num_key_value_heads=2, tie_word_embeddings=sys.argv[2] == "tied", use_cache=False)
model = AutoModelForCausalLM.from_config(config)
head = HeadLoss(model, chunks)

def step(length):
    ids = torch.randint(0, words, (1, length))
    with head.chunked(scale=None, share=None, num_items=length - 1):
        model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(length - 1)).loss.backward()

step(2 * chunks)  # gradients exist from here on
step(2 * chunks)
base = int(open("/proc/self/statm").read().split()[1]) * 4096
for _ in range(2):
    step(tokens)
print(json.dumps(peak_kib() * 1024 - base))
"""


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_thousand_tokens_over_152_000_words_need_less_than_half_a_gigabyte(tied):
    chunks = head_chunks_for(1024, 152_000, 400_000_000)
    command = [sys.executable, "-c", _SCRIPT, str(chunks), tied]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown < 500_000_000, (grown, chunks)
    assert 1024 * 152_000 * 4 > 500_000_000  # a single copy of the logits would be more
