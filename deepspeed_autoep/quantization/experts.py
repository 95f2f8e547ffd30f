"""Quantizers of an experts module: they are cut as its weights are, called by its own forward, and named as in the whole model.

Model-Optimizer keeps a quantizer for each expert's weight (``<projection>_weight_quantizers.<expert>``), or one for the whole
stack of experts (``<projection>_weight_quantizer``, which sees ``[E, out, in]``), and one for the inputs of all experts
(``<projection>_input_quantizer``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.errors import ConfigError, ModelError
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.folding.spec import ParallelFoldingSpec
from deepspeed_autoep.moe.discovery import ExpertsSite
from deepspeed_autoep.moe.experts import RowCounts
from deepspeed_autoep.moe.weight_layout import ExpertLayout, ExpertShard, ExpertTensor
from deepspeed_autoep.peft_adapters import expert_adapters
from deepspeed_autoep.quantization.buffers import BufferLayout, Extent, Runs, layout_of_buffer, layout_of_input_buffer
from deepspeed_autoep.quantization.quantizers import (
    blocks_of,
    check_range_of_rows,
    dims_of_one_range,
    is_active,
    is_calibrating,
    is_quantizer,
    quantizers_of,
)

# What a quantizer keeps that follows from the range and the tensor alone. Others (low-rank corrections, biases) are refused.
_KNOWN_BUFFERS = ("_amax", "_global_amax", "_pre_quant_scale")
# Set in a static block quantizer's first forward from the shape of the weight, and set again when they are gone.
_SHAPE_MEMORY = ("_original_shape", "_block_reshape_size", "_padding", "_slices", "_amax_shape_for_export")
_STACK_ONLY = "legal are experts whose forward Model-Optimizer 0.47 calls its quantizers in: [E, out, in] with a quantizer for each expert, [E, in, out] with one for all"


@dataclass(frozen=True)
class QuantizerBuffer:
    """A buffer of an experts module's quantizers, on a rank that holds a part of the experts.

    ``path``: of the quantizer in the cut module. ``expert``: the local index of the one expert whose it is, None where it is
    not one expert's; ``shared``: the same for all experts.
    """

    path: str
    key: str
    expert: int | None
    layout: BufferLayout
    trailing: int  # dimensions of size 1 behind a flat buffer's entries

    @property
    def shared(self) -> bool:
        return self.expert is None and not any(extent is not None and extent.over_experts for extent in self.layout.extents)

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}"

    def logical_name(self, first: int) -> str:
        """With the expert's index in the whole module, on a rank whose experts begin at ``first``."""
        if self.expert is None:
            return self.name
        projection, index, *inner = self.path.split(".")
        return ".".join([projection, str(first + int(index)), *inner, self.key])


@dataclass(frozen=True)
class BufferPart:
    """What one rank holds of a quantizer's buffer.

    ``value``: its part, shaped by dimension of the quantized tensor: ``[sum of runs, ...]``, dtype of the buffer; a view of it
    where that is possible. ``shape``: of the whole buffer. ``runs``: of each dimension the ranges ``[start, stop)`` that ``value``
    holds, in order. ``shared``: all experts', so the same on every rank of an EP group and to be written once; else the rank's
    own experts'. Ranks that hold the same experts (EDP) hold the same parts, and so do ETP peers with the same runs.
    """

    name: str
    value: torch.Tensor
    shape: tuple[int, ...]
    runs: tuple[Runs, ...]
    shared: bool


def is_quantized_site(site: ExpertsSite) -> bool:
    """Whether the experts have quantizers that are at work or keep values (disabled ones may be enabled again)."""
    return any(is_active(quantizer) or any(True for _ in quantizer.buffers()) for _, quantizer in quantizers_of(site.module))


def check_expert_quantizers(model: nn.Module, sites: list[ExpertsSite], spec: ParallelFoldingSpec, backend: str) -> None:
    """Raise :class:`ModelError` for quantizers of experts that cannot be cut or would compute something else, and
    :class:`ConfigError` for an ``expert_backend`` (the user's) that would not call them."""
    for site in sites:
        if not is_quantized_site(site):
            continue
        where = f"experts module {site.name!r}"
        if backend not in ("auto", "model"):
            raise ConfigError(
                f"expert_parallel.expert_backend={backend!r} does not call the quantizers of {where}: legal with quantized experts "
                "are 'auto' and 'model' (the module's own forward)"
            )
        if expert_adapters(model, site):
            raise ModelError(
                f"{where} is quantized and has PEFT adapters on its weights, in which Model-Optimizer's forward does not find an expert's "
                "index: legal is one of both"
            )
        _check_implementation(where, site.module)
        try:
            quantizer_buffers(site)
        except ValueError as error:
            raise ModelError(f"{where}: {error}") from None
        _check_ranges(site, spec)


def _check_implementation(where: str, module: nn.Module) -> None:
    found = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if found not in (None, "eager"):
        raise ModelError(f"{where} has the experts implementation {found!r}, which does not call its quantizers: legal is model.set_experts_implementation('eager')")


def _weight_extents(tensor: ExpertTensor, layout: ExpertLayout, of_stack: bool) -> tuple[Extent, ...]:
    """Of what a weight's quantizer sees: one expert's ``[out, in]``, or the stack ``[E, out, in]``."""
    order = (2, 1) if layout.is_transposed else (1, 2)
    extents = tuple(Extent(tensor.shape[dim], tensor=tensor if dim == tensor.intermediate_dim else None) for dim in order)
    return (Extent(tensor.shape[0], over_experts=True), *extents) if of_stack else extents


def _input_features(tensor: ExpertTensor, layout: ExpertLayout) -> Extent:
    dim = 1 if layout.is_transposed else 2
    return Extent(tensor.shape[dim], tensor=tensor if dim == tensor.intermediate_dim else None)


@dataclass(frozen=True)
class _Placed:
    """A quantizer of an experts module and what it sees."""

    path: str
    quantizer: nn.Module
    expert: int | None
    extents: tuple[Extent, ...]  # of an input: its features only
    of_input: bool


def _placed(site: ExpertsSite) -> list[_Placed]:
    """Every quantizer of an uncut experts module. Raises ``ValueError`` for one whose place is not known."""
    layout, module = site.layout, site.module
    found: list[_Placed] = []

    def add(path: str, root: nn.Module, expert: int | None, extents: tuple[Extent, ...], of_input: bool = False) -> None:
        for inner, quantizer in quantizers_of(root):
            found.append(_Placed(f"{path}.{inner}" if inner else path, quantizer, expert, extents, of_input))

    for tensor in layout.tensors:
        if len(tensor.shape) != 3:
            continue
        for path, root in module.named_children():
            if path == f"{tensor.name}_input_quantizer":
                add(path, root, None, (_input_features(tensor, layout),), of_input=True)
            elif path == f"{tensor.name}_weight_quantizers" and not layout.is_transposed:
                if len(root) != layout.num_experts:
                    raise ValueError(f"{path!r} has {len(root)} quantizers, expected one for each of {layout.num_experts} experts")
                for expert, of_expert in enumerate(root):
                    add(f"{path}.{expert}", of_expert, expert, _weight_extents(tensor, layout, of_stack=False))
            elif path == f"{tensor.name}_weight_quantizer" and layout.is_transposed:
                if not is_quantizer(root) and any(is_active(inner) for _, inner in quantizers_of(root)):
                    raise ValueError(
                        f"{path!r} is a {type(root).__name__}, in which Model-Optimizer keeps the first weight that it quantized: the model "
                        "would not train. Legal for experts [E, in, out] is one quantizer, cfg without a list"
                    )
                add(path, root, None, _weight_extents(tensor, layout, of_stack=True))
    known = {placed.path for placed in found}
    for path, quantizer in quantizers_of(module):
        if path not in known and (is_active(quantizer) or path.partition(".")[0].endswith("_weight_quantizers")):
            raise ValueError(f"its quantizer {path!r} is not one of {sorted({name.partition('.')[0] for name in known})}: {_STACK_ONLY}")
    return found


def quantizer_buffers(site: ExpertsSite) -> list[QuantizerBuffer]:
    """Every buffer of the quantizers of an uncut experts module. Raises ``ValueError`` that names the buffer for one that
    cannot be split, and for experts whose quantizers differ in their buffers."""
    buffers = []
    first: dict[tuple[str, str], list] = {}
    for placed in _placed(site):
        shapes = [(key, tuple(value.shape), value.dtype) for key, value in placed.quantizer.named_buffers()]
        if placed.expert is not None:
            projection, _, *inner = placed.path.split(".")
            expected = first.setdefault((projection, ".".join(inner)), shapes)
            if shapes != expected:
                raise ValueError(f"{placed.path!r} has the buffers {shapes}, expected those of expert 0: {expected}")
        for key, shape, _ in shapes:
            name = f"{placed.path}.{key}"
            if key not in _KNOWN_BUFFERS:
                raise ValueError(f"{name!r} is a buffer that cannot be split over ranks: legal are {list(_KNOWN_BUFFERS)}")
            try:
                if placed.of_input or key == "_pre_quant_scale":
                    layout = layout_of_input_buffer(shape, placed.extents[-1])
                else:
                    layout = layout_of_buffer(shape, placed.extents, blocks_of(placed.quantizer, len(placed.extents)))
            except ValueError as error:
                raise ValueError(f"{name!r} cannot be split over ranks: {error}") from None
            buffers.append(QuantizerBuffer(placed.path, key, placed.expert, layout, len(shape) - 1))
    return buffers


def _check_ranges(site: ExpertsSite, spec: ParallelFoldingSpec) -> None:
    """Ranges that are taken while the model runs must not need what another rank holds, and a block is one rank's."""
    for placed in _placed(site):
        name = f"{site.name}.{placed.path}"
        # An input is rows and their features.
        extents = (Extent(0), *placed.extents) if placed.of_input else placed.extents
        if placed.of_input and spec.world_size > 1:
            check_range_of_rows(name, placed.quantizer, dims=2)
        moving = dims_of_one_range(placed.quantizer, len(extents))
        blocks = blocks_of(placed.quantizer, len(extents))
        for dim, extent in enumerate(extents):
            size = spec.etp_size if extent.tensor is not None else spec.ep_size if extent.over_experts else 1
            what = "expert_tensor_parallel_size" if extent.tensor is not None else "autoep_size"
            if size > 1 and dim in moving:
                raise ModelError(
                    f"quantizer {name!r} takes its range (amax) in each call from a dimension of size {extent.size} that expert_parallel."
                    f"{what}={size} cuts: legal are a calibrated range, and expert_parallel.{what}=1"
                )
            # Of a half in [gate | up], blocks end where it does.
            part = extent.size // (extent.tensor.halves if extent.tensor is not None else 1) // size
            if size > 1 and placed.quantizer.is_enabled and part % blocks.get(dim, 1):
                raise ModelError(
                    f"quantizer {name!r} has blocks of {blocks[dim]}, and expert_parallel.{what}={size} leaves parts of {part} of a dimension "
                    f"of size {extent.size}, which is no whole number of blocks: legal are sizes that divide at blocks, and expert_parallel.{what}=1"
                )


@torch.no_grad()
def cut_buffer(whole: torch.Tensor, buffer: QuantizerBuffer, shard: ExpertShard) -> torch.Tensor:
    """A copy of one rank's part of a quantizer's whole buffer, as the quantizer keeps it."""
    layout = buffer.layout
    value = whole.reshape(layout.shape)
    for dim, runs in enumerate(layout.runs(shard)):
        value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return value.reshape(layout.stored_shape(layout.local_shape(shard), buffer.trailing)).clone()


@torch.no_grad()
def join_buffer(parts: list[tuple[ExpertShard, torch.Tensor]], buffer: QuantizerBuffer) -> torch.Tensor:
    """Ranks' parts as quantizers keep them -> the whole buffer as a quantizer keeps it. Undoes :func:`cut_buffer`."""
    layout = buffer.layout
    whole = parts[0][1].new_empty(layout.shape)
    for shard, part in parts:
        index = [torch.tensor([i for run in runs for i in range(*run)], device=part.device) for runs in layout.runs(shard)]
        whole[torch.meshgrid(*index, indexing="ij") if index else ...] = part.reshape(layout.local_shape(shard))
    return whole.reshape(layout.stored_shape(layout.shape, buffer.trailing))


def cut_expert_quantizers(site: ExpertsSite, handles: FoldingGroupHandles) -> None:
    """Leave an experts module the quantizers of this rank's experts, with this rank's part of their buffers, in place: the
    quantizers stay the same objects. Before its weights are cut. Local: no collective."""
    if not is_quantized_site(site):
        return
    spec = handles.spec
    shard = ExpertShard.of(site.layout.num_experts, spec.ep_size, handles.ep_rank, spec.etp_size, handles.etp_rank)
    site.module.autoep_quantizers = cut_quantizers(site, shard)
    site.module.autoep_guard = QuantizerGuard(site)


def cut_quantizers(site: ExpertsSite, shard: ExpertShard) -> tuple[QuantizerBuffer, ...]:
    """:func:`cut_expert_quantizers` for a given shard; returns what is left, by its place in the module."""
    module = site.module
    placed, buffers = _placed(site), quantizer_buffers(site)
    holders = {entry.path: entry.quantizer for entry in placed}
    kept = []
    for buffer in buffers:
        if buffer.expert is not None and not shard.first <= buffer.expert < shard.last:
            continue
        quantizer = holders[buffer.path]
        if buffer.layout.local_shape(shard) != buffer.layout.shape:
            quantizer._buffers[buffer.key] = cut_buffer(quantizer._buffers[buffer.key], buffer, shard)
        kept.append(buffer if buffer.expert is None else _renumbered(buffer, shard.first))
    for entry in placed:
        for key in _SHAPE_MEMORY:
            if not entry.of_input and key in vars(entry.quantizer):
                delattr(entry.quantizer, key)
    for path in {entry.path.partition(".")[0] for entry in placed if entry.expert is not None}:
        experts = getattr(module, path)
        del experts[shard.last :]
        del experts[: shard.first]
    return tuple(kept)


def _renumbered(buffer: QuantizerBuffer, first: int) -> QuantizerBuffer:
    projection, index, *inner = buffer.path.split(".")
    local = int(index) - first
    return QuantizerBuffer(".".join([projection, str(local), *inner]), buffer.key, local, buffer.layout, buffer.trailing)


class QuantizerGuard:
    """Around an experts module's own forward: its quantizers must be called, and must not be calibrated on a rank's own rows.

    That they are called is looked at in the first forward: all ranks take the same way through the same code. What could
    change that later, the model's experts implementation, is compared every time.
    """

    def __init__(self, site: ExpertsSite) -> None:
        self.where = f"experts module {site.name!r}"
        self.seen_called = False
        self.quantizers = list(quantizers_of(site.module))

    @contextlib.contextmanager
    def __call__(self, module: nn.Module, counts: RowCounts) -> Iterator[None]:
        _check_implementation(self.where, module)
        for path, quantizer in self.quantizers:
            if is_calibrating(quantizer):
                raise ModelError(
                    f"{self.where}: its quantizer {path!r} is being calibrated, on rows of this rank: calibrate the whole model before "
                    "deepspeed_autoep.initialize"
                )
        if self.seen_called:
            yield
            return
        called: set[str] = set()
        handles = [quantizer.register_forward_hook(lambda *_, path=path: called.add(path)) for path, quantizer in self.quantizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        missing = [path for path, quantizer in self.quantizers if is_active(quantizer) and path not in called and _must_be_called(path, counts)]
        if missing:
            raise ModelError(
                f"{self.where}: its forward did not call {len(missing)} of its quantizers, first {missing[0]!r}: the model would train "
                "without them. Legal are experts whose own eager forward calls the quantizers that Model-Optimizer gave them"
            )
        self.seen_called = True


def _must_be_called(path: str, counts: RowCounts) -> bool:
    """An expert without rows is not computed."""
    projection, *rest = path.split(".")
    return not projection.endswith("_weight_quantizers") or counts.host[int(rest[0])] > 0


def describe_buffers(module: nn.Module) -> list[BufferPart]:
    """What this rank holds of every buffer of a cut experts module's quantizers; names begin with the module's own. [] for
    experts that are not quantized. Local: no collective.

    Raises :class:`ModelError` for a module that :func:`deepspeed_autoep.initialize` has not cut.
    """
    context = getattr(module, "autoep", None)
    if context is None:
        raise ModelError(f"{type(module).__name__} has not been cut: describe_buffers takes an experts module of an engine's model")
    found = []
    for buffer in getattr(module, "autoep_quantizers", ()):
        held = module.get_buffer(buffer.name)
        found.append(
            BufferPart(
                name=f"{context.name}.{buffer.logical_name(context.shard.first)}",
                value=held.reshape(buffer.layout.local_shape(context.shard)),
                shape=buffer.layout.shape,
                runs=buffer.layout.runs(context.shard),
                shared=buffer.shared,
            )
        )
    return found
