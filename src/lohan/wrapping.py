"""Long sentences on a terminal: broken between words, never inside a number or a path."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO


def wrapped(text: str, stream: TextIO, *, indent: str = "") -> str:
    """The text for this stream, further lines of a sentence indented. Elsewhere than on a terminal it is left as it is:
    programs read lines."""
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        width=shutil.get_terminal_size().columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))
