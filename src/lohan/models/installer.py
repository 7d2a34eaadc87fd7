"""Puts streamed tensors where the model looks for its parameters, and takes them out again.

A plain tensor goes into module._parameters in every place that holds the parameter, so a tied weight is one
tensor everywhere. Nothing is copied and no attribute is hung on anything. The originals (on meta) come back with
uninstall(), and with leaving the context whatever happened inside. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import nn

from lohan.models.units import ParamSpec, Units, UnitSpec


class Installer:
    def __init__(self, model: nn.Module, units: Units):
        self._specs: dict[str, ParamSpec] = {param.name: param for param in units.params}
        self._places: dict[str, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        self._originals: dict[str, nn.Parameter | None] = {}
        self._installed: set[str] = set()
        for param in units.params:
            places = [(model.get_submodule(path)._parameters, attribute) for path, attribute in param.places]
            self._places[param.name] = places
            parameters, attribute = places[0]
            self._originals[param.name] = parameters[attribute]

    def __enter__(self) -> Installer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall_all()

    @property
    def installed(self) -> frozenset[str]:
        return frozenset(self._installed)

    def install(self, unit: UnitSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        """Install all parameters of a unit. Either all of them go in or none."""
        wanted = {param.name for param in unit.params}
        if wanted != tensors.keys():
            raise ValueError(f"unit {unit.name} holds {sorted(wanted)} and was given {sorted(tensors)}")
        for name, tensor in tensors.items():
            self._check(name, tensor)
        for name, tensor in tensors.items():
            self._put(name, tensor)

    def uninstall(self, unit: UnitSpec) -> None:
        """Give the places of this unit back to the originals. Does nothing where nothing is installed."""
        for param in unit.params:
            self.uninstall_param(param.name)

    def install_param(self, name: str, tensor: torch.Tensor) -> None:
        """Install one parameter: what the head needs of the embedding when they are tied."""
        self._check(name, tensor)
        self._put(name, tensor)

    def uninstall_param(self, name: str) -> None:
        original = self._originals[name]
        for parameters, attribute in self._places[name]:
            parameters[attribute] = original
        self._installed.discard(name)

    def uninstall_all(self) -> None:
        for name in tuple(self._installed):
            self.uninstall_param(name)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._specs[name]
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{name} has shape {list(spec.shape)} and was given {list(tensor.shape)}")

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        for parameters, attribute in self._places[name]:
            parameters[attribute] = tensor  # type: ignore[assignment]  # forward needs a tensor, not a Parameter
        self._installed.add(name)
