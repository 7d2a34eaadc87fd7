"""Processors that claim AMX and hide its layout must not end a run at its first bf16 matmul."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lohan.amx import avoid_unusable_amx, has_unusable_amx


def cpuinfo(*, level: int, flags: str) -> str:
    first = f"processor\t: 0\nmodel name\t: Some CPU\ncpuid level\t: {level}\nflags\t\t: fpu {flags} vme\n"
    return f"{first}\nprocessor\t: 1\ncpuid level\t: 99\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("level", "flags", "unusable"),
    [
        (28, "amx_bf16 amx_tile", True),
        (29, "amx_bf16 amx_tile", False),
        (32, "amx_tile", False),
        (28, "avx512f", False),
        (13, "", False),
    ],
)
def test_amx_is_unusable_where_cpuid_ends_before_its_layout(level, flags, unusable):
    assert has_unusable_amx(cpuinfo(level=level, flags=flags)) is unusable


@pytest.mark.parametrize(
    "text", ["", "processor : 0\n", "flags : amx_tile\n", "CPU architecture: 8\nFeatures : asimd\n"]
)
def test_what_says_nothing_of_it_is_left_alone(text):
    environment: dict[str, str] = {}
    assert not avoid_unusable_amx(environment, text)
    assert not environment


def test_onednn_is_kept_from_amx_unless_somebody_has_chosen():
    text = cpuinfo(level=28, flags="amx_tile")
    environment: dict[str, str] = {}
    assert avoid_unusable_amx(environment, text)
    assert environment == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    chosen = {"DNNL_MAX_CPU_ISA": "AVX2"}
    assert avoid_unusable_amx(chosen, text)
    assert chosen == {"DNNL_MAX_CPU_ISA": "AVX2"}


def test_a_bf16_matmul_works_after_importing_lohan():
    code = "import lohan, torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 256"
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_MAX_CPU_ISA")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0, done.stderr
