"""Parameter groups are split by kind and dtype, with order, options, names and schedules kept."""

import torch

from deepspeed_autoep.engine.param_groups import ORIGIN_KEY, split_groups, split_optimizer, split_scheduler
from deepspeed_autoep.folding import GradientFamily
from deepspeed_autoep.gradients.slices import ParameterInfo

EXPERT_GROUPS = {"edp": "ep_size_4"}
KINDS = [
    ("embed", GradientFamily.REPLICATED, torch.bfloat16),
    ("q", GradientFamily.TP_SHARDED, torch.float32),
    ("gate", GradientFamily.REPLICATED, torch.float32),
    ("up", GradientFamily.EXPERT, torch.bfloat16),
    ("norm", GradientFamily.REPLICATED, torch.bfloat16),
    ("down", GradientFamily.EXPERT, torch.float32),
    ("k", GradientFamily.TP_SHARDED, torch.float32),
    ("bias", GradientFamily.REPLICATED, torch.float32),
]


def parameters():
    made = {name: torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for name, _, dtype in KINDS}
    families = {made[name]: ParameterInfo(index, name, family) for index, (name, family, _) in enumerate(KINDS)}
    return made, families


def named(groups, made) -> list[tuple]:
    names = {parameter: name for name, parameter in made.items()}
    return [(group["name"], [names[parameter] for parameter in group["params"]]) for group in groups]


def test_each_group_has_one_dtype_and_keeps_its_order():
    made, families = parameters()
    groups = split_groups([{"params": list(made.values()), "lr": 0.25, "param_names": list(made)}], families, EXPERT_GROUPS)
    assert named(groups, made) == [
        ("group0-tp_sharded", ["q", "k"]),
        ("group0-replicated-bfloat16", ["embed", "norm"]),
        ("group0-replicated-float32", ["gate", "bias"]),
        ("ep_size_4", ["up"]),
        ("ep_size_4", ["down"]),
    ]
    assert all(group["lr"] == 0.25 and group[ORIGIN_KEY] == 0 for group in groups)
    assert [group["param_names"] for group in groups] == [members for _, members in named(groups, made)]
    assert [group.get("moe", False) for group in groups] == [False, False, False, True, True]


def test_a_schedulers_lists_follow():
    made, families = parameters()
    dense = [made[name] for name in ("embed", "q", "gate", "norm", "k", "bias")]
    optimizer = torch.optim.SGD([{"params": dense, "lr": 1.0}, {"params": [made["up"], made["down"]], "lr": 2.0}], lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.25**step])
    origins = split_optimizer(optimizer, families, EXPERT_GROUPS)
    split_scheduler(schedule, origins, 2)
    assert origins == [0, 0, 0, 1, 1]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5, 0.5, 0.5]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.25, 0.125, 0.125]
