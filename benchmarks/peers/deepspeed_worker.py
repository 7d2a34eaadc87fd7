"""DeepSpeed ZeRO-3 on its CPU accelerator: parameters and optimizer in RAM (`cpu`) or on SSD (`nvme`, ZeRO-Infinity).

options: offload, and any of the names in TUNED. What had to be changed to make it run at all, and the two repairs
below, are listed with their reasons in systems.py.

Runs in the peers' own virtual environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from peers.serving import Job, System, serve
from peers.workloads import LEARNING_RATE, SHAPES

TUNED: dict[str, Any] = {
    "sub_group_size": 20_000_000,
    "prefetch_bucket_size": 50_000_000,
    "param_buffer_count": 12,
    "optimizer_buffer_count": 4,
    "pipeline_read": False,
    "pipeline_write": False,
    "pin_memory": False,
    "block_size": 1 << 20,
    "queue_depth": 8,
    "threads": 1,
    "single_submit": False,
    "overlap_events": True,
    "persistence_threshold": 100_000,
    "max_live": 1_000_000_000,
    "max_reuse": 0,
    "reduce_bucket_size": 20_000_000,
    "contiguous_gradients": True,
    "reduce_scatter": True,
}
"""For NVMe: the best of a sweep, benchmarks/results/2026-11-17_peers_tuning.md"""

IN_RAM: dict[str, Any] = {"sub_group_size": 1_000_000_000, "max_reuse": 1_000_000_000}
"""What differs with everything in RAM: DeepSpeed's own defaults, because nothing has to fit into buffers there."""


def config(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    own = {**TUNED, **(IN_RAM if job.options["offload"] == "cpu" else {}), **job.options}
    shape = SHAPES[job.shape]
    largest = shape["hidden_size"] * max(shape["vocab_size"], shape["intermediate_size"])
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": own["sub_group_size"],
        "stage3_prefetch_bucket_size": own["prefetch_bucket_size"],
        "stage3_param_persistence_threshold": own["persistence_threshold"],
        "stage3_max_live_parameters": own["max_live"],
        "stage3_max_reuse_distance": own["max_reuse"],
        "stage3_gather_16bit_weights_on_model_save": True,
        "reduce_bucket_size": own["reduce_bucket_size"],
        "contiguous_gradients": own["contiguous_gradients"],
        "reduce_scatter": own["reduce_scatter"],
        "offload_param": {"device": own["offload"], "pin_memory": own["pin_memory"]},
        "offload_optimizer": {"device": own["offload"], "pin_memory": own["pin_memory"]},
    }
    if own["offload"] == "nvme":
        zero["offload_param"] |= {
            "nvme_path": job.directory, "max_in_cpu": 0, "buffer_count": own["param_buffer_count"],
            "buffer_size": largest,
        }  # fmt: skip
        zero["offload_optimizer"] |= {
            "nvme_path": job.directory, "buffer_count": own["optimizer_buffer_count"],
            "pipeline_read": own["pipeline_read"], "pipeline_write": own["pipeline_write"],
        }  # fmt: skip
    rows = max(1, job.tokens // 512)
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "aio": {
            "block_size": own["block_size"], "queue_depth": own["queue_depth"], "intra_op_parallelism": own["threads"],
            "single_submit": own["single_submit"], "overlap_events": own["overlap_events"],
        },
    }  # fmt: skip


def repair() -> None:
    """Two repairs at run time, without which ZeRO-Infinity on one CPU rank trains on wrong weights or stops.

    A gathered weight on one rank is a view of its swap buffer, because `.to(device)` copies nothing on the CPU; when
    the buffer is given to the next parameter, the weight in use changes under it. Here it is copied, as it is on a GPU.
    And under gradient checkpointing the prefetcher can name one parameter twice in a request, which the swapper
    refuses.
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
    from deepspeed.runtime.zero import partition_parameters as zero

    def copies(cls: Any) -> None:
        made = cls.__init__

        def init(self: Any, params: Any) -> None:
            made(self, params)
            for param in params if isinstance(params, list) else [params]:
                if param.nvme_swapper is not None:
                    param.data = param.data.clone()

        cls.__init__ = init

    copies(zero.NoGatherHandle)
    copies(zero.NoGatherCoalescedHandle)
    swap_in = AsyncPartitionedParameterSwapper.swap_in

    def swap_in_once(self: Any, params: Any, *args: Any, **more: Any) -> Any:
        return swap_in(self, list(dict.fromkeys(params)), *args, **more)

    AsyncPartitionedParameterSwapper.swap_in = swap_in_once


class DeepSpeed:
    """A DeepSpeed engine."""

    def __init__(self, engine: Any):
        self._engine = engine

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        [batch] = micro_batches
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return {"loss": loss.item()}

    def settle(self) -> None:
        """Nothing is ever left."""

    def export(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._engine.save_16bit_model(str(out), "pytorch_model.bin")


def fill(model: Any, folder: str) -> None:
    """Give every parameter its value, one at a time, as DeepSpeed's documentation says."""
    import deepspeed
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                    parameters[name].data.copy_(file.get_tensor(name))


@contextmanager
def load(job: Job) -> Iterator[System]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    # Imported only inside zero.Init, which replaces Tensor.__new__, it compares signatures and fails.
    import_module("torch._dynamo.polyfills.loader")

    deepspeed.init_distributed("gloo")
    if job.options.get("repair", True) and job.options["offload"] == "nvme":
        repair()
    settings = config(job)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder), dtype=torch.float32)
    fill(model, job.folder)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    wrong = {str(p.dtype) for p in model.parameters()} - {"torch.float32"}
    if wrong:
        raise SystemExit(f"DeepSpeed made parameters of {', '.join(sorted(wrong))} where fp32 was asked for")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    try:
        yield DeepSpeed(engine)
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(load)
