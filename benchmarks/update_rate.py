"""How close does the update of stored state come to torch's fused AdamW on whole fp32 tensors, and to memory?

    python benchmarks/update_rate.py

64 million parameters, bf16 wire and gradients, AdamW, every state format, by the native kernel and by torch operators,
with one thread and with all. All take turns with the fused optimizer; a ratio is the median over rounds of a rate over
the fused rate of the same round. The limit is what memory allows: the faster of two in-place passes of torch in bytes
per second, over the bytes an update reads and writes per parameter. Prints parameters per second with the spread; the
last line of output is JSON, the ratios. `--blocks` compares block sizes of the torch operators.
"""

from __future__ import annotations

import argparse
import json
import os
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

MOVED_BYTES = {"fused": 28, "fp32": 28, "split": 26, "bf16-moments": 18}
"""Read and written per parameter, gradient included, with bf16 wire and gradients."""


def fused_work(num: int) -> Callable[[], None]:
    """The yardstick: parameter, gradient and moments all f32, one call for the whole tensor."""
    parameter = torch.nn.Parameter(torch.randn(num) * 0.02)
    parameter.grad = torch.randn(num) * 1e-3
    optimizer = torch.optim.AdamW([parameter], fused=True, lr=LR, weight_decay=WEIGHT_DECAY)

    def work() -> None:
        optimizer.step()

    return work


def format_work(
    name: str, num: int, block_elements: int, multipliers: tuple[torch.Tensor, ...], *, native: bool
) -> Callable[[], None] | None:
    """None where there is no native kernel and one is asked for."""
    os.environ["LOHAN_NATIVE"] = "1" if native else "0"
    updater = Updater(AdamW(), get_format(name), torch.bfloat16, block_elements=block_elements)
    if (updater.path == "native") != native:
        print(f"no native kernel for {name}: {updater.path}")
        return None
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


def memory_works(num: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Passes in place that do next to nothing, and the bytes each moves."""
    a, b = torch.ones(num), torch.ones(num)
    return {"scale": (lambda: a.mul_(1.0), 8 * num), "add": (lambda: torch.add(a, b, out=a), 12 * num)}


def memory_rate(num: int, rounds: int) -> float:
    """Bytes per second, the best of all passes."""
    best = 0.0
    for work, moved in memory_works(num).values():
        work()
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            best = max(best, moved / (time.perf_counter() - started))
    return best


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
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCK_ELEMENTS], help="elements")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--clip", action="store_true", help="multiply gradients by a clip coefficient")
    options = parser.parse_args()

    print(
        f"{cpu_name()}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), "
        f"{options.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{options.parameters:,} parameters, bf16 wire and gradients, clip {'on' if options.clip else 'off'}\n")
    print("| threads | what | by | 1e6 parameters/s | spread | ratio to fused | limit of memory, 1e6/s |")
    print("|---|---|---|---|---|---|---|")
    multipliers = (torch.tensor(0.5),) if options.clip else ()
    result: dict[str, float] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        memory = memory_rate(options.parameters, options.rounds)
        for block in options.blocks:
            works = {"fused": fused_work(options.parameters)}
            for name in options.formats:
                for native in (True, False):
                    work = format_work(name, options.parameters, block, multipliers, native=native)
                    if work is not None:
                        works[f"{name} {'native' if native else f'torch, blocks of {block}'}"] = work
            rates = measure(works, options.parameters, options.rounds)
            for what, seen in rates.items():
                name, _, by = what.partition(" ")
                print(
                    f"| {threads} | {name} | {by or 'torch'} | {statistics.median(seen) / 1e6:.0f} | "
                    f"{min(seen) / 1e6:.0f}-{max(seen) / 1e6:.0f} | {ratio(rates, what):.2f} | "
                    f"{memory / MOVED_BYTES[name] / 1e6:.0f} |",
                    flush=True,
                )
                if name != "fused":
                    key = f"{name.replace('-', '_')}_{by.partition(',')[0]}_ratio"
                    result[f"{key}_{threads}_threads" if threads > 1 else key] = round(ratio(rates, what), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
