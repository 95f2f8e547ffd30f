"""Tiny models with PEFT's LoRA, and the same training of them in one plain process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from unittest import mock

import peft
import torch

from tests.unit.models import Curve, make_model, plain_curve
from tests.unit.training import Case, train

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Lora:
    """What is adapted. Hashable, as a case is."""

    modules: tuple | str = ATTENTION
    parameters: tuple = ()
    adapters: tuple = ("default",)
    options: tuple = ()
    base: bool = False  # whether the base trains too
    injected: bool = False  # into the transformers model, without a PeftModel around it

    def __str__(self) -> str:
        modules = self.modules if isinstance(self.modules, str) else "+".join(self.modules)
        names = [modules, *(name.rpartition(".")[2] for name in self.parameters), *(f"{key}={value}" for key, value in self.options)]
        return "-".join([name for name in names if name] + ["base"] * self.base + ["injected"] * self.injected + list(self.adapters[1:]))

    def config(self) -> peft.LoraConfig:
        modules = self.modules if isinstance(self.modules, str) else list(self.modules)
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in self.options}
        options = {"r": 2, "lora_alpha": 6, **options}
        return peft.LoraConfig(target_modules=modules, target_parameters=list(self.parameters) or None, **options)


def adapt(model, lora: Lora) -> torch.nn.Module:
    """``model`` with adapters, all adapters active. B starts at zero in PEFT, and A would have no gradient: both are random
    here, the same in every process."""
    with _names_as_given() if isinstance(lora.modules, str) else contextlib.nullcontext():
        return _adapt(model, lora)


def _names_as_given():
    """PEFT takes gate_proj and the like for the experts of transformers v4, also where a dense layer has that name."""
    return mock.patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe", lambda _config, _model: None)


def _adapt(model, lora: Lora) -> torch.nn.Module:
    if lora.injected:
        fill(peft.inject_adapter_in_model(lora.config(), model))
        return model
    adapted = peft.get_peft_model(model, lora.config(), adapter_name=lora.adapters[0])
    for name in lora.adapters[1:]:
        adapted.add_adapter(name, lora.config())
    if len(lora.adapters) > 1:
        adapted.base_model.set_adapter(list(lora.adapters))
    fill(adapted)
    if lora.base:
        adapted.requires_grad_(True)
    return adapted


def fill(model) -> None:
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2


def make_lora_model(case: Case, lora: Lora) -> torch.nn.Module:
    return adapt(make_model(case.family, aux=case.aux, **dict(case.overrides)), lora)


def train_lora(case: Case, lora: Lora) -> Curve | None:
    return train(case, make_lora_model(case, lora))


@functools.cache
def lora_reference(family: str, overrides: tuple, optimizer: str, steps: int, samples: int, length: int, clip: float, lora: Lora):
    model = make_lora_model(Case(family, overrides=overrides), lora)
    return plain_curve(model, optimizer, steps, samples, length, clip)


def reference_of_lora(case: Case, lora: Lora) -> Curve:
    return lora_reference(case.family, case.overrides, case.optimizer, case.steps, case.samples, case.length, case.clip, lora)
