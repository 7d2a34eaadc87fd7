"""The machine apart from its drives: interpreter, torch, the device, cores and memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from lohan.amx import avoid_unusable_amx
from lohan.doctor.findings import Finding, Verdict
from lohan.sizes import format_bytes

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 6)

# Below this, staging for one block of a 7e9-parameter model and the system leave each other no room. By feel.
_LITTLE_RAM_BYTES = 8 * 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Torch:
    """What importing torch showed."""

    version: str
    cuda: str | None
    """The CUDA version torch was built for; None in a build without CUDA."""

    gpus: tuple[Gpu, ...] = ()
    error: str | None = None
    """Why it cannot be imported, if so."""


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    limit_bytes: int
    used_bytes: int


def examine_machine() -> list[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    torch = find_torch()
    return [
        judge_python(sys.version_info[:2], platform.python_version()),
        judge_torch(torch),
        *judge_device(torch),
        judge_cpu(len(os.sched_getaffinity(0)), unusable_amx=avoid_unusable_amx()),
        *judge_update(find_update_path(torch)),
        *judge_memory(memory.total, memory.available, find_cgroup_memory()),
    ]


def judge_python(version: tuple[int, int], text: str) -> Finding:
    new_enough = version >= MIN_PYTHON
    return Finding(
        name="python",
        value=text,
        verdict=Verdict.OK if new_enough else Verdict.PROBLEM,
        advice="" if new_enough else "Install Python 3.11 or newer and make the environment again with it.",
        data={"version": text},
    )


def find_torch() -> Torch | None:
    """torch as it is installed here; None if it is not."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        import torch

        gpus = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                gpus.append(Gpu(properties.name, properties.total_memory))
        return Torch(str(torch.__version__), torch.version.cuda, tuple(gpus))
    except Exception as error:  # a broken driver or library fails in ways nobody can list; each is a finding
        return Torch("", None, error=f"{type(error).__name__}: {error}".splitlines()[0])


def judge_torch(torch: Torch | None) -> Finding:
    if torch is None:
        return Finding(
            name="torch",
            value="not installed",
            verdict=Verdict.PROBLEM,
            advice="Install it: pip install 'torch>=2.6'. The store works without it, training does not.",
        )
    if torch.error is not None:
        return Finding(
            name="torch",
            value=f"cannot be imported: {torch.error}",
            verdict=Verdict.PROBLEM,
            advice="Install it again: pip install --force-reinstall 'torch>=2.6'.",
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2])
    data = {"version": torch.version, "cuda": torch.cuda}
    if numbers < MIN_TORCH:
        return Finding(
            name="torch",
            value=torch.version,
            verdict=Verdict.PROBLEM,
            advice="It is too old: pip install 'torch>=2.6'.",
            data=data,
        )
    return Finding(name="torch", value=torch.version, data=data)


def judge_device(torch: Torch | None) -> list[Finding]:
    """One finding for each GPU, or one that says why there is none."""
    if torch is None or torch.error is not None:
        return []
    if torch.gpus:
        return [
            Finding(
                name="device",
                value=f"{gpu.name}, {format_bytes(gpu.memory_bytes)}",
                data={"kind": "cuda", "index": index, "name": gpu.name, "memory_bytes": gpu.memory_bytes},
            )
            for index, gpu in enumerate(torch.gpus)
        ]
    if torch.cuda is None:
        advice = "This torch is built without CUDA. With an NVIDIA card, install a CUDA build of torch."
    else:
        advice = f"torch is built for CUDA {torch.cuda} and sees no card. With one built in, check nvidia-smi."
    return [Finding(name="device", value="CPU only", verdict=Verdict.NOTE, advice=advice, data={"kind": "cpu"})]


def judge_cpu(num_cores: int, *, unusable_amx: bool = False) -> Finding:
    few = num_cores < 4
    advice = []
    if few:
        advice.append("Checksums and optimizer updates share these with the rest; with so few they take turns.")
    if unusable_amx:
        advice.append(
            "It claims AMX and hides how to use it, as some virtual machines do, and plain torch dies at its first "
            "bf16 matmul. lohan does without; in other programs set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16."
        )
    return Finding(
        name="cpu",
        value=f"{num_cores} core{'s' if num_cores != 1 else ''} usable",
        verdict=Verdict.NOTE if advice else Verdict.OK,
        advice=" ".join(advice),
        data={"num_cores": num_cores, "unusable_amx": unusable_amx},
    )


def find_update_path(torch: Torch | None) -> str | None:
    """What would do the optimizer updates of a bf16 run, as Updater.path says it; None where torch does not work.
    May compile for a second or two."""
    if torch is None or torch.error is not None:
        return None
    from torch import bfloat16

    from lohan.optim import AdamW, Updater, default_format

    return Updater(AdamW(), default_format(bfloat16), bfloat16).path


def judge_update(path: str | None) -> list[Finding]:
    if path is None:
        return []
    by, _, reason = path.partition(": ")
    native = by == "native"
    return [
        Finding(
            name="update",
            value="native kernel, compiled here" if native else f"torch operators, no native kernel: {reason}",
            verdict=Verdict.OK if native else Verdict.NOTE,
            advice=""
            if native
            else "Optimizer updates give the same bits and take two to four times as long. "
            "gcc or clang on the PATH is all the kernel needs on most machines.",
            data={"native": native, "reason": reason},
        )
    ]


def judge_memory(total: int, available: int, cgroup: CgroupMemory | None) -> list[Finding]:
    """RAM as the system counts it, and the limit of the container or slice where that is lower."""
    findings = []
    limit = cgroup.limit_bytes if cgroup is not None and cgroup.limit_bytes < total else None
    usable = available
    if cgroup is not None and limit is not None:
        usable = min(available, max(0, limit - cgroup.used_bytes))
        findings.append(
            Finding(
                name="memory limit",
                value=f"{format_bytes(limit)} for this process's control group, {format_bytes(cgroup.used_bytes)} used",
                verdict=Verdict.NOTE,
                advice=f"Keep host_memory below it, not below the machine's {format_bytes(total)}.",
                data={"limit_bytes": limit, "used_bytes": cgroup.used_bytes},
            )
        )
    little = usable < _LITTLE_RAM_BYTES
    memory = Finding(
        name="memory",
        value=f"{format_bytes(usable)} free of {format_bytes(total)}",
        verdict=Verdict.WARNING if little else Verdict.OK,
        advice="Close other programs: large models need more than 8 GB for staging." if little else "",
        data={"total_bytes": total, "free_bytes": usable},
    )
    return [memory, *findings]


def find_cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """The tightest memory limit on the way up from this process's control group, v2 or v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[CgroupMemory] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's; the limit then stands at the top of what is mounted here.
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            limit, used = (_number(base.joinpath(*parts[:depth], name)) for name in names)
            if limit is not None:
                found.append(CgroupMemory(limit, used or 0))
    return min(found, key=lambda memory: memory.limit_bytes, default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
