"""What DeepSpeed's own engine saved is read back bit for bit, under the names of the unmodified Hugging Face model."""

import argparse
import contextlib
import functools
import itertools
import random
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed_autoep.checkpoint.stock import MASTER, WEIGHT, StockKind, detect, open_stock
from deepspeed_autoep.checkpoint.stock.names import NameMap
from deepspeed_autoep.checkpoint.stock.shards import ZeroShards
from deepspeed_autoep.checkpoint.stock.sources import Flat
from tests.unit.pool import run_on
from tests.unit.stock_training import MOMENTS, StockCase, stock_model, train_and_save

ROOT = tempfile.TemporaryDirectory(prefix="stock_checkpoints_")


@functools.cache
def saved(case: StockCase, client_state: tuple = ()) -> tuple[Path, dict]:
    """The tag folder of a case, and what its engine held."""
    folder = tempfile.mkdtemp(dir=ROOT.name)
    return Path(folder) / "tag", run_on(case.world, train_and_save, case, folder, dict(client_state))[0]


@functools.cache
def converted(case: StockCase) -> Path:
    """The case's universal checkpoint, by DeepSpeed's converter."""
    from deepspeed.checkpoint import ds_to_universal

    source = saved(case)[0]
    target = source.parent / "universal"
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(None):
        ds_to_universal.main(options)
    return target


def as_model(stock: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stock's names and stacks as the model of transformers v5 has them, written down once more by hand."""
    found = {}
    for name, value in stock.items():
        if name.endswith(".experts.w1"):
            found[name.replace("w1", "gate_up_proj")] = torch.cat([value, stock[name.replace("w1", "w3")]], dim=1)
        elif name.endswith(".experts.w2"):
            found[name.replace("w2", "down_proj")] = value
        elif not name.endswith(".experts.w3"):
            found[name.replace(".mlp.router.gate.", ".mlp.gate.")] = value
    return found


def differences(reader, held: dict) -> list[str]:
    """What the reader gives otherwise than the engine ``held`` it."""
    wrong = []
    for state, values in held.items():
        right = as_model(values)
        have = {name for name in reader.names() if state in reader.states(name)}
        wrong += [f"{state} of {name}: in one only" for name in have ^ right.keys()]
        for name in have & right.keys():
            value = reader.read(name, state)
            if value.shape != right[name].shape or not torch.equal(value, right[name]) or value.dtype != reader.states(name)[state]:
                wrong.append(f"{state} of {name}")
    return wrong


def check(reader, case: StockCase, held: dict) -> None:
    parameters = dict(stock_model(case).named_parameters())
    assert {name: reader.shape(name) for name in reader.names()} == {name: tuple(p.shape) for name, p in parameters.items()}
    assert len(held[MASTER]) > 10 or not case.zero
    assert differences(reader, held) == []
    # Stock counts the samples of every TP rank.
    assert (reader.global_steps, reader.global_samples, reader.skipped_steps) == (case.steps, case.steps * case.world, 0)
    assert reader.lr_scheduler == {"last_batch_iteration": case.steps - 1}
    assert (reader.dp_size, reader.tp_size, reader.ep_size) == (case.dp, case.tp, case.ep or 1)
    if case.zero:
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        assert reader.trained == trained
        assert reader.step_counts == dict.fromkeys(trained, case.steps)
        assert sorted(itertools.chain(*(group.names for group in reader.groups))) == sorted(trained)
        for group in reader.groups:
            assert {"lr", "betas", "eps", "weight_decay"} <= group.options.keys() and group.options["weight_decay"] == 0.1
            assert all(("experts" in name and bool(case.ep)) == group.is_expert for name in group.names)


# Its nine stacks of experts lie over two partitions: the end of one is in the middle of the fifth.
THREE_LAYERS = StockCase(world=4, ep=2, zero=2, overrides=(("num_hidden_layers", 3),))
AUTOEP = [
    StockCase(ep=2),
    StockCase("qwen3_moe", ep=2, zero=2, dtype="bf16", expert_config=(("preset_model", "qwen3_moe"),)),
    THREE_LAYERS,
    StockCase("qwen3_moe", world=4, ep=2, dtype="bf16", config=(("use_data_before_expert_parallelism", True),)),
    StockCase(ep=2, zero=2, frozen="layers.0.mlp.experts"),
    StockCase(world=4, ep=2, dtype="bf16", accumulation="fp32"),
]


@pytest.mark.parametrize("case", AUTOEP, ids=str)
def test_autoep_checkpoints(case):
    folder, held = saved(case)
    assert detect(folder) is StockKind.AUTOEP
    reader = open_stock(folder)
    check(reader, case, held)
    assert reader.states_missing is None
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert reader.states(name) == {MASTER: torch.float32, **dict.fromkeys(MOMENTS, torch.float32), WEIGHT: dtype}
    frozen = "model.layers.0.mlp.experts.down_proj"
    assert (reader.states(frozen) == {WEIGHT: torch.float32}) is bool(case.frozen)


@pytest.mark.parametrize("case", [case for case in AUTOEP if not case.frozen], ids=str)
def test_universal_checkpoints_of_autoep(case):
    folder = converted(case)
    assert detect(folder) is StockKind.UNIVERSAL
    held = {state: dict(values) for state, values in saved(case)[1].items()}
    # The converter leaves the files of single experts out.
    held[WEIGHT] = {name: value for name, value in held[WEIGHT].items() if ".experts." not in name}
    check(open_stock(folder), case, held)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_autoep_without_zero(dtype):
    """Weights; the optimizer's states have numbers for names."""
    case = StockCase(ep=2, zero=0, dtype=dtype)
    reader = open_stock(saved(case)[0])
    check(reader, case, saved(case)[1])
    assert "numbered" in reader.states_missing and reader.trained is None and reader.groups == ()


TP = StockCase(world=2, tp=2)
DENSE = [
    StockCase(overrides=(("tie_word_embeddings", True),)),
    StockCase("qwen3_moe", zero=2, dtype="bf16", frozen="embed_tokens"),
    StockCase(world=4, zero=2, zero_config=(("round_robin_gradients", True),)),
    TP,
    StockCase(world=4, tp=2, zero=2, dtype="bf16", frozen="layers.0.self_attn.q_proj"),
]


@pytest.mark.parametrize("kind", [StockKind.SHARDED, StockKind.UNIVERSAL])
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_checkpoints_without_autoep(case, kind):
    folder, held = saved(case)
    folder = folder if kind is StockKind.SHARDED else converted(case)
    assert detect(folder) is kind
    reader = open_stock(folder)
    check(reader, case, held)
    tied = dict(case.overrides).get("tie_word_embeddings", False)
    assert reader.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


@pytest.mark.parametrize("ep", [2, 4])
def test_autoep_with_autotp(ep):
    """DeepSpeed does not convert these; which rank holds what stands in the files."""
    case = StockCase(world=4, tp=2, ep=ep)
    folder, held = saved(case)
    check(open_stock(folder), case, held)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_a_checkpoint_before_the_first_step_is_the_model(family):
    """The oracle is the model as transformers made it: names, shapes, values, buffers. There are no moments yet."""
    case = StockCase(family, ep=2, steps=0)
    reader = open_stock(saved(case)[0])
    model = stock_model(case)
    for state in (MASTER, WEIGHT):
        for name, parameter in model.named_parameters():
            assert torch.equal(reader.read(name, state), parameter), name
    assert len(reader.names()) == len(list(model.parameters())) and not reader.step_counts
    buffers = {name: value for name, value in model.named_buffers() if name in model.state_dict()}
    assert set(reader.buffers()) == set(buffers)
    for name, value in buffers.items():
        assert torch.equal(reader.read_buffer(name), value)
    assert bool(buffers) is (family == "deepseek_v3")


def test_zero3_is_refused_and_its_universal_form_read():
    case = StockCase(zero=3, frozen="layers.0.self_attn.q_proj", zero_config=(("stage3_param_persistence_threshold", 0),))
    folder, held = saved(case)
    with pytest.raises(Exception, match=r"zero_pp_rank_0_mp_rank_00_model_states.pt is of ZeRO-3.*ds_to_universal --input_folder"):
        open_stock(folder)
    frozen = "model.layers.0.self_attn.q_proj.weight"
    reader = open_stock(converted(case))
    assert torch.equal(reader.read(frozen, WEIGHT), dict(stock_model(case).named_parameters())[frozen])
    assert reader.states(frozen) == {WEIGHT: torch.float32}
    for state in (MASTER, *MOMENTS):
        assert len(held[state]) > 10
        for name, value in as_model(held[state]).items():
            assert torch.equal(reader.read(name, state), value), name


@pytest.mark.parametrize("case", [THREE_LAYERS, DENSE[4]], ids=str)
def test_boxes_are_slices_of_the_whole(case):
    draw = random.Random(0)
    for folder in (saved(case)[0], converted(case)):
        reader = open_stock(folder)
        for name in reader.names():
            for state in reader.states(name):
                whole = reader.read(name, state)
                for _ in range(3):
                    box = tuple(sorted(draw.choices(range(size + 1), k=2)) for size in whole.shape)
                    part = reader.read(name, state, box)
                    assert torch.equal(part, whole[tuple(slice(*side) for side in box)])
                    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_a_box_of_experts_reads_only_their_rows():
    """Of a stack that lies over several files no more is read than what is asked for."""
    folder = saved(THREE_LAYERS)[0]
    reader, read = open_stock(folder), []
    original = Flat.read

    def counted(self, files, box):
        value = original(self, files, box)
        read.append(value.numel())
        return value

    name = "model.layers.0.mlp.experts.gate_up_proj"
    with mock.patch.object(Flat, "read", counted):
        reader.read(name, "exp_avg", ((5, 6), (0, 96), (0, 32)))
    assert sum(read) == 96 * 32


def test_zero3_with_autoep_is_read_in_its_universal_form():
    case = StockCase(world=4, ep=2, zero=3, zero_config=(("stage3_param_persistence_threshold", 0),))
    check(open_stock(converted(case)), case, saved(case)[1])


@pytest.mark.parametrize("ep", [0, 2])
def test_elastic_checkpoints(ep):
    """Of ZeRO-1's older form, which DeepSpeed does not convert: no parameter groups."""
    case = StockCase(world=4, ep=ep, zero_config=(("elastic_checkpoint", True),))
    folder, held = saved(case)
    reader = open_stock(folder)
    assert differences(reader, held) == [] and len(held["exp_avg"]) > 10
    assert set(reader.step_counts.values()) == {2} and all(group.options == {} for group in reader.groups)


def test_what_the_client_saved():
    case = StockCase("mixtral", ep=2)
    folder, _ = saved(case, (("epoch", 3), ("sampler", (1, 2))))
    assert open_stock(folder).client_state == {"epoch": 3, "sampler": (1, 2)}


def test_the_loss_scale_travels():
    case = StockCase(zero=1, dtype="fp16", steps=3)
    scale = open_stock(saved(case)[0]).loss_scale
    assert scale["cur_scale"] == 2.0**9 and scale["cur_iter"] == 3 and scale["scale_window"] == 2
    assert open_stock(saved(DENSE[1])[0]).loss_scale["cur_scale"] == 1


# The tests above must see it when a rule is broken.
def _swapped(layer):
    return f"{layer.prefix}.w3", f"{layer.prefix}.w2", f"{layer.prefix}.w1"


def _reversed_replicas(self, layer, name):
    return [shards[::-1] for shards in _REPLICAS(self, layer, name)]


def _exchanged_blocks(self, layer, name):
    return _REPLICAS(self, layer, name)[::-1]


_REPLICAS = ZeroShards._replicas


def test_exchanged_halves_blocks_and_partitions_are_seen():
    from deepspeed_autoep.checkpoint.stock.names import ExpertLayer

    folder, held = saved(THREE_LAYERS)
    experts = {f"{state} of model.layers.{layer}.mlp.experts.{part}_proj" for state in held for layer in range(3) for part in ("gate_up", "down")}
    with mock.patch.object(ExpertLayer, "stacks", _swapped):
        assert set(differences(open_stock(folder), held)) == {item for item in experts if "gate_up" in item}
    with mock.patch.object(ZeroShards, "_replicas", _exchanged_blocks):
        assert set(differences(open_stock(folder), held)) == {item for item in experts if not item.startswith(WEIGHT)}
    with mock.patch.object(ZeroShards, "_replicas", _reversed_replicas), pytest.raises(Exception, match="do not follow each other"):
        open_stock(folder)
    with mock.patch.object(NameMap, "logical", lambda self, name: name):
        assert any("router" in item for item in differences(open_stock(folder), held))
