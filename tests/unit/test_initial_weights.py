"""Models built on the meta device, their weights streamed from safetensors files."""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed_autoep.errors import AutoEPError, ConfigError, ModelError
from deepspeed_autoep.folding.spec import build_folding_spec
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.discovery import find_experts
from deepspeed_autoep.moe.layer import convert_experts
from deepspeed_autoep.moe.weight_layout import ExpertShard
from deepspeed_autoep.tensor_parallel import PartitionPlan
from deepspeed_autoep.weights.files import SafetensorsFolder
from deepspeed_autoep.weights.plan import plan_weights
from deepspeed_autoep.weights.stream import expert_layouts, initialize_buffers, stream_weights
from tests.families.tiny import build as build_family
from tests.perf.memory import LiveTensors, tensor_bytes
from tests.unit.models import Curve, make_model
from tests.unit.pool import run_on
from tests.unit.test_hf_families import DOZEN, EVERY
from tests.unit.training import Case, build_engine, finished, reference_of, train, worst_errors

LIMITS = {"loss": 1e-5, "norm": 1e-5, "parameter": 1e-3}

CASES = [
    # Files: one tensor an expert, merged to [gate | up]; the router and the block have other names than in the model.
    Case("mixtral", world=4, tp=2, ep=2, etp=2, zero=1),
    Case("mixtral", world=4, tp=1, ep=4, zero=0),
    # Stacked in the file, transposed, interleaved, biases; attention sinks are cut vectors.
    Case("gpt_oss", world=4, tp=2, ep=2, etp=2, zero=2),
    Case("gpt_oss", world=2, tp=2, ep=1, etp=2, zero=0),
    # A persistent buffer, latent attention.
    Case("deepseek_v3", world=4, tp=2, ep=4, zero=1),
    Case("qwen3_moe", world=2, tp=2, ep=2, zero=1, overrides=(("tie_word_embeddings", True),)),
    Case("qwen3_moe", world=4, tp=2, ep=2, zero=2, overrides=(("attention_bias", True),)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``save(case)`` -> a folder with the weights of the case's model, in several files."""
    folders: dict = {}

    def save(case: Case) -> str:
        key = (case.family, case.overrides)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(case.family)
            make_model(case.family, **dict(case.overrides)).save_pretrained(folders[key], max_shard_size="50KB")
        return str(folders[key])

    return save


def meta_model(case: Case) -> nn.Module:
    with torch.device("meta"):
        return make_model(case.family, **dict(case.overrides))


def streamed(case: Case, folder: str) -> Case:
    return dataclasses.replace(case, expert_config=(*case.expert_config, ("initial_weights", folder)))


def train_streamed(case: Case):
    return train(case, model=meta_model(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streamed_weights_train_as_one_process_does(case, saved):
    curve = run_on(case.world, train_streamed, streamed(case, saved(case)))[0]
    errors = worst_errors(curve, reference_of(case))
    assert all(errors[key] <= limit for key, limit in LIMITS.items()), errors


def state_of_bf16(case: Case):
    """A bf16 model with fp32 routers, from files in fp32; the whole state on rank 0."""
    model = meta_model(case).bfloat16()
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.float()
    return finished(Curve(), build_engine(case, model))


def test_tensors_get_the_models_dtype(saved):
    case = Case("mixtral", world=4, tp=2, ep=2, zero=1, dtype="bf16")
    state = run_on(case.world, state_of_bf16, streamed(case, saved(case)))[0].state
    whole = make_model("mixtral").state_dict()
    assert state.keys() == whole.keys()
    for name, value in state.items():
        dtype = torch.float32 if name.endswith("mlp.gate.weight") else torch.bfloat16
        assert value.dtype == dtype and torch.equal(value, whole[name].to(dtype)), name


# One rank's part, in one process: EP rank 1 of 2, ETP rank 1 of 2.
CPU = torch.device("cpu")
HANDLES = SimpleNamespace(
    spec=build_folding_spec(world_size=4, pp_size=1, tp_size=1, ep_size=2, etp_size=2),
    ep_rank=1,
    etp_rank=1,
    tp_rank=0,
    ep_group_name="experts",
    expert_shared_name="shared",
    tp_group=None,
    ep_group=None,
    etp_group=None,
)


def stream_part(meta: nn.Module, folder: str):
    """Cut ``meta`` as the rank of HANDLES does and fill it. Returns the plan and the layouts of experts' tensors."""
    sites = find_experts(meta)
    experts = expert_layouts(sites)
    plan = plan_weights(meta, SafetensorsFolder.open(folder), experts)
    initialize_buffers(meta, plan, CPU)
    for site in sites:
        convert_experts(site, HANDLES, backend="auto", validate_routing=False)
    stream_weights(meta, plan, PartitionPlan(), HANDLES, CPU)
    return plan, experts


def check_family(name: str, folder: str) -> None:
    whole = build_family(name)
    whole.save_pretrained(folder)
    with torch.device("meta"):
        meta = type(whole)._from_config(whole.config, attn_implementation="eager", dtype=torch.float32).train()
    _, experts = stream_part(meta, folder)
    right = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    streamed = {**dict(meta.named_parameters()), **dict(meta.named_buffers())}
    assert right.keys() == streamed.keys()
    for key, value in right.items():
        if key in experts:
            count = experts[key].shape[0]
            value = cut_expert_tensor(value.detach(), experts[key], ExpertShard.of(count, 2, 1, 2, 1))
        assert torch.equal(value, streamed[key]), key


@pytest.mark.parametrize("name", [name for name in DOZEN if name in EVERY])
def test_family_is_streamed_bit_by_bit(name, tmp_path):
    run_on(1, check_family, name, str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EVERY if name not in DOZEN])
def test_family_is_streamed_bit_by_bit_full(name, tmp_path):
    run_on(1, check_family, name, str(tmp_path))


def bytes_held(family: str, folder: str, by_expert: bool = True) -> dict[str, int]:
    """Of a rank's own part, the largest tensor, the whole model, and the most that was alive at a time while streaming.

    Views of the mapped files are no memory of the process's own."""
    with torch.device("meta"):
        meta = make_model(family, **LARGER)
    sizes = [parameter.nbytes for parameter in meta.parameters()]
    read = SafetensorsFolder.read

    def unseen(*arguments):
        with _disable_current_modes():
            return read(*arguments)

    with pytest.MonkeyPatch.context() as patch, LiveTensors() as live:
        patch.setattr(SafetensorsFolder, "read", unseen)
        if not by_expert:
            patch.setattr("deepspeed_autoep.weights.plan._by_expert", lambda *_: None)
        stream_part(meta, folder)
    return {"own": tensor_bytes(meta.parameters()), "largest": max(sizes), "whole": sum(sizes), "peak": live.peak}


LARGER = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "layer_types": None}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_rank_holds_its_part_and_one_tensor(family, tmp_path):
    make_model(family, **LARGER).save_pretrained(tmp_path)
    held = run_on(1, bytes_held, family, str(tmp_path))[0]
    assert held["own"] < 0.4 * held["whole"] and held["peak"] <= held["own"] + held["largest"], held


def test_the_bound_is_passed_where_experts_are_read_all_together(tmp_path):
    make_model("mixtral", **LARGER).save_pretrained(tmp_path)
    held = run_on(1, bytes_held, "mixtral", str(tmp_path), False)[0]
    assert held["peak"] > held["own"] + held["largest"], held


# What is wrong -> how the folder or the model is made so, and what the error says.
def _no_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _no_files(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def _truncated(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


def _edit(change):
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


ROUTER = "model.layers.0.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def _without(name):
    return _edit(lambda tensors: tensors.pop(name))


def _misshapen(tensors) -> None:
    tensors[ROUTER] = tensors[ROUTER][:-1].contiguous()


def _quantized(tensors) -> None:
    tensors[EXPERT] = tensors[EXPERT].to(torch.float8_e4m3fn)


def _index_of_more(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.lost.weight": "model.safetensors"}}))


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


BAD_FOLDERS = {
    "no folder": (_no_folder, ConfigError, "neither a folder nor a file"),
    "no files": (_no_files, ConfigError, r"without \*.safetensors files"),
    "truncated": (_truncated, ConfigError, "model.safetensors cannot be read"),
    "broken index": (_broken_index, ConfigError, "not an index"),
    "index of more": (_index_of_more, ConfigError, "model.lost.weight"),
    "without a router": (_without(ROUTER), ModelError, "lacks 1 of the model's .* model.layers.0.mlp.gate.weight"),
    "without an expert": (_without(EXPERT), ModelError, "experts.down_proj"),
    "misshapen": (_edit(_misshapen), ModelError, r"mlp.gate.weight' the shape \[7, 32\], the model has \[8, 32\]"),
    "quantized": (_edit(_quantized), ModelError, "F8_E4M3"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_refused_before_anything_is_read(name, tmp_path):
    spoil, kind, message = BAD_FOLDERS[name]
    make_model("mixtral").save_pretrained(tmp_path)
    spoil(tmp_path)
    with torch.device("meta"):
        meta = make_model("mixtral")
    with pytest.raises(kind, match=message):
        plan_weights(meta, SafetensorsFolder.open(str(tmp_path)), expert_layouts(find_experts(meta)))


def test_tensors_that_are_not_the_models_are_listed(tmp_path):
    make_model("mixtral").save_pretrained(tmp_path)
    _edit(lambda tensors: tensors.update(extra=torch.ones(3)))(tmp_path)
    with torch.device("meta"):
        meta = make_model("mixtral")
    plan = plan_weights(meta, SafetensorsFolder.open(str(tmp_path)), expert_layouts(find_experts(meta)))
    assert plan.unexpected == ("extra",)


def refused(case: Case, kind: str, folder: str, other: str) -> str:
    """Build an engine from what is wrong; the error's text on this rank."""
    case = streamed(case, folder)
    model = make_model(case.family) if kind == "real" else meta_model(case)
    if kind == "part":
        model.lm_head = nn.Linear(32, 64, bias=False)
    elif kind == "no key":
        case = dataclasses.replace(case, expert_config=())
    elif kind == "hook":
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    elif kind == "weak reference":
        model.seen = weakref.ref(model.lm_head.weight)
    elif kind == "buffer":
        model.model.register_buffer("factors", torch.ones(3, device="meta"), persistent=False)
    elif kind == "tied":
        with torch.device("meta"):
            model = make_model(case.family, tie_word_embeddings=True)
    elif kind == "adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    elif kind == "other files" and dist.get_rank() == 1:
        folder = other
    if kind == "other files":  # the same path on every rank, as on nodes with disks of their own
        link = Path(folder)
        real = SafetensorsFolder.open
        SafetensorsFolder.open = staticmethod(lambda _: real(str(link)))
    try:
        build_engine(case, model)
    except AutoEPError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if kind == "other files":
            SafetensorsFolder.open = staticmethod(real)
    return "nothing was refused"


REFUSED = {
    "real": "ConfigError: expert_parallel.initial_weights=.* remove the key",
    "part": "ModelError: .*'lm_head.weight' is not",
    "no key": "ConfigError: .* set expert_parallel.initial_weights",
    "hook": "ModelError: parameter 'lm_head.weight' .* gradient hooks",
    "weak reference": "ModelError: parameter 'lm_head.weight' .* weak reference",
    "buffer": "ModelError: buffer 'model.factors' .*_init_weights",
    "tied": "ModelError: the model ties 'model.embed_tokens.weight' and 'lm_head.weight'",
    "adapters": r"ModelError: module 'base_model.model.model.layers.0.self_attn.q_proj' \(Linear\) is PEFT's",
    "other files": "RankMismatchError: .* 'model.embed_tokens.weight'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_rank_refuses(kind, tmp_path):
    make_model("mixtral").save_pretrained(tmp_path / "one")
    make_model("mixtral", seed=1).save_pretrained(tmp_path / "other")
    case = Case("mixtral", world=2, tp=1, ep=2, zero=1)
    for message in run_on(case.world, refused, case, kind, str(tmp_path / "one"), str(tmp_path / "other")):
        assert re.match(REFUSED[kind], message), message
