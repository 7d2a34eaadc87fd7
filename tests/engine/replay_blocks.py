"""Small blocks that do to their tensors what is hard to record and replay. Each takes three 8 x 8 weights and an input.

The input has the shape (2, 6, 8). RIGHT ones must give the bits of plain autograd whatever is kept of them.
"""

import random

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RIGHT = {}


def right(block):
    RIGHT[block.__name__] = block
    return block


# -- changes in place -----------------------------------------------------------------------------------


@right
def adds_in_place(w, x):
    y = x @ w[0]
    z = torch.sigmoid(y)
    y.add_(z)
    return z * (y @ w[1])


@right
def relu_in_place(w, x):
    return functional.relu_(x @ w[0]) @ w[1]


@right
def masked_fill_in_place(w, x):
    y = x @ w[0]
    y.masked_fill_(y > 0.5, -1.0)
    return (y * y) @ w[1]


@right
def index_put_in_place(w, x):
    y = x @ w[0]
    rows = torch.tensor([0, 1, 1])
    y[rows, rows] = (x @ w[1])[rows, rows] * 2
    y.index_put_((rows, rows + 1), x[rows, rows], accumulate=True)
    return y.exp()


@right
def changes_views_of_a_kept_output(w, x):
    y = x @ w[0]
    y[:, 0].mul_(2)
    y.transpose(1, 2)[:, 3:5].add_(1)
    y[..., 4:].add_(y[..., :4].detach())
    return (y * y) @ w[1]


@right
def changes_a_flat_view(w, x):
    y = x @ w[0]
    flat = y.view(-1)
    flat[3:9] = flat[20:26].detach()
    return y.sin() @ w[1]


@right
def changes_twice_what_is_kept(w, x):
    y = x @ w[0]
    y.add_(1)
    z = y.clone() @ w[1]
    y.mul_(2)
    z += y
    return z.tanh() @ w[2]


@right
def writes_into_given_memory(w, x):
    with torch.no_grad():
        made = torch.empty(2, 6, 8)
        torch.mul(x, 2.0, out=made)
        torch.matmul(made.detach(), w[0], out=made)
        other = torch.empty(0)
        torch.add(made, 1.0, out=other)
    return (x * made) @ w[1] + other * x


@right
def changes_data_behind_autograd(w, x):
    y = x @ w[0]
    y.data.mul_(0.5)
    with torch.no_grad():
        y[0] = 1.0
    return (y * y) @ w[1]


@right
def softmax_and_scatter_in_place(w, x):
    y = x @ w[0]
    mask = torch.zeros_like(y)
    mask.scatter_(-1, y.topk(3, -1).indices, 1.0)
    return (y.exp_() * mask).cumsum(-1) @ w[1]


@right
def fills_a_preallocated_result(w, x):
    result = torch.zeros_like(x)
    for row in range(2):
        result[row] = x[row] @ w[row]
    result.index_add_(0, torch.tensor([0]), (x @ w[2])[:1])
    return result.sigmoid()


@right
def clamps_in_place_after_a_view_was_saved(w, x):
    y = x @ w[0]
    z = y[..., :4] * y[..., 4:].detach()
    y = y.clone().clamp_(-0.2, 0.3)
    return (y @ w[1])[..., :4] * z


# -- views ----------------------------------------------------------------------------------------------


@right
def odd_views(w, x):
    y = x @ w[0]
    windows = y.as_strided((2, 5, 2, 8), (48, 8, 8, 1))
    wide = y[:, :1].expand(2, 6, 8)
    folded = y.unfold(1, 2, 2).sum(-1)
    flat = torch.ops.aten._unsafe_view(y.clone(), [12, 8])
    return (windows.sum(2)[:, :3] * folded) @ w[1], (wide * y).permute(2, 0, 1), flat.sin().T @ flat


@right
def views_without_names(w, x):
    parts = (x @ w[0]).unbind(1)
    pieces = torch.split(torch.stack(parts[::-1], 0), [1, 2, 3])
    return torch.cat([piece.movedim(0, 1).flip(1) for piece in pieces], 1) @ w[1]


@right
def returns_a_part(w, x):
    y = (x @ w[0]).relu()
    return y[:, ::2], y[..., 3], x


@right
def joins_heads(w, x):
    heads = [(x @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w]
    scores = torch.einsum("bhqd,bhkd->bhqk", heads[0], heads[1]).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", scores, heads[2]).reshape(2, 6, 8)


# -- heavy operators ------------------------------------------------------------------------------------


@right
def batched_matmuls(w, x):
    y = torch.bmm(x, w[0].expand(2, 8, 8))
    z = torch.baddbmm(y, x, w[1].expand(2, 8, 8), beta=0.5)
    return torch.addmm(w[2], z[0].T, z[1]).tanh()


@right
def convolution(w, x):
    y = functional.conv1d(x.transpose(1, 2), w[0].view(8, 4, 2), w[1][0], padding=1, groups=2)
    return functional.gelu(y).transpose(1, 2)[:, :6] @ w[2]


@right
def biases(w, x):
    return functional.linear(functional.silu(functional.linear(x, w[0], w[2][0])), w[1], w[2][1])


@right
def attention_with_several_outputs(w, x):
    q, k, v = ((x @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(2, 6, 8)


@right
def attention_with_a_mask(w, x):
    q, k, v = ((x @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = y * 2
    y.mul_(1.5)
    return y.transpose(1, 2).reshape(2, 6, 8)


@right
def attention_with_a_learned_bias(w, x):
    q, k, v = ((x @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w)
    bias = (w[0] @ w[1])[:6, :6]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(2, 6, 8)


@right
def rows_nobody_gets(w, x):
    nothing = x[:, :0] @ w[0]
    routed = x.flatten(0, 1)[torch.zeros(12, dtype=torch.bool)] @ w[1]
    return x @ w[2], nothing, nothing.sum() + routed.sum(), torch.cat([nothing, x @ w[0]], 1)


@right
def single_numbers(w, x):
    y = x @ w[0]
    top = y.max()
    top = top.clone().mul_(2.0)
    return y / (top + w[1][0] @ w[2][0]), top


# -- random numbers -------------------------------------------------------------------------------------


@right
def dropout_before_and_after(w, x):
    y = functional.dropout(x, 0.3) @ w[0]
    return functional.dropout(functional.dropout(y, 0.5, inplace=True) @ w[1], 0.2) * torch.rand_like(y)


@right
def dropout_inside_attention(w, x):
    q, k, v = ((x @ one).view(2, 6, 2, 4).transpose(1, 2) for one in w)
    y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    return functional.dropout(y, 0.3).transpose(1, 2).reshape(2, 6, 8)


@right
def noise_in_place(w, x):
    y = x @ w[0]
    y = y + torch.empty_like(y).normal_()
    y.bernoulli_(0.5) if torch.rand(()) > 2 else y.mul_(torch.randn(8))
    picked = torch.multinomial(y.flatten(0, 1).softmax(-1), 2)
    return (y @ w[1]).flatten(0, 1).gather(-1, picked) * torch.randperm(12).view(12, 1)


# -- values that steer ----------------------------------------------------------------------------------


@right
def item_steers(w, x):
    y = x @ w[0]
    return y @ w[1] if y.sum().item() > 0 else y @ w[2]


@right
def item_multiplies(w, x):
    y = x @ w[0]
    return y @ w[1] * y.abs().max().item() * (2 if bool((y > 0).any()) else 3)


@right
def tolist_steers(w, x):
    y = x @ w[0]
    return y @ w[1] * y.mean((1, 2)).tolist()[0] + x


@right
def numpy_steers(w, x):
    y = x @ w[0]
    return (y @ w[1]) * float(numpy.asarray(y.detach()).mean()) + float(y.detach().numpy().max())


@right
def numpy_changes(w, x):
    y = x @ w[0]
    y.detach().numpy()[...] += 1
    return (y * y) @ w[1]


@right
def equality_steers(w, x):
    y = (x @ w[0]).round()
    return x @ w[1] if torch.equal(y, y.clone()) else x @ w[2]


@right
def closeness_steers(w, x):
    y = x @ w[0]
    return x @ w[1] if torch.allclose(y, y + 1e-9) else x @ w[2]


@right
def integers_route(w, x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ w[0])[:, :2].softmax(-1).topk(1)
    result = torch.zeros_like(flat)
    for expert in range(2):
        rows = torch.where(chosen[:, 0] == expert)[0]
        result.index_add_(0, rows, flat[rows] @ w[1 + expert] * weights[rows])
    return result.view_as(x)


@right
def sorts_and_counts(w, x):
    y = (x @ w[0]).flatten()
    order = y.argsort()
    counts = torch.bincount((y[order] > 0).long(), minlength=2)
    split = int(counts[0])
    return y[order][:split].sum() * (x @ w[1]), y[order][split:].exp()


# -- graphs within graphs -------------------------------------------------------------------------------


class Stash(torch.autograd.Function):
    """Keeps tensors on its context where autograd cannot see them."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.a, ctx.b = a, b
        return a * b

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.b, gradient * ctx.a


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        ctx.b = b
        return a @ b

    @staticmethod
    def backward(ctx, gradient):
        (a,) = ctx.saved_tensors
        return gradient @ ctx.b.mT, (a.mT @ gradient).sum(0)


@right
def custom_function_that_stashes(w, x):
    return Stash.apply(x @ w[0], x @ w[1]) @ w[2]


@right
def custom_matmul(w, x):
    return Matmul.apply((x @ w[0]).tanh(), w[1]) + Matmul.apply(x, w[2])


def _sometimes(y, w):
    return Stash.apply(y, y @ w) if y.sum() > 0 else y * (y @ w)


@right
def custom_function_on_one_way_only(w, x):
    return _sometimes(x @ w[0], w[1]) + _sometimes(-(x @ w[0]), w[2])


@right
def no_grad_island(w, x):
    y = x @ w[0]
    with torch.no_grad():
        scale = (y @ w[1]).abs().amax(-1, keepdim=True)
    return (y / scale) @ w[2]


@right
def inference_island(w, x):
    with torch.inference_mode():
        scale = (x.detach().transpose(1, 2).reshape(2, 6, 8) @ w[1].detach()).relu().contiguous().mean()
    return (x @ w[0]) * scale.clone()


@right
def detached_branch(w, x):
    y = x @ w[0]
    return y * (y @ w[1]).detach().sigmoid() + (x.detach() @ w[2])


@right
def checkpoint_inside(w, x):
    y = x @ w[0]
    hidden = (x @ w[2]).sin()
    z = checkpoint(lambda a: functional.dropout((a @ w[1]).tanh() * hidden, 0.3), y, use_reentrant=False)
    return z * y


@right
def reentrant_checkpoint_inside(w, x):
    y = x @ w[0]
    return checkpoint(lambda a: functional.dropout((a @ w[1]).tanh(), 0.3), y, use_reentrant=True) * y


@right
def saves_on_the_host(w, x):
    with torch.autograd.graph.save_on_cpu():
        y = (x @ w[0]).exp()
        return (y @ w[1]).sin() * y


@right
def own_saved_tensor_hooks(w, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = (x @ w[0]).exp()
    return (y @ w[1]).sin()


@right
def tensor_hook_that_looks_outside(w, x):
    y = x @ w[0]
    other = (x @ w[1]).sin()
    y.register_hook(lambda gradient: gradient * other.detach())
    return y * 2


@right
def graph_hook_that_looks_outside(w, x):
    y = x @ w[0]
    other = (x @ w[1]).sin().detach()
    z = y * 2
    z.grad_fn.register_prehook(lambda gradients: (gradients[0] * other,))
    return z


@right
def autocast_inside(w, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = functional.linear(functional.linear(x, w[0]), w[0])
        with torch.autocast("cpu", enabled=False):
            y = functional.layer_norm(y.float(), (8,))
        y = y @ w[1]
    return y.float() * x


@right
def mapped_over_rows(w, x):
    return torch.vmap(lambda row: (row @ w[0]).tanh())(x) @ w[1]


@right
def fourier(w, x):
    return torch.fft.irfft(torch.fft.rfft(x @ w[0], dim=1) * 0.5, n=6, dim=1) @ w[1]


@right
def factorises(w, x):
    y = (x @ w[0])[0]
    return torch.linalg.cholesky(y.T @ y + 3 * torch.eye(8)) @ w[1]


@right
def norms_nobody_reads(w, x):
    first, second = functional.layer_norm(x @ w[0], (8,)), functional.group_norm(x @ w[1], 2)
    return first + second @ w[2].detach()


@right
def own_leaf(w, x):
    gain = torch.full((8,), 0.5, requires_grad=True)
    return (x @ w[0]) * gain


@right
def nested_results(w, x):
    y = x @ w[0]
    return {"value": y, "more": (y @ w[1], [y.long(), None, {"deep": y.exp()}]), "text": "unchanged"}


# -- modules --------------------------------------------------------------------------------------------


def _module(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


_hooked = _module(lambda: nn.Linear(8, 8))
_hooked.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 2,))
_hooked.register_forward_hook(lambda module, args, output: output + output.mean().item())
_recurrent = _module(lambda: nn.GRU(8, 8, batch_first=True))


@right
def module_with_hooks(w, x):
    return _hooked(x @ w[0]).tanh() @ w[1]


@right
def recurrent(w, x):
    return _recurrent(x @ w[0])[0] @ w[1]


# -- what cannot be repeated ----------------------------------------------------------------------------

REFUSED = {}


def refused(text):
    def register(block):
        REFUSED[block.__name__] = block, text
        return block

    return register


_runs = [0]
_generator = torch.Generator()
_counter = torch.zeros((), dtype=torch.int64)
_statistics = nn.BatchNorm1d(6)
_dice = random.Random(1)


@refused("does not repeat itself")
def other_operators_each_time(w, x):
    _runs[0] += 1
    return (x @ w[0]).sin() if _runs[0] % 2 else (x @ w[0]).cos()


@refused("does not repeat itself")
def more_operators_each_time(w, x):
    _runs[0] += 1
    for _ in range(_runs[0] % 5):
        x = x * 1.5
    return x @ w[0]


@refused("does not repeat itself")
def other_numbers_each_time(w, x):
    return (x @ w[0]) * _dice.random()


@refused("does not repeat itself")
def other_constants_each_time(w, x):
    return (x @ w[0]) * torch.tensor(_dice.random())


@refused("does not repeat itself")
def other_rows_each_time(w, x):
    row = _runs[0] = (_runs[0] + 1) % 2
    return (x @ w[0])[row]


@refused("does not repeat itself")
def other_shapes_each_time(w, x):
    _runs[0] += 1
    return torch.cat([x @ w[0]] * (1 + _runs[0] % 3)).sin()


@refused("random numbers")
def own_generator(w, x):
    return (x @ w[0]) * torch.rand(8, generator=_generator)


@refused("did not make")
def counts_its_runs(w, x):
    _counter.add_(1)
    return (x @ w[0]) * float(_counter)


@refused("did not make")
def keeps_statistics(w, x):
    return _statistics(x @ w[0]) @ w[1]


@refused("did not make")
def changes_its_input(w, x):
    y = x.detach()
    y[0] *= 2
    return y @ w[0]


@refused("did not make")
def changes_its_weights(w, x):
    with torch.no_grad():
        w[1].view(-1)[:3].mul_(0.9)
    return x @ w[0]
