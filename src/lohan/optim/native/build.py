"""From update.c to a shared library in the user's cache: compiled once per source, compiler and CPU.

A library ends with the SHA-256 of what stands before it, because the system's loader crashes on a file that was cut
short. It is written under another name and renamed, so processes that compile at the same time do no harm.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("update.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-shared", "-pthread",
    # Fused only where the source says so; the other two let sqrtf and comparisons be vectorised and change no bit.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip

_DIGEST_BYTES = 32
_COMPILE_SECONDS = 120
_CPU_KEYS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")


class Unavailable(Exception):
    """There is no native kernel here; the message says why in a few words."""


def build() -> Path:
    """The library, compiled now or before. Raises Unavailable."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) on the PATH")
    try:
        source = SOURCE.read_bytes()
        folder = _cache_folder()
        library = folder / f"update-{_key(source, compiler)}.so"
        if not _is_whole(library):
            _compile(compiler, library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # Path.home() raises RuntimeError
        raise Unavailable(f"it could not be compiled: {error}") from error
    return library


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lohan" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    # What lies here is loaded into this process.
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{folder} can be written by others")
    return folder


def _key(source: bytes, compiler: str) -> str:
    """Of all that decides the machine code; the compiler by its file, since asking it starts a process."""
    path = os.path.realpath(compiler)
    found = os.stat(path)
    parts = [source, repr((path, found.st_size, found.st_mtime_ns, FLAGS, platform.machine())).encode(), _cpu()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _cpu() -> bytes:
    """What -march=native looks at, as the system tells it."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor().encode()
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].strip() in _CPU_KEYS).encode()


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="compiling-") as folder:
        made = Path(folder) / "update.so"
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise Unavailable(f"{compiler} refused it: {(lines or [f'exit code {done.returncode}'])[0]}")
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(made, library)
