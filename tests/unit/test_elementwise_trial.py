"""An optimizer of unknown type is tried on a small matrix, whole and cut, before it is let onto partitions."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW
from torch.optim import lr_scheduler as schedules

from deepspeed_autoep.engine.user_optimizer import check_elementwise
from deepspeed_autoep.errors import UnsupportedError


class WholeNorm(torch.optim.Optimizer):
    """Of an unknown name; the update is divided by the norm of the whole tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class SharedStep(WholeNorm):
    """One step size from all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(grad.abs().sum() for grad in grads)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / size, alpha=group["lr"])


class MatricesOnly(WholeNorm):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, _ = parameter.shape
                    parameter.sub_(parameter.grad, alpha=group["lr"] * rows)


class Sign(WholeNorm):
    """Of an unknown name, and each element by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class NeedsClosure(WholeNorm):
    def step(self, closure):
        raise RuntimeError("no closure")


@pytest.mark.parametrize("kind", [WholeNorm, SharedStep, MatricesOnly])
def test_an_optimizer_of_unknown_type_is_tried(kind):
    with pytest.raises(UnsupportedError, match=f"{kind.__name__}.*each|{kind.__name__}.*cut"):
        check_elementwise(kind([torch.nn.Parameter(torch.ones(3, 3))]))


@pytest.mark.parametrize("name", ["ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"])
def test_torchs_elementwise_optimizers_pass_the_trial(name):
    """By a subclass, so that the trial is made and not the name believed."""
    kind = type(f"My{name}", (getattr(torch.optim, name),), {"__module__": "mine"})
    assert check_elementwise(kind([torch.nn.Parameter(torch.ones(3, 3))], lr=0.01)) is None


class SecondGroupWhole(torch.optim.SGD):
    """An update by the group's options: matrices otherwise than vectors, as Muon and its like are used."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.norm() if group["momentum"] else 1.0
                parameter.data.add_(parameter.grad / scale, alpha=-group["lr"])


class Lookahead(torch.optim.SGD):
    def __init__(self, parameters, base, **options):
        super().__init__(parameters, **options)
        self.base = base


def test_every_set_of_options_is_tried():
    one, other = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3, 3))
    assert check_elementwise(SecondGroupWhole([{"params": []}, {"params": [one]}], lr=0.1)) is None
    with pytest.raises(UnsupportedError, match="SecondGroupWhole"):
        check_elementwise(SecondGroupWhole([{"params": [one]}, {"params": [other], "momentum": 0.5}], lr=0.1))


def test_an_optimizer_around_another_is_not_tried():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    base = torch.optim.SGD([parameter], lr=0.1)
    assert "'base'" in check_elementwise(Lookahead([parameter], base, lr=0.1))


def test_the_trial_leaves_the_optimizer_alone():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = type("Mine", (AdamW,), {"__module__": "mine"})([parameter], lr=0.0)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    schedules.LambdaLR(optimizer, lambda step: 0.0)  # patches step, and starts at 0
    assert check_elementwise(optimizer) is None
    assert not called and not optimizer.state and parameter.eq(1).all() and optimizer.param_groups[0]["lr"] == 0.0
    assert "'closure'" in check_elementwise(NeedsClosure([parameter]))
