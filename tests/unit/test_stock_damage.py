"""A stock checkpoint that is damaged, incomplete, mixed or of a layout that is not read: opening it fails, and names the file."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_autoep.checkpoint.stock import detect, open_stock
from deepspeed_autoep.errors import CheckpointError
from tests.unit.test_stock_checkpoints import THREE_LAYERS, TP, converted, saved

AUTOEP = THREE_LAYERS
MODEL = "mp_rank_00_model_states.pt"
EXPERT = "layer_1_expert_5_mp_rank_00_model_states.pt"
ZERO = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
STACK = "model.layers.1.mlp.experts.w1"
MASTER = f"zero/{STACK}/fp32.pt"
MOMENT = "zero/model.norm.weight/exp_avg.pt"


def copied(kind: str, tmp_path: Path) -> Path:
    source = {"autoep": lambda: saved(AUTOEP)[0], "universal": lambda: converted(AUTOEP), "tp": lambda: saved(TP)[0]}[kind]()
    shutil.copytree(source, tmp_path / "tag")
    return tmp_path / "tag"


def edit(path: Path, change: Callable) -> None:
    """Save the file's content again after ``change(content)``; what is no dictionary is what that returns."""
    content = torch.load(path, weights_only=False)
    changed = change(content)
    torch.save(content if isinstance(content, dict) else changed, path)


def refused(folder: Path, *parts: str) -> str:
    """Opening fails with a message that has all ``parts``."""
    with pytest.raises(CheckpointError) as caught:
        open_stock(folder)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    return message


FILES = [("autoep", MODEL), ("autoep", EXPERT), ("autoep", ZERO), ("universal", MODEL), ("universal", MASTER), ("universal", MOMENT)]
FILES += [("universal", "zero/optimizer_state.pt"), ("tp", "mp_rank_01_model_states.pt"), ("tp", "zero_pp_rank_0_mp_rank_01_optim_states.pt")]


@pytest.mark.parametrize("kind, name", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "other"])
def test_files(kind, name, damage, tmp_path):
    path = copied(kind, tmp_path) / name
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        path.write_text("not a checkpoint\n" * 100)
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if damage == "truncated" else 0])
    refused(tmp_path / "tag", path.name, "missing" if damage == "missing" else "")


def osd(content: dict) -> dict:
    return content["optimizer_state_dict"]


def expert_group(content: dict) -> int:
    return next(index for index, names in enumerate(osd(content)["param_slice_mappings"]) if any(".experts." in name for name in names))


def shorter_partition(content):
    fp32 = osd(content)["single_partition_of_fp32_groups"]
    fp32[0] = fp32[0].detach()[:-5].clone()


def shifted(content):
    names = osd(content)["param_slice_mappings"][0]
    next(iter(names.values())).start += 1


def lost(content):
    names = osd(content)["param_slice_mappings"][0]
    del names[next(iter(names))]


def fewer_partitions(content):
    osd(content)["partition_count"][expert_group(content)] = 4


def one_step_more(content):
    for state in osd(content)["base_optimizer_state"]["state"].values():
        state["step"] += 1


def no_moment(content):
    for state in osd(content)["base_optimizer_state"]["state"].values():
        del state["exp_avg_sq"]


def short_moment(content):
    state = osd(content)["base_optimizer_state"]["state"][0]
    state["exp_avg"] = state["exp_avg"][:7].clone()


def stage3(content):
    osd(content)["fp32_flat_groups"] = osd(content).pop("single_partition_of_fp32_groups")


def placed_otherwise(content):
    for entry in content["ds_autoep_layers"]:
        ranks = entry["expert_placement"]["ranks"]
        ranks[0]["experts"], ranks[1]["experts"] = ranks[1]["experts"], ranks[0]["experts"]


def bias_of_router(content):
    content["module"]["model.layers.0.mlp.expert_bias"] = torch.ones(8)


def unknown_name(content):
    content["module"]["model.layers.0.mlp.surprise"] = torch.ones(8)


def unknown_preset(content):
    content["ds_config"]["expert_parallel"]["preset_model"] = "mixtrel"


def other_weight(content):
    content["module"]["model.norm.weight"] = torch.ones(31)


def no_weight(content):
    del content["module"]["model.norm.weight"]


def no_layers(content):
    content["ds_autoep_layers"] = None


def no_counter(content):
    del content["skipped_steps"]


def pipeline(content):
    content["checkpoint_parallel_dimensions"]["pp_degree"] = 2


def other_expert_shape(content):
    content[f"{STACK}.5"] = content[f"{STACK}.5"].T.contiguous()


def other_expert_dtype(content):
    content[f"{STACK}.5"] = content[f"{STACK}.5"].bfloat16()


def no_expert_key(content):
    del content[f"{STACK}.5"]


EDITS = [
    ("autoep", ZERO, shorter_partition, ("are not laid out so", ZERO)),
    ("autoep", ZERO, shifted, ("not laid out so", ZERO)),
    ("autoep", ZERO, lost, ("elements of it", ZERO)),
    ("autoep", ZERO, fewer_partitions, ("was cut into 4 partitions, and 2 files hold it", ZERO)),
    ("autoep", ZERO, one_step_more, ("optimizer steps",)),
    ("autoep", ZERO, no_moment, ("states",)),
    ("autoep", ZERO, short_moment, ("'exp_avg'", "[7]", ZERO)),
    ("autoep", ZERO, stage3, (ZERO, "not of ZeRO-1 or ZeRO-2", "ds_to_universal --input_folder")),
    ("autoep", MODEL, placed_otherwise, (MODEL, "equal blocks, in order")),
    ("autoep", MODEL, bias_of_router, (MODEL, "load_balance_coeff")),
    ("autoep", MODEL, unknown_name, (MODEL, "model.layers.0.mlp.surprise")),
    ("autoep", MODEL, unknown_preset, (MODEL, "'mixtrel'")),
    ("autoep", MODEL, other_weight, (MODEL, "model.norm.weight", "[31]", "[32]")),
    ("autoep", MODEL, no_weight, (MODEL, "model.norm.weight")),
    ("autoep", MODEL, no_layers, (MODEL, "deepspeed.moe.layer.MoE")),
    ("autoep", MODEL, no_counter, (MODEL, "skipped_steps")),
    ("autoep", MODEL, pipeline, (MODEL, "pipeline of 2 stages")),
    ("autoep", EXPERT, other_expert_shape, (EXPERT, "[32, 48]", "[48, 32]")),
    ("autoep", EXPERT, other_expert_dtype, (EXPERT, "bfloat16")),
    ("autoep", EXPERT, no_expert_key, (EXPERT, STACK)),
    ("tp", "mp_rank_01_model_states.pt", lambda content: content.update(global_steps=7), ("mp_rank_01_model_states.pt", "global_steps=7")),
    ("tp", MODEL, lambda content: content["universal_checkpoint_info"].pop("affine_map"), (MODEL, "does not say how", "ds_to_universal")),
    ("tp", MODEL, lambda content: content["universal_checkpoint_info"]["affine_map"].update(version=9), (MODEL, "version 9")),
    ("universal", MASTER, lambda content: content.update(param=content["param"][:-1].clone()), (MASTER, "[7, 48, 32]", "[8, 48, 32]")),
    ("universal", MOMENT, lambda content: content.update(param=content["param"][:-1].clone()), (MOMENT, "[31]", "[32]")),
    ("universal", MOMENT, lambda content: content.pop("param"), (MOMENT, "'param'")),
    ("universal", "zero/model.norm.weight/step.pt", lambda content: "two", ("step.pt", "str")),
    ("universal", "zero/optimizer_state.pt", lambda content: content["param_groups"].pop(), ("optimizer_state.pt", "1 parameter groups", "2")),
    ("universal", MODEL, lambda content: content.pop("param_shapes"), (MODEL, "param_shapes")),
]


@pytest.mark.parametrize("kind, name, change, parts", EDITS, ids=[f"{kind}-{change.__name__}-{index}" for index, (kind, _, change, _) in enumerate(EDITS)])
def test_contents(kind, name, change, parts, tmp_path):
    folder = copied(kind, tmp_path)
    open_stock(folder)
    edit(folder / name, change)
    refused(folder, *parts)


def test_left_over_files(tmp_path):
    folder = copied("autoep", tmp_path)
    left = folder / "zero_pp_rank_4_mp_rank_00_optim_states.pt"
    shutil.copy(folder / ZERO, left)
    refused(folder, left.name, "left of another checkpoint")
    left.rename(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refused(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt", "left of another checkpoint")


@pytest.mark.parametrize(
    "name, part", [("layer_03-model_00-model_states.pt", "pipeline"), ("offloaded_tensors", "NVMe"), ("zero_pp_rank_0_mp_rank_00_model_states.pt", "two checkpoints")]
)
def test_layouts_that_are_not_read(name, part, tmp_path):
    folder = copied("autoep", tmp_path)
    (folder / name).mkdir() if "." not in name else shutil.copy(folder / MODEL, folder / name)
    refused(folder, name, part)


def test_states_without_a_partner(tmp_path):
    folder = copied("universal", tmp_path)
    (folder / MOMENT).unlink()
    refused(folder, MOMENT, "missing")
    shutil.rmtree((folder / MOMENT).parent)
    refused(folder, "zero/model.norm.weight is missing", "interrupted")


def test_what_is_no_checkpoint(tmp_path):
    assert detect(tmp_path / "nothing") is detect(tmp_path) is None
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "checkpoint.json").touch()
    assert detect(tmp_path / "tag") is None
    refused(tmp_path / "tag", str(tmp_path / "tag"), "holds no checkpoint of DeepSpeed")


class Unknown:
    """What a client may save."""


def test_classes_are_named_and_their_code_is_not_run(tmp_path):
    folder = copied("autoep", tmp_path)
    edit(folder / MODEL, lambda content: content.update(callback=Unknown()))
    assert "test_stock_damage.Unknown" in refused(folder, MODEL, "trust_files=True")
    assert isinstance(open_stock(folder, trust_files=True).client_state["callback"], Unknown)


def test_what_is_asked_for_must_be_there():
    reader = open_stock(saved(AUTOEP)[0])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for call, text in (
        (lambda: reader.shape("model.layers.0.mlp.experts.w1"), "no parameter 'model.layers.0.mlp.experts.w1'"),
        (lambda: reader.read(name, "momentum"), "no 'momentum'.*exp_avg"),
        (lambda: reader.read(name, box=((0, 9), (0, 96), (0, 32))), r"\[8, 96, 32\].*\[0:9, 0:96, 0:32\]"),
        (lambda: reader.read(name, box=((0, 8),)), r"\[8, 96, 32\]"),
        (lambda: reader.read_buffer("nothing"), "no buffer"),
    ):
        with pytest.raises(CheckpointError, match=text):
            call()


def test_files_that_change_while_they_are_read(tmp_path):
    folder = copied("autoep", tmp_path)
    reader = open_stock(folder)
    edit(folder / ZERO, shorter_partition)
    edit(folder / EXPERT, no_expert_key)
    for path in sorted(folder.iterdir()):  # so that others take the place of what was kept
        if not re.search("zero_pp_rank_2|expert_5", path.name):
            reader._files.load(path)
    with pytest.raises(CheckpointError, match=EXPERT):
        reader.read("model.layers.1.mlp.experts.gate_up_proj", "weight")


def test_tensor_parallel_ranks_must_agree(tmp_path):
    folder = copied("tp", tmp_path)
    edit(folder / "mp_rank_01_model_states.pt", lambda content: content["module"]["model.norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight'.*different data"):
        open_stock(folder).read("model.norm.weight", "weight")
