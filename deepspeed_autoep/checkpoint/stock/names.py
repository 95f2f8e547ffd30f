"""What stock AutoEP calls the parameters of an experts block, and what the Hugging Face model calls them.

Stock replaces the block (``model.layers.0.mlp``) by a module of its own: its router is ``router.gate``, its experts are three stacks
``experts.w1`` (gate) and ``experts.w3`` (up), both ``[E, I, H]``, and ``experts.w2`` (down), ``[E, H, I]``, and shared experts are
``shared_experts`` and ``shared_experts_gate`` whatever the model calls them. In the model of transformers v5 gate and up are one
stack, ``gate_up_proj`` ``[E, 2 I, H]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_autoep.compat import stock_expert_names, stock_keys
from deepspeed_autoep.errors import CheckpointError

# What the model's names are without a preset in the configuration: those of every preset that stock has (0.19.8).
_USUAL = {"router": "gate", "experts": "experts", "w1": "gate_up_proj", "w2": "down_proj", "w3": None}
# Keys of stock's expert_parallel block that override a preset's.
_OVERRIDES = {
    "router_pattern": "router",
    "expert_pattern": "experts",
    "expert_w1": "w1",
    "expert_w2": "w2",
    "expert_w3": "w3",
    "shared_experts_pattern": "shared_experts",
    "shared_experts_gate_pattern": "shared_experts_gate",
}


@dataclass(frozen=True)
class ExpertLayer:
    """One block that stock AutoEP replaced: ``index`` is its number in the expert files' names, ``block`` its module's name."""

    index: int
    block: str
    num_experts: int
    ep_size: int

    @property
    def prefix(self) -> str:
        return f"{self.block}.experts" if self.block else "experts"

    def stacks(self) -> tuple[str, str, str]:
        return tuple(f"{self.prefix}.{part}" for part in ("w1", "w2", "w3"))


def expert_layers(model_state: Mapping[str, Any], path: Path) -> tuple[ExpertLayer, ...]:
    """From a model file's metadata; () where AutoEP was off.

    Raises :class:`CheckpointError` for metadata that does not say what is needed, or experts that do not lie in equal blocks.
    """
    entries = model_state.get(stock_keys.AUTOEP_LAYERS_KEY) or model_state.get(stock_keys.AUTOEP_LAYERS_KEY_LEGACY) or ()
    layers = []
    for entry in entries:
        try:
            layer = ExpertLayer(entry["moe_layer_id"], entry["module_path"], entry["num_experts"], entry["ep_size"])
            local, prefix = entry["num_local_experts"], entry["expert_key_prefix"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: its {stock_keys.AUTOEP_LAYERS_KEY!r} is damaged: {error!r}") from None
        if local * layer.ep_size != layer.num_experts or not _in_order(entry.get(stock_keys.AUTOEP_EXPERT_PLACEMENT), local):
            raise CheckpointError(
                f"{path}: the {layer.num_experts} experts of {layer.block!r} do not lie on {layer.ep_size} ranks in equal blocks, in order; that is not read"
            )
        if prefix != layer.prefix:
            raise CheckpointError(f"{path}: the experts of {layer.block!r} are called {prefix!r}, {layer.prefix!r} is expected")
        layers.append(layer)
    return tuple(layers)


def _in_order(placement: Mapping[str, Any] | None, local: int) -> bool:
    if placement is None:  # older versions know equal blocks only
        return True
    ranks = placement.get(stock_keys.AUTOEP_PLACEMENT_RANKS, ())
    found = {entry[stock_keys.AUTOEP_PLACEMENT_RANK]: list(entry[stock_keys.AUTOEP_PLACEMENT_EXPERTS]) for entry in ranks}
    return found == {rank: list(range(rank * local, (rank + 1) * local)) for rank in range(len(ranks))}


class NameMap:
    """Stock's names of parameters and buffers -> the model's."""

    def __init__(self, layers: Collection[ExpertLayer], ds_config: Any, names: Collection[str], path: Path) -> None:
        """``names``: all that the model file holds; ``path``: that file, for messages."""
        self.layers = tuple(layers)
        self._path = path
        block = ds_config.get("expert_parallel") if isinstance(ds_config, dict) else None
        block = block if isinstance(block, dict) else {}
        preset = block.get("preset_model")
        known = stock_expert_names(preset) if preset is not None else None
        if preset is not None and known is None:
            raise CheckpointError(f"{path} was trained with expert_parallel.preset_model={preset!r}, which this DeepSpeed does not know")
        if known is None:
            # Of the families that stock knows, those whose shared expert has a gate call it shared_expert.
            gated = any(name.startswith(f"{layer.block}.shared_experts_gate.") for layer in self.layers for name in names)
            shared = ("shared_expert", "shared_expert_gate") if gated else ("shared_experts", None)
            known = {**_USUAL, "shared_experts": shared[0], "shared_experts_gate": shared[1]}
        overrides = {_OVERRIDES[key]: block[key] for key in _OVERRIDES if block.get(key) is not None or (key == "expert_w3" and key in block)}
        self.parts: dict[str, str | None] = {**known, **overrides}

    @property
    def fused(self) -> bool:
        """Are gate and up one stack in the model?"""
        return self.parts["w3"] is None

    def stack(self, layer: ExpertLayer, part: str) -> str:
        """The model's name of a stack: ``part`` is w1 (gate, or gate and up), w2 (down) or w3 (up)."""
        return ".".join(filter(None, (layer.block, self.parts["experts"], self.parts[part])))

    def logical(self, name: str) -> str | None:
        """The model's name of anything but a stack of experts; None for what is no tensor of the model's own.

        Raises :class:`CheckpointError` for a name under a block of experts that stock AutoEP does not use.
        """
        for layer in self.layers:
            start = f"{layer.block}." if layer.block else ""
            if name.startswith(start):
                return self._inside(name, start)
        return name

    def _inside(self, name: str, start: str) -> str | None:
        rest = name[len(start) :]
        router = self.parts["router"]
        if rest in ("expert_bias", "tokens_per_expert"):
            return None
        if rest.startswith(f"{router}.gate.") and router != "router":
            return None  # the router once more, under the model's name for it
        moved = {"router.gate.": router, "router.": router}
        moved |= {f"{part}.": self.parts[part] for part in ("shared_experts_gate", "shared_experts")}
        for old, new in moved.items():
            if rest.startswith(old) and new is not None:
                return f"{start}{new}.{rest[len(old) :]}"
        raise CheckpointError(f"{self._path} has {name!r}, a name that DeepSpeed's AutoEP does not use: what it is in the model is not known")
