"""The compiled update gives the bits of the torch operators, or is not used and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.optim import SGD, Adam, AdamW, GradNorm, Updater, get_format
from lohan.optim.formats import ArraySpec, StateFormat
from lohan.optim.native import Numbers, build, find, find_norm, norm
from lohan.optim.native.team import torch_team

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STORED = [
    ("fp32", BF16), ("fp32", FP16), ("fp32", FP32), ("split", BF16),
    ("bf16-moments", BF16), ("bf16-moments", FP16), ("bf16-moments", FP32),
]  # fmt: skip
OPTIMIZERS = [AdamW(), Adam(), AdamW(betas=(0.3, 0.95)), Adam(betas=(0.0, 0.5), eps=0.0)]
NATIVE = Updater(AdamW(), get_format("split"), BF16).path == "native"
needs_native = pytest.mark.skipif(not NATIVE, reason="there is no native kernel on this machine")
SPECIAL = [0.0, -0.0, 1.0, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3e38, 1e19, float("inf"), -float("inf")]


def by_torch(updater, wire, state, grad, numbers):
    arrays = updater.state_views(state, wire.numel())
    updater._update_by_torch(wire, arrays, grad, (0, wire.numel()), numbers)


def by_kernel(updater, wire, state, grad, numbers, num_threads=1, in_team=False):
    """Returns what the kernel left to torch."""
    assert updater.path == "native"
    arrays = updater.state_views(state, wire.numel())
    rest = updater._kernel.update(wire, arrays, grad, numbers, num_threads=num_threads, in_team=in_team)
    for within in rest:
        updater._update_by_torch(wire, arrays, grad, within, numbers)
    return rest


def drawn(num, generator, power=0.0, spread=0.0, special=0.0):
    values = torch.randn(num, generator=generator)
    values *= torch.exp2(power + spread * (torch.rand(num, generator=generator) - 0.5))
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (num,), generator=generator)]
    return torch.where(torch.rand(num, generator=generator) < special, chosen, values)


def some_state(updater, num, generator, **kind):
    """Wire and state with every moment drawn by itself, and masters half-way between two weights of the wire."""
    master = drawn(num, generator, **kind)
    master.view(torch.int32)[::5] &= -0x10000
    master.view(torch.int32)[::5] |= 0x8000
    wire, state = torch.empty(num, dtype=updater.wire_dtype), torch.empty(updater.state_bytes(num), dtype=torch.uint8)
    updater.initialise(master, wire, state)
    arrays = updater.state_views(state, num)
    arrays["exp_avg"].copy_(drawn(num, generator, **kind))
    arrays["exp_avg_sq"].copy_(drawn(num, generator, **kind).abs())
    return wire, state


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@needs_native
@settings(max_examples=250, deadline=None)
@given(
    stored=st.sampled_from(STORED),
    optimizer=st.sampled_from(OPTIMIZERS),
    num=st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    gradient=st.sampled_from([BF16, FP16, FP32]),
    step=st.one_of(st.integers(1, 20), st.integers(1, 1 << 24)),
    lr=st.one_of(st.just(0.0), st.floats(1e-7, 1.0)),
    weight_decay=st.one_of(st.just(0.0), st.floats(1e-50, 0.5)),
    multipliers=st.lists(st.one_of(st.floats(-4, 4), st.floats(0, 1).map(torch.tensor)), max_size=3),
    power=st.sampled_from([-135, -70, -20, 0, 20, 63]),
    spread=st.sampled_from([0, 12, 300]),
    special=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    seed=st.integers(0, 1 << 30),
)
def test_every_bit_is_that_of_the_torch_operators(
    stored, optimizer, num, gradient, step, lr, weight_decay, multipliers, power, spread, special, seed
):
    generator = torch.Generator().manual_seed(seed)
    kind = {"power": power, "spread": spread, "special": special}
    updater = Updater(optimizer, get_format(stored[0]), stored[1], block_elements=1024)
    wire, state = some_state(updater, num, generator, **kind)
    grad = drawn(num, generator, **kind).to(gradient)
    numbers = Numbers(step, lr, weight_decay, tuple(multipliers))
    expected, kept = (wire.clone(), state.clone()), grad.clone()
    by_torch(updater, *expected, grad, numbers)
    by_kernel(updater, wire, state, grad, numbers)
    assert same_bits(wire, expected[0])
    assert same_bits(state, expected[1])
    assert same_bits(grad, kept)


@needs_native
@pytest.mark.parametrize(("name", "dtype"), STORED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_ordinary_numbers_are_all_done_by_the_kernel_step_after_step(name, dtype, optimizer):
    generator = torch.Generator().manual_seed(1)
    updater = Updater(optimizer, get_format(name), dtype)
    for num in (*range(1, 20), 64, 65, 127, 1000, 1003):
        wire, state = torch.empty(num, dtype=dtype), torch.empty(updater.state_bytes(num), dtype=torch.uint8)
        updater.initialise(torch.randn(num, generator=generator) * 0.02, wire, state)
        expected = wire.clone(), state.clone()
        for step in range(1, 4):
            grad = (torch.randn(num, generator=generator) * 0.01).to(dtype)
            numbers = Numbers(step, 1e-3, 0.1, (0.5, torch.tensor(0.9)))
            by_torch(updater, *expected, grad, numbers)
            assert by_kernel(updater, wire, state, grad, numbers) == []
            assert same_bits(wire, expected[0])
            assert same_bits(state, expected[1])


@needs_native
@pytest.mark.parametrize("num", [1, 64, 40_000, 150_001])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("in_team", [False, True])
def test_the_number_of_threads_and_whose_they_are_changes_no_bit(num, num_threads, in_team):
    generator = torch.Generator().manual_seed(num)
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, num, generator)
    grad = drawn(num, generator).to(BF16)
    if num > 100_000:
        grad[[70_000, 149_990]] = float("nan")
    expected, numbers = (wire.clone(), state.clone()), Numbers(3, 1e-3, 0.1, (0.5,))
    by_torch(updater, *expected, grad, numbers)
    rest = by_kernel(updater, wire, state, grad, numbers, num_threads, in_team=in_team)
    assert all(start % 64 == 0 for start, _ in rest)
    assert bool(rest) == (num > 100_000)
    assert same_bits(wire, expected[0])
    assert same_bits(state, expected[1])


@needs_native
@pytest.mark.parametrize("name", ["split", "bf16-moments"])
@given(seed=st.integers(0, 2**32), num=st.integers(1, 3000))
@settings(max_examples=25, deadline=None)
def test_first_state_is_the_one_torch_makes(name, seed, num):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (num,), generator=generator).to(torch.int32)  # every kind of float
    bits[::5] = (bits[::5] & -0x10000) | 0x8000  # ties
    values, found = bits.view(torch.float32), []
    for native in (True, False):
        updater = Updater(AdamW(), get_format(name), BF16)
        assert updater.path == "native"
        if not native:
            updater._path = "torch: for comparison"
        wire, state = torch.empty(num, dtype=BF16), torch.full((updater.state_bytes(num),), 7, dtype=torch.uint8)
        updater.initialise(values, wire, state)
        found.append((wire.view(torch.int16), state))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@needs_native
def test_in_the_team_no_thread_is_started_for_an_update():
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, 1 << 20, torch.Generator().manual_seed(0))
    grad = torch.ones(1 << 20).to(BF16)
    assert torch_team() is not None
    numbers = Numbers(1, 1e-3, 0.0)
    by_kernel(updater, wire, state, grad, numbers, num_threads=2, in_team=True)  # the helper is there from here on
    before, stop, most = len(os.listdir("/proc/self/task")), threading.Event(), []

    def watch():
        while not stop.is_set():
            most.append(len(os.listdir("/proc/self/task")))

    watching = threading.Thread(target=watch)
    watching.start()
    for _ in range(30):
        by_kernel(updater, wire, state, grad, numbers, num_threads=2, in_team=True)
    stop.set()
    watching.join()
    assert max(most) <= before + 1


@needs_native
@pytest.mark.parametrize("name", ["fp32", "split", "bf16-moments"])
def test_a_nan_and_its_payload_are_left_to_torch(name):
    updater = Updater(AdamW(), get_format(name), BF16)
    wire, state = some_state(updater, 1000, torch.Generator().manual_seed(0))
    grad = torch.randn(1000)
    grad.view(torch.int32)[[130, 700]] = torch.tensor([0x7FC12345, -0x3FFFFF], dtype=torch.int32)
    expected, numbers = (wire.clone(), state.clone()), Numbers(1, 1e-3, 0.1)
    by_torch(updater, *expected, grad, numbers)
    assert by_kernel(updater, wire, state, grad, numbers) == [(128, 1000)]
    assert same_bits(wire, expected[0])
    assert same_bits(state, expected[1])


@needs_native
@pytest.mark.parametrize("optimizer", [AdamW(), Adam()], ids=repr)
def test_the_decay_is_rounded_once(optimizer):
    # 1 - lr * weight_decay so close to the middle of two floats that rounding the product first gives the other one.
    middle = 1 - (2**23 + 2**22 + 1) * 2.0**-25
    target = (1 - middle) + 2.0**-54
    generator = torch.Generator().manual_seed(0)
    pairs = ((lr, target / lr) for lr in torch.rand(10_000, generator=generator, dtype=torch.float64).tolist())
    lr, decay = next((a, b) for a, b in pairs if a * b == target and Fraction(a) * Fraction(b) > Fraction(target))
    updater = Updater(optimizer, get_format("fp32"), FP32)
    wire, state = some_state(updater, 500, generator)
    expected, grad = (wire.clone(), state.clone()), torch.randn(500)
    by_torch(updater, *expected, grad, Numbers(1, lr, decay))
    assert by_kernel(updater, wire, state, grad, Numbers(1, lr, decay)) == []
    assert same_bits(wire, expected[0])


@needs_native
def test_any_alignment_of_memory_will_do():
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, 333, torch.Generator().manual_seed(0))
    grad = torch.randn(333).to(BF16)
    expected, numbers = (wire.clone(), state.clone()), Numbers(1, 1e-3, 0.1)
    by_torch(updater, *expected, grad, numbers)
    odd_wire, odd_grad = torch.empty(336, dtype=BF16)[3:], torch.empty(338, dtype=BF16)[5:]
    odd_state = torch.empty(state.numel() + 4, dtype=torch.uint8)[4:]
    for to, values in ((odd_wire, wire), (odd_grad, grad), (odd_state, state)):
        to.copy_(values)
    assert by_kernel(updater, odd_wire, odd_state, odd_grad, numbers) == []
    assert same_bits(odd_wire.clone(), expected[0])
    assert same_bits(odd_state, expected[1])


@needs_native
@pytest.mark.parametrize(
    ("grad", "numbers"),
    [
        (torch.ones(128)[::2], Numbers(1, 1e-3, 0.1)),
        (torch.ones(64, dtype=torch.float64), Numbers(1, 1e-3, 0.1)),
        (torch.ones(64), Numbers((1 << 24) + 1, 1e-3, 0.1)),
        (torch.ones(64), Numbers(1, 1e-3, 0.1, (float("inf"),))),
        (torch.ones(64), Numbers(1, 1e-3, 0.1, (torch.tensor(float("nan")),))),
    ],
    ids=["stride", "float64", "step", "infinite", "nan"],
)
def test_what_the_kernel_was_not_made_for_goes_to_torch(grad, numbers):
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, 64, torch.Generator().manual_seed(0))
    expected = wire.clone(), state.clone()
    by_torch(updater, *expected, grad, numbers)
    assert by_kernel(updater, wire, state, grad, numbers) == [(0, 64)]
    assert same_bits(wire, expected[0])


@needs_native
def test_update_uses_the_kernel_by_itself():
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, 640, torch.Generator().manual_seed(0))
    updater._update_by_torch = None  # would be called for anything left
    updater.update(wire, state, torch.randn(640), step=1, lr=1e-3, weight_decay=0.1)


def test_rules_and_formats_it_does_not_know_are_left_to_torch():
    class Doubled(AdamW):
        def update(self, master, grad, moments, **numbers):
            super().update(master, 2 * grad, moments, **numbers)

    class Odd(StateFormat):
        name = "odd"

        def arrays(self, moments, wire):
            return tuple(ArraySpec(name, FP32) for name in moments)

        def unpack(self, wire, arrays, scratch):
            return wire.float(), dict(arrays)

    for optimizer, state_format in ((SGD(), get_format("split")), (Doubled(), get_format("split")), (AdamW(), Odd())):
        assert Updater(optimizer, state_format, BF16).path.startswith("torch: ")


# -- the norm ---------------------------------------------------------------------------------------------


def norm_by_torch(grad):
    return torch.linalg.vector_norm(grad.to(FP32), 2.0)


@needs_native
@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([BF16, FP16]),
    num=st.one_of(st.integers(1024, 3000), st.integers(1024, 200_000)),
    power=st.integers(-80, 60),
    special=st.sampled_from([0.0, 0.0, 0.001]),
    seed=st.integers(0, 1 << 30),
)
def test_the_norm_of_a_gradient_is_torchs_to_the_bit(dtype, num, power, special, seed):
    generator = torch.Generator().manual_seed(seed)
    grad = drawn(num, generator, power=power, spread=8, special=special).to(dtype)
    found, wanted = find_norm(grad, norm_by_torch), norm_by_torch(grad)
    assert found is not None
    assert same_bits(found.view(1), wanted.view(1))
    assert same_bits(GradNorm.tensor_norm(grad).view(1), wanted.view(1))


@needs_native
def test_norms_it_is_not_made_for_are_left_to_torch(monkeypatch):
    grad = torch.ones(4096, dtype=BF16)
    assert find_norm(grad, norm_by_torch) == 64
    nan = torch.full((4096,), float("nan"), dtype=BF16)
    for other in (nan, grad[:1000], grad[::2], grad.float()):
        assert find_norm(other, norm_by_torch) is None
        torch.testing.assert_close(GradNorm.tensor_norm(other), norm_by_torch(other), rtol=0, atol=0, equal_nan=True)
    monkeypatch.setenv("LOHAN_NATIVE", "0")
    assert find_norm(grad, norm_by_torch) is None


@needs_native
def test_a_norm_of_other_bits_is_refused(new_cache, tmp_path, monkeypatch):
    other, old = tmp_path / "other.c", "sum += sums[k]"
    assert old in build.SOURCE.read_text()
    other.write_text(build.SOURCE.read_text().replace(old, "sum += sums[lanes - 1 - k]"))
    monkeypatch.setattr(build, "SOURCE", other)
    assert find_norm(torch.ones(4096, dtype=FP16), norm_by_torch) is None


# -- where there is no kernel -----------------------------------------------------------------------------


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    """An empty cache of one's own, looked at afresh."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find.forget()
    norm.forget()
    yield tmp_path / "cache" / "lohan" / "native"
    find.forget()
    norm.forget()


def path_now() -> str:
    """The path of a new updater, which must work whatever it is."""
    updater = Updater(AdamW(), get_format("split"), BF16)
    wire, state = some_state(updater, 100, torch.Generator().manual_seed(0))
    updater.update(wire, state, torch.randn(100), step=1, lr=1e-3, weight_decay=0.1)
    return updater.path


def test_the_switch_turns_it_off(monkeypatch):
    monkeypatch.setenv("LOHAN_NATIVE", "0")
    assert path_now() == "torch: LOHAN_NATIVE is 0"


def test_without_a_compiler_torch_does_it(new_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert path_now() == "torch: no C compiler (cc, gcc, clang) on the PATH"
    assert not new_cache.exists()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'x.c:1: error: it is broken' >&2; exit 1", "it is broken"),
        ("exit 0", "could not be compiled"),
        ("exec false", "code 1"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_words(new_cache, tmp_path, monkeypatch, script, words):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    path = path_now()
    assert path.startswith("torch: ")
    assert words in path
    assert list(new_cache.iterdir()) == []


@pytest.mark.parametrize("base", ["/proc", "a file"])
def test_a_cache_that_cannot_be_written_leaves_it_to_torch(new_cache, tmp_path, monkeypatch, base):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc" if base == "/proc" else str(tmp_path / "file"))
    assert path_now().startswith("torch: it could not be compiled" if NATIVE else "torch: ")


@needs_native
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it likes")
def test_a_read_only_cache_leaves_it_to_torch(new_cache):
    new_cache.mkdir(parents=True)
    new_cache.chmod(0o500)
    assert path_now().startswith("torch: it could not be compiled")


@needs_native
def test_a_cache_that_others_may_write_is_not_trusted(new_cache):
    new_cache.mkdir(parents=True)
    new_cache.chmod(0o777)
    assert path_now() == f"torch: {new_cache} can be written by others"


@needs_native
@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty", "not a library"])
def test_a_damaged_library_is_never_loaded_and_made_again(new_cache, damage):
    assert path_now() == "native"
    [library] = new_cache.iterdir()
    whole = library.read_bytes()
    damaged = {"cut short": whole[:4096], "one bit": b"\x00" + whole[1:], "empty": b"", "not a library": b"x" * 99}
    library.unlink()  # the loaded one stays as it is
    library.write_bytes(damaged[damage])
    find.forget()
    assert path_now() == "native"
    assert build._is_whole(library)


@needs_native
def test_a_damaged_library_without_a_compiler_to_mend_it_leaves_it_to_torch(new_cache, tmp_path, monkeypatch):
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    library = new_cache / f"update-{build._key(build.SOURCE.read_bytes(), compiler)}.so"
    new_cache.mkdir(parents=True, mode=0o700)
    library.write_bytes(b"damaged")
    monkeypatch.setattr(build, "_compile", lambda *_: (_ for _ in ()).throw(OSError("no more processes")))
    assert path_now() == "torch: it could not be compiled: no more processes"


@needs_native
def test_a_kernel_of_other_bits_is_refused(new_cache, tmp_path, monkeypatch):
    text = build.SOURCE.read_text()
    for old, new in [
        (
            "fmaf(grad[i] - old_average[i], c.lerp, base[i])",
            "base[i] + (grad[i] - old_average[i]) * c.lerp",
        ),
        ("fmaf(c.beta2, old_square[i], c.square * grad[i] * grad[i])", "0.5f"),
        (">> 16) & 1", ">> 17) & 1"),
        ("+ 0x8000", "+ 0x7fff"),
        ("(bits + 0x8000u) >> 16, kept", "(bits + 0x8001u) >> 16, kept"),
        ("kept = (bits >> 16) | 0x40u", "kept = bits >> 16"),
        ("remainder[i] = (uint16_t)bits", "remainder[i] = (uint16_t)(bits & 0x7fff)"),
    ]:
        assert old in text
        other = tmp_path / "other.c"
        other.write_text(text.replace(old, new))
        monkeypatch.setattr(build, "SOURCE", other)
        find.forget()
        paths = [Updater(AdamW(), get_format(name), BF16).path for name in ("split", "bf16-moments")]
        assert "torch: its bits are not torch's on this machine" in paths, old


@needs_native
def test_two_processes_may_compile_at_the_same_time(new_cache):
    code = "import torch; from lohan.optim import *; print(Updater(AdamW(), get_format('split'), torch.bfloat16).path)"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["native", "native"]
    [library] = new_cache.iterdir()
    assert build._is_whole(library)


@needs_native
def test_threads_that_come_first_together_compile_once(new_cache, monkeypatch):
    compiled = []
    real = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (compiled.append(1), real(*args)))
    with ThreadPoolExecutor(4) as pool:
        assert {pool.submit(path_now).result() for _ in range(4)} == {"native"}
    assert len(compiled) == 1


def test_the_source_is_part_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert build.SOURCE.is_file()
    assert '"optim/native/*.c"' in text
