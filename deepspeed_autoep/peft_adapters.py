"""PEFT: which modules of a model its adapters wrap, and how LoRA's matrices follow the cut of the weight they add to.

``W + s B A``: a cut of W's outputs cuts B's, a cut of W's inputs cuts A's, and the other matrix stays whole. PEFT is never
imported here: without it in ``sys.modules`` no model has adapters.

Names are *logical*: the name that a wrapped module had before PEFT, under which plans of models know it, and under which
PEFT's wrapper now stands (``q_proj``; the linear layer itself is ``q_proj.base_layer``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.families import mark_expert_shared_over_etp
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.folding.spec import ParallelFoldingSpec
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.discovery import ExpertsSite, has_experts_interface
from deepspeed_autoep.moe.weight_layout import ExpertLayout, ExpertShard, ExpertTensor

_BASE = ".base_layer"
# Ends of the names of a linear layer's weight, wrapped or not, and of LoRA's matrices beside it.
BASE_WEIGHT, LORA_A_WEIGHT, LORA_B_WEIGHT = r"(?:\.base_layer)?\.weight", r"\.lora_A\.[^.]+\.weight", r"\.lora_B\.[^.]+\.weight"


def _class(module: str, name: str) -> type | tuple[()]:
    """A class of PEFT, or what nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether PEFT put ``module`` in the place of another one to add an adapter."""
    return isinstance(module, _class("peft.tuners.tuners_utils", "BaseTunerLayer"))


def _is_trained_copy(module: nn.Module) -> bool:
    """PEFT's ``modules_to_save`` and ``trainable_token_indices``."""
    return isinstance(module, _class("peft.utils.other", "AuxiliaryTrainingWrapper"))


def is_wrapper(module: nn.Module) -> bool:
    return is_tuner_layer(module) or _is_trained_copy(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the model's author wrote, under any number of PEFT's wrappers."""
    while is_wrapper(module):
        module = module.base_layer if is_tuner_layer(module) else module.original_module
    return module


def transformers_model(model: nn.Module) -> nn.Module:
    """The model inside a PeftModel, whose class knows its tp_plan."""
    if isinstance(model, _class("peft.peft_model", "PeftModel")):
        model = model.get_base_model()
    return model.model if isinstance(model, _class("peft.tuners.tuners_utils", "BaseTuner")) else model


def logical_name(name: str) -> str:
    while name.endswith(_BASE):
        name = name.removesuffix(_BASE)
    return name


def logical_modules(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """(name -> module as if PEFT had wrapped none, name -> outermost wrapper). What is inside of a wrapped module is left out."""
    modules: dict[str, nn.Module] = {}
    wrappers: dict[str, nn.Module] = {}
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        inside = None
        if is_wrapper(module):
            wrappers[name], inside = module, f"{name}."
        modules[name] = unwrapped(module)
    return modules, wrappers


def check_adapter_kinds(model: nn.Module, tp_size: int) -> None:
    """Raise :class:`ModelError` for what PEFT does to a model beyond adapting single layers."""
    configs = getattr(model, "peft_config", None) if "peft" in sys.modules else None
    for adapter, config in configs.items() if isinstance(configs, dict) else ():
        if getattr(config, "ensure_weight_tying", False):
            raise ModelError(
                f"PEFT adapter {adapter!r} has ensure_weight_tying=True, by which parameters share their memory: cutting and "
                "ZeRO would undo that without a word. Legal is False"
            )
        # Lanes hold some heads only, and these methods add to the attention of all.
        if tp_size > 1 and (config.is_prompt_learning or config.is_adaption_prompt):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ModelError(
                f"PEFT adapter {adapter!r} is of the kind {kind}, which is not supported with tensor_parallel.autotp_size="
                f"{tp_size}: use LoRA, or set autotp_size to 1"
            )


def obstacle_to_cut(wrapper: nn.Module) -> str | None:
    """Why a wrapped linear layer cannot be cut with its adapters; None for LoRA whose arithmetic is ``W x + s B A x``."""
    kind = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
    if _is_trained_copy(wrapper):
        return f"{kind} (modules_to_save) keeps a second copy of it"
    if type(wrapper) is not _class("peft.tuners.lora.layer", "Linear"):
        return f"its adapter is {kind}"
    variants = sorted({type(variant).__name__ for variant in getattr(wrapper, "lora_variant", {}).values()})
    if len(wrapper.lora_magnitude_vector) or any(wrapper.use_dora.values()):
        return f"its adapter is DoRA (use_dora=True{', ' + variants[0] if variants else ''}), which reads norms of the whole weight"
    if variants:
        return f"its adapter is the LoRA variant {variants}"
    if len(wrapper.lora_embedding_A) or wrapper.fan_in_fan_out or "forward" in vars(wrapper):
        return f"{kind} has an embedding's matrices, fan_in_fan_out or a replaced forward"
    base = wrapper.base_layer
    if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
        return f"its adapter is over a {type(base).__name__}, which is no floating-point torch.nn.Linear"
    return None


def require_cuttable(name: str, wrapper: nn.Module, cut: str) -> None:
    """Raise :class:`ModelError` where :func:`obstacle_to_cut` says why."""
    reason = obstacle_to_cut(wrapper)
    if reason is not None:
        raise ModelError(
            f"module {name!r} is cut by tensor parallelism ({cut}) and PEFT changed it: {reason}. Legal on such a module is LoRA "
            "over torch.nn.Linear (any rank and number of adapters, use_rslora, lora_bias, lora_dropout). Leave the module out "
            "of the PEFT configuration, or set tensor_parallel.autotp_size to 1"
        )


@contextlib.contextmanager
def hidden_weights(model: nn.Module) -> Iterator[None]:
    """While it lasts adapted layers have no ``weight`` of their own (PEFT's is a property that reads the base layer's): AutoTP takes
    a module with one for a linear layer, and would not look at the layers inside, or put one shard in the place of all."""
    hidden = [(module, type(module)) for module in model.modules() if is_tuner_layer(module)]
    for module, kind in hidden:
        module.__class__ = type(kind.__name__, (kind,), {"weight": property(_no_weight)})
    try:
        yield
    finally:
        for module, kind in hidden:
            module.__class__ = kind


def _no_weight(module: nn.Module):
    raise AttributeError("weight")


# LoRA on experts: ParamWrapper, one for each of the module's parameters that is adapted, around each other.


@dataclass(frozen=True)
class ExpertAdapter:
    """One LoRA matrix of stacked experts. PEFT stores A as ``[E r, in]`` and B as ``[out, r E]``, with E the fastest.

    ``tensor``: it as a stack, A ``[E, r, in]`` and B ``[E, out, r]``, of which a rank holds the part that it holds of the weight.
    """

    name: str
    parameter: nn.Parameter
    tensor: ExpertTensor

    def stacked(self, num_experts: int) -> torch.Tensor:
        """The parameter's stack, of the whole module or of a rank's part."""
        value = self.parameter.detach()
        if self.tensor.name == "lora_A":
            return value.reshape(num_experts, -1, value.shape[-1])
        return value.reshape(value.shape[0], -1, num_experts).permute(2, 0, 1)

    def flat(self, stack: torch.Tensor) -> torch.Tensor:
        """As PEFT stores it."""
        if self.tensor.name == "lora_A":
            return stack.reshape(-1, stack.shape[-1])
        return stack.permute(1, 2, 0).reshape(stack.shape[1], -1).contiguous()


def _expert_wrappers(model: nn.Module, site: ExpertsSite) -> list[tuple[str, nn.Module]]:
    """The wrappers around an experts module, outside first."""
    return [(name, module) for name, module in model.named_modules() if is_wrapper(module) and unwrapped(module) is site.module]


def expert_adapters(model: nn.Module, site: ExpertsSite) -> list[ExpertAdapter]:
    """Every LoRA matrix on an experts module's weights; shapes are those of the whole module, before and after the cut."""
    layout = site.layout
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    inputs, outputs = (1, 2) if layout.is_transposed else (2, 1)
    found = []
    for name, wrapper in _expert_wrappers(model, site):
        tensor = tensors[wrapper.parameter_name]
        for adapter in wrapper.lora_A:
            rank = wrapper.r[adapter]
            for kind, dim, shape, place in (
                ("lora_A", inputs, (layout.num_experts, rank, tensor.shape[inputs]), 2),
                ("lora_B", outputs, (layout.num_experts, tensor.shape[outputs], rank), 1),
            ):
                cut = place if tensor.intermediate_dim == dim else None
                matrix = ExpertTensor(kind, shape, cut, tensor.halves if cut is not None else 1)
                found.append(ExpertAdapter(f"{name}.{kind}.{adapter}.weight", getattr(wrapper, kind)[adapter].weight, matrix))
    return found


def check_trained_copies(model: nn.Module) -> None:
    """Raise :class:`ModelError` for experts inside of PEFT's ``modules_to_save``: two copies, of which one is never used."""
    for name, module in model.named_modules():
        if _is_trained_copy(module) and any(has_experts_interface(inner) for inner in module.original_module.modules()):
            raise ModelError(
                f"module {name!r} ({type(module).__name__}) keeps a second copy of experts by PEFT's modules_to_save, which is not "
                "supported: leave the experts trainable in a model without this copy, or adapt them by LoraConfig.target_parameters"
            )


def check_expert_adapters(model: nn.Module, sites: list[ExpertsSite], spec: ParallelFoldingSpec) -> None:
    """Raise :class:`ModelError` for adapters on experts that cannot follow their weights' cut."""
    for site in sites:
        weights = [tensor.name for tensor in site.layout.tensors if len(tensor.shape) == 3]
        for name, wrapper in _expert_wrappers(model, site):
            where = f"experts module {name!r}"
            if type(wrapper) is not _class("peft.tuners.lora.layer", "ParamWrapper"):
                raise ModelError(
                    f"{where} has a PEFT adapter of the kind {type(wrapper).__module__}.{type(wrapper).__name__}: legal on experts is "
                    "LoRA, by LoraConfig.target_parameters"
                )
            if wrapper.parameter_name not in weights:
                raise ModelError(f"{where} has LoRA on its parameter {wrapper.parameter_name!r}: legal are {weights}")
            _check_param_wrapper(where, wrapper, site.layout, spec)
        for adapter in expert_adapters(model, site):
            _check_shape(adapter, site.layout)


def _check_param_wrapper(where: str, wrapper: nn.Module, layout: ExpertLayout, spec: ParallelFoldingSpec) -> None:
    swapped, experts = getattr(wrapper, "_did_swap_in_out_features", None), getattr(wrapper, "num_experts", None)
    if swapped is not (not layout.is_transposed) or experts != layout.num_experts:
        raise ModelError(
            f"{where}: PEFT's {type(wrapper).__name__} on {wrapper.parameter_name!r} has num_experts={experts!r} and "
            f"_did_swap_in_out_features={swapped!r}, expected {layout.num_experts} and {not layout.is_transposed} of weights with "
            f"is_transposed={layout.is_transposed}. Legal is a version of PEFT that knows them; 0.21.2 is tested"
        )
    if getattr(wrapper, "lora_variant", None) or len(wrapper.lora_magnitude_vector):
        raise ModelError(f"{where} has a LoRA variant on {wrapper.parameter_name!r}: legal is LoRA without use_dora and other variants")
    if layout.is_transposed and layout.num_experts == spec.ep_size:
        raise ModelError(
            f"{where} has LoRA on weights [E, in, out] and expert_parallel.autoep_size={spec.ep_size} leaves one expert on a rank, "
            f"for which PEFT computes a delta [out, in]: legal are sizes below the number of experts, {layout.num_experts}"
        )


def _check_shape(adapter: ExpertAdapter, layout: ExpertLayout) -> None:
    experts, first, second = adapter.tensor.shape
    expected = [experts * first, second] if adapter.tensor.name == "lora_A" else [first, experts * second]
    if list(adapter.parameter.shape) != expected:
        raise ModelError(
            f"parameter {adapter.name!r} has shape {list(adapter.parameter.shape)}, expected {expected} of LoRA on "
            f"{layout.num_experts} experts"
        )


def cut_expert_adapters(model: nn.Module, site: ExpertsSite, handles: FoldingGroupHandles) -> None:
    """Cut LoRA's matrices on an experts module to this rank's part, in place, and mark them as its weights are. No collective."""
    spec, layout = handles.spec, site.layout
    shard = ExpertShard.of(layout.num_experts, spec.ep_size, handles.ep_rank, spec.etp_size, handles.etp_rank)
    for adapter in expert_adapters(model, site):
        parameter = adapter.parameter
        parameter.data = adapter.flat(cut_expert_tensor(adapter.stacked(layout.num_experts), adapter.tensor, shard))
        parameter.allreduce = False
        parameter.group_name = handles.ep_group_name
        if adapter.tensor.intermediate_dim is None and spec.etp_size > 1:
            mark_expert_shared_over_etp(parameter)
            parameter.group_name = handles.expert_shared_name
    for _, wrapper in _expert_wrappers(model, site):
        wrapper.num_experts = shard.last - shard.first
        for inner in (*wrapper.lora_A.values(), *wrapper.lora_B.values()):
            inner.out_features, inner.in_features = inner.weight.shape
        for adapter in wrapper.lora_A:
            wrapper.in_features, wrapper.out_features = wrapper.lora_A[adapter].in_features, wrapper.lora_B[adapter].out_features
