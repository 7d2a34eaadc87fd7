"""Modules that are awkward on purpose, small enough to train in a moment. The vocabulary is the zoo's."""

import torch
from torch import nn
from torch.nn import functional

from lohan.testing.parity import VOCABULARY

WIDTH = 16


class Mixer(nn.Module):
    """A block's work: mixes every token with the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        seen = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)
        return hidden + self.outer(functional.gelu(self.inner(self.norm(seen))))


class Small(nn.Module):
    """Embedding, blocks, head, and a loss as transformers gives it."""

    def __init__(self, block=Mixer, num_blocks=3):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def run_blocks(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(self.run_blocks(self.embedding(input_ids)))
        return {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits, labels):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class SharedBlock(Mixer):
    def forward(self, hidden, *, context, scale=1.0):
        return super().forward(hidden + scale * context.tanh())


class SharedArgument(Small):
    """A tensor made from the embedding goes to every block, and needs the gradients of all."""

    joins_at = None

    def __init__(self):
        super().__init__(SharedBlock, 4)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            self.project = nn.Linear(WIDTH, WIDTH)

    def run_blocks(self, hidden):
        context = self.project(hidden) * 0.5
        for index, block in enumerate(self.blocks):
            if index == self.joins_at:
                context = context + hidden * 0.1
            hidden = block(hidden, context=context, scale=0.5)
        return hidden


class JoinedArgument(SharedArgument):
    """From the third block on it is made from the embedding and from a block's output together."""

    joins_at = 2


class TupleBlock(Mixer):
    def forward(self, hidden, *, carried, options):
        mixed = super().forward(hidden["value"])
        gate = torch.sigmoid(carried[0] * options["gain"])
        return ({"value": mixed * gate, "count": hidden["count"] + 1}, (carried[0] + mixed, carried[1]))


class TuplesAndDicts(Small):
    """Blocks take and return nested tuples and dicts; some of it needs gradients, some are integers."""

    def __init__(self):
        super().__init__(TupleBlock)

    def run_blocks(self, hidden):
        state = {"value": hidden, "count": torch.zeros((), dtype=torch.int64)}
        carried = (hidden * 0.1, torch.ones(1, dtype=torch.int64))
        for block in self.blocks:
            state, carried = block(state, carried=carried, options={"gain": 0.3})
        assert int(state["count"]) == len(self.blocks)
        return state["value"] + carried[0]


class NeverUsed(Small):
    """Has parameters that get no gradient at all."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.never = nn.Linear(WIDTH, WIDTH)


class BlockTwice(Small):
    def run_blocks(self, hidden):
        return self.blocks[-1](super().run_blocks(hidden))


class OutOfOrder(Small):
    def run_blocks(self, hidden):
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden


class KeepsInside(Mixer):
    """Leaves a tensor behind that no module returned."""

    def forward(self, hidden):
        self.kept = hidden * 2
        return super().forward(hidden)


class Failing(Small):
    """Raises in its third forward, between two blocks."""

    calls = 0

    def run_blocks(self, hidden):
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index == 1 and hidden.device.type != "meta" and not torch._subclasses.fake_tensor.is_fake(hidden):
                type(self).calls += 1
                if type(self).calls == 3:
                    raise ZeroDivisionError("in the model's own code")
        return hidden
