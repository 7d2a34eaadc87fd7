"""Whatever a block does: replayed, it gives the bits of plain autograd, or it is refused by name."""

import itertools

import pytest
import torch
from replay_blocks import REFUSED, RIGHT
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.engine.cut import SavedCall
from lohan.engine.devices import VirtualDevice
from lohan.engine.replay import Replayer
from lohan.engine.swap import Swapper
from lohan.engine.trees import tensors_in
from lohan.errors import ModelError
from lohan.plan.plan import Plan
from lohan.store import Arena

NAME = "model.blocks.0"


def weights_and_input():
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(8, 8, generator=generator) / 2 for _ in range(3)]
    return tensors, torch.randn(2, 6, 8, generator=generator)


def leaves(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def push(result, inputs):
    """Gradients of the inputs for fixed gradients of everything a block returned."""
    generator = torch.Generator().manual_seed(6)
    outputs = [t for t in tensors_in(result) if t.requires_grad]
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs])
    return [one.grad for one in inputs]


def plain(block):
    w, x = weights_and_input()
    *w, x = leaves([*w, x])
    torch.manual_seed(11)
    result = block(w, x)
    return [t.detach().clone() for t in tensors_in(result)], push(result, [*w, x])


def new_replayer():
    return Replayer(torch.get_rng_state, torch.set_rng_state, poison=True)


def replayed(block, keep, *, replayer=None, travel=False, during=None):
    """What plain() gives, by a recorded and a replayed run. `during` is a mode around the replay."""
    replayer = replayer or new_replayer()
    w, x = weights_and_input()
    *w, x = leaves([*w, x])
    torch.manual_seed(11)
    result, recording = replayer.record(NAME, keep, lambda: block(w, x))
    made = [t.detach().clone() for t in tensors_in(result)]
    del result
    if travel:
        away_and_back(recording, keep)
    torch.manual_seed(11)
    with during or torch.enable_grad(), replayer.replay(recording, NAME):
        result = block(w, x)
    return made, push(result, [*w, x]), recording


def away_and_back(recording, keep):
    """Send everything that is kept to host memory and bring it back; the device's memory is spoilt meanwhile."""
    plan = Plan(separate_memory=True, kept=((), tuple((op, "host") for op in keep)), host_bytes=1 << 20)
    arena = Arena(1 << 20)
    try:
        swapper = Swapper(VirtualDevice(), arena, plan, None)
        call = SavedCall((), {}, [], recording)
        swapper.out((1, 0), call)
        swapper.back((1, 0))
    finally:
        arena.close()


def same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def heavy_ops(block):
    return sum(op.heavy >= 0 for op in replayed(block, {})[2].ops)


@pytest.mark.parametrize("name", RIGHT)
def test_any_choice_of_what_is_kept_gives_the_bits_of_plain_autograd(name, monkeypatch):
    monkeypatch.setattr("lohan.engine.swap._SMALL_BYTES", 0)
    block = RIGHT[name]
    outputs, gradients = plain(block)
    count = min(heavy_ops(block), 4)
    assert all(t.isfinite().all() for t in outputs)
    for kept in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(count + 1)):
        for travel in (False, True) if kept else (False,):
            made, found, _ = replayed(block, dict.fromkeys(kept, "host"), travel=travel)
            same(made, outputs)
            same(found, gradients)


@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_cannot_be_repeated_is_refused_by_name(name):
    block, text = REFUSED[name]
    with pytest.raises(ModelError, match=text) as refusal:
        replayed(block, {})
    assert NAME in str(refusal.value)


# -- how much is computed again -------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Sees what is really computed: it lies below the replay."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    @property
    def heavy(self):
        return [n for n in self.names if n in ("mm", "addmm", "bmm", "baddbmm", "convolution") or "attention" in n]


def computed_again(block, keep):
    counter = Counter()
    recording = replayed(block, keep, during=counter)[2]
    return counter, recording


def transformer(w, x):
    q, k, v = ((functional.layer_norm(x, (8,)) @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 8)
    x = x + y @ w[0]
    return x + functional.gelu(functional.layer_norm(x, (8,)) @ w[1]) @ w[2]


def test_recompute_stops_where_backward_needs_no_more():
    heavy = heavy_ops(transformer)
    assert heavy == 7
    counter, _ = computed_again(transformer, {})
    assert len(counter.heavy) == heavy - 1  # nobody reads what the last projection gave
    assert counter.names.count("add") == 1  # nor what it is added to


def test_everything_kept_leaves_no_heavy_operator_to_compute():
    counter, _ = computed_again(transformer, dict.fromkeys(range(7), "device"))
    assert counter.heavy == []


def test_what_was_computed_for_something_kept_is_not_computed_again():
    attention = 3
    counter, _ = computed_again(transformer, {attention: "device"})
    assert len(counter.heavy) == 5  # q, k and v are needed by attention's own backward
    counter, _ = computed_again(lambda w, x: (((x @ w[0]) @ w[1].detach()) @ w[2].detach()).sin(), {2: "host"})
    assert counter.heavy == []


def test_outputs_that_nobody_reads_are_never_kept():
    recording = replayed(transformer, dict.fromkeys(range(7), "host"))[2]
    last = max(number for number, op in enumerate(recording.ops) if op.heavy >= 0)
    assert {recording.ops[number].heavy for number in recording.kept} == {0, 1, 2, 3, 4, 5}
    assert last not in recording.kept
    assert replayed(lambda w, x: x + x @ w[0], {0: "host"})[2].kept == {}


def test_operators_with_several_outputs_are_left_out_too():
    def block(w, x):
        with torch.no_grad():
            shift = functional.layer_norm(x @ w[0], (8,))
        return x + shift

    counter, _ = computed_again(block, {})
    assert counter.heavy == []
    assert "native_layer_norm" not in counter.names


@pytest.mark.parametrize("block", ["custom_function_that_stashes", "tolist_steers", "tensor_hook_that_looks_outside"])
def test_what_cannot_be_seen_through_is_computed_in_whole_but_for_what_is_kept(block):
    heavy = heavy_ops(RIGHT[block])
    counter, recording = computed_again(RIGHT[block], {})
    assert recording.opaque
    assert len(counter.heavy) == heavy
    counter, _ = computed_again(RIGHT[block], {0: "host"})
    assert len(counter.heavy) == heavy - 1


def test_a_block_may_be_opaque_in_one_run_and_not_in_the_next():
    def block(w, x):
        return custom(w, x) if choice[0] else (x @ w[0]).sin() + x @ w[1]

    replayer, custom = new_replayer(), RIGHT["custom_function_that_stashes"]
    for choice in ([False], [True], [False], [True]):
        outputs, gradients = plain(block)
        made, found, recording = replayed(block, {}, replayer=replayer)
        same(made, outputs)
        same(found, gradients)
        assert recording.opaque == choice[0]
