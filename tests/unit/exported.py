"""What the tests of exports have in common: tensors to export, and what a folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

SHARD = 50_000  # bytes: several files for a tiny model


class StateSource:
    """A model's state dict; each read is a copy, as gathered tensors are. ``reads`` says what was asked for."""

    def __init__(self, model: nn.Module, without: tuple[str, ...] = ()) -> None:
        self.tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in without}
        self.reads: list[tuple[str, int | None]] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        self.reads.append((name, expert))
        return (self.tensors[name] if expert is None else self.tensors[name][expert : expert + 1]).clone()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_index(folder: Path) -> None:
    """It lists what the files hold; one file has none."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(paths) > 1)
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
        assert listed["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(folder).values())


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose dtypes or bits differ."""
    return [name for name in sorted(one.keys() | other.keys()) if name not in one or name not in other or not same_bits(one[name], other[name])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
