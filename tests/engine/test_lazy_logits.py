"""Logits that are not there: what they answer is right, and what they cannot answer they refuse by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lohan.engine.head_loss import HeadLoss, why_not_chunked
from lohan.engine.lazy_logits import LazyLogits
from lohan.errors import ConfigError, ModelError
from lohan.testing import zoo

WORDS, WIDTH = 11, 4


class Model(nn.Module):
    """A head and a loss that a test gives it."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, WORDS)
        self.gain = nn.Parameter(torch.ones(()))
        self.use = use

    def get_output_embeddings(self):
        return self.head

    def forward(self, hidden, labels):
        return self.use(self, self.head(hidden), labels)


def summed(logits, labels):
    return functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), reduction="sum")


def run(use, num_chunks=3, micro_batches=2):
    """The gradients of head and hidden states after some micro-batches."""
    model, gradients = Model(use), []
    head = HeadLoss(model, num_chunks)
    hidden = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(2))
    for _ in range(micro_batches):
        given = hidden.clone().requires_grad_(True)
        with head.chunked(scale=None, share=1.0, num_items=10):
            model(given, labels).backward()
        gradients.append(given.grad)
    return [*gradients, model.head.weight.grad, model.head.bias.grad]


RIGHT = {
    "as it is": lambda model, logits, labels: summed(logits, labels),
    "one row": lambda model, logits, labels: summed(logits[0], labels[0]),
    "some tokens": lambda model, logits, labels: summed(logits[:, 1:4], labels[:, 1:4]),
    "every other token": lambda model, logits, labels: summed(logits[..., ::2, :], labels[..., ::2]),
    "weighed": lambda model, logits, labels: 0.25 * summed(logits, labels),
    "weighed by what is learned": lambda model, logits, labels: model.gain * summed(logits, labels),
    "squared": lambda model, logits, labels: summed(logits, labels) ** 2,
    "two losses": lambda model, logits, labels: summed(logits, labels) + 0.5 * summed(logits[:, 1:], labels[:, :-1]),
    "half of it used": lambda model, logits, labels: (summed(logits * 2, labels), summed(logits, labels))[1],
    "sizes": lambda model, logits, labels: summed(logits.view(logits.shape[0] * logits.size(1), -1), labels),
    "same dtype and device": lambda model, logits, labels: summed(logits.to(labels.device).type_as(model.gain), labels),
    "casts": lambda model, logits, labels: summed(logits.bfloat16().float().to(torch.float64), labels).float(),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_understood_is_right(name):
    torch.testing.assert_close(run(RIGHT[name]), run(RIGHT[name], num_chunks=1), rtol=1e-5, atol=1e-6)


REFUSED = {
    "logsumexp": lambda model, logits, labels: summed(logits, labels) + logits.logsumexp(-1).sum(),
    "log_softmax": lambda model, logits, labels: -torch.log_softmax(logits, -1).mean(),
    "softmax": lambda model, logits, labels: logits.softmax(-1).max(),
    "argmax": lambda model, logits, labels: (summed(logits, labels), logits.argmax(-1))[0],
    "matmul": lambda model, logits, labels: (logits @ model.head.weight).sum(),
    "transpose": lambda model, logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels),
    "mul_": lambda model, logits, labels: summed(logits.mul_(2), labels),
    "__setitem__": lambda model, logits, labels: logits.__setitem__((..., 0), 0.0),
    "by word": lambda model, logits, labels: summed(logits[..., :7], labels),
    "by a tensor": lambda model, logits, labels: summed(logits[labels > 3], labels[labels > 3]),
    "shape": lambda model, logits, labels: summed(logits * torch.ones(2, 5, 1), labels),
    "needs a gradient": lambda model, logits, labels: summed(logits * model.gain, labels),
    "themselves": lambda model, logits, labels: summed(logits * logits, labels),
    "over the vocabulary": lambda model, logits, labels: logits.flatten().sum(),
    "to \\[": lambda model, logits, labels: summed(logits.view(2, 55), labels),
    "weights of words": lambda model, logits, labels: functional.cross_entropy(
        logits.view(-1, WORDS), labels.view(-1), weight=torch.ones(WORDS)
    ),
    "without a sum": lambda model, logits, labels: functional.cross_entropy(
        logits.view(-1, WORDS), labels.view(-1), reduction="none"
    ).sum(),
    "not words": lambda model, logits, labels: functional.cross_entropy(
        logits.view(-1, WORDS), torch.rand(10, WORDS)
    ),
    "requires_grad": lambda model, logits, labels: summed(logits, labels) if logits.requires_grad else None,
    "item": lambda model, logits, labels: logits[0, 0, 0].item(),
    "numpy": lambda model, logits, labels: logits.numpy(),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name):
    refused = "by word" if name == "item" else name
    with pytest.raises(ModelError, match=refused) as error:
        run(REFUSED[name])
    assert "head_chunks=1" in str(error.value)


def test_a_loss_that_is_weighed_otherwise_later_is_never_wrong():
    weights = iter([1.0, 2.0])
    with pytest.raises(ModelError, match="otherwise than in its first micro-batch"):
        run(lambda model, logits, labels: next(weights) * summed(logits, labels))


def test_a_loss_that_is_dropped_later_is_never_wrong():
    kept = iter([1, 0])

    def sometimes(model, logits, labels):
        loss = summed(logits, labels)
        return loss if next(kept) else model.gain * 1.0

    with pytest.raises(ModelError, match="did not use it at all"):
        run(sometimes)


def test_a_loss_whose_weight_was_a_surprise_at_first_may_change():
    weights = iter([3.0, 2.0, 3.0, 2.0])
    whole, chunked = (
        run(lambda model, logits, labels: next(weights) * summed(logits, labels), chunks) for chunks in (1, 3)
    )
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_the_output_has_logits_that_say_what_they_are():
    model = zoo.tiny_model("llama")
    (batch,) = zoo.random_batches(257, num_micro_batches=1, batch=2, seq=12, seed=1)
    head = HeadLoss(model, 4)
    with torch.no_grad(), head.chunked(scale=None, share=None, num_items=10):
        output = model(**batch)
    assert isinstance(output.logits, LazyLogits)
    assert (output.logits.shape, output.logits.dtype) == ((2, 12, 257), torch.float32)
    assert repr(output.logits) == "LazyLogits(tokens=24, steps=0)"
    assert "forward" not in model.lm_head.__dict__
    torch.testing.assert_close(output.loss, model(**batch).loss, rtol=1e-6, atol=0)


def test_one_chunk_changes_nothing():
    model = Model(RIGHT["as it is"])
    with HeadLoss(model, 1).chunked(scale=None, share=None, num_items=10):
        assert "forward" not in model.head.__dict__
        assert type(model.head(torch.ones(1, WIDTH))) is torch.Tensor


def test_the_head_is_itself_again_after_an_error():
    model = Model(REFUSED["softmax"])
    with pytest.raises(ModelError), HeadLoss(model, 2).chunked(scale=None, share=None, num_items=10):
        model(torch.ones(1, 3, WIDTH), torch.zeros(1, 3, dtype=torch.int64))
    assert "forward" not in model.head.__dict__


def test_heads_that_cannot_be_cut_are_refused_before_the_run():
    assert why_not_chunked(zoo.tiny_model("gpt2")) is None
    with pytest.raises(ModelError, match="does not say which module makes its logits"):
        HeadLoss(nn.Linear(2, 2), 2)
    model = Model(RIGHT["as it is"])
    model.head = nn.Sequential(model.head)
    with pytest.raises(ModelError, match="is a Sequential, not a plain"):
        HeadLoss(model, 2)
    HeadLoss(model, 1)
    with pytest.raises(ConfigError, match="head_chunks is 0"):
        HeadLoss(model, 0)


def test_autocast_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ModelError, match="autocast"):
        run(RIGHT["as it is"])
