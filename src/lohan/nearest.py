"""The name somebody probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean x?' for the nearest of these names; nothing where none is near."""
    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f" Did you mean {names[found[0]]}?" if found else ""
