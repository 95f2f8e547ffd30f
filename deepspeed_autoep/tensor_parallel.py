"""Dense tensor parallelism: transformers' ``tp_plan`` -> DeepSpeed AutoTP's partition config. Pure but for reading the model.

Experts are left out (they are cut by expert parallelism). A user's own ``partition_config`` or ``preset_model`` wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import nn

from deepspeed_autoep import compat
from deepspeed_autoep.errors import ModelError

# HF style -> how AutoTP cuts the module. "replicated" and "partial" modules stay whole.
_COLUMN, _COLUMN_GATHER, _PACKED_COLUMN = "column", "column_gather", "packed_column"
_ROW, _ROW_SPLIT, _REPLICATED, _PARTIAL = "row", "row_split_input", "replicated", "partial"
STYLES: dict[str, str] = {
    "colwise": _COLUMN,
    "colwise_rep": _COLUMN_GATHER,  # the name before transformers 5.0
    "colwise_gather_output": _COLUMN_GATHER,
    "packed_colwise": _PACKED_COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW_SPLIT,
    "replicate": _REPLICATED,
    # AutoTP keeps embeddings whole unless the head is vocabulary-parallel, which is not supported here.
    "embedding_rowwise": _REPLICATED,
    "replicated_with_grad_allreduce": _PARTIAL,
}
_DEFAULT_HEAD_PATTERNS = ("lm_head", "embed_out")
_ATTENTION_PROJECTIONS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


@dataclass
class PartitionPlan:
    """What AutoTP is told, and which parameters have a partial gradient on each lane."""

    layer_specs: list[dict] = field(default_factory=list)
    partial_patterns: list[str] = field(default_factory=list)  # regular expressions over parameter names
    head_patterns: list[str] = field(default_factory=lambda: list(_DEFAULT_HEAD_PATTERNS))

    def as_partition_config(self) -> dict:
        return {"use_default_specs": False, "layer_specs": self.layer_specs, "lm_head_patterns": self.head_patterns}

    def is_partial(self, parameter_name: str) -> bool:
        return any(re.match(pattern, parameter_name) for pattern in self.partial_patterns)


def plan_regex(pattern: str, suffix: str = "") -> str:
    """A tp_plan pattern as a regular expression over full names: ``*`` stands for a layer number, any prefix may lead."""
    return r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+") + suffix + "$"


def _check_style(style: str, where: str) -> str:
    if style not in STYLES:
        raise ModelError(
            f"{where} has the tensor-parallel style {style!r} in the model's tp_plan, which is not supported: legal are "
            f"{sorted(STYLES)}. Give tensor_parallel.partition_config for this model"
        )
    return STYLES[style]


def _check_divisible(name: str, what: str, size: int, tp_size: int) -> None:
    if size % tp_size:
        raise ModelError(
            f"tensor_parallel.autotp_size={tp_size} must divide {what} of {name!r}, which is {size}: "
            f"{size} / {tp_size} is not whole"
        )


def _check_heads(name: str, config, tp_size: int) -> None:
    attribute = _ATTENTION_PROJECTIONS.get(name.rsplit(".", 1)[-1])
    heads = getattr(config, attribute, None) if attribute else None
    if heads is not None:
        _check_divisible(name, attribute, heads, tp_size)


def _check_sizes(name: str, module: nn.Module, cut: str, config, tp_size: int) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        raise ModelError(f"{name!r} ({type(module).__name__}) is to be cut as {cut!r} but has no two-dimensional weight")
    rows, columns = weight.shape
    if cut == _COLUMN:
        _check_heads(name, config, tp_size)
        _check_divisible(name, "the output size", rows, tp_size)
    elif cut == _PACKED_COLUMN:
        _check_divisible(name, "each half of the packed output", rows // 2, tp_size)
    elif cut in (_ROW, _ROW_SPLIT):
        _check_divisible(name, "the input size", columns, tp_size)


def _layer_spec(pattern: str, cut: str) -> dict:
    spec: dict = {"patterns": [plan_regex(pattern, r"\.weight")]}
    if cut in (_REPLICATED, _PARTIAL):
        return spec | {"partition_type": "skip"}
    if cut in (_ROW, _ROW_SPLIT):
        return spec | {"partition_type": "row"}
    spec |= {"partition_type": "column", "gather_output": cut == _COLUMN_GATHER}
    return spec | {"shape": [2, -1], "partition_dim": 0} if cut == _PACKED_COLUMN else spec


def plan_from_model(model: nn.Module, expert_names: list[str], tp_size: int) -> PartitionPlan:
    """Derive the plan from the model's tp_plan without its expert entries.

    Raises :class:`ModelError` that names the module and the numbers: no tp_plan, an unknown style, a size or head
    count that ``tp_size`` does not divide.
    """
    tp_plan = compat.hf_tp_plan(model)
    if not tp_plan:
        raise ModelError(
            f"{type(model).__name__} has no tp_plan, so tensor_parallel.autotp_size={tp_size} does not know how to cut it: "
            "give tensor_parallel.partition_config, or set autotp_size to 1"
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    modules = dict(model.named_modules())
    plan = PartitionPlan()
    for pattern, style in tp_plan.items():
        if _is_of_experts(pattern, model, expert_names):
            continue
        matched = [name for name in modules if re.match(plan_regex(pattern), name)]
        if not matched:
            _refuse_bare_parameter(model, pattern, style)
            continue
        cut = _check_style(style.lower(), f"module {matched[0]!r} (pattern {pattern!r})")
        if cut not in (_REPLICATED, _PARTIAL):
            for name in matched:
                _check_sizes(name, modules[name], cut, config, tp_size)
        if cut == _PARTIAL:
            plan.partial_patterns.append(plan_regex(pattern, r"\.[^.]+"))
        if cut == _ROW_SPLIT:
            # AutoTP splits a replicated input for its output heads only; these modules take the same way.
            plan.head_patterns.append(pattern.rsplit(".", 1)[-1])
        plan.layer_specs.append(_layer_spec(pattern, cut))
    return plan


def _refuse_bare_parameter(model: nn.Module, pattern: str, style: str) -> None:
    """AutoTP cuts modules only: a parameter of a sharded module that the plan cuts by itself cannot be left whole."""
    for name, _ in model.named_parameters():
        if re.match(plan_regex(pattern), name) and STYLES.get(style.lower()) not in (_REPLICATED, _PARTIAL):
            raise ModelError(
                f"parameter {name!r} is cut by itself (style {style!r}) in the model's tp_plan, which is not supported: only "
                "modules are. Give tensor_parallel.partition_config for this model"
            )


def _is_of_experts(pattern: str, model: nn.Module, expert_names: list[str]) -> bool:
    """Whether a pattern means an experts module or a parameter of one."""
    names = list(expert_names)
    for name in expert_names:
        names += [f"{name}.{parameter}" for parameter, _ in model.get_submodule(name).named_parameters()]
    return any(re.match(plan_regex(pattern), name) for name in names)


def make_plan(model: nn.Module, expert_names: list[str], tensor_parallel: dict, tp_size: int) -> PartitionPlan:
    """The user's own partition_config or preset, else the model's tp_plan."""
    own = compat.user_layer_specs(tensor_parallel)
    if own is None:
        return plan_from_model(model, expert_names, tp_size)
    specs, partial = own
    heads = (tensor_parallel.get("partition_config") or {}).get("lm_head_patterns", list(_DEFAULT_HEAD_PATTERNS))
    _check_user_specs(model, specs, tp_size)
    return PartitionPlan(layer_specs=specs, partial_patterns=partial, head_patterns=list(heads))


def _check_user_specs(model: nn.Module, specs: list[dict], tp_size: int) -> None:
    """Attention heads must divide whoever wrote the plan: uneven shards die in a mismatched collective."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    model_type = str(getattr(model.config, "model_type", "")).lower()
    for name, _ in model.named_parameters():
        spec = next((spec for spec in specs if _applies(spec, name, model_type)), None)
        if spec is not None and spec["partition_type"] == "column" and not spec["gather_output"]:
            _check_heads(name.removesuffix(".weight").removesuffix(".bias"), config, tp_size)


def _applies(spec: dict, parameter_name: str, model_type: str) -> bool:
    """As AutoTP decides: the first spec of which this is true is the parameter's."""
    if spec["model_types"] and model_type not in {str(kind).lower() for kind in spec["model_types"]}:
        return False
    return any(re.match(pattern, parameter_name) for pattern in spec["patterns"])
