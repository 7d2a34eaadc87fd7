"""Fine-tune all parameters of language models far larger than GPU memory and RAM.

    with lohan.open_run(model="path/to/hf", ssd=["/nvme0/run"], host_memory="24GB", learning_rate=1e-5) as run:
        for micro_batches in loader:
            out = run.step(micro_batches)
        run.export("out/")

Importing this package is cheap on purpose: no torch, no NumPy, nothing that touches a device. What needs them is
imported when it is first asked for. It sets one environment variable on processors with unusable AMX: see lohan.amx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lohan.amx import avoid_unusable_amx

if TYPE_CHECKING:
    from lohan.engine.devices import VirtualOptions
    from lohan.engine.export import export_run
    from lohan.engine.run import Run, StepResult, open_run
    from lohan.engine.settings import Settings

__version__ = "0.1.0"
__all__ = ["Run", "Settings", "StepResult", "VirtualOptions", "__version__", "export_run", "open_run"]

_HOMES = {
    "Run": "lohan.engine.run",
    "Settings": "lohan.engine.settings",
    "StepResult": "lohan.engine.run",
    "VirtualOptions": "lohan.engine.devices",
    "export_run": "lohan.engine.export",
    "open_run": "lohan.engine.run",
}
_ROOMS = ("engine", "errors", "models", "optim", "store")

avoid_unusable_amx()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"lohan.{name}")
    raise AttributeError(f"module 'lohan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
