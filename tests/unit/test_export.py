"""Exported folders against what transformers' save_pretrained writes."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from deepspeed_autoep.errors import ConfigError, ModelError
from deepspeed_autoep.weights import export, reversal
from deepspeed_autoep.weights.export import export_folder
from deepspeed_autoep.weights.export_plan import plan_export
from tests.families.tiny import build as build_family
from tests.perf.memory import LiveTensors
from tests.unit.exported import SHARD, StateSource, check_index, differences, weights_of
from tests.unit.models import make_model
from tests.unit.test_hf_families import DOZEN, EVERY

INDEX = "model.safetensors.index.json"


def check_files(model: nn.Module, folder: Path) -> None:
    export_folder(folder / "made", StateSource(model), model, max_shard_bytes=SHARD)  # first: save_pretrained changes the configuration
    model.save_pretrained(folder / "right", max_shard_size=SHARD)
    assert differences(weights_of(folder / "made"), weights_of(folder / "right")) == []
    check_index(folder / "made")
    for name in ("config.json", "generation_config.json"):
        made, right = [(folder / kind / name).read_text() if (folder / kind / name).exists() else None for kind in ("made", "right")]
        assert made == right, name


def check_family(model: nn.Module, folder: Path) -> None:
    check_files(model, folder)
    again = type(model).from_pretrained(folder / "made")
    assert differences(again.state_dict(), model.state_dict()) == []


@pytest.mark.parametrize("name", [name for name in DOZEN if name in EVERY])
def test_family_is_written_as_save_pretrained_does(name, tmp_path):
    check_family(build_family(name), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EVERY if name not in DOZEN])
def test_family_is_written_as_save_pretrained_does_full(name, tmp_path):
    check_family(build_family(name), tmp_path)


def test_the_comparison_fails_without_conversions(tmp_path, monkeypatch):
    monkeypatch.setattr(reversal, "_conversions", lambda model: [])
    with pytest.raises(AssertionError, match="block_sparse_moe"):
        check_family(make_model("mixtral"), tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_loaded_model_has_the_same_logits(family, tmp_path):
    model = make_model(family).eval()
    export_folder(tmp_path, StateSource(model), model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        right, made = model(input_ids=tokens).logits, again(input_ids=tokens).logits
        assert torch.equal(made, right)
        again.lm_head.weight[5, 5] += 1  # were any weight another one, it would show
        assert not torch.equal(again(input_ids=tokens).logits, right)


def test_every_dtype_is_kept(tmp_path):
    model = make_model("mixtral").bfloat16()
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.float()
    check_files(model, tmp_path)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == "bfloat16"
    dtypes = {tensor.dtype for tensor in weights_of(tmp_path / "made").values()}
    assert dtypes == {torch.bfloat16, torch.float32}


def test_the_dtype_is_that_of_the_tensors_where_the_model_has_another(tmp_path):
    model = make_model("mixtral")
    export_folder(tmp_path, StateSource(copy.deepcopy(model).bfloat16()), model)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert model.config.dtype != "bfloat16"


def test_a_model_keeps_the_names_that_it_was_loaded_from(tmp_path):
    """A prefix that the files had and the model has not: only from_pretrained knows of it."""
    model = build_family("qwen3_omni_moe_thinker")
    check_files(model, tmp_path / "fresh")
    model.save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    save_file({f"thinker.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path / "whole")
    check_family(loaded, tmp_path)
    assert all(name.startswith("thinker.") for name in weights_of(tmp_path / "made"))


def test_the_conversions_of_the_model_are_left_as_they_are(tmp_path):
    """transformers changes a conversion's patterns while it reverses it."""
    from transformers.core_model_loading import WeightRenaming

    model = make_model("mixtral")
    renaming = WeightRenaming(r"^backbone\.", "model.")
    model._weight_conversions = [renaming]

    def patterns() -> list[str]:
        return renaming._original_source_patterns + renaming._original_target_patterns

    before = patterns()
    plan_export(StateSource(model), model)
    assert patterns() == before
    model.save_pretrained(tmp_path)
    assert patterns() != before  # else the copy is not needed any more


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("without", [(), (EMBEDDING,), (HEAD,)])
def test_tied_weights_are_written_once(without, tmp_path):
    model = make_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "right")
    export_folder(tmp_path / "made", StateSource(model, without), model)
    made = weights_of(tmp_path / "made")
    assert differences(made, weights_of(tmp_path / "right")) == [] and HEAD not in made
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_tied_weights_that_differ_are_refused(tmp_path):
    model = make_model("qwen3_moe", tie_word_embeddings=True)
    source = StateSource(model)
    source.tensors[HEAD] = source.tensors[HEAD] + 1
    with pytest.raises(ModelError, match=f"ties '{EMBEDDING}' and '{HEAD}', and their values differ"):
        export_folder(tmp_path, source, model)


@pytest.mark.parametrize("cut", [False, True])
def test_the_model_may_be_on_meta_and_its_parameters_cut(cut, tmp_path):
    model = make_model("mixtral")
    with torch.device("meta"):
        other = make_model("mixtral")
    if cut:
        experts = other.model.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj[:2])
    model.save_pretrained(tmp_path / "right")
    export_folder(tmp_path / "made", StateSource(model), other)
    assert differences(weights_of(tmp_path / "made"), weights_of(tmp_path / "right")) == []


# Files.


def test_files_are_bounded_but_for_a_larger_tensor(tmp_path):
    model = make_model("qwen3_moe", vocab_size=2048)
    report = export_folder(tmp_path, StateSource(model), model, max_shard_bytes=SHARD)
    sizes = {name: [tensor.nbytes for tensor in load_file(tmp_path / name).values()] for name in report.weights}
    assert all(sum(each) <= SHARD or len(each) == 1 for each in sizes.values())
    assert sum(sum(each) > SHARD for each in sizes.values()) == 2  # the embedding and the head
    assert list(sizes) == [f"model-{place + 1:05d}-of-{len(sizes):05d}.safetensors" for place in range(len(sizes))]
    assert (report.num_tensors, report.num_bytes) == (sum(map(len, sizes.values())), sum(map(sum, sizes.values())))


def test_one_file_has_no_index(tmp_path):
    model = make_model("mixtral")
    assert export_folder(tmp_path, StateSource(model), model).weights == ("model.safetensors",)
    assert not (tmp_path / INDEX).exists() and not (tmp_path / ".export").exists()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tokenizer_is_copied_and_nothing_else(tmp_path):
    model = make_model("mixtral")
    (tmp_path / "from" / "additional_chat_templates").mkdir(parents=True)
    wanted = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "additional_chat_templates/tools.jinja"]
    for name in (*wanted, "model.safetensors", "config.json", "optimizer.pt"):
        (tmp_path / "from" / name).write_text(f"text of {name}")
    export_folder(tmp_path / "made", StateSource(model), model, tokenizer=tmp_path / "from")
    files = {path.relative_to(tmp_path / "made").as_posix() for path in (tmp_path / "made").rglob("*") if path.is_file()}
    assert files == {*wanted, "config.json", "generation_config.json", "model.safetensors"}
    assert all((tmp_path / "made" / name).read_text() == f"text of {name}" for name in wanted)


def test_custom_code_is_copied(tmp_path, monkeypatch):
    (tmp_path / "own_mixtral.py").write_text("from transformers import MixtralForCausalLM\n\n\nclass OwnMixtral(MixtralForCausalLM):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from own_mixtral import OwnMixtral

    OwnMixtral.register_for_auto_class("AutoModelForCausalLM")
    check_family(OwnMixtral(make_model("mixtral").config), tmp_path)
    assert (tmp_path / "made" / "own_mixtral.py").read_text() == (tmp_path / "own_mixtral.py").read_text()
    assert "own_mixtral.OwnMixtral" in (tmp_path / "made" / "config.json").read_text()


# Memory, and what is read.

LARGER = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "layer_types": None}


def peak_of_export(model: nn.Module, folder: Path) -> int:
    source = StateSource(model)
    with LiveTensors() as live:
        export_folder(folder, source, model, max_shard_bytes=10**6)
    return live.peak


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_one_expert_is_held_at_a_time(family, tmp_path, monkeypatch):
    model = make_model(family, **LARGER)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    others = max(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." not in name)
    # A row and its conversion, or another tensor; and small ones, such as what stands for tied weights.
    assert peak_of_export(model, tmp_path / "one") <= max(2 * experts[0].nbytes, others) + 2000
    monkeypatch.setattr("deepspeed_autoep.weights.reversal._by_expert", lambda group, *_: group)
    assert peak_of_export(model, tmp_path / "all") >= experts.nbytes


def test_other_ranks_read_the_same(tmp_path):
    model = make_model("qwen3_moe", tie_word_embeddings=True)
    writer, reader = StateSource(model), StateSource(model)
    export_folder(tmp_path, writer, model)
    plan_export(reader, model).read_all(reader)
    assert reader.reads == writer.reads and (HEAD, None) in reader.reads
    assert ("model.layers.0.mlp.experts.down_proj", 7) in reader.reads


# Interruptions.


class Failing(StateSource):
    def read(self, name, expert=None):
        if len(self.reads) == 20:
            raise OSError("lost")
        return super().read(name, expert)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_export_leaves_what_was_there(tmp_path):
    model = make_model("mixtral")
    with pytest.raises(OSError, match="lost"):
        export_folder(tmp_path, Failing(model), model, max_shard_bytes=SHARD)
    assert contents(tmp_path) == {}
    export_folder(tmp_path, StateSource(model), model, max_shard_bytes=SHARD)
    before = contents(tmp_path)
    with pytest.raises(OSError, match="lost"):
        export_folder(tmp_path, Failing(model), make_model("mixtral", seed=1), max_shard_bytes=SHARD, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("shard, last", [(SHARD, INDEX), (10**9, "model.safetensors")])
def test_a_folder_is_complete_with_its_last_file_only(shard, last, tmp_path, monkeypatch):
    """Over an older export: its parts must not be taken for the new one's."""
    old, model = make_model("mixtral"), make_model("mixtral", seed=1)
    export_folder(tmp_path, StateSource(old), old, max_shard_bytes=30_000)
    replace, loadable = os.replace, []

    def watched(source, target):
        loadable.append((tmp_path / INDEX).exists() or (tmp_path / "model.safetensors").exists())
        replace(source, target)

    monkeypatch.setattr(export.os, "replace", watched)
    export_folder(tmp_path, StateSource(model), model, max_shard_bytes=shard, overwrite=True)
    assert len(loadable) > 2 and not any(loadable) and (tmp_path / last).exists()
    model.save_pretrained(tmp_path / "right")
    assert differences(weights_of(tmp_path), weights_of(tmp_path / "right")) == []


# What is wrong -> how it is made so (of folder, model, source, and options), and what the error says.


def _weights(folder, model, source, options):
    (folder / "made").mkdir()
    (folder / "made" / "pytorch_model.bin").touch()


def _foreign(folder, model, source, options):
    (folder / "made").mkdir()
    (folder / "made" / "adapter_model.safetensors").touch()
    options["overwrite"] = True


def _interrupted(folder, model, source, options):
    (folder / "made" / ".export").mkdir(parents=True)


def _file(folder, model, source, options):
    (folder / "made").touch()


def _option(**values):
    return lambda folder, model, source, options: options.update(values)


def _tokenizer(folder, model, source, options):
    options["tokenizer"] = folder


def _config(**values):
    return lambda folder, model, source, options: [setattr(model.config, name, value) for name, value in values.items()]


def _tensor(name, change):
    def edit(folder, model, source, options):
        source.tensors[name] = change(source.tensors.get(name))

    return edit


def _lost(folder, model, source, options):
    del source.tensors["model.layers.1.mlp.experts.down_proj"]


def _not_as_described(folder, model, source, options):
    source.read = lambda name, expert=None: source.tensors[name].double()


def _misshapen(folder, model, source, options):
    source.read = lambda name, expert=None: source.tensors[name][..., :-1]


DOWN = "model.layers.0.mlp.experts.down_proj"
BAD = {
    "weights": (_weights, ConfigError, "out='.*made' holds weights already, 'pytorch_model.bin' .*overwrite=True"),
    "foreign weights": (_foreign, ConfigError, "holds 'adapter_model.safetensors', which save_pretrained does not write"),
    "interrupted": (_interrupted, ConfigError, "under way or was interrupted"),
    "a file": (_file, ConfigError, "out='.*made' is a file: legal is a folder"),
    "no bytes": (_option(max_shard_bytes=0), ConfigError, "max_shard_bytes=0: legal is a whole number of bytes, 1 or more"),
    "text": (_option(max_shard_bytes="5GB"), ConfigError, "max_shard_bytes='5GB'"),
    "no tokenizer folder": (_option(tokenizer="/nowhere"), ConfigError, "tokenizer='/nowhere' is not a folder"),
    "no tokenizer": (_tokenizer, ConfigError, "a folder without tokenizer files"),
    "missing": (_lost, ModelError, "lacks tensors of MixtralForCausalLM: 'model.layers.1.mlp.experts.down_proj' .20 of 21"),
    "unknown": (_tensor("extra", lambda _: torch.ones(2)), ModelError, "does not have: 'extra'"),
    "cut tensor": (_tensor(DOWN, lambda tensor: tensor[:4]), ModelError, rf"'{DOWN}' has the shape \[4, 32, 48\] .* \[8, 32, 48\]"),
    "cut config": (_config(num_local_experts=4), ModelError, r"has the shape \[8, 32\] in the source, the configuration makes it \[4, 32\]"),
    "quantized": (_config(quantization_config={"quant_method": "fp8"}), ModelError, "quantization_config"),
    "dtype": (_tensor(HEAD, lambda tensor: tensor.to(torch.float8_e4m3fn)), ModelError, "'lm_head.weight' is torch.float8_e4m3fn: legal are"),
    "not as described": (_not_as_described, ModelError, r"'model.embed_tokens.weight' was read as \[64, 32\] torch.float64 on cpu, described"),
    "of another shape": (_misshapen, ModelError, r"'model.embed_tokens.weight' was read as \[64, 31\] torch.float32 on cpu, described as \[64, 32\]"),
    "generation in config": (_config(temperature=0.5), ModelError, "configuration of MixtralForCausalLM cannot be saved: (?s:.*)temperature"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused(name, tmp_path):
    spoil, kind, message = BAD[name]
    model = make_model("mixtral")
    source, options = StateSource(model), {}
    spoil(tmp_path, model, source, options)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=message):
        export_folder(tmp_path / "made", source, model, **options)
    assert [path for path in sorted(tmp_path.rglob("*")) if path != tmp_path / "made"] == [path for path in before if path != tmp_path / "made"]


def test_another_kind_of_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="Linear cannot be exported: legal is a transformers PreTrainedModel"):
        export_folder(tmp_path, StateSource(nn.Linear(2, 2)), nn.Linear(2, 2))


@pytest.mark.parametrize(
    "name, other",
    [
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.norm.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),  # what a converter makes
        ("lm_head.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    ],
)
def test_names_that_meet_are_refused(name, other, tmp_path):
    """Two tensors under one name: transformers would save one of them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    model = make_model("mixtral")
    model._weight_conversions = [*get_model_conversion_mapping(model, add_legacy=False), WeightRenaming(other, name)]
    with pytest.raises(ModelError, match="would be saved under a name that another tensor has"):
        export_folder(tmp_path, StateSource(model), model)
