"""The command line. Heavy imports happen inside the commands: `lohan --help` must answer at once.

Exit codes: 0 all is well, 1 the command worked and found something bad, 2 it could not be done (bad usage or a
LohanError, said in one message on stderr), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lohan import __version__, cli_estimate, cli_train
from lohan.cli_profile import profile
from lohan.errors import LohanError
from lohan.wrapping import wrapped

if TYPE_CHECKING:
    from lohan.doctor import Finding

INTERRUPTED = 130


class _Commands(TyperGroup):
    """All commands, with one place where what went wrong becomes a message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LohanError as error:
            print(wrapped(f"lohan: {error}", sys.stderr), file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("lohan: interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None


app = typer.Typer(
    name="lohan",
    cls=_Commands,
    help="Fine-tune all parameters of language models far larger than GPU memory and RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
store_app = typer.Typer(name="store", help="Look at a store on disk.", no_args_is_help=True)
app.add_typer(store_app)
app.command()(profile)
cli_train.register(app)
cli_estimate.register(app)

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="All drive directories of one store, in any order.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """The `lohan` command."""
    app(prog_name="lohan")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lohan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("first-run")
def first_run(
    directory: Annotated[Path, typer.Option(help="Where to work; a folder of its own is made.")] = Path(
        "lohan-first-run"
    ),
    size: Annotated[
        str, typer.Option(help="How much data the store gets. It takes twice as much disk space.")
    ] = "128MiB",
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything there to look at.")] = False,
) -> None:
    """See it work in about a minute: a store survives a kill, and a small model is trained from SSD and exported."""
    from lohan.first_run import run
    from lohan.sizes import parse_size

    run(directory, parse_size(size, name="--size"), keep=keep)


@app.command()
def doctor(
    paths: Annotated[list[str] | None, typer.Argument(metavar="[SSD_PATH]...", help="Directories for `ssd`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and its SSD paths; say what is wrong and what to do. Exit code 1 if there is a problem."""
    from rich.console import Console

    from lohan.doctor import Verdict, examine, worst

    if as_json:
        findings = examine(paths or [])
        _print_json(
            {
                "lohan": __version__,
                "verdict": worst(findings).value,
                "findings": [finding.as_json() for finding in findings],
            }
        )
    else:
        console = Console()
        with console.status("") as status:
            findings = examine(paths or [], lambda text: status.update(text))
        _print_findings(console, findings)
        if not paths:
            console.print("Name your SSD directories to have them checked too: lohan doctor /path/on/ssd ...")
    if worst(findings) is Verdict.PROBLEM:
        raise typer.Exit(1)


def _print_findings(console: Any, findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from lohan.doctor import Verdict

    colours = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "what", "found and what to do"):
        table.add_column(heading, overflow="fold")
    path: str | None = None
    for finding in findings:
        if finding.path != path:
            path = finding.path
            table.add_row("", "")
            table.add_row("", "[bold]path[/]", f"[bold]{escape(path or '')}[/]")
        advice = f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else ""
        colour = colours[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict.value}[/]", escape(finding.name), f"{escape(finding.value)}{advice}")
    console.print(table)
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in (Verdict.PROBLEM, Verdict.WARNING)}
    words = [f"{n} {verdict.value}{'s' if n != 1 else ''}" for verdict, n in counts.items() if n]
    console.print(f"\n[bold]{' and '.join(words) if words else 'All is well'}.[/]", highlight=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's output_dir, config file or first SSD directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new Hugging Face folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16|fp32", help="Convert the weights. By default they stay as trained.")
    ] = None,
    master: Annotated[bool, typer.Option("--master", help="Export the fp32 master weights instead.")] = False,
    ssd: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A directory of the run, if they have moved. Repeat it for each of them."),
    ] = None,
) -> None:
    """Write the weights of a run's last commit as a Hugging Face folder. The run must not be open elsewhere."""
    from lohan.engine.export import export_run
    from lohan.sizes import format_bytes
    from lohan.train.find_run import find_run

    written = 0

    with _byte_bar("Exporting") as progress:

        def told(done: int, total: int) -> None:
            nonlocal written
            written = total
            progress(done, total)

        export_run(find_run(run) or run, out, ssd=ssd or (), dtype=dtype, master=master, progress=told)
    print(f"{out}: {format_bytes(written)} of weights.")


@store_app.command("info")
def store_info(directories: Directories, as_json: AsJson = False) -> None:
    """What is in a store. Takes no lock, so it can be asked while a run uses the store."""
    from lohan.store.report import describe_store

    info = describe_store(directories)
    if as_json:
        _print_json(info)
    else:
        _print_info(info)


def _print_info(info: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lohan.sizes import format_bytes

    console = Console()
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    step = info["committed_step"]
    rows = [
        ("store", f"{info['store'][:8]} (format {info['format_version']})"),
        ("committed step", "none yet" if step is None else str(step)),
        ("metadata", ", ".join(info["metadata"]) or "none"),
        ("records", f"{info['num_records']} in {info['num_groups']} groups, {info['num_written']} written"),
        ("size", f"{format_bytes(info['record_bytes'])}, {format_bytes(info['data_bytes'])} on the drives"),
        ("versions", str(info["versions"])),
        ("chunks", f"{info['num_chunks']} of {format_bytes(info['chunk_bytes'])} at most"),
        (
            "state",
            {"clean": "closed", "open": "open in another process", "torn": "torn: cut off inside a step"}[
                info["state"]
            ],
        ),
    ]
    for name, value in rows:
        facts.add_row(name, escape(value))
    console.print(facts, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("drive", "directory", "data", "share", "direct I/O"):
        table.add_column(heading, overflow="fold")
    for drive in info["drives"]:
        share = drive["data_bytes"] / max(info["data_bytes"], 1)
        table.add_row(
            str(drive["drive"]),
            escape(drive["directory"]),
            format_bytes(drive["data_bytes"]),
            f"{share:.0%}",
            "yes" if drive["direct"] else "no",
        )
    console.print()
    console.print(table, highlight=False)
    for note in info["notes"]:
        console.print(f"[yellow]note[/]  {escape(note)}", highlight=False)


@store_app.command("verify")
def store_verify(directories: Directories, as_json: AsJson = False) -> None:
    """Read every committed byte and check it. Exit code 1 if anything is damaged."""
    from rich.console import Console
    from rich.markup import escape

    from lohan.sizes import format_bytes
    from lohan.store.report import verify_directories

    with _byte_bar("Verifying") as progress:
        report = verify_directories(directories, progress)
    if as_json:
        _print_json(report)
    else:
        console = Console()
        for problem in report["problems"]:
            console.print(f"[bold red]damaged[/]  {escape(problem['message'])}", highlight=False, soft_wrap=True)
        for note in report["notes"]:
            console.print(f"[yellow]note[/]  {escape(note)}", highlight=False, soft_wrap=True)
        num = len(report["problems"])
        what = f"{format_bytes(report['verified_bytes'])} in {report['num_records']} records"
        console.print(
            f"{num} problem{'s' if num != 1 else ''} in {what}."
            if num
            else f"All is well: {what} match their checksums (step {report['committed_step']}).",
            highlight=False,
        )
    if report["problems"]:
        raise typer.Exit(1)


@contextmanager
def _byte_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar to be told (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    # On stderr, so that the report can be piped while the bar is seen; without a terminal there is no bar.
    bar = Progress(
        what,
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
