"""The commands around a training run: init, train, status, report and generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.errors import ConfigError, LohanError
from lohan.wrapping import wrapped

if TYPE_CHECKING:
    from lohan.train.preview import Preview
    from lohan.train.status import Status

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(init)
    app.command(epilog=_TRAIN_EXAMPLES)(train)
    app.command(epilog="Example: lohan status my-run --json")(status)
    app.command(epilog="Examples: lohan report my-run; lohan report my-run --out page.html")(report)
    app.command(epilog=_GENERATE_EXAMPLES)(generate)


_TRAIN_EXAMPLES = (
    "Examples: lohan train config.yaml; lohan train config.yaml --set learning_rate=2e-5 --set max_steps=100; "
    "lohan train config.yaml --resume"
)
_GENERATE_EXAMPLES = (
    'Examples: lohan generate my-run/model "What is two plus two?"; '
    'lohan generate /mnt/nvme0/my-run "Once upon" --raw --temperature 0.8 --seed 1'
)


def init(
    out: Annotated[Path, typer.Option(help="The file to write. One that is there is left alone.")] = Path(
        "config.yaml"
    ),
) -> None:
    """Write a commented training config for this machine."""
    from lohan.train.config_example import find_machine, write_example

    text = write_example(find_machine())
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists. Remove it, or name another file with --out.") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Name another file with --out.") from None
    print(f"Wrote {out}. Set model_name_or_path and train_file in it, then: lohan train {out}")


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="See docs/config.md, or `lohan init`.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key for this run. Repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only go on with a run that is there; never begin.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although changed settings will change the result.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a new run is begun.")] = False,
) -> None:
    """Train, and go on after any interruption with the same command. Ctrl-C stops after the step; twice, at once."""
    from lohan.train.config_file import load_config

    loaded = load_config(config, changes or [])  # what is wrong with it is said before torch is loaded
    _quiet()
    from lohan.train import loop

    try:
        result = loop.train(
            loaded,
            resume=True if resume else None,
            accept_changes=accept_changes,
            say=lambda text: print(text, flush=True),
            on_preview=lambda ahead: _show_preview(ahead, ask=not yes),
        )
    except OSError as error:
        raise _no_place(error, loaded.output_dir) from error
    except KeyboardInterrupt:
        from lohan.store import has_store

        there = any(has_store(Path(directory)) for directory in loaded.ssd)
        print("Stopped at once. The same command " + ("goes on from the last commit." if there else "begins again."))
        raise typer.Exit(INTERRUPTED) from None
    if result.stopped == "interrupted":
        print(f"Stopped after step {result.step} of {result.total_steps}. The same command goes on from there.")
        raise typer.Exit(INTERRUPTED)


def _show_preview(ahead: Preview, *, ask: bool) -> None:
    print(wrapped("\n".join(ahead.lines()), sys.stdout, indent=" " * 9), flush=True)
    if ask and ahead.new and sys.stdin.isatty() and sys.stdout.isatty() and not typer.confirm("Begin?", default=True):
        print("Nothing was begun.")
        raise typer.Exit(1)


def _no_place(error: OSError, output_dir: str) -> LohanError:
    """What the system refuses us outside of the store: a full disk, a folder that may not be written to."""
    return ConfigError(
        f"{error.filename or output_dir}: {error.strerror or error}. Make room or give permission, and repeat the "
        "command: it goes on from the last commit."
    )


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's output_dir, config file or SSD directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """How a run is doing. May be asked while it trains."""
    import json

    from lohan.train.status import read_status

    found = read_status(run)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        for name, value in _status_rows(found):
            print(f"{name:<10} {value}")


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's output_dir, config file or SSD directory.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; report.html in output_dir if not given.")] = None,
) -> None:
    """Write one HTML page about a run: curves, a step's lanes predicted above measured, memory, advice, config."""
    from lohan.report.page import write_report

    print(write_report(run, out))


def _status_rows(found: Status) -> list[tuple[str, str]]:
    from lohan.train.display import clock

    words = {
        "new": "not begun. `lohan train` with its config begins",
        "running": f"running (process {found.pid})",
        "died": "not running: it was killed. The same command goes on from the last commit",
        "interrupted": "stopped by hand. The same command goes on",
        "early": "stopped early: evaluations got no better",
    }
    rows = [("state", words.get(found.state, found.state))]
    of = "" if found.total_steps is None else f" of {found.total_steps}"
    epoch = "" if found.epoch is None else f", epoch {found.epoch:.2f}"
    rows.append(("step", f"{found.step}{of}{epoch}"))
    rows.append(("committed", "nothing yet" if found.committed_step is None else f"step {found.committed_step}"))
    if found.loss is not None:
        norm = "" if found.grad_norm is None else f", gradient norm {found.grad_norm:.3g}"
        rows.append(("loss", f"{found.loss:.4f}{norm}"))
    if found.eval_loss is not None:
        rows.append(("held out", f"{found.eval_loss:.4f} at step {found.eval_step}"))
    if found.tokens_per_second is not None:
        rows.append(("rate", f"{found.tokens_per_second:,.0f} tokens/s"))
    if found.seconds_left is not None:
        rows.append(("left", clock(found.seconds_left)))
    if found.seconds_since_step is not None:
        rows.append(("last step", f"{clock(found.seconds_since_step)} ago"))
    return rows


def generate(
    model: Annotated[Path, typer.Argument(metavar="RUN_OR_DIR", help="A run or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Argument(help="What to answer or go on from; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the likeliest tokens up to this sum.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: go on from the text as it is.")] = False,
    memory: Annotated[str, typer.Option(help="Memory for weights; the rest is streamed.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    dtype: Annotated[str | None, typer.Option(metavar="bf16|fp16|fp32", help="To compute in.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
) -> None:
    """Let a model write. Weights that do not fit into memory are streamed from SSD for every token."""
    _quiet()
    from lohan.generate import Sampling, open_generator

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with open_generator(
        model, memory=memory, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    ) as generator:
        written = generator.write(text, sampling, raw=raw, show=lambda part: print(part, end="", flush=True))
    print()
    rate = len(written.tokens) / max(written.seconds, 1e-9)
    print(f"{len(written.tokens)} tokens in {written.seconds:.1f} s, {rate:.2f} tokens/s", file=sys.stderr)


def _quiet() -> None:
    """Our own bars and sentences are enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()
