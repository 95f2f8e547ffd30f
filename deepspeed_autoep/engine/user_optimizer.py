"""The optimizer as a user brings it: what is checked on one rank, before anything is built on it. No collective."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

import torch

from deepspeed_autoep.config import EXPERT_BLOCK, check_optimizer
from deepspeed_autoep.engine.param_groups import as_groups, as_list
from deepspeed_autoep.errors import ModelError, UnsupportedError

_SHOWN = 4  # names in a message

# These update each element by itself; others are tried.
_ELEMENTWISE = {"ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


def listed_parameters(model_parameters) -> list | None:
    """``model_parameters`` with its generators read, as the user gave it otherwise: a callable gets it so."""
    if model_parameters is None:
        return None
    return [{**item, "params": as_list(item["params"])} if isinstance(item, dict) and "params" in item else item for item in as_list(model_parameters)]


def check_user_optimizer(model: torch.nn.Module, optimizer, model_parameters, lr_scheduler) -> None:
    """An optimizer object with its scheduler, or ``model_parameters`` for one to be built. Called before the model is cut, so
    that shapes in messages are the model's own.

    Raises :class:`ModelError` or :class:`UnsupportedError`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer_object(model, optimizer)
        check_scheduler(lr_scheduler, optimizer)
    elif optimizer is not None and not callable(optimizer):
        raise ModelError(f"optimizer={type(optimizer).__name__} is not supported: legal are a torch.optim.Optimizer, a callable or None")
    else:
        if optimizer is None:
            check_scheduler(lr_scheduler, None)
        if model_parameters is not None:
            check_groups(model, as_groups(model_parameters), "model_parameters")


def check_scheduler(lr_scheduler, optimizer: torch.optim.Optimizer | None) -> None:
    """A scheduler object changes the rates of the optimizer that it was built on. ``optimizer``: the one that will be used, None
    for one that DeepSpeed builds. Raises :class:`ModelError`.
    """
    if lr_scheduler is None or callable(lr_scheduler):
        return
    bound_to = getattr(lr_scheduler, "optimizer", optimizer)
    if bound_to is not optimizer:
        used = "the one that the configuration declares" if optimizer is None else f"the {type(optimizer).__name__} that will be used"
        raise ModelError(
            f"lr_scheduler ({type(lr_scheduler).__name__}) was built on another optimizer ({type(bound_to).__name__}) than {used}, whose "
            "learning rates it would never change: pass a callable that takes the optimizer and returns the scheduler"
        )


def check_optimizer_object(model: torch.nn.Module, optimizer) -> None:
    """Raises :class:`ModelError` or :class:`UnsupportedError`."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"the optimizer callable returned a {kind}: legal is a torch.optim.Optimizer")
    check_optimizer(kind)
    check_groups(model, optimizer.param_groups, "the optimizer")
    if any(state for state in optimizer.state.values()):
        raise ModelError(
            "the client optimizer has state already (from steps that it took): its shapes are the whole model's. Pass a fresh "
            "optimizer, or declare it in the DeepSpeed configuration"
        )


def check_groups(model: torch.nn.Module, groups: list[dict], what: str) -> None:
    """Every parameter is the model's and in one group only, and some can be trained. Raises :class:`ModelError`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: dict[int, int] = {}
    trainable = 0
    for origin, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            own_names = group.get("param_names", ())
            if id(parameter) not in names:
                called = f" ({own_names[position]!r})" if position < len(own_names) else ""
                raise ModelError(
                    f"parameter {position}{called} of {what}'s parameter group {origin}, of shape {list(parameter.shape)}, is none of "
                    f"the model's: it would train in vain. {_of_shape(model, parameter.shape)} Build the optimizer on "
                    "model.parameters() of the model given to initialize, after its last change (tied or resized weights, a copy)"
                )
            if id(parameter) in seen:
                raise ModelError(
                    f"parameter {names[id(parameter)]!r} is in {what}'s parameter groups {seen[id(parameter)]} and {origin}: give each "
                    "parameter once"
                    if seen[id(parameter)] != origin
                    else f"parameter {names[id(parameter)]!r} is twice in {what}'s parameter group {origin}: give each parameter once"
                )
            seen[id(parameter)] = origin
            trainable += parameter.requires_grad
    if not trainable:
        raise ModelError(f"{what}'s parameter groups hold no parameter with requires_grad=True: nothing would be trained")


def _of_shape(model: torch.nn.Module, shape: torch.Size) -> str:
    same = [name for name, parameter in model.named_parameters() if parameter.shape == shape]
    return f"The model's of that shape: {listed(same)}." if same else "The model has none of that shape."


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def check_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Let a copy of an optimizer of unknown type step on a small matrix, and on its elements in three pieces, as ranks hold them:
    an update that needs more than its own element (norms, factored moments, whole matrices) is not the same. Once for each
    set of options that its groups have, which may choose the update.

    Returns why it could not be tried, or None. Raises :class:`UnsupportedError` for an update that is not the same.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE or kind.__module__.startswith("deepspeed."):
        return None
    inside = [name for name, value in vars(optimizer).items() if _holds_tensors(value) and name not in ("state", "param_groups")]
    if inside:
        return f"its attributes {inside} hold tensors or another optimizer, which a trial would change"
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    if device.type == "meta":
        device = torch.device("cpu")
    tried: list[dict] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:  # a schedule may start at 0
            options["lr"] = torch.full_like(options["lr"], 0.1) if isinstance(options["lr"], torch.Tensor) else 0.1
        if repr(options) not in map(repr, tried):
            tried.append(options)
            reason = _try_cut(optimizer, options, device)
            if reason is not None:
                return reason
    return None


def _holds_tensors(value) -> bool:
    if isinstance(value, torch.optim.Optimizer | torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, list | tuple | set) and any(map(_holds_tensors, value))


def _try_cut(optimizer: torch.optim.Optimizer, options: dict, device: torch.device) -> str | None:
    elements = torch.arange(48, dtype=torch.float32, device=device)
    start = torch.sin(elements)
    # Pieces of different magnitude: their norms differ much.
    gradients = [torch.cos(elements * step) * (1 + elements) for step in range(1, 6)]
    try:
        whole = _stepped(optimizer, options, start.view(6, 8), [gradient.view(6, 8) for gradient in gradients]).flatten() - start
    except Exception as caught:
        return f"a step on a small matrix raised {type(caught).__name__}: {caught}"
    if not whole.any():
        return "it left a small matrix as it was"
    try:
        cut = zip(start.chunk(3), zip(*[g.chunk(3) for g in gradients], strict=True), strict=True)
        pieces = [_stepped(optimizer, options, *part) for part in cut]
        error = (torch.cat(pieces) - start - whole).abs().max() / whole.abs().max()
    except Exception:
        error = torch.tensor(torch.inf)
    if not error < 1e-3:
        raise UnsupportedError(
            f"optimizer.type={type(optimizer).__name__!r} is not supported with {EXPERT_BLOCK}.enabled=true: tried on a small matrix, its "
            "update is another one when the matrix is cut, as it is over ranks; use AdamW, Adam or SGD"
        )
    return None


def _stepped(optimizer: torch.optim.Optimizer, options: dict, start: torch.Tensor, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    trial = object.__new__(type(optimizer))
    # Schedulers patch ``step`` of the original; its hooks are the user's.
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state", "param_groups")}
    hooks = {name: OrderedDict() for name in own if name.startswith("_optimizer_step_")}
    trial.__dict__ |= {name: copy.deepcopy(value) if isinstance(value, dict | list | set) else value for name, value in own.items() if name not in hooks}
    trial.__dict__ |= hooks
    trial.state, trial.param_groups = defaultdict(dict), [{**options, "params": [parameter]}]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        trial.step()
    return parameter.detach()


def groups_digest(groups: list[dict], names: dict[torch.nn.Parameter, str], kind: str) -> dict[str, object]:
    """What ranks must agree on: ZeRO's partitions of two ranks meet whatever they hold."""
    digest: dict[str, object] = {"optimizer": kind}
    for index, group in enumerate(groups):
        plain = (bool, int, float, str, tuple, type(None))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names") and isinstance(value, plain)}
        digest[f"optimizer group {index}"] = sorted(options.items())
        held = [names[parameter] for parameter in group["params"]]
        key = hashlib.sha256("\n".join(held).encode()).hexdigest()[:8]
        digest[f"optimizer group {index}, parameters"] = f"{len(held)} ({listed(held)}; digest {key})"
    return digest
