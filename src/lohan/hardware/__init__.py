"""Real hardware: a catalogue with sources, and machines described in YAML. Reads files; plan/ and sim/ do not."""

from lohan.hardware.catalogue import Drive, Gpu, Link, load_drives, load_gpus, load_links
from lohan.hardware.machine_file import load_machine, machine_from_dict, machine_names, machine_to_dict, resize
from lohan.hardware.parts import machine_from_parts

__all__ = [
    "Drive",
    "Gpu",
    "Link",
    "load_drives",
    "load_gpus",
    "load_links",
    "load_machine",
    "machine_from_dict",
    "machine_from_parts",
    "machine_names",
    "machine_to_dict",
    "resize",
]
