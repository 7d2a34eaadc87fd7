"""The command line. Heavy imports happen inside the commands: `lohan --help` must answer at once."""

from __future__ import annotations

import sys

import typer

from lohan.errors import LohanError

app = typer.Typer(name="lohan", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run a command; an error the user can mend is one message and exit code 2, never a traceback."""
    try:
        app()
    except LohanError as error:
        print(f"lohan: {error}", file=sys.stderr)
        raise SystemExit(2) from None
