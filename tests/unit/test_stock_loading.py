"""A run of stock DeepSpeed goes on in this engine, under another topology, as it would in one plain process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.stock import MASTER, WEIGHT, open_stock
from tests.unit.models import make_batches
from tests.unit.pool import run_on
from tests.unit.stock_training import StockCase, stock_model
from tests.unit.test_stock_checkpoints import converted, saved
from tests.unit.training import mean_over_data, relative

STEPS, SAMPLES, CLIP = 3, 4, 0.5
ADAMW = {"weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def batches() -> torch.Tensor:
    return make_batches(STEPS, SAMPLES, 9, seed=11)


def goes_on(case: StockCase, folder: str, tag: str, topology: tuple, dtype: str, options: dict):
    """Losses, norms and the learning rate of the steps after the load."""
    import deepspeed_autoep

    world, tp, ep, etp, zero = topology
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES * tp // world,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1, "torch_adam": True}},
        "expert_parallel": {"enabled": True, "autoep_size": ep, "expert_tensor_parallel_size": etp},
        "tensor_parallel": {"autotp_size": tp},
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
    }
    model = stock_model(replace(case, overrides=case.overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed_autoep.initialize(model=model, model_parameters=trained, config=config)
    try:
        path, client_state = engine.load_checkpoint(folder, tag=tag, **options)
        curve, rate = [], engine.get_lr()[0]
        for batch in batches():
            share = batch.chunk(world // tp)[dist.get_rank() // tp]
            loss = engine(input_ids=share, labels=share).loss
            engine.backward(loss)
            engine.step()
            curve.append((mean_over_data(loss, engine), float(engine.get_global_grad_norm())))
        return path, client_state, curve, rate, engine.global_steps
    finally:
        engine.destroy()


def plain(case: StockCase, folder: Path, rate: float, with_states: bool = True) -> list[tuple[float, float]]:
    """The same from the files by one process, with torch's own AdamW."""
    reader = open_stock(folder)
    model = stock_model(case)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, **ADAMW)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            states = reader.states(name)
            parameter.copy_(reader.read(name, MASTER if MASTER in states else WEIGHT))
            if with_states and "exp_avg" in states:
                optimizer.state[parameter] = {state: reader.read(name, state) for state in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter]["step"] = torch.tensor(float(reader.step_counts[name]))
    curve = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def check(curve, right, limit: float = 1e-5) -> None:
    for mine, other in zip(curve, right, strict=True):
        assert relative(mine[0], other[0]) < limit and relative(mine[1], other[1]) < limit, (curve, right)


AUTOEP = StockCase(ep=2)
RUNS = [
    (AUTOEP, False, (4, 2, 2, 2, 1)),
    (replace(AUTOEP, zero=2, dtype="bf16"), False, (2, 1, 1, 1, 0)),
    (StockCase(family="qwen3_moe", ep=2, frozen="embed_tokens"), False, (4, 4, 2, 1, 2)),
    (StockCase(), False, (4, 2, 4, 1, 1)),
    (AUTOEP, True, (4, 2, 2, 1, 2)),
    (StockCase(tp=2), True, (2, 1, 2, 1, 0)),
]


@pytest.mark.parametrize("case, universal, topology", RUNS, ids=str)
def test_a_stock_run_goes_on(case, universal, topology):
    folder = converted(case) if universal else saved(case)[0]
    path, client_state, curve, rate, steps = run_on(topology[0], goes_on, case, str(folder.parent), folder.name, topology, "fp32", {})[0]
    assert Path(path) == folder and isinstance(client_state, dict)
    assert rate != 0.003  # stock's, after two steps of its schedule
    assert steps == case.steps + STEPS
    check(curve, plain(case, folder, rate))


def test_the_comparison_needs_the_moments():
    folder = saved(AUTOEP)[0]
    curve = run_on(2, goes_on, AUTOEP, str(folder.parent), folder.name, (2, 1, 2, 1, 1), "fp32", {})[0][2]
    right = plain(AUTOEP, folder, 0.003, with_states=False)
    assert relative(curve[0][0], right[0][0]) < 1e-5 and relative(curve[2][0], right[2][0]) > 1e-4


def test_weights_only():
    folder = saved(AUTOEP)[0]
    *_, curve, rate, steps = run_on(2, goes_on, AUTOEP, str(folder.parent), folder.name, (2, 2, 2, 1, 1), "fp32", {"load_module_only": True})[0]
    assert rate == 0.003 and steps == STEPS
    check(curve, plain(AUTOEP, folder, 0.003, with_states=False))


def refused(case: StockCase, folder: str, tag: str, topology: tuple) -> str:
    from deepspeed_autoep.errors import AutoEPError

    try:
        goes_on(case, folder, tag, topology, "fp32", {})
    except AutoEPError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_damaged_stock_file_is_named(name, tmp_path):
    import shutil

    folder = saved(StockCase())[0]
    shutil.copytree(folder, tmp_path / "tag")
    content = (tmp_path / "tag" / name).read_bytes()
    (tmp_path / "tag" / name).write_bytes(content[: len(content) // 2])
    for message in run_on(2, refused, StockCase(), str(tmp_path), "tag", (2, 1, 2, 1, 1)):
        assert name in message, message


def test_another_model_is_refused():
    folder = saved(StockCase())[0]
    other = StockCase(overrides=(("num_hidden_layers", 3),))
    for message in run_on(2, refused, other, str(folder.parent), folder.name, (2, 1, 2, 1, 1)):
        assert "lacks" in message and "model.layers.2" in message
