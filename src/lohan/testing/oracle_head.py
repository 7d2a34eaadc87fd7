"""The oracle's head, when it is computed in chunks of tokens: plain PyTorch, by the model's configuration.

`lohan.testing.oracle` is the specification; this is its section "The head in chunks".
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def head_in_chunks(
    model: Any,
    hidden: Tensor,
    labels: Tensor,
    factor: Tensor,
    num_chunks: int,
    sums: dict[nn.Parameter, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' losses and the hidden states' gradient for `factor` times it.

    The output embedding's gradients are added to `sums`; without it nothing has a gradient.
    """
    head = model.get_output_embeddings()
    total, gradients = None, []
    for part, words in zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), strict=True):
        logits = head(part).detach().requires_grad_(sums is not None)
        loss = nn.functional.cross_entropy(_finished(model.config, logits).float(), words, reduction="sum")
        total = loss.detach() if total is None else total + loss.detach()
        if sums is None:
            continue
        (gradient,) = torch.autograd.grad(loss, logits, factor)
        with torch.no_grad():
            gradients.append(gradient @ head.weight)
            if head.bias is not None and head.bias.requires_grad:
                sums[head.bias] = sums[head.bias] + gradient.sum(0) if head.bias in sums else gradient.sum(0)
            if not head.weight.requires_grad:
                continue
            if head.weight in sums:
                sums[head.weight].addmm_(gradient.t(), part)
            else:
                sums[head.weight] = gradient.t() @ part
    assert total is not None
    return total, torch.cat(gradients) if gradients else hidden


def balancing_loss(config: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """What Mixtral adds to its loss when it is asked for router logits."""
    loss: Tensor = config.router_aux_loss_coef * load_balancing_loss_func(
        router_logits, config.num_local_experts, config.num_experts_per_tok, attention_mask
    )
    return loss


def _finished(config: Any, logits: Tensor) -> Tensor:
    """What a model does to its logits, by its configuration: soft-capping (Gemma), scaling (Granite, Cohere)."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if hasattr(config, "logits_scaling"):
        logits = logits / config.logits_scaling
    return logits * config.logit_scale if hasattr(config, "logit_scale") else logits
