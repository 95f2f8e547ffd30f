"""Which uses of an expert's weight outside its module count as reading it."""

from types import SimpleNamespace

import pytest
import torch

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.interface_check import InterfaceCheck

HIDDEN = torch.ones(2, 4)
ABOUT = {
    "dtype": lambda w: HIDDEN.to(w.dtype),
    "device": lambda w: w.device,
    "shape": lambda w: w.shape[0] + w.size(1) + w.dim() + len(w),
    "type_as": lambda w: HIDDEN.type_as(w),
    "to": lambda w: HIDDEN.to(w),
    "new_zeros": lambda w: w.new_zeros(1),
    "zeros_like": lambda w: torch.zeros_like(w),
    "requires_grad_": lambda w: w.requires_grad_(True),
    "result_type": lambda w: torch.result_type(HIDDEN, w),
}
READS = {
    "matmul": lambda w: HIDDEN @ w[0],
    "index": lambda w: w[0],
    "sum": lambda w: w.sum(),
    "to": lambda w: w.to(torch.bfloat16),
    "data": lambda w: w.data,
    "transposed": lambda w: w.mT,
    "stacked": lambda w: torch.stack([w, w]),
    "linear": lambda w: torch.nn.functional.linear(HIDDEN, weight=w[0]),
}


def make():
    module = torch.nn.Module()
    module.gate_up_proj = torch.nn.Parameter(torch.ones(3, 4, 4))
    return module.gate_up_proj, InterfaceCheck([SimpleNamespace(name="layers.0.experts", module=module)])


@pytest.mark.parametrize("use", ABOUT)
def test_what_a_weight_is_may_be_asked(use):
    weight, check = make()
    with check:
        ABOUT[use](weight)


@pytest.mark.parametrize("use", READS)
def test_what_it_holds_may_not_be_read(use):
    weight, check = make()
    with check, pytest.raises(ModelError, match="'layers.0.experts'"):
        READS[use](weight)


@pytest.mark.parametrize("use", READS)
def test_the_module_itself_may(use):
    weight, check = make()
    with check, check.calling("layers.0.experts"):
        READS[use](weight)
    assert not check.uncalled
