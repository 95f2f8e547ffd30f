"""The checksum behind the lane and replica checks: equal for equal data only."""

import pytest
import torch

from deepspeed_autoep.moe import lane_check
from deepspeed_autoep.moe.lane_check import checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_changed_element_changes_it(dtype):
    base = torch.zeros(3, 5, dtype=dtype)
    seen = {checksum([base]).item()}
    for position in range(base.numel()):
        changed = base.clone()
        changed.view(-1)[position] = 1
        seen.add(checksum([changed]).item())
    assert len(seen) == base.numel() + 1
    assert checksum([base.clone()]).item() in seen


def test_shape_order_and_layout():
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2)
    assert checksum([a]) != checksum([b])
    assert checksum([a, b]) != checksum([b, a])
    assert checksum([a.t().contiguous().t()]) == checksum([a])  # the same values in another memory order
    assert checksum([torch.tensor([0.0])]) != checksum([torch.tensor([-0.0])])  # bits, not values


def test_chunks_do_not_show(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = checksum([tensor])
    monkeypatch.setattr(lane_check, "_CHUNK", 7)
    assert checksum([tensor]) == whole
