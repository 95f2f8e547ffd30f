"""Find the experts modules of a model by their interface: no list of model families.

What is looked for: a module with the flags of transformers' ``use_experts_implementation`` and the stacked
parameters that these flags promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.weight_layout import INTERFACE_FLAGS, POST_EXPERT_NORM, ExpertLayout, describe_layout


@dataclass(frozen=True)
class ExpertsSite:
    """One experts module: where it is and how its weights lie."""

    name: str
    module: nn.Module
    layout: ExpertLayout


def has_experts_interface(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, flag, None), bool) for flag in INTERFACE_FLAGS)


def _lookalikes(model: nn.Module) -> Iterator[str]:
    """Modules that are probably experts but do not carry the interface: for the error message only."""
    for name, module in model.named_modules():
        stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        listed = isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] == "experts"
        if stacked or listed:
            yield f"{name} ({type(module).__name__})"


def _describe(name: str, module: nn.Module) -> ExpertLayout:
    where = f"experts module {name!r} ({type(module).__name__})"
    has_norm = bool(getattr(module, "has_post_expert_norm", False))
    if has_norm and not isinstance(getattr(module, POST_EXPERT_NORM, None), nn.Module):
        raise ModelError(f"{where} has has_post_expert_norm=True and no module {POST_EXPERT_NORM!r}")
    known = f"{POST_EXPERT_NORM}." if has_norm else None
    nested = sorted(child for child, _ in module.named_parameters() if "." in child and not (known and child.startswith(known)))
    if nested:
        raise ModelError(f"{where} has an unknown shape: it keeps parameters in submodules: {nested}")
    try:
        layout = describe_layout(
            **{flag: getattr(module, flag) for flag in INTERFACE_FLAGS},
            has_post_expert_norm=has_norm,
            shapes={key: tuple(value.shape) for key, value in module.named_parameters(recurse=False)},
        )
    except ValueError as error:
        flags = {flag: getattr(module, flag) for flag in INTERFACE_FLAGS}
        raise ModelError(f"{where} has an unknown shape: {error}; flags {flags}") from None
    declared = getattr(module, "num_experts", None)
    if declared != layout.num_experts:
        raise ModelError(f"{where} says num_experts={declared!r}, its weights hold {layout.num_experts} experts")
    return layout


def find_experts(model: nn.Module) -> list[ExpertsSite]:
    """Every experts module of ``model``, in module order. Raises :class:`ModelError` when there is none, or when one
    has a layout that its flags do not describe."""
    sites = [
        ExpertsSite(name, module, _describe(name, module))
        for name, module in model.named_modules()
        if has_experts_interface(module)
    ]
    if not sites:
        found = list(_lookalikes(model))[:8]
        raise ModelError(
            f"{type(model).__name__} has no experts that can be parallelised: looked in all "
            f"{sum(1 for _ in model.modules())} modules for the experts interface of transformers v5 (the flags "
            f"{', '.join(INTERFACE_FLAGS)}, set by use_experts_implementation). "
            + (f"Modules that look like experts without it: {'; '.join(found)}. " if found else "It looks like a dense model. ")
            + "Remove the expert_parallel block (or set expert_parallel.enabled to false) for a dense model"
        )
    return sites


def check_expert_sizes(sites: list[ExpertsSite], ep_size: int, etp_size: int = 1) -> None:
    """Every module's experts must split evenly over EP, and each expert's intermediate size over ETP.

    Raises :class:`ModelError` with the numbers and the legal sizes.
    """
    for site in sites:
        for key, size, total, what in (
            ("autoep_size", ep_size, site.layout.num_experts, "number of experts"),
            ("expert_tensor_parallel_size", etp_size, site.layout.intermediate_size, "intermediate size of an expert"),
        ):
            if total % size:
                legal = [candidate for candidate in range(1, total + 1) if total % candidate == 0]
                raise ModelError(
                    f"expert_parallel.{key}={size} must divide the {what}: {site.name!r} has {total}, and "
                    f"{total} / {size} is not whole. Legal values: {legal}"
                )
