"""Files that are written piece by piece, read by the safetensors library."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.weights.reversal import FileTensor
from deepspeed_autoep.weights.safetensors_writer import STORED_NAMES, SafetensorsWriter, split_into_files
from tests.unit.exported import differences


def described(tensors: dict[str, torch.Tensor]) -> dict[str, FileTensor]:
    return {name: FileTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def mixed() -> dict[str, torch.Tensor]:
    """Every dtype, in odd sizes; a scalar, an empty one, one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in STORED_NAMES}
    return tensors | {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 5, generator=generator).t(),
        "ünïcode": torch.tensor([float("nan"), -0.0]),
    }


def test_the_library_reads_every_dtype(tmp_path):
    tensors = mixed()
    places = described(tensors)
    writer = SafetensorsWriter(tmp_path / "file", list(places.values()))
    for name in sorted(tensors, reverse=True):
        if tensors[name].dim() == 2 and tensors[name].numel():
            for row in (2, 0, 1, *range(3, len(tensors[name]))):
                writer.write(places[name], tensors[name][row : row + 1], row)
        else:
            writer.write(places[name], tensors[name])
    writer.close()
    assert differences(load_file(tmp_path / "file"), tensors) == []


def test_tensors_start_at_multiples_of_their_items(tmp_path):
    places = described(mixed())
    writer = SafetensorsWriter(tmp_path / "file", list(places.values()))
    writer.abandon()
    data = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert all(entry["data_offsets"][0] % places[name].dtype.itemsize == 0 for name, entry in header.items())


def test_missing_and_repeated_values_are_refused(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    places = described(tensors)
    writer = SafetensorsWriter(tmp_path / "file", list(places.values()))
    writer.write(places["a"], tensors["a"][:1], 1)
    with pytest.raises(ModelError, match="'a' of file is written twice"):
        writer.write(places["a"], tensors["a"][:1], 1)
    with pytest.raises(ModelError, match=r"'b' of file is \[3\] torch.float32, planned were \[4\]"):
        writer.write(places["b"], tensors["b"][:3])
    with pytest.raises(ModelError, match=r"'b' of file is \[4\] torch.float64, planned were \[4\] torch.float32"):
        writer.write(places["b"], tensors["b"].double())
    with pytest.raises(ModelError, match="lacks 28 bytes"):
        writer.close()


@pytest.mark.parametrize(
    "sizes, files",
    [
        ([], []),
        ([10, 10, 10], [[10, 10], [10]]),
        ([20], [[20]]),
        ([5, 21, 5], [[5, 5], [21]]),
        ([21, 21], [[21], [21]]),
        ([1, 20, 1], [[1], [20], [1]]),
    ],
)
def test_files_are_filled_in_order(sizes, files):
    tensors = [FileTensor(str(place), (size,), torch.uint8) for place, size in enumerate(sizes)]
    assert [[tensor.nbytes for tensor in file] for file in split_into_files(tensors, 20)] == files
