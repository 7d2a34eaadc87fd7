"""Whatever a block does: replayed, it gives the bits of plain autograd, or it is refused by name."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from replay_blocks import REFUSED, RIGHT, Stash
from small_models import Mixer, Small
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lohan.engine.cut import SavedCall
from lohan.engine.devices import VirtualDevice
from lohan.engine.replay import Replayer
from lohan.engine.swap import Swapper
from lohan.engine.trees import tensors_in
from lohan.errors import ModelError
from lohan.plan.plan import Plan
from lohan.store import Arena
from lohan.testing import parity
from lohan.testing.parity import Case

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
    if not outputs:
        return []
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
    plan = Plan(separate_memory=True, kept=((), tuple(keep.items())), host_bytes=1 << 20)
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


@pytest.mark.parametrize(
    "block", ["custom_matmul", "tolist_steers", "tensor_hook_that_looks_outside", "checkpoint_inside"]
)
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


# -- any program ----------------------------------------------------------------------------------------


def _changed(change):
    """An operation that changes its first tensor, or a copy of it if it is the block's input."""

    def run(pool, w, a, b):
        target = pool[a % len(pool)]
        if a % len(pool) == 0:
            target = target.clone()
            pool.append(target)
        change(target, pool[b % len(pool)])

    return run


def _made(make):
    def run(pool, w, a, b):
        pool.append(make(pool[a % len(pool)], pool[b % len(pool)], w[(a + b) % 3]))

    return run


def _without_graph(a, b, w):
    with torch.no_grad():
        return (a * b).sin_() @ w


def _steered(a, b, w):
    return a @ w if a.sum().item() > b.sum().item() else b + w[:4]


def _attention(a, b, w):
    q, k, v = (t.reshape(1, 2, 2, 8) for t in (a, b, a @ w))
    return functional.scaled_dot_product_attention(q, k, v).reshape(4, 8)


OPERATIONS = {
    "matmul": _made(lambda a, b, w: a @ w),
    "bmm": _made(lambda a, b, w: torch.bmm(a.reshape(2, 2, 8), w.expand(2, 8, 8)).view(4, 8)),
    "addmm": _made(lambda a, b, w: torch.addmm(a, b, w)),
    "products": _made(lambda a, b, w: (a @ b.T).softmax(-1) @ a),
    "attention": _made(_attention),
    "add": _made(lambda a, b, w: a + b),
    "multiply": _made(lambda a, b, w: a * b),
    "sin": _made(lambda a, b, w: a.sin()),
    "tanh": _made(lambda a, b, w: torch.tanh(a)),
    "norm": _made(lambda a, b, w: functional.layer_norm(a, (8,), w[0])),
    "where": _made(lambda a, b, w: torch.where(a > b, a, b.sin())),
    "sort": _made(lambda a, b, w: a.sort(-1).values * b.argsort(0).float()),
    "cat": _made(lambda a, b, w: torch.cat([a[:2], b[2:]])),
    "gather": _made(lambda a, b, w: a.gather(1, b.argsort(1))),
    "copy": _made(lambda a, b, w: a.clone()),
    "detach": _made(lambda a, b, w: a.detach()),
    "reversed view": _made(lambda a, b, w: a.reshape(8, 4).T),
    "same view": _made(lambda a, b, w: a.view_as(a)),
    "half, twice": _made(lambda a, b, w: a[:, :4].repeat(1, 2)),
    "row, everywhere": _made(lambda a, b, w: a[1].expand(4, 8)),
    "dropout": _made(lambda a, b, w: functional.dropout(a, 0.3)),
    "noise": _made(lambda a, b, w: a + torch.rand_like(b)),
    "no graph": _made(_without_graph),
    "steered": _made(_steered),
    "custom": _made(lambda a, b, w: Stash.apply(a, b)),
    "checkpoint": _made(lambda a, b, w: checkpoint(lambda c: (c @ w).sin() * b, a, use_reentrant=False)),
    "add in place": _changed(lambda a, b: a.add_(b)),
    "multiply in place": _changed(lambda a, b: a.mul_(0.7)),
    "relu in place": _changed(lambda a, b: a.relu_()),
    "sigmoid in place": _changed(lambda a, b: a.sigmoid_()),
    "fill in place": _changed(lambda a, b: a.masked_fill_(b > 0.5, -0.3)),
    "rows in place": _changed(lambda a, b: a[1:3].copy_(b[:2])),
    "columns in place": _changed(lambda a, b: a.T[::3].mul_(b.T[::3])),
    "scatter in place": _changed(lambda a, b: a.scatter_(1, b.argsort(1)[:, :2], 0.5)),
    "data in place": _changed(lambda a, b: a.data.mul_(1.1)),
    "dropout in place": _changed(lambda a, b: functional.dropout(a, 0.2, inplace=True)),
}
programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=14
)


@given(programs, st.dictionaries(st.integers(0, 9), st.sampled_from(["device", "host"])), st.booleans())
@settings(max_examples=200, deadline=None)
@pytest.mark.filterwarnings("ignore:Use of")
def test_any_program_and_any_choice_give_the_bits_of_plain_autograd(program, keep, travel):
    def block(w, x):
        pool = [x[:, :2].reshape(4, 8)]
        for name, a, b in program:
            OPERATIONS[name](pool, w, a, b)
        return pool[-3:]

    try:
        outputs, gradients = plain(block)
    except RuntimeError:  # autograd itself refuses some changes in place
        reject()
    with mock.patch("lohan.engine.swap._SMALL_BYTES", 0):
        made, found, _ = replayed(block, keep, travel=travel)
    same(made, outputs)
    same(found, gradients)


# -- in a run -------------------------------------------------------------------------------------------

LENGTH = 6


class Wrapped(nn.Module):
    """One of the blocks above as a block of a model: everything it returns goes into the hidden state."""

    function = None

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 4) for _ in range(3))

    def forward(self, hidden, **shared):
        made = type(self).function(list(self.weights), hidden, **shared)
        for tensor in tensors_in(made):
            if tensor.is_floating_point() and tensor.numel():
                hidden = hidden + 0.1 * (tensor if tensor.shape == hidden.shape else tensor.float().tanh().mean())
        return hidden


class Narrow(Small):
    """A model of such blocks; 8 wide, so that all of them fit."""

    def __init__(self, block):
        super().__init__(Mixer, 1)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embedding = nn.Embedding(parity.VOCABULARY, 8)
            self.blocks = nn.ModuleList(block() for _ in range(3))
            self.head = nn.Linear(8, parity.VOCABULARY)


def block_of(function):
    return type("Block", (Wrapped,), {"function": staticmethod(function)})


def train(model, folder, device="virtual", activations="mixed", steps=2):
    data = [[{k: v[:, :LENGTH] for k, v in batch.items()} for batch in step] for step in parity.batches(steps, 2)]
    options = {"device": device, "activations": parity.activations_of(Case(activations=activations))}
    with mock.patch("lohan.engine.swap._SMALL_BYTES", 1):
        return parity.compare(model, data, directory=folder, run=options)


IN_A_RUN = [
    "adds_in_place", "changes_views_of_a_kept_output", "attention_with_several_outputs", "dropout_inside_attention",
    "item_steers", "tolist_steers", "numpy_changes", "integers_route", "custom_function_that_stashes",
    "checkpoint_inside", "module_with_hooks", "autocast_inside", "rows_nobody_gets", "inference_island",
]  # fmt: skip


@pytest.mark.parametrize("name", IN_A_RUN)
def test_a_run_of_such_blocks_is_plain_pytorch_to_the_bit(name, folder_in_memory):
    found = train(Narrow(block_of(RIGHT[name])), folder_in_memory, device=["cpu", "virtual"][len(name) % 2])
    assert found is None, str(found)


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.startswith("other_")])
def test_a_run_refuses_what_cannot_be_repeated(name, folder_in_memory):
    block, text = REFUSED[name]
    with pytest.raises(ModelError, match=text) as refusal:
        train(Narrow(block_of(block)), folder_in_memory)
    assert "blocks.0" in str(refusal.value)


class ChangesInput(Mixer):
    def forward(self, hidden):
        hidden += 1
        return super().forward(hidden)


class WithMask(Narrow):
    def __init__(self, block, between):
        super().__init__(block)
        self.between = between

    def run_blocks(self, hidden):
        mask = torch.linspace(0.5, 1, 8)
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
            mask = self.between(mask)
        return hidden


def test_a_block_that_changes_its_arguments_is_refused(folder_in_memory):
    changes_mask = block_of(lambda w, x, mask: x @ w[0] + mask.mul_(2))
    for number, model in enumerate((Small(ChangesInput), WithMask(changes_mask, lambda mask: mask))):
        with pytest.raises(ModelError, match="did not make"):
            train(model, folder_in_memory / str(number))


def test_a_model_that_changes_an_argument_between_blocks_is_refused(folder_in_memory):
    block = block_of(lambda w, x, mask: (x @ w[0] + mask).sin())
    assert train(WithMask(block, lambda mask: mask + 0.5), folder_in_memory / "right") is None
    with pytest.raises(ModelError, match="changed in place after the block had used it"):
        train(WithMask(block, lambda mask: mask.add_(0.5)), folder_in_memory / "wrong")


class Slices(Wrapped):
    """Takes and returns a view with gaps, and something empty."""

    def forward(self, hidden, part, empty):
        wide = torch.cat([hidden @ self.weights[0], part @ self.weights[1]], -1) + part.sum((0, 1)).sin().repeat(2)
        return hidden + (wide @ torch.cat([*self.weights[:2]]))[..., :8] + empty.sum(), wide[..., 3:11], wide[:0, :, :8]


class SlicedModel(Narrow):
    def run_blocks(self, hidden):
        part, empty = torch.linspace(0, 1, 8).expand(2, LENGTH, 8), torch.empty(0)
        for block in self.blocks:
            hidden, part, empty = block(hidden, part, empty)
        return hidden + part


@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("activations", ["host", "ssd"])
def test_inputs_with_gaps_and_empty_ones_are_as_they_were(device, activations, folder_in_memory):
    found = train(SlicedModel(Slices), folder_in_memory, device=device, activations=activations)
    assert found is None, str(found)
