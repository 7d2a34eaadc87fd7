"""In how many chunks of tokens the head computes its loss, so that its logits fit.

The head holds rows x vocabulary x bytes_per_logit beyond weights, gradients and hidden states, where rows are the
tokens of the largest chunk. Measured over live storages (tests/engine/test_head_chunks.py): log-softmax, its gradient
and the logits' gradient, each fp32, are alive at once in backward, 12 bytes; a step of the model that keeps its result
for backward (the tanh of a soft-cap) adds the compute dtype's size, 4 bytes at most.
"""

from __future__ import annotations

from lohan.errors import PlanInfeasible
from lohan.sizes import format_bytes

LOSS_BYTES_PER_LOGIT = 12
CAPPED_BYTES_PER_LOGIT = 16


def head_bytes(tokens: int, vocabulary: int, chunks: int, *, bytes_per_logit: int = CAPPED_BYTES_PER_LOGIT) -> int:
    """What the head of one micro-batch holds at its peak, in so many chunks."""
    return -(-tokens // chunks) * vocabulary * bytes_per_logit


def head_chunks_for(
    tokens: int, vocabulary: int, budget_bytes: int, *, bytes_per_logit: int = CAPPED_BYTES_PER_LOGIT
) -> int:
    """The fewest chunks for a micro-batch of `tokens` whose logits stay within the budget; 1 when they all fit."""
    rows = budget_bytes // (vocabulary * bytes_per_logit)
    if rows == 0:
        need = vocabulary * bytes_per_logit
        raise PlanInfeasible(
            f"The loss of one token over {vocabulary:,} words needs {format_bytes(need)} and "
            f"{format_bytes(budget_bytes)} is free.\nRaise the memory budget by {format_bytes(need - budget_bytes)}."
        )
    return -(-tokens // rows)
