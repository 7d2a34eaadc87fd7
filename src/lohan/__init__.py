"""Fine-tune all parameters of language models far larger than GPU memory and RAM.

Importing this package is cheap on purpose: no torch, no NumPy, nothing that touches a device.
"""

from __future__ import annotations

__version__ = "0.1.0"
