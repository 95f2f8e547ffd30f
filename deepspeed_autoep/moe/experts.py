"""Compute the local experts on rows that are sorted by expert.

Backends, forward + backward in ms on CPU (one thread of a Xeon with AVX-512, torch 2.13, transformers 5.24, a shared
machine; H hidden, I intermediate, E local experts, R rows; ``tests/perf/bench_experts.py`` measures them again):

=========================  ==========  ====  ========  ===============  ==============
H, I, E, R, dtype          grouped_mm  loop  HF eager  HF grouped_mm    HF batched_mm
=========================  ==========  ====  ========  ===============  ==============
256, 512, 4, 256, fp32     8.8         8.4   15.9      8.1              699
256, 512, 4, 256, bf16     5.9         5.2   9.6       6.0              506
512, 1024, 8, 2048, fp32   219         225   458       233              -
512, 1024, 8, 2048, bf16   54          57    142       64               -
=========================  ==========  ====  ========  ===============  ==============

So ``grouped_mm`` where torch has it for the dtype and alignment (``loop`` is within noise on CPU, and many launches on a
GPU), else ``loop``. ``model`` runs the model's own
forward with top-1 routing: for experts whose arithmetic the interface cannot say.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.moe.weight_layout import POST_EXPERT_NORM, ExpertLayout

_GROUPED_MM_ALIGNMENT = 16  # bytes: torch.nn.functional.grouped_mm refuses strides that are not a multiple


@dataclass(frozen=True)
class RowCounts:
    """Rows of each local expert, on the host and as int32 end offsets on the device."""

    host: tuple[int, ...]
    offsets: torch.Tensor  # [E_local] int32


class _GroupedLinear(torch.autograd.Function):
    """``out[rows of e] = x[rows of e] @ w[e].T`` as a loop of matmuls; w [E, out, in]."""

    @staticmethod
    def forward(ctx, x, w, counts):
        ctx.save_for_backward(x, w)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], w.shape[1])
        for expert, start, stop in _segments(counts):
            torch.mm(x[start:stop], w[expert].t(), out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx, grad_out):
        x, w = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        # An expert without rows has a zero gradient, not an undefined one.
        grad_w = torch.zeros(w.shape, dtype=w.dtype, device=w.device) if ctx.needs_input_grad[1] else None
        for expert, start, stop in _segments(ctx.counts):
            if grad_x is not None:
                torch.mm(grad_out[start:stop], w[expert], out=grad_x[start:stop])
            if grad_w is not None:
                torch.mm(grad_out[start:stop].t(), x[start:stop], out=grad_w[expert])
        return grad_x, grad_w, None


def _segments(counts: tuple[int, ...]):
    stops = itertools.accumulate(counts)
    return [(expert, stop - count, stop) for expert, (count, stop) in enumerate(zip(counts, stops, strict=True)) if count]


def _can_use_grouped_mm(rows: torch.Tensor, *weights: torch.Tensor) -> bool:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    on_cpu = rows.device.type == "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if on_cpu else (torch.bfloat16,)
    if rows.dtype not in dtypes or any(weight.dtype != rows.dtype for weight in weights):
        return False
    if not on_cpu and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    sizes = [size for weight in weights for size in weight.shape[1:]]
    return all(size * rows.element_size() % _GROUPED_MM_ALIGNMENT == 0 for size in sizes)


class _Contiguous(torch.autograd.Function):
    """Identity whose backward packs the gradient: grouped_mm refuses an expanded one."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


def _project(rows, weight, bias, counts: RowCounts, row_experts, transposed: bool, grouped: bool):
    """rows [R, in] -> [R, out] through each row's expert."""
    if grouped:
        stacked = weight if transposed else weight.transpose(-2, -1)
        out = _Contiguous.apply(torch.nn.functional.grouped_mm(rows, stacked, offs=counts.offsets))
    else:
        out = _GroupedLinear.apply(rows, weight.transpose(-2, -1) if transposed else weight, counts.host)
    return out if bias is None else out + bias[row_experts]


def _row_experts(counts: RowCounts, device) -> torch.Tensor:
    """[R] local expert of each row."""
    experts = torch.arange(len(counts.host), device=device)
    host = torch.tensor(counts.host, device=device)
    return experts.repeat_interleave(host, output_size=sum(counts.host))


def run_experts(module: nn.Module, model_forward, layout: ExpertLayout, backend: str, rows, counts: RowCounts):
    """rows [R, H], sorted by local expert -> [R, H]: up (and gate), activation, down, without what :func:`finish_rows` does.

    Under ETP the module holds a part of each expert along its intermediate size, and this is its summand of the output.
    ``model_forward`` is the module's own forward, for the ``model`` backend.
    """
    if backend == "model":
        experts = _row_experts(counts, rows.device)[:, None]
        with _unfinished(module, layout):
            return model_forward(rows, experts, rows.new_ones(rows.shape[0], 1))

    up, down = getattr(module, layout.up_name), module.down_proj
    grouped = backend in ("auto", "grouped_mm") and _can_use_grouped_mm(rows, up, down)
    up_bias = getattr(module, f"{layout.up_name}_bias") if layout.has_bias else None
    row_experts = _row_experts(counts, rows.device) if layout.has_bias else None
    inner = _project(rows, up, up_bias, counts, row_experts, layout.is_transposed, grouped)
    inner = module._apply_gate(inner) if layout.has_gate else module.act_fn(inner)
    return _project(inner, down, None, counts, None, layout.is_transposed, grouped)


def finish_rows(module: nn.Module, layout: ExpertLayout, rows: torch.Tensor, row_experts: torch.Tensor) -> torch.Tensor:
    """What an expert does to a whole output row, rows [R, H], ``row_experts`` [R] local experts: bias, norm. Under ETP after
    the summands of its peers are added: a bias would count etp times, and a norm is not linear."""
    if layout.has_bias:
        rows = rows + module.down_proj_bias[row_experts]
    return getattr(module, POST_EXPERT_NORM)(rows) if layout.has_post_expert_norm else rows


@contextlib.contextmanager
def _unfinished(module: nn.Module, layout: ExpertLayout) -> Iterator[None]:
    """While it lasts the module's own forward leaves out what :func:`finish_rows` does."""
    bias = module._parameters.get("down_proj_bias") if layout.has_bias else None
    norm = module._modules.get(POST_EXPERT_NORM) if layout.has_post_expert_norm else None
    try:
        if bias is not None:
            module._parameters["down_proj_bias"] = torch.zeros_like(bias)
        if norm is not None:
            module._modules[POST_EXPERT_NORM] = nn.Identity()
        yield
    finally:
        if bias is not None:
            module._parameters["down_proj_bias"] = bias
        if norm is not None:
            module._modules[POST_EXPERT_NORM] = norm
