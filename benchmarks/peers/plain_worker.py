"""Plain PyTorch with everything in RAM: fp32, gradient checkpointing, AdamW(fused=True). The ceiling.

With `fsdp2` in its options: the same under torch's FSDP2 with CPUOffloadPolicy, on one gloo rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from peers.serving import Job, System, serve
from peers.workloads import LEARNING_RATE


class Plain:
    """A model and its optimizer in RAM."""

    def __init__(self, model: Any, *, sharded: bool):
        self._model, self._sharded = model, sharded
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        if sharded:
            _shard(model)
        # FSDP2's parameters are DTensors, for which the fused update exists too.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        total = torch.tensor(sum(batch["labels"][..., 1:].numel() for batch in micro_batches))
        loss = 0.0
        for batch in micro_batches:
            part = self._model(**batch, num_items_in_batch=total).loss
            part.backward()
            loss += part.item()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"loss": loss}

    def settle(self) -> None:
        """Nothing is ever left."""

    def export(self, out: Path) -> None:
        if not self._sharded:
            self._model.save_pretrained(out)
            return
        weights = {name: value.full_tensor() for name, value in self._model.state_dict().items()}
        self._model.save_pretrained(out, state_dict=weights)


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    # There is no page-locked memory without an accelerator: pin_memory=True fails here.
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.model.layers:
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)


@contextmanager
def load(job: Job) -> Iterator[System]:
    sharded = bool(job.options.get("fsdp2"))
    if sharded:
        rendezvous = f"file://{Path(job.directory).resolve()}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    try:
        yield Plain(model, sharded=sharded)
    finally:
        if sharded:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(load)
