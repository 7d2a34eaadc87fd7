"""How close does the chunked update on stored state come to torch's fused AdamW on whole fp32 tensors?

    python benchmarks/update_rate.py

64 million parameters, bf16 wire and gradients, AdamW, every state format, with one thread and with two. Each format
and the fused optimizer take turns; a format's ratio is the median over rounds of its rate over the fused rate of the
same round. Prints parameters per second with the spread; the last line of output is JSON, the ratios with one thread.
`--blocks` compares block sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lohan.optim import AdamW, Updater, get_format
from lohan.optim.formats import FORMATS
from lohan.optim.update import BLOCK_ELEMENTS

LR, WEIGHT_DECAY = 1e-4, 0.1


def fused_work(num: int) -> Callable[[], None]:
    """The yardstick: parameter, gradient and moments all f32, one call for the whole tensor."""
    parameter = torch.nn.Parameter(torch.randn(num) * 0.02)
    parameter.grad = torch.randn(num) * 1e-3
    optimizer = torch.optim.AdamW([parameter], fused=True, lr=LR, weight_decay=WEIGHT_DECAY)

    def work() -> None:
        optimizer.step()

    return work


def format_work(name: str, num: int, block_elements: int, multipliers: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    updater = Updater(AdamW(), get_format(name), torch.bfloat16, block_elements=block_elements)
    wire = torch.empty(num, dtype=torch.bfloat16)
    state = torch.empty(updater.state_bytes(num), dtype=torch.uint8)
    updater.initialise(torch.randn(num) * 0.02, wire, state)
    grad = (torch.randn(num) * 1e-3).to(torch.bfloat16)
    step = 0

    def work() -> None:
        nonlocal step
        step += 1
        updater.update(wire, state, grad, step=step, lr=LR, weight_decay=WEIGHT_DECAY, grad_multipliers=multipliers)

    return work


def measure(works: dict[str, Callable[[], None]], num: int, rounds: int) -> dict[str, list[float]]:
    """Parameters per second of each, in turns, who goes first alternating."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for name in works:
        works[name]()
    for turn in range(rounds):
        for name in list(works) if turn % 2 == 0 else reversed(list(works)):
            started = time.perf_counter()
            works[name]()
            rates[name].append(num / (time.perf_counter() - started))
    return rates


def ratio(rates: dict[str, list[float]], name: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[name], rates["fused"], strict=True))


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCK_ELEMENTS], help="elements")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--clip", action="store_true", help="multiply gradients by a clip coefficient")
    options = parser.parse_args()

    print(
        f"{cpu_name()}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), {options.rounds} rounds"
    )
    print(f"{options.parameters:,} parameters, bf16 wire and gradients, clip {'on' if options.clip else 'off'}\n")
    print("| threads | what | block | 1e6 parameters/s | spread | ratio to fused |")
    print("|---|---|---|---|---|---|")
    multipliers = (torch.tensor(0.5),) if options.clip else ()
    result: dict[str, float] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for block in options.blocks:
            works = {"fused": fused_work(options.parameters)}
            for name in options.formats:
                works[name] = format_work(name, options.parameters, block, multipliers)
            rates = measure(works, options.parameters, options.rounds)
            for name, seen in rates.items():
                print(
                    f"| {threads} | {name} | {'whole' if name == 'fused' else block} | "
                    f"{statistics.median(seen) / 1e6:.0f} | {min(seen) / 1e6:.0f}-{max(seen) / 1e6:.0f} | "
                    f"{ratio(rates, name):.2f} |",
                    flush=True,
                )
                suffix = "" if threads == options.threads[0] else f"_{threads}_threads"
                if name != "fused":
                    result[f"{name.replace('-', '_')}_ratio{suffix}"] = round(ratio(rates, name), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
