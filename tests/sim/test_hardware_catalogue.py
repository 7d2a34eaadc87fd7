"""The catalogue and machine files: complete, plausible, and refused with the reason where they are wrong."""

import re

import pytest
import yaml

from lohan.errors import ConfigError
from lohan.hardware import (
    load_drives,
    load_gpus,
    load_links,
    load_machine,
    machine_from_dict,
    machine_from_parts,
    machine_names,
    machine_to_dict,
    resize,
)
from lohan.presets import preset_profile
from lohan.sim.strategies import build_scenario

SMALL = {
    "name": "pc",
    "gpu_flops_per_second": 1e14,
    "gpu_memory": "24GB",
    "to_gpu_bytes_per_second": "21e9",
    "to_host_bytes_per_second": 2.1e10,
    "host_memory": "64GB",
    "update_parameters_per_second": 1e9,
    "drives": [{"name": "d", "count": 2, "read_bytes_per_second": 7e9, "write_bytes_per_second": 1.5e9}],
}


def test_every_part_has_a_source_and_every_price_a_date():
    for part in (*load_gpus().values(), *load_drives().values(), *load_links().values()):
        assert len(part.source) > 10
        if getattr(part, "price", None) is not None:
            assert re.fullmatch(r"20\d\d(-\d\d)?", part.price_date), part


def test_parts_are_plausible():
    links = load_links()
    for gpu in load_gpus().values():
        assert gpu.link in links
        assert 2e13 < gpu.flops_per_second < 5e15
        assert 10e9 < gpu.memory_bytes < 300e9
    for drive in load_drives().values():
        profile = drive.profile()
        assert profile.write_bytes_per_second <= profile.read_bytes_per_second < 16e9
        assert profile.endurance_bytes > 100 * profile.capacity_bytes
        if profile.burst_write_bytes_per_second is not None:
            assert profile.burst_write_bytes_per_second > profile.write_bytes_per_second
            assert 0 < profile.burst_bytes < profile.capacity_bytes
    for link in links.values():
        assert link.copied_bytes_per_second < link.bytes_per_second


def test_the_published_testbed_is_one_card_twelve_drives_and_768_gb():
    machine = load_machine("lohan-testbed")
    assert machine.gpus == 1
    assert len(machine.drives) == 12
    assert machine.host_memory_bytes == 768 * 10**9
    assert machine.gpu_memory_bytes == 24 << 30


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_written_and_read_again_is_the_same(name, tmp_path):
    machine = load_machine(name)
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(machine_to_dict(machine)))
    assert load_machine(path) == machine


def test_sizes_and_rates_may_be_written_as_people_do():
    machine = machine_from_dict(SMALL)
    assert machine.gpu_memory_bytes == 24 * 10**9
    assert machine.to_gpu_bytes_per_second == 21e9
    assert len(machine.drives) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_flops": 1e14}, "gpu_flops"),
        ({"to_gpu_bytes_per_second": "fast"}, "it is a number"),
        ({"to_gpu_bytes_per_second": 0}, "above 0"),
        ({"drives": [{"read_bytes_per_second": 1e9}]}, "lacks write_bytes_per_second"),
        ({"drives": {"read_bytes_per_second": 1e9}}, "drives is a list"),
        ({"drives": [{"count": "two"}]}, "whole number"),
        ({"separate_memory": "no"}, "true or false"),
    ],
)
def test_a_wrong_machine_is_refused_with_what_is_wrong(change, message):
    with pytest.raises(ConfigError, match=message):
        machine_from_dict(SMALL | change)


def test_a_machine_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="lohan-testbed"):
        load_machine("no-such-machine")


def test_a_machine_can_be_made_larger_and_smaller():
    machine = load_machine("lohan-testbed")
    assert len(resize(machine, ssds=1).drives) == 1
    assert len(resize(machine, ssds=16).drives) == 16
    assert resize(machine, gpus=4).gpus == 4
    assert resize(machine) == machine


def test_every_card_and_drive_makes_a_machine_that_can_be_simulated():
    profile = preset_profile("qwen3-0.6b", sequence_length=1024)
    for gpu in load_gpus():
        machine = machine_from_parts(gpu, {"samsung-990-pro-2tb": 1}, host_memory_bytes=64 * 10**9)
        assert build_scenario("lohan", profile, machine, steps=2).run().seconds_per_step > 0
    for drive in load_drives():
        machine = machine_from_parts("rtx-4090", {drive: 2}, host_memory_bytes=64 * 10**9)
        assert len(machine.drives) == 2


def test_a_part_that_is_not_in_the_catalogue_is_refused():
    with pytest.raises(ConfigError, match="rtx-4090"):
        machine_from_parts("rtx-9090", {}, host_memory_bytes=10**9)
