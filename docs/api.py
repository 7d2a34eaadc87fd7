"""Writes docs/api.md from the docstrings of what users may call.

python docs/api.py            write it
python docs/api.py --check    exit 1 if it is not what the docstrings say
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_name("api.md")
PARTS: list[tuple[str, str, list[str]]] = [
    ("Training from Python", "lohan", ["open_run", "Run", "StepResult", "Settings", "export_run"]),
    ("Models", "lohan.models", ["load"]),
    ("The training command from Python", "lohan.train.config_file", ["load_config", "parse_config", "dump_config"]),
    ("", "lohan.train.loop", ["train", "TrainResult"]),
    ("", "lohan.train.preview", ["Preview"]),
    ("", "lohan.train.status", ["read_status", "Status"]),
    ("", "lohan.train.metrics", ["read_metrics"]),
    ("Writing text", "lohan.generate", ["open_generator", "Generator", "Sampling", "Written"]),
    (
        "The store",
        "lohan.store",
        ["create_store", "open_store", "Store", "RecordSpec", "Handle", "open_arena", "Arena"],
    ),
    ("Machines", "lohan.hardware", ["load_machine"]),
    ("", "lohan.measure.machine", ["profile_machine"]),
    ("", "lohan.profiles", ["MachineProfile", "DriveProfile"]),
]


def make_page() -> str:
    """The whole page."""
    lines = [
        "# API reference",
        "",
        "Made from the docstrings by `make docs`; a test keeps it current. Settings of the training command are in",
        "[config.md](config.md), errors in [troubleshooting.md](troubleshooting.md).",
    ]
    for title, module, names in PARTS:
        if title:
            lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *describe(module, name)]
    return "\n".join(lines) + "\n"


def describe(module: str, name: str) -> list[str]:
    """One class or function."""
    thing = getattr(import_module(module), name)
    lines = [f"### `{module}.{name}`", ""]
    if is_dataclass(thing):
        return [*lines, *paragraphs(thing), *dataclass_rows(thing), *methods(thing)]
    if inspect.isclass(thing):
        return [*lines, *paragraphs(thing), *methods(thing)]
    return [*lines, f"    {signature(name, thing)}", "", *paragraphs(thing)]


def paragraphs(thing: object) -> list[str]:
    # A dataclass without a docstring gets its signature as one.
    text = inspect.getdoc(thing) or ""
    name = getattr(thing, "__name__", "")
    return [] if text.startswith(f"{name}(") else text.splitlines()


def dataclass_rows(thing: type) -> list[str]:
    said = field_docs(thing)
    rows = ["", "| field | default | |", "|---|---|---|"]
    for field in fields(thing):
        default = "" if field.default is MISSING else f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | {default} | {said.get(field.name, '')} |")
    return rows


def field_docs(thing: type) -> dict[str, str]:
    """The string under each field, which Python itself does not keep."""
    source = inspect.getsource(thing)
    found = re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', source, flags=re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def methods(thing: type) -> list[str]:
    lines: list[str] = []
    for name, member in vars(thing).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            lines += ["", f"`{name}`: {first_line(member.fget)}"]
        elif inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod)):
            inner = getattr(member, "__func__", member)
            lines += ["", f"    {signature(name, inner)}", "", *paragraphs(inner)]
    return lines


def first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def signature(name: str, thing: object) -> str:
    """As it is written, without the types of what is obvious from the name."""
    shown = inspect.signature(inspect.unwrap(thing))  # type: ignore[arg-type]
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in shown.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return f"{name}{shown.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"


def main() -> int:
    page = make_page()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    print(f"Wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
