"""The same training in one plain PyTorch process: what the distributed run is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# DeepSpeed's own kernels for Adam and AdamW.
_DEEPSPEED_ADAM = ("DeepSpeedCPUAdam", "FusedAdam")
_TORCH = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


class NotComparable(ValueError):
    """Why no plain run computes the same thing."""


@dataclass(frozen=True)
class OptimizerRecipe:
    """A torch optimizer with its hyperparameters, the learning rate aside."""

    kind: type[torch.optim.Optimizer]
    options: dict

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerRecipe:
        """The recipe of a live optimizer. Raises :class:`NotComparable`."""
        kind = type(optimizer)
        if not optimizer.defaults.get("bias_correction", True):
            raise NotComparable("the optimizer has bias_correction=false, which torch's has not")
        if kind.__name__ in _DEEPSPEED_ADAM:
            decoupled = bool(getattr(optimizer, "adam_w_mode", True))
            kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        elif kind not in _TORCH:
            raise NotComparable(f"the optimizer is {kind.__name__}; the plain process knows AdamW, Adam and SGD")
        names = ("momentum", "dampening", "nesterov") if kind is torch.optim.SGD else ("betas", "eps", "amsgrad")
        names = (*names, "weight_decay")
        return cls(kind, {name: optimizer.defaults[name] for name in names if name in optimizer.defaults})


@dataclass(frozen=True)
class Step:
    """What one training step reports."""

    loss: float
    grad_norm: float


def train_plain(
    model: torch.nn.Module,
    recipe: OptimizerRecipe,
    batches: Iterable[torch.Tensor],
    learning_rates: Sequence[float],
    clipping: float,
    shares: int,
) -> list[Step]:
    """One step a batch [samples, length]: loss, ``clip_grad_norm_`` (0: the norm alone), optimizer.

    Each batch is split into ``shares`` forwards, whose losses are averaged: gradient accumulation. An auxiliary loss is
    not linear in the tokens, so there a share must be what one rank sees.
    """
    optimizer = recipe.kind(model.parameters(), lr=0.0, **recipe.options)
    steps = []
    for batch, rate in zip(batches, learning_rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total = 0.0
        for share in batch.chunk(shares):
            loss = model(input_ids=share, labels=share, use_cache=False).loss / shares
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping if clipping > 0 else float("inf"))
        optimizer.step()
        steps.append(Step(total, norm.item()))
    return steps


def largest_difference(values: Sequence[float], right: Sequence[float]) -> float:
    """Largest relative difference."""
    return max(abs(value - truth) / max(abs(truth), 1e-12) for value, truth in zip(values, right, strict=True))
