"""Installs the peers into a virtual environment of their own, benchmarks/peers/.venv, and builds DeepSpeed's operators.

    python benchmarks/peers/install.py

torch comes first and DeepSpeed after it, without build isolation, because its setup asks the installed torch. Its
operators are built here once (up to three minutes each), so that no benchmark waits for a compiler. Asynchronous I/O
needs Debian's libaio-dev, which is installed if this runs as root on such a system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = (HERE / ".venv").resolve()
PYTHON = VENV / "bin" / "python"
_STAMP = VENV / ".installed"
# Operators are built again when a path in their compiler's command changes: one folder for each environment, and the
# same path to it from everywhere.
EXTENSIONS = {"TORCH_EXTENSIONS_DIR": str(VENV / "extensions")}
_ENVIRONMENT = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", **EXTENSIONS}


class CannotInstall(Exception):
    """What is missing, and what to do."""


def ensure(*, nvme: bool) -> None:
    """Everything is there afterwards, or CannotInstall says what is not. Does nothing the second time."""
    if nvme and not _has_aio():
        _install_aio()
    if _wanted() != (_STAMP.read_text() if _STAMP.exists() else ""):
        _install()
    for builder in ("CPUAdamBuilder", "ShareMemCommBuilder", *(("AsyncIOBuilder",) if nvme else ())):
        _build(builder)


def version(package: str) -> str | None:
    """Of a package in the peers' environment; None while that is not installed to its end."""
    if not _STAMP.exists():
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _wanted() -> str:
    return "".join((HERE / name).read_text() for name in ("requirements.txt", "constraints.txt"))


def _install() -> None:
    print(f"Installing the peers into {VENV} (a few minutes)", flush=True)
    if not PYTHON.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", str(HERE / "constraints.txt")]
    lines = (HERE / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    first = [line for line in wanted if not line.startswith("deepspeed")]
    _run([*pip, *first])
    _run([*pip, "--no-build-isolation", *(line for line in wanted if line not in first)])
    _STAMP.write_text(_wanted())


def _build(builder: str) -> None:
    """Compile one of DeepSpeed's operators, which it would do itself at first use."""
    stamp = VENV / "extensions" / f".built-{builder}"
    if stamp.exists():
        return
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise CannotInstall(
            "DeepSpeed compiles its operators and there is no C++ compiler. Install one: apt install g++"
        )
    print(f"Building DeepSpeed's {builder.removesuffix('Builder')} (up to three minutes)", flush=True)
    code = "from deepspeed.accelerator import get_accelerator as get; "
    code += f"get().create_op_builder({builder!r}).load(verbose=False)"
    _run([str(PYTHON), "-c", code])
    stamp.touch()


def _has_aio() -> bool:
    return Path("/usr/include/libaio.h").exists()


def _install_aio() -> None:
    can = os.geteuid() == 0 and shutil.which("apt-get") is not None
    if can:
        print("Installing libaio-dev", flush=True)
        done = subprocess.run(["apt-get", "install", "-y", "-q", "libaio-dev"], capture_output=True, check=False)
        can = done.returncode == 0
    if not can or not _has_aio():
        raise CannotInstall(
            "DeepSpeed on NVMe needs libaio's headers, and /usr/include/libaio.h is not there. "
            "Install them: sudo apt install libaio-dev"
        )


def _run(command: list[str]) -> None:
    environment = {**os.environ, **_ENVIRONMENT, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise CannotInstall(f"The peers could not be installed: {words[-1] if words else done.returncode}")


if __name__ == "__main__":
    try:
        ensure(nvme=True)
    except CannotInstall as problem:
        sys.exit(str(problem))
