"""Processors that claim AMX tiles and do not say how they are laid out: oneDNN's bf16 matmuls die there.

The layout stands in CPUID leaf 0x1D. Some hypervisors pass the feature's flags through and end CPUID before that leaf;
oneDNN then reads "no tiles" from it, configures none, and the first bf16 matmul of torch ends the process with an
illegal instruction. Without AMX everything works, so oneDNN is told not to use it before it looks, which it does once,
at its first call. `import lohan` does this; whoever has set ONEDNN_MAX_CPU_ISA keeps what they chose.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_LAYOUT_LEAF = 0x1D
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def has_unusable_amx(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo speaks of such a processor."""
    first = cpuinfo.partition("\n\n")[0]
    flags = re.search(r"^flags\s*:(.*)$", first, re.MULTILINE)
    level = re.search(r"^cpuid level\s*:\s*(\d+)$", first, re.MULTILINE)
    if flags is None or level is None:
        return False
    return "amx_tile" in flags.group(1).split() and int(level.group(1)) < _LAYOUT_LEAF


def avoid_unusable_amx(environment: MutableMapping[str, str] = os.environ, cpuinfo: str | None = None) -> bool:
    """Keep oneDNN from it; True if this processor has it. Does nothing once oneDNN has been used."""
    if cpuinfo is None:
        try:
            with Path("/proc/cpuinfo").open() as file:
                cpuinfo = file.read(8192)  # the first processor's, of perhaps hundreds
        except OSError:
            return False
    if not has_unusable_amx(cpuinfo):
        return False
    if not any(name in environment for name in _VARIABLES):
        environment[_VARIABLES[0]] = "AVX512_CORE_FP16"  # the most that is not AMX; oneDNN takes what is there of it
    return True
