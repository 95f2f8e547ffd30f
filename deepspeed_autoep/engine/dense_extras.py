"""What a dense tensor-parallel plan asks for beyond AutoTP's linear layers: vectors cut by head, and latent projections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from deepspeed_autoep.engine.column_inputs import EnterTensorParallelRegion
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.tensor_parallel import PartitionPlan


@contextlib.contextmanager
def whole_sizes(model: nn.Module) -> Iterator[None]:
    """Give every module its sizes back that AutoTP divides (``hidden_size``, ``num_heads`` and the like, in every module above
    a cut layer). Models with a tp_plan take a lane's heads from the shapes, and read these attributes as the model's."""
    before = [
        (module, {name: value for name, value in vars(module).items() if type(value) is int}) for module in model.modules()
    ]
    yield
    for module, sizes in before:
        for name, value in sizes.items():
            if not isinstance(module, nn.Linear) and getattr(module, name, value) != value:
                setattr(module, name, value)


def apply_dense_extras(model: nn.Module, plan: PartitionPlan, handles: FoldingGroupHandles) -> None:
    """Cut the plan's parameters in place, and complete gradients of rotary keys. Local: no collective."""
    for name in plan.cut_parameters:
        parameter = model.get_parameter(name)
        with torch.no_grad():
            parameter.data = parameter.data.chunk(handles.spec.tp_size)[handles.tp_rank].clone()
        parameter.tensor_model_parallel = True
    for name, size in plan.rotary_outputs.items():
        model.get_submodule(name).register_forward_hook(_complete_rotary_gradient(size, handles.tp_group))


def _complete_rotary_gradient(size: int, tp_group):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a projection's output is [latent | rotary key].

    The latent part is read by column-parallel layers, which sum its gradient over the lanes. The rotary key is shared by all
    heads and read by this lane's only: its gradient is summed here, and the projection's own is whole then.
    """

    def hook(_module, _inputs, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([latent, EnterTensorParallelRegion.apply(rotary, tp_group)], dim=-1)

    return hook
