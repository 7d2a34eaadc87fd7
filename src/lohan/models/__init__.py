"""From nn.Module to units that can be streamed; Hugging Face folders in and out.

`load` streams a folder into a new run. It needs the store and the optimizer's state formats, so its code is in
engine/create.py, and it is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.engine.create import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from lohan.engine.create import load

        return load
    raise AttributeError(f"module 'lohan.models' has no attribute {name!r}")
