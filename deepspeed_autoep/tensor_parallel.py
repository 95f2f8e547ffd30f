"""Dense tensor parallelism: transformers' ``tp_plan`` -> DeepSpeed AutoTP's partition config. Pure but for reading the model.

Experts are left out (they are cut by expert parallelism). A user's own ``partition_config`` or ``preset_model`` wins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from deepspeed_autoep import compat, peft_adapters
from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.peft_adapters import BASE_WEIGHT, LORA_A_WEIGHT, LORA_B_WEIGHT

# HF style -> how AutoTP cuts the module. "replicated" and "partial" modules stay whole.
_COLUMN, _COLUMN_GATHER, _PACKED_COLUMN = "column", "column_gather", "packed_column"
_ROW, _ROW_SPLIT, _REPLICATED, _PARTIAL = "row", "row_split_input", "replicated", "partial"
_LATENT, _SUMMED_BLOCK, _LOCAL = "latent", "summed_block", "local"
STYLES: dict[str, str] = {
    "colwise": _COLUMN,
    "colwise_rep": _COLUMN_GATHER,  # the name before transformers 5.0
    "colwise_gather_output": _COLUMN_GATHER,
    "packed_colwise": _PACKED_COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW_SPLIT,
    "rowwise_rep": _ROW_SPLIT,
    "replicate": _REPLICATED,
    # AutoTP keeps embeddings whole unless the head is vocabulary-parallel, which is not supported here.
    "embedding_rowwise": _REPLICATED,
    "embedding_colwise": _REPLICATED,
    "replicated_with_grad_allreduce": _PARTIAL,
    # Whole, but the rotary end of its output goes to each lane's heads without another projection between.
    "mla_kv_a_proj": _LATENT,
    # A block whose lanes' outputs are summed: kept whole, with all that is in it.
    "all_reduce": _SUMMED_BLOCK,
    # transformers runs such a module on local parameters; parameters are local here anyway.
    "local_params": _LOCAL,
}
_WHOLE = (_REPLICATED, _PARTIAL, _LATENT, _SUMMED_BLOCK, _LOCAL)
_DEFAULT_HEAD_PATTERNS = ("lm_head", "embed_out")
_ATTENTION_PROJECTIONS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


@dataclass
class PartitionPlan:
    """What AutoTP is told, and what it cannot be told.

    ``partial_patterns``: regular expressions over the names of parameters whose gradient is partial on each lane.
    ``cut_parameters``: names of parameters outside of linear layers that are cut along dimension 0 (attention sinks).
    ``rotary_outputs``: name of a latent projection -> how many of its last outputs go to the lane's heads directly.
    """

    layer_specs: list[dict] = field(default_factory=list)
    partial_patterns: list[str] = field(default_factory=list)
    cut_parameters: list[str] = field(default_factory=list)
    rotary_outputs: dict[str, int] = field(default_factory=dict)
    derived: bool = False  # from the model's tp_plan, not given by the user
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


# LoRA's matrix beside a cut weight that is cut alike. Beside a gathered output it stays whole, as its own output is.
_CUT_ADAPTERS = {_COLUMN: LORA_B_WEIGHT, _PACKED_COLUMN: LORA_B_WEIGHT, _ROW: LORA_A_WEIGHT}


def _layer_spec(pattern: str, cut: str) -> dict:
    suffixes = [BASE_WEIGHT] + ([_CUT_ADAPTERS[cut]] if cut in _CUT_ADAPTERS else [])
    spec: dict = {"patterns": [plan_regex(pattern, suffix) for suffix in suffixes]}
    if cut in _WHOLE:
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
    tp_plan = compat.hf_tp_plan(peft_adapters.transformers_model(model))
    if not tp_plan:
        raise ModelError(
            f"{type(model).__name__} has no tp_plan, so tensor_parallel.autotp_size={tp_size} does not know how to cut it: "
            "give tensor_parallel.partition_config, or set autotp_size to 1"
        )
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    modules, wrappers = peft_adapters.logical_modules(model)
    plan = PartitionPlan(derived=True)
    found: dict[str, tuple[str, list[str]]] = {}  # pattern -> how its modules are cut, and their names
    whole_blocks = [pattern for pattern, style in tp_plan.items() if STYLES.get(style.lower()) == _SUMMED_BLOCK]
    for pattern, style in tp_plan.items():
        if _is_of_experts(pattern, model, expert_names) or any(pattern.startswith(f"{block}.") for block in whole_blocks):
            continue
        matched = [name for name in modules if re.match(plan_regex(pattern), name)]
        if not matched:
            plan.cut_parameters += _bare_parameters(model, pattern, style, tp_size)
            continue
        cut = _check_style(style.lower(), f"module {matched[0]!r} (pattern {pattern!r})")
        found[pattern] = cut, matched

    cuts = {name: cut for cut, matched in found.values() for name in matched}
    whole = _kept_whole(modules, cuts) | _adapted_and_whole(wrappers, cuts)
    if whole:
        # With what is inside of them: a pattern without a layer's number may mean names at any depth.
        patterns = [rf"{re.escape(name)}(?:\..+)?\.weight$" for name in sorted(whole)]
        plan.layer_specs.append({"patterns": patterns, "partition_type": "skip"})
    for name, cut in cuts.items():
        if name in wrappers and name not in whole and cut in (*_CUT_ADAPTERS, _PARTIAL):
            peft_adapters.require_cuttable(name, wrappers[name], cut)
    for pattern, (cut, matched) in found.items():
        used = [name for name in matched if name not in whole]
        if cut not in _WHOLE:
            for name in used:
                _check_sizes(name, modules[name], cut, config, tp_size)
        if cut == _LATENT:
            plan.rotary_outputs |= {name: _rotary_size(name, modules, config) for name in used}
        if cut == _PARTIAL:
            plan.partial_patterns += [rf"{re.escape(name)}\.[^.]+$" for name in used]
        if cut == _ROW_SPLIT:
            # AutoTP splits a replicated input for its output heads only; these modules take the same way.
            plan.head_patterns.append(pattern.rsplit(".", 1)[-1])
        plan.layer_specs.append(_layer_spec(pattern, cut))
    columns = {name for cut, matched in found.values() if cut == _COLUMN for name in matched} - whole
    norms = _forgotten_head_norms(modules, tp_plan, columns)
    for name in norms:
        if name in wrappers:
            peft_adapters.require_cuttable(name, wrappers[name], _PARTIAL)
    plan.partial_patterns += [rf"{re.escape(name)}\.[^.]+$" for name in norms]
    return plan


def _adapted_and_whole(wrappers: dict[str, nn.Module], cuts: dict[str, str]) -> set[str]:
    """Modules that PEFT wraps and that stay whole, which is exact because their neighbours see whole inputs and outputs: those of
    which a lane would take its slice of the input, and gathered ones whose adapter cannot be cut (``modules_to_save`` of a head)."""
    return {
        name
        for name, cut in cuts.items()
        if name in wrappers
        and (cut == _ROW_SPLIT or (cut == _COLUMN_GATHER and peft_adapters.obstacle_to_cut(wrappers[name]) is not None))
    } | {name for name, wrapper in wrappers.items() if name not in cuts and not peft_adapters.is_tuner_layer(wrapper)}


def _kept_whole(modules: dict[str, nn.Module], cuts: dict[str, str]) -> set[str]:
    """Modules that the plan cuts and that must stay whole on every lane, which is exact and costs memory.

    A block is the smallest module around a layer that holds another linear layer: attention, an MLP. Row-parallel layers
    read the lanes' outputs of its column-parallel ones: a block without any is left whole by the plan, whose pattern
    means a block of another kind (full attention, not linear attention). A block that shares its weights with another
    (an encoder's with a decoder's) would be cut twice.
    """
    linears: Counter[str] = Counter()  # under each module
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            parts = name.split(".")
            linears.update(".".join(parts[:length]) for length in range(len(parts)))
    uses = Counter(id(value) for module in modules.values() for value in module._parameters.values() if value is not None)

    blocks: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        if cut in (_COLUMN, _PACKED_COLUMN, _ROW, _PARTIAL):
            block = name.rpartition(".")[0]
            while block and linears[block] < 2:
                block = block.rpartition(".")[0]
            blocks.setdefault(block, []).append(name)
    whole: set[str] = set()
    for names in blocks.values():
        if any(uses[id(value)] > 1 for name in names for value in modules[name].parameters()):
            whole.update(names)
        elif not any(cuts[name] in (_COLUMN, _PACKED_COLUMN) for name in names):
            whole.update(name for name in names if cuts[name] == _ROW and isinstance(modules[name], nn.Linear))
    return whole


def _bare_parameters(model: nn.Module, pattern: str, style: str, tp_size: int) -> list[str]:
    """Parameters that the plan cuts by themselves: AutoTP cuts modules only. One value a head can be cut here."""
    cut = []
    for name, parameter in model.named_parameters():
        if not re.match(plan_regex(pattern), name) or STYLES.get(style.lower()) in _WHOLE:
            continue
        if STYLES.get(style.lower()) != _COLUMN or parameter.dim() != 1:
            raise ModelError(
                f"parameter {name!r} of shape {list(parameter.shape)} is cut by itself (style {style!r}) in the model's tp_plan, "
                "which is supported for vectors in the style 'colwise' only. Give tensor_parallel.partition_config for this model"
            )
        _check_divisible(name, "the size", parameter.shape[0], tp_size)
        cut.append(name)
    return cut


# Norms of single heads, by the projection whose heads they normalise.
_HEAD_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj", "query_layernorm": "q_proj", "key_layernorm": "k_proj"}


def _forgotten_head_norms(modules: dict[str, nn.Module], tp_plan: dict[str, str], columns: set[str]) -> list[str]:
    """Names of norms with one head's size behind a column-parallel projection that the plan does not mention: each lane
    normalises its own heads, so their gradient is partial. Some plans forget it (Qwen3-VL-MoE, GLM-4-MoE with qk norm)."""
    found = []
    for name, module in modules.items():
        block, _, last = name.rpartition(".")
        projection = f"{block}.{_HEAD_NORMS.get(last)}"
        if last not in _HEAD_NORMS or any(re.match(plan_regex(pattern), name) for pattern in tp_plan):
            continue
        weight = getattr(module, "weight", None)
        if projection in columns and weight is not None and weight.numel() < modules[projection].weight.shape[0]:
            found.append(name)
    return found


def _rotary_size(name: str, modules: dict[str, nn.Module], config) -> int:
    """Last outputs of a latent projection (kv_a_proj_with_mqa) that are rotary keys, shared by all heads."""
    owner = modules[name.rsplit(".", 1)[0]]
    for holder in (owner, getattr(owner, "config", None), config):
        size = getattr(holder, "qk_rope_head_dim", None)
        if isinstance(size, int):
            return size
    raise ModelError(
        f"{name!r} has the style 'mla_kv_a_proj' in the model's tp_plan, and neither its module nor the configuration has "
        "qk_rope_head_dim. Give tensor_parallel.partition_config for this model"
    )


def _is_of_experts(pattern: str, model: nn.Module, expert_names: list[str]) -> bool:
    """Whether a pattern means an experts module or a parameter of one."""
    names = [peft_adapters.logical_name(name) for name in expert_names]
    for name, logical in zip(expert_names, list(names), strict=True):
        names += [f"{logical}.{parameter}" for parameter, _ in model.get_submodule(name).named_parameters()]
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
    """Attention heads must divide whoever wrote the plan: uneven shards die in a mismatched collective. And what PEFT added
    must follow the layers' cuts: a LoRA matrix that does not would give a wrong result, mostly without an error."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    model_type = str(getattr(model.config, "model_type", "")).lower()

    def cut_of(name: str) -> dict | None:
        spec = next((spec for spec in specs if _applies(spec, name, model_type)), None)
        return spec if spec is not None and spec["partition_type"] != "skip" else None

    for name, _ in model.named_parameters():
        spec = cut_of(name)
        if spec is not None and spec["partition_type"] == "column" and not spec["gather_output"]:
            _check_heads(peft_adapters.logical_name(name.removesuffix(".weight").removesuffix(".bias")), config, tp_size)
    for name, wrapper in peft_adapters.logical_modules(model)[1].items():
        _check_user_specs_of_wrapped(name, wrapper, cut_of)


def _check_user_specs_of_wrapped(name: str, wrapper: nn.Module, cut_of: Callable[[str], dict | None]) -> None:
    if (spec := cut_of(f"{name}.weight")) is not None:
        peft_adapters.require_cuttable(name, wrapper, spec["partition_type"])
        raise ModelError(
            f"a pattern of tensor_parallel.partition_config cuts {name + '.weight'!r}, and PEFT wraps this module: its own weight is "
            f"{name + '.base_layer.weight'!r}. Legal are patterns that match it, and LoRA's matrices as it is cut"
        )
    inside = [f"{name}.{inner}" for inner, _ in wrapper.named_parameters() if inner.endswith("weight")]
    base = cut_of(f"{name}.base_layer.weight")
    cut_inside = [inner for inner in inside if cut_of(inner) is not None and inner != f"{name}.base_layer.weight"]
    if base is None:
        wanted: list[str] = []
    else:
        peft_adapters.require_cuttable(name, wrapper, base["partition_type"])
        suffix = LORA_A_WEIGHT if base["partition_type"] == "row" else LORA_B_WEIGHT
        wanted = [] if base["gather_output"] else [inner for inner in inside if re.match(re.escape(name) + suffix + "$", inner)]
    alike = ("partition_type", "gather_output", "shape", "partition_dim")
    for inner in sorted({*wanted, *cut_inside}):
        cut = cut_of(inner)
        right = base if inner in wanted else None
        if cut is not right and (cut is None or right is None or any(cut[key] != right[key] for key in alike)):
            raise ModelError(
                f"tensor_parallel.partition_config cuts {name + '.base_layer.weight'!r} as {_described(base)} and {inner!r} as "
                f"{_described(cut)}: legal for the latter is {_described(right)}. LoRA's lora_B is cut as a column-parallel layer "
                "beside one whose output is not gathered, lora_A as a row-parallel layer beside one, and nothing else of PEFT's"
            )


def cut_modules(model: nn.Module, plan: PartitionPlan) -> set[str]:
    """Names of the modules that AutoTP replaces by its own."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    found = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            spec = next((spec for spec in plan.layer_specs if _applies(spec, f"{name}.weight", model_type)), None)
            if spec is not None and spec["partition_type"] != "skip":
                found.add(name)
    return found


def check_shares(cuts: Mapping[str, compat.AutoTPCut], tp_size: int) -> None:
    """Of each block (attention, an MLP) every lane holds the same share of all cut layers, and not nothing: else one projection's heads
    would meet another's. ``cuts``: by the names of weights. AutoTP cuts what divides by the number of heads by heads, others evenly.

    Raises :class:`ModelError` that names the layers and what each lane would have.
    """
    blocks: dict[str, tuple[str, tuple[int, ...]]] = {}
    legal = f"legal values of tensor_parallel.autotp_size={tp_size} divide the number of heads"
    for name, cut in cuts.items():
        layer = peft_adapters.logical_name(name.removesuffix(".weight"))
        if len(cut.widths) != 1 or ".lora_" in name:
            continue
        (widths,) = cut.widths
        if 0 in widths:
            raise ModelError(f"{layer!r} would be cut into {list(widths)}, nothing for rank {widths.index(0)} of each TP group: {legal}")
        block = layer.rpartition(".")[0]
        other, others = blocks.setdefault(block, (layer, widths))
        if any(mine * sum(others) != theirs * sum(widths) for mine, theirs in zip(widths, others, strict=True)):
            raise ModelError(f"{other!r} would be cut into {list(others)} and {layer!r} into {list(widths)}, which are not the same heads: {legal}")


def _described(spec: dict | None) -> str:
    return "nothing (whole)" if spec is None else ", ".join(f"{key}={spec[key]!r}" for key in ("partition_type", "gather_output", "shape"))


def _applies(spec: dict, parameter_name: str, model_type: str) -> bool:
    """As AutoTP decides: the first spec of which this is true is the parameter's."""
    kinds = spec.get("model_types")
    if kinds and model_type not in {str(kind).lower() for kind in kinds}:
        return False
    return any(re.match(pattern, parameter_name) for pattern in spec["patterns"])
