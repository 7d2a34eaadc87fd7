"""The oracle against what it stands for: an ordinary Hugging Face loop, torch's own GradScaler, hand-counted bits."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from lohan.testing.oracle import Oracle, find_blocks, round_to_wire, unit_seed
from lohan.testing.zoo import NAMES, random_batches, tiny_model, tiny_model_folder

FP32 = {"wire_dtype": torch.float32, "compute_dtype": torch.float32}
BLOCKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "gpt_neox": "gpt_neox.layers"}


@pytest.fixture(autouse=True)
def _one_thread():
    """Operators this small lose far more to waking a second thread than they gain, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(step=1, *, num_micro_batches=2, ragged=False):
    return random_batches(257, num_micro_batches=num_micro_batches, batch=2, seq=16, seed=5, step=step, ragged=ragged)


def hugging_face_loop(model, steps, *, max_grad_norm, learning_rate=1e-3, weight_decay=0.1):
    """What a user would write. Returns the losses, the norms and the optimizer."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        fused=True,
    )
    model.train()
    losses, norms = [], []
    for micro_batches in steps:
        num_items = sum((b["labels"][..., 1:] != -100).sum() for b in micro_batches)
        total = 0.0
        for batch in micro_batches:
            loss = model(**batch, use_cache=False, num_items_in_batch=num_items).loss
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, optimizer


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral", "mixtral-router", "gpt2"])
def test_in_fp32_without_dropout_and_tying_it_is_an_ordinary_hugging_face_loop(name, ragged):
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gpt2" else {}
    model = tiny_model(name, tied=False, **quiet)
    oracle = Oracle(model, **FP32, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    steps = [batches(step, num_micro_batches=3, ragged=ragged) for step in range(1, 4)]

    losses, norms, optimizer = hugging_face_loop(model, steps, max_grad_norm=1.0)
    reported = [oracle.step(micro_batches) for micro_batches in steps]

    assert [out.loss for out in reported] == losses
    assert [out.grad_norm for out in reported] == norms
    assert max(norms) > 1.0  # so that clipping had something to do
    weights, moments = oracle.weights(), oracle.moments()
    for key, parameter in model.named_parameters():
        assert torch.equal(weights[key], parameter), key
        assert torch.equal(moments[key]["exp_avg"], optimizer.state[parameter]["exp_avg"]), key
        assert torch.equal(moments[key]["exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"]), key


@pytest.mark.parametrize("name", NAMES)
def test_every_zoo_model_trains(name, tmp_path):
    oracle = Oracle(tiny_model_folder(name, tmp_path), learning_rate=1e-2, max_grad_norm=1.0)
    losses = [oracle.step(batches(ragged=True)).loss for _ in range(4)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", NAMES)
def test_the_same_run_gives_the_same_bits_and_leaves_the_global_random_state_alone(name):
    model = tiny_model(name)
    torch.manual_seed(1)
    first = Oracle(model, seed=7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = Oracle(model, seed=7)
    for step in (1, 2):
        assert first.step(batches(step)) == second.step(batches(step))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first.masters(), second.masters())


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_dropout_follows_the_seed(name):
    model = tiny_model(name)
    assert Oracle(model, seed=1).step(batches()).loss != Oracle(model, seed=2).step(batches()).loss
    assert Oracle(model, seed=1).evaluate(batches()) == Oracle(model, seed=2).evaluate(batches())


def test_every_unit_is_seeded_for_itself():
    """Block 1's dropout must not notice how many random numbers block 0 took."""

    class Noisy(nn.Module):
        def __init__(self, drawn_by_block_0):
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.drawn = [drawn_by_block_0, 3]
            self.seen = []

        def forward(self, labels):
            self.seen.append(torch.rand(1).item())
            x = torch.ones(4)
            for block, count in zip(self.h, self.drawn, strict=True):
                x = block(x)
                self.seen.append(torch.rand(count)[0].item())
            return (x.sum(),)

    seen = []
    for drawn in (1, 100):
        oracle = Oracle(Noisy(drawn), seed=9)
        oracle.step([{"labels": torch.tensor([1, 1])}] * 2)
        seen.append(oracle.model.seen)
    assert seen[0] == seen[1]
    expected = []
    for micro_batch in (0, 1):
        for unit in (0, 1, 3):  # the draw after block 1 belongs to what comes after the blocks
            source = torch.Generator().manual_seed(unit_seed(9, 1, micro_batch, unit))
            expected.append(torch.rand(1, generator=source).item())
    assert seen[0] == expected


def test_a_tied_weight_gets_the_heads_sum_plus_the_embeddings_sum():
    model = tiny_model("qwen3")
    oracle = Oracle(model, **FP32)
    assert "lm_head.weight" not in oracle.weights()
    oracle.step(batches(num_micro_batches=3))

    untied = tiny_model("qwen3", tied=False)
    untied.load_state_dict(model.state_dict())
    apart = Oracle(untied, **FP32)
    apart.step(batches(num_micro_batches=3))
    head, embedding = (apart.last_gradients[key] for key in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(oracle.last_gradients["model.embed_tokens.weight"], head + embedding)

    hugging_face_loop(model, [batches(num_micro_batches=3)], max_grad_norm=math.inf, weight_decay=0.0)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(oracle.weights()[key], parameter.detach(), rtol=0, atol=2e-4)


def test_both_uses_of_a_tied_weight_see_the_update():
    oracle = Oracle(tiny_model("qwen3"))
    oracle.step(batches())
    weight = oracle.weights()["model.embed_tokens.weight"].float()
    assert torch.equal(oracle.model.lm_head.weight, weight)
    assert torch.equal(oracle.model.model.embed_tokens.weight, weight)


def test_wire_casts_happen_where_the_specification_says():
    """One step of SGD by hand: gradients rounded to even, masters exact, weights rounded away from zero on ties."""
    model = tiny_model("llama")
    oracle = Oracle(model, optimizer="sgd", learning_rate=0.5)
    gradients = copy.deepcopy(model)
    num_items = sum((b["labels"][..., 1:] != -100).sum() for b in batches())
    for batch in batches():
        gradients(**batch, use_cache=False, num_items_in_batch=num_items).loss.backward()
    oracle.step(batches())
    for key, parameter in gradients.named_parameters():
        master = torch.add(parameter.detach(), parameter.grad.bfloat16().float(), alpha=-0.5)
        torch.testing.assert_close(oracle.masters()[key], master, rtol=0, atol=1e-7)
        assert torch.equal(oracle.last_gradients[key], parameter.grad.bfloat16().float())
        assert torch.equal(oracle.weights()[key], round_to_wire(oracle.masters()[key], torch.bfloat16))
        assert torch.equal(dict(oracle.model.named_parameters())[key], oracle.weights()[key].float())


def test_a_master_starts_as_the_files_value_even_where_the_wire_cannot_hold_it():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0 + 2.0**-20)
    oracle = Oracle(model)
    assert torch.equal(oracle.masters()["lm_head.weight"], model.lm_head.weight)
    assert (oracle.weights()["lm_head.weight"] == 1.0).all()
    assert (oracle.model.lm_head.weight == 1.0).all()


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1.0
        (0x3F808000, 0x3F81),  # a tie above an even number: to even would give 0x3F80
        (0x3F818000, 0x3F82),  # a tie above an odd one
        (0x3F807FFF, 0x3F80),  # just below a tie
        (0x3F808001, 0x3F81),  # just above it
        (0xBF808000, 0xBF81),  # a negative tie: away from zero
        (0x3FFFFFFF, 0x4000),  # the carry moves the exponent
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),  # minus zero
        (0x00008000, 0x0001),  # a tie among the subnormals
        (0x00007FFF, 0x0000),
        (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
        (0x7F7F8000, 0x7F80),  # and the first that does not
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_rounding_to_bf16(bits, rounded):
    value = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    assert round_to_wire(value, torch.bfloat16).view(torch.uint16).item() == rounded


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001, 0xFFC12345])
def test_rounding_to_bf16_keeps_nan(bits):
    value = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    assert round_to_wire(value, torch.bfloat16).isnan().all()


def test_rounding_to_bf16_differs_from_torch_on_every_second_tie_and_nowhere_else():
    high = torch.arange(0x10000, dtype=torch.int64) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        value = (high + low).to(torch.uint32).view(torch.float32)
        value = value[~value.isnan()]
        ours, theirs = round_to_wire(value, torch.bfloat16), value.to(torch.bfloat16)
        differs = ours.view(torch.int16) != theirs.view(torch.int16)
        is_even = (value.view(torch.int32) >> 16) & 1 == 0
        finite = value.isfinite()
        expected = finite & is_even if low == 0x8000 else torch.zeros_like(finite)
        assert torch.equal(differs, expected), hex(low)


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale():
    oracle = Oracle(tiny_model("llama"), wire_dtype=torch.float16, loss_scale="dynamic")
    oracle.scale = 2.0**40
    oracle.step(batches(1))
    assert oracle.num_updates() == {}
    before = oracle.masters()
    out = oracle.step(batches(2))
    assert out.skipped
    assert out.grad_norm is None
    assert math.isfinite(out.loss)
    assert oracle.scale == 2.0**38
    assert_same(oracle.masters(), before)

    oracle.scale = 1024.0
    assert not oracle.step(batches(3)).skipped
    assert oracle.scale == 1024.0
    assert set(oracle.num_updates().values()) == {1}
    assert oracle.num_steps == 3


def test_a_power_of_two_scale_changes_no_bit_in_fp32():
    plain = Oracle(tiny_model("llama"), **FP32, max_grad_norm=1.0)
    scaled = Oracle(tiny_model("llama"), **FP32, max_grad_norm=1.0, loss_scale=1024.0)
    assert plain.step(batches()) == scaled.step(batches())
    assert_same(plain.masters(), scaled.masters())
    assert scaled.scale == 1024.0


def test_the_dynamic_scale_moves_as_torchs_grad_scaler_does(monkeypatch):
    monkeypatch.setattr("lohan.testing.oracle._GROWTH_INTERVAL", 3)
    oracle = Oracle(tiny_model("llama"), wire_dtype=torch.float16, loss_scale="dynamic")
    assert oracle.scale == torch.amp.GradScaler("cpu").get_scale()
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    for overflowed in (0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0):
        oracle._adjust_scale(bool(overflowed))
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflowed)), 2.0, 0.5, 3)
        assert oracle.scale == scale.item()


def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_and_names_the_place():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(FloatingPointError, match="Step 1, micro-batch 0: the loss"):
        Oracle(model).step(batches())

    class Cliff(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(1, 1, bias=False)])
            nn.init.zeros_(self.h[0].weight)

        def forward(self, labels):
            return (self.h[0](torch.ones(1)).sum().abs().sqrt(),)  # 0 at 0, with slope 0 * infinity

    with pytest.raises(FloatingPointError, match=r"Step 1: the gradient of h\.0\.weight"):
        Oracle(Cliff()).step([{"labels": torch.tensor([1, 1])}])


def test_frozen_parameters_stay_and_the_others_do_not_notice():
    model = tiny_model("llama")
    oracle = Oracle(model, frozen=r"embed_tokens|layers\.1\.", learning_rate=1e-2)
    before = oracle.weights()
    oracle.step(batches())
    after = oracle.weights()
    frozen = {key for key in before if "embed_tokens" in key or "layers.1." in key}
    assert {key for key in before if torch.equal(before[key], after[key])} == frozen
    assert oracle.masters().keys() == before.keys() - frozen

    free = Oracle(model, learning_rate=1e-2)
    free.step(batches())
    assert_same(oracle.masters(), {key: free.masters()[key] for key in oracle.masters()})


def test_a_parameter_that_never_gets_a_gradient_is_left_alone():
    model = tiny_model("llama")
    model.unused = nn.Parameter(torch.ones(3, 3))
    oracle = Oracle(model, weight_decay=0.1)
    oracle.step(batches())
    assert torch.equal(oracle.masters()["unused"], torch.ones(3, 3))
    assert "unused" not in oracle.moments()


def test_weight_decay_leaves_norms_and_biases_alone():
    steps = [batches()]
    results = [Oracle(tiny_model("opt"), weight_decay=decay) for decay in (0.0, 0.5)]
    for oracle in results:
        for micro_batches in steps:
            oracle.step(micro_batches)
    without, with_decay = (oracle.masters() for oracle in results)
    assert {key for key in without if torch.equal(without[key], with_decay[key])} == {
        key for key in without if without[key].ndim < 2
    }


def test_bf16_moments_are_rounded_after_each_update_and_split_is_fp32():
    results = {}
    for state_format in ("fp32", "split", "bf16-moments"):
        oracle = Oracle(tiny_model("llama"), state_format=state_format)
        for step in (1, 2):
            oracle.step(batches(step))
        results[state_format] = oracle
    assert_same(results["fp32"].masters(), results["split"].masters())
    for moments in results["bf16-moments"].moments().values():
        for moment in moments.values():
            assert torch.equal(moment, moment.bfloat16().float())
    rounded, exact = (results[key].masters()["lm_head.weight"] for key in ("bf16-moments", "fp32"))
    assert not torch.equal(rounded, exact)


def test_named_schedules_are_those_of_transformers():
    oracle = Oracle(tiny_model("llama"), learning_rate=3e-3, lr_schedule="cosine", warmup_steps=2, total_steps=5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 5)
    for step in range(1, 6):
        oracle.step(batches(step))
        assert oracle._optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()


def test_a_schedule_of_ones_own_is_a_factor_of_the_step_counted_from_one():
    seen = []
    oracle = Oracle(tiny_model("llama"), learning_rate=2.0, lr_schedule=lambda step: seen.append(step) or 0.25)
    oracle.step(batches())
    oracle.step(batches())
    assert seen[0] == 1
    assert set(seen) == {1, 2}
    assert oracle._optimizer.param_groups[0]["lr"] == 0.5


def test_a_model_that_does_not_take_the_token_count_is_weighted_from_outside():
    class Deaf(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask, labels):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    model = tiny_model("llama")
    deaf, hearing = Oracle(Deaf(model)), Oracle(model)
    assert deaf.step(batches()).loss == pytest.approx(hearing.step(batches()).loss, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_every_optimizer_lowers_the_loss(optimizer):
    rate = 0.1 if optimizer == "sgd" else 1e-2
    oracle = Oracle(tiny_model("llama"), optimizer=optimizer, learning_rate=rate, momentum=0.9, max_grad_norm=1.0)
    losses = [oracle.step(batches()).loss for _ in range(4)]
    assert losses[-1] < losses[0]
    expected = {"momentum_buffer"} if optimizer == "sgd" else {"exp_avg", "exp_avg_sq"}
    assert all(moments.keys() == expected for moments in oracle.moments().values())


def test_gradients_can_be_summed_in_a_wider_dtype_than_they_are_computed_in():
    model = tiny_model("llama")
    narrow = Oracle(model, compute_dtype=torch.bfloat16)
    wide = Oracle(model, compute_dtype=torch.bfloat16, grad_dtype=torch.float32)
    assert narrow.step(batches(num_micro_batches=4)).loss == wide.step(batches(num_micro_batches=4)).loss
    assert not torch.equal(narrow.last_gradients["lm_head.weight"], wide.last_gradients["lm_head.weight"])


def test_evaluation_does_not_disturb_training():
    first, second = (Oracle(tiny_model("gpt2")) for _ in range(2))
    first.step(batches(1))
    second.step(batches(1))
    assert math.isfinite(first.evaluate(batches(9)))
    assert first.step(batches(2)) == second.step(batches(2))
    assert_same(first.masters(), second.masters())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_found(name):
    model = tiny_model(name)
    blocks = model.get_submodule(BLOCKS.get(name, "model.layers"))
    assert find_blocks(model) == list(blocks)


def test_the_callers_module_is_not_changed():
    model = tiny_model("qwen3")
    before = copy.deepcopy(model.state_dict())
    Oracle(model).step(batches())
    assert_same(model.state_dict(), before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_step_without_labels_is_refused():
    (batch,) = batches(num_micro_batches=1)
    batch["labels"].fill_(-100)
    with pytest.raises(ValueError, match="no token with a label"):
        Oracle(tiny_model("llama")).step([batch])


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(actual[key], expected[key])] == []
