"""Optimizers and schedulers as users bring them: each kind trains as in one process, on each folding; what cannot is an error."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim import lr_scheduler as schedules

from deepspeed_autoep.engine.param_groups import ORIGIN_KEY, split_scheduler
from deepspeed_autoep.errors import UnsupportedError
from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.test_elementwise_trial import WholeNorm
from tests.unit.training import Case, ds_config, finished_beside, my_share, parameter_error, relative

BETAS = {"betas": (0.9, 0.95)}
NO_DECAY = ("bias", "norm", "sinks")


def two_groups(pairs, named: bool = False) -> list[dict]:
    """Matrices with decay; norms, biases and sinks without, at half the rate. Different in all that a group may hold."""
    items = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
    plain = [item for item in items if any(word in item[0] for word in NO_DECAY)]
    decayed = [item for item in items if item not in plain]
    take = (lambda found: found) if named else (lambda found: [parameter for _, parameter in found])
    return [
        {"params": take(decayed), "lr": 2e-3, "weight_decay": 0.1, "name": "decayed"},
        {"params": take(plain), "lr": 1e-3, "weight_decay": 0.0, "name": "plain"},
    ]


def adamw(model, named: bool = False, **options) -> AdamW:
    return AdamW(two_groups(list(model.named_parameters()), named), lr=1e-3, **BETAS, **options)


def lambdas(optimizer):
    return schedules.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 / (1 + step)])


def sequence(optimizer):
    """Three schedulers have two milestones: as many as there are groups."""
    parts = [schedules.ConstantLR(optimizer, 0.5), schedules.ExponentialLR(optimizer, 0.5), schedules.ConstantLR(optimizer, 0.3)]
    return schedules.SequentialLR(optimizer, parts, milestones=[1, 2])


SCHEDULES = {
    "lambdas": lambdas,
    "sequence": sequence,
    "one_cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=[5e-3, 1e-3], total_steps=8),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=5, eta_min=1e-4),
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0, min_lr=[1e-5, 1e-4]),
}


def by_dimension(parameters) -> AdamW:
    """A callable that looks at what it is given: the model's parameters, as DeepSpeed gives them."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 1e-3, "weight_decay": 0.0},
    ]
    return AdamW(groups, **BETAS)


def from_groups(parameters) -> AdamW:
    return AdamW(parameters, lr=1e-3, **BETAS)


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": [4e-3, 1e-3], "warmup_num_steps": 3, "warmup_type": "linear"},
}


def bring(kind: str, model, plain):
    """What a user gives to initialize for ``model``, and the optimizer and schedule of one process for ``plain``."""
    what, _, schedule = kind.partition("+")
    make = SCHEDULES.get(schedule, lambda optimizer: None)
    config: dict = {}
    if what in ("object", "named", "fused", "foreach"):
        options = {what: True} if what in ("fused", "foreach") else {}
        made = adamw(model, what == "named", **options)
        right = adamw(plain)
        return {"optimizer": made, "lr_scheduler": make(made)}, config, right, make(right)
    right = by_dimension(plain.parameters()) if what == "callable" else from_groups(two_groups(plain.named_parameters()))
    if what == "callable":
        arguments = {"optimizer": by_dimension}
    else:  # model_parameters: a generator of groups, of a callable or of the configuration's optimizer
        arguments = {"model_parameters": (group for group in two_groups(list(model.named_parameters()), named=True))}
        if what == "callable_groups":
            arguments["optimizer"] = from_groups
        else:
            config["optimizer"] = ADAMW
    if schedule == "warmup":
        from deepspeed.runtime.lr_schedules import WarmupLR

        config["scheduler"] = WARMUP
        return arguments, config, right, WarmupLR(right, **WARMUP["params"])
    if schedule:
        arguments["lr_scheduler"] = make
    return arguments, config, right, make(right)


def rates(optimizer, of_group=None) -> list[tuple]:
    groups = optimizer.param_groups
    picked = range(len(groups)) if of_group is None else of_group
    return [(groups[index]["lr"], groups[index]["weight_decay"], tuple(groups[index]["betas"])) for index in picked]


def train_kind(case: Case, kind: str):
    """Worst errors of loss, norm, parameters and rates; group order and names as seen from outside."""
    import deepspeed_autoep

    model, plain = make_model(case.family), make_model(case.family)
    arguments, config, right, schedule = bring(kind, model, plain)
    engine, optimizer, _, scheduler = deepspeed_autoep.initialize(model=model, config=ds_config(case) | config, **arguments)
    origins = [group[ORIGIN_KEY] for group in optimizer.param_groups]
    worst = {"loss": 0.0, "norm": 0.0, "rate": 0.0, "parameter": 0.0}
    moved, smallest = set(), float("inf")
    for batch in make_batches(case.steps, case.samples, case.length):
        right.zero_grad()
        loss = plain(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        share = my_share(batch, case)
        mine = engine(input_ids=share, labels=share).loss
        engine.backward(mine)
        pairs = list(zip(rates(optimizer), rates(right, origins), strict=True))
        worst["rate"] = max(worst["rate"], *(abs(a - b) for x, y in pairs for a, b in zip((*x[:2], *x[2]), (*y[:2], *y[2]), strict=True)))
        moved.add(pairs[0][0][0])
        metrics = {"metrics": loss.item()} if kind.endswith("plateau") else {}
        engine.step(lr_kwargs=metrics or None)
        right.step()
        if schedule is not None:
            schedule.step(**metrics)
        total = mine.detach().double()
        dist.all_reduce(total, group=engine.autoep.handles.dense_dp_group)
        worst["loss"] = max(worst["loss"], relative(total.item() / engine.autoep.handles.spec.dp_size, loss.item()))
        worst["norm"] = max(worst["norm"], relative(float(engine.get_global_grad_norm()), norm.item()))
        smallest = min(smallest, norm.item())
    shown = engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    last = [right.param_groups[origin]["lr"] for origin in origins]
    names = sorted({name for group in optimizer.param_groups for name in group.get("param_names", ())})
    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    if state is not None:
        worst["parameter"] = max(parameter_error(state[name], value, 1e-2) for name, value in plain.state_dict().items())
    trained = sorted(name for name, p in plain.named_parameters())
    last_error = max(abs(a - b) for a, b in zip(engine.get_lr(), last, strict=True))
    return worst, origins, names == trained, shown and last_error < 1e-9, len(moved), smallest


GPT_ETP = {"family": "gpt_oss", "tp": 2, "ep": 1, "etp": 2}
MIXED = {"family": "qwen3_moe", "tp": 1, "ep": 2, "etp": 2}
FOLDED = {"family": "mixtral", "tp": 2, "ep": 4}
WIDE = {"family": "gpt_oss", "tp": 2, "ep": 2, "etp": 2}

KINDS = [
    ("config+warmup", GPT_ETP, 1),
    ("config", FOLDED, 2),
    ("object", WIDE, 2),
    ("named+lambdas", GPT_ETP, 2),
    ("named+sequence", FOLDED, 0),
    ("object+one_cycle", GPT_ETP, 0),
    ("object+cosine", MIXED, 1),
    ("object+plateau", FOLDED, 1),
    ("callable+lambdas", GPT_ETP, 1),
    ("callable_groups+one_cycle", MIXED, 2),
    ("callable_groups", GPT_ETP, 0),
    ("fused", FOLDED, 1),
    ("foreach", MIXED, 0),
]
EVERY = [(kind, folding, zero) for kind, _, _ in KINDS for folding in (GPT_ETP, MIXED, FOLDED, WIDE) for zero in (0, 1, 2)]


def kind_cases():
    for kind, folding, zero in KINDS + [case for case in EVERY if case not in KINDS]:
        marks = () if (kind, folding, zero) in KINDS else pytest.mark.full
        case = Case(**folding, zero=zero, steps=4, clip=0.2)
        yield pytest.param(kind, case, id=f"{kind}-{case}", marks=marks)


@pytest.mark.parametrize(("kind", "case"), list(kind_cases()))
def test_each_kind_trains_as_in_one_process(kind, case):
    for worst, origins, named, shown, rates_seen, smallest_norm in run_on(case.world, train_kind, case, kind):
        assert smallest_norm > case.clip, "clipping must be active"
        assert worst["loss"] < 1e-5 and worst["norm"] < 1e-5 and worst["rate"] < 1e-9 and worst["parameter"] < 1e-4, worst
        assert origins == sorted(origins) and set(origins) == {0, 1}
        assert shown
        assert named == (kind.startswith(("named", "config", "callable_groups")))
        assert rates_seen == 1 if "+" not in kind else rates_seen >= 3


def test_lists_of_a_scheduler_that_are_not_by_group_stay():
    mine = SimpleNamespace(base_values=[1, 2], lr_lambdas=[3, 4], milestones=[5, 6], lr_decay_steps=[7, 8], min_lrs=[9])
    split_scheduler(mine, [0, 0, 1], 2)
    assert (mine.base_values, mine.lr_lambdas) == ([1, 1, 2], [3, 3, 4])
    assert (mine.milestones, mine.lr_decay_steps, mine.min_lrs) == ([5, 6], [7, 8], [9])


# Errors


def bad(what: str) -> dict:
    """Arguments of initialize, with the model they are for."""
    model = make_model("mixtral")
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    other = copy.deepcopy(model)
    kinds = {
        "good": lambda: {"optimizer": sgd},
        "foreign": lambda: {"optimizer": AdamW(other.named_parameters())},
        "one foreign": lambda: {"optimizer": AdamW([{"params": parameters[:3]}, {"params": [*parameters[3:], torch.nn.Parameter(torch.ones(5))]}])},
        "foreign model_parameters": lambda: {"optimizer": sgd, "model_parameters": other.parameters()},
        "callable and another's schedule": lambda: {"optimizer": sgd, "lr_scheduler": schedules.ConstantLR(sgd(parameters))},
        "configuration and a schedule": lambda: {"config": {"optimizer": {"type": "AdamW", "params": {}}}, "lr_scheduler": schedules.ConstantLR(sgd(parameters))},
        "foreign callable": lambda: {"optimizer": lambda _: sgd(other.parameters())},
        "raising callable": lambda: {"optimizer": lambda _: 1 / 0},
        "callable of nothing": lambda: {"optimizer": lambda _: None},
        "no optimizer": lambda: {"optimizer": "AdamW"},
        "in two groups": lambda: {"optimizer": sgd, "model_parameters": [{"params": parameters}, {"params": parameters[:1]}]},
        "twice": lambda: {"optimizer": sgd, "model_parameters": [*parameters, parameters[0]]},
        "set": lambda: {"optimizer": sgd, "model_parameters": [{"params": set(parameters)}]},
        "mixed": lambda: {"optimizer": sgd, "model_parameters": [{"params": parameters[:3]}, *parameters[3:]]},
        "some named": lambda: {"optimizer": sgd, "model_parameters": [("a", parameters[0]), parameters[1]]},
        "all frozen": lambda: {"optimizer": sgd, "model": model.requires_grad_(False)},
        "another's schedule": lambda: {"optimizer": sgd(parameters), "lr_scheduler": schedules.ConstantLR(sgd(parameters))},
        "raising schedule": lambda: {"optimizer": sgd, "lr_scheduler": lambda _: 1 / 0},
        "whole norm": lambda: {"optimizer": WholeNorm(parameters)},
        "whole norm callable": lambda: {"optimizer": WholeNorm},
        "lbfgs": lambda: {"optimizer": torch.optim.LBFGS(parameters)},
        "muon": lambda: {"optimizer": torch.optim.Muon(matrices)},
        "sparse": lambda: {"optimizer": torch.optim.SparseAdam(parameters)},
        "other groups": lambda: {"optimizer": sgd([{"params": parameters[:3]}, {"params": parameters[3:]}])},
        "other rate": lambda: {"optimizer": torch.optim.SGD(parameters, lr=0.2)},
        "unsplit": lambda: {"optimizer": sgd(parameters)},
        "adafactor": lambda: {"config": {"optimizer": {"type": "Adafactor", "params": {}}}},
    }
    return {"model": model} | kinds[what]()


def refused(what: str, only_on: int | None = None, elsewhere: str = "good") -> tuple[str, str]:
    import deepspeed_autoep

    arguments = bad(what if only_on in (None, dist.get_rank()) else elsewhere)
    config = ds_config(Case(ep=4)) | arguments.pop("config", {})
    try:
        engine, *_ = deepspeed_autoep.initialize(config=config, **arguments)
        engine.destroy()
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


def all_refused(cases: list[tuple]) -> list[tuple[str, str]]:
    return [refused(*case) for case in cases]


EMBEDDING = ["parameter 0", "[64, 32]", "'model.embed_tokens.weight'", "'lm_head.weight'"]
REFUSED = {
    "foreign": ("ModelError", [*EMBEDDING, "group 0", "('model.embed_tokens.weight')"]),
    "one foreign": ("ModelError", ["group 1", "[5]", "none of that shape"]),
    "foreign model_parameters": ("ModelError", [*EMBEDDING, "model_parameters"]),
    "foreign callable": ("ModelError", ["group 0", "none of the model's"]),
    "callable of nothing": ("ModelError", ["NoneType", "torch.optim.Optimizer"]),
    "no optimizer": ("ModelError", ["optimizer=str", "callable"]),
    "in two groups": ("ModelError", ["'model.embed_tokens.weight'", "groups 0 and 1"]),
    "twice": ("ModelError", ["'model.embed_tokens.weight'", "twice", "group 0"]),
    "set": ("ModelError", ["set", "list"]),
    "mixed": ("ModelError", ["model_parameters[1]", "Parameter"]),
    "some named": ("ModelError", ["names for 1 of 2"]),
    "all frozen": ("ModelError", ["requires_grad=True"]),
    "another's schedule": ("ModelError", ["lr_scheduler (ConstantLR)", "another optimizer"]),
    "callable and another's schedule": ("ModelError", ["lr_scheduler (ConstantLR)", "another optimizer", "a callable"]),
    "configuration and a schedule": ("ModelError", ["lr_scheduler (ConstantLR)", "the configuration declares", "a callable"]),
    "whole norm": ("UnsupportedError", ["'WholeNorm'", "cut"]),
    "whole norm callable": ("UnsupportedError", ["'WholeNorm'", "cut"]),
    "lbfgs": ("UnsupportedError", ["'LBFGS'", "closure", "AdamW"]),
    "muon": ("UnsupportedError", ["'Muon'", "whole matrices"]),
    "sparse": ("UnsupportedError", ["'SparseAdam'"]),
    "adafactor": ("UnsupportedError", ["'Adafactor'", "whole matrix"]),
}


def test_optimizers_that_cannot_be_taken():
    for results in run_on(4, all_refused, [(what,) for what in REFUSED]):
        for (what, (error, words)), (kind, message) in zip(REFUSED.items(), results, strict=True):
            assert kind == error, (what, message)
            for word in words:
                assert word in message, (what, message)


# What one rank alone got, what the others had, and what all of them are told.
ON_ONE_RANK = [
    ("foreign", 2, "good", "none of the model's"),
    ("foreign callable", 0, "good", "none of the model's"),
    ("raising callable", 3, "good", "division by zero"),
    ("raising schedule", 1, "good", "division by zero"),
    ("whole norm", 2, "unsplit", "'WholeNorm'"),
    ("another's schedule", 2, "unsplit", "another optimizer"),
    ("other groups", 1, "unsplit", "optimizer group"),
    ("other rate", 3, "unsplit", "0.2"),
]


def test_what_one_rank_got_is_an_error_on_all():
    results = run_on(4, all_refused, [(what, rank, elsewhere) for what, rank, elsewhere, _ in ON_ONE_RANK], timeout=120.0)
    for position, (what, _, _, word) in enumerate(ON_ONE_RANK):
        for result in results:
            kind, message = result[position]
            assert kind != "nothing" and word in message, (what, kind, message)


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def partly_held(case: Case):
    """An optimizer that misses trainable parameters: a warning that names them, and the norm of the others at every stage."""
    import deepspeed_autoep

    held = lambda model: [p for name, p in model.named_parameters() if "mlp.gate." not in name and "norm" not in name]  # noqa: E731
    heard = Warnings()
    logger = logging.getLogger("deepspeed_autoep")
    logger.addHandler(heard)
    model, plain = make_model(case.family), make_model(case.family)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=torch.optim.SGD(held(model), lr=0.5), config=ds_config(case))
    logger.removeHandler(heard)
    stepper, worst = torch.optim.SGD(held(plain), lr=0.5), 0.0
    for batch in make_batches(3, case.samples, case.length):
        plain.zero_grad()
        plain(input_ids=batch, labels=batch).loss.backward()
        share = my_share(batch, case)
        engine.backward(engine(input_ids=share, labels=share).loss)
        engine.step()
        norm = torch.nn.utils.clip_grad_norm_(held(plain), case.clip)
        stepper.step()
        worst = max(worst, relative(float(engine.get_global_grad_norm()), norm.item()))
    return finished_beside(engine, plain, worst), [message for message in heard.messages if "trainable" in message]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_that_no_group_holds(zero):
    for rank, (worst, warnings) in enumerate(run_on(4, partly_held, Case(ep=4, zero=zero, clip=0.2))):
        assert worst < 1e-5
        assert len(warnings) == (rank == 0)
        for message in warnings:  # two layers: a router and two norms each, and the last norm
            assert message.startswith("7 trainable") and "'model.layers.0.mlp.gate.weight'" in message and "3 more" in message


def changed_later(case: Case, what: str):
    """requires_grad or the groups changed after initialize."""
    import deepspeed_autoep

    model = make_model(case.family)
    model.model.embed_tokens.weight.requires_grad_(False)
    engine, *_ = deepspeed_autoep.initialize(
        model=model, optimizer=lambda _: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), config=ds_config(case)
    )
    share = my_share(make_batches(1, case.samples, case.length)[0], case)
    calls = 0

    def count(_):
        nonlocal calls
        calls += 1

    hook = model.lm_head.weight.register_post_accumulate_grad_hook(count)
    engine.backward(engine(input_ids=share, labels=share).loss)
    engine.step()
    hook.remove()
    if what == "unfrozen":
        model.model.embed_tokens.weight.requires_grad_(True)
    elif what == "frozen":
        model.lm_head.weight.requires_grad_(False)
    else:
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    try:
        engine.backward(engine(input_ids=share, labels=share).loss)
        engine.step()
    except UnsupportedError as caught:
        return calls, str(caught)
    finally:
        engine.autoep.binding.restore()
    return calls, ""


@pytest.mark.parametrize(
    ("what", "zero", "word"),
    [("unfrozen", 0, "embed_tokens"), ("unfrozen", 2, "embed_tokens"), ("frozen", 1, "lm_head"), ("added", 0, "groups")],
)
def test_parameters_that_change_later(what, zero, word):
    for calls, message in run_on(4, changed_later, Case(ep=4, zero=zero), what):
        assert calls == 1  # a hook on a parameter object of before is the trained parameter's
        assert word in message and "at initialize" in message or word in message and "all groups" in message
