"""Quantizers of experts, cut and joined again, and the structure of a quantized model: in one process."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("modelopt", reason="needs nvidia-modelopt, of the extra 'quantization'")

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.discovery import find_experts
from deepspeed_autoep.moe.weight_layout import ExpertShard
from deepspeed_autoep.quantization import check_structure, describe_buffers, restore_structure, structure_of
from deepspeed_autoep.quantization.experts import cut_quantizers, join_buffer, quantizer_buffers
from deepspeed_autoep.quantization.quantizers import quantizers_of
from tests.unit.models import make_batches, make_model
from tests.unit.quantized import make_quantized

SECOND = ExpertShard.of(8, 4, 1, 2, 1)  # experts 2 and 3, second half
NAMES = ["FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "INT4_BLOCKS_OF_8", "INT8_TILES", "NVFP4_DEFAULT_CFG", "NVFP4_STATIC"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("family", "ep", "etp"), [("mixtral", 4, 2), ("mixtral", 2, 1), ("gpt_oss", 2, 2), ("gpt_oss", 8, 1)])
def test_parts_join_to_the_whole(family, ep, etp, name):
    model = make_quantized(family, name)
    site = find_experts(model)[1]
    whole = {key: value.clone() for key, value in site.module.named_buffers()}
    layouts = {f"{buffer.path}.{buffer.key}": buffer for buffer in quantizer_buffers(site)}
    assert layouts.keys() == whole.keys()
    parts: dict[str, list] = {key: [] for key in whole}
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            part = find_experts(copy.deepcopy(model))[1]
            shard = ExpertShard.of(8, ep, ep_rank, etp, etp_rank)
            for buffer in cut_quantizers(part, shard):
                parts[buffer.logical_name(shard.first)].append((shard, part.module.get_buffer(buffer.name)))
            if family == "mixtral":
                assert len(part.module.gate_up_proj_weight_quantizers) == len(part.module.down_proj_weight_quantizers) == 8 // ep
    for key, held in parts.items():
        shared = layouts[key].shared
        assert shared == ("_input_quantizer" in key or (family == "gpt_oss" and whole[key].numel() == 1))
        assert len(held) == (ep * etp if layouts[key].expert is None else etp), key
        joined = join_buffer(held, layouts[key])
        assert torch.equal(joined, whole[key]) and joined.dtype == whole[key].dtype, key


def test_a_value_for_each_feature_is_cut_with_the_features():
    model = make_quantized("mixtral", "INT8_DEFAULT_CFG")
    site = find_experts(model)[0]
    site.module.down_proj_input_quantizer.pre_quant_scale = torch.arange(48.0)
    site.module.gate_up_proj_input_quantizer.pre_quant_scale = torch.arange(32.0)
    cut_quantizers(site, SECOND)
    assert site.module.down_proj_input_quantizer.pre_quant_scale.tolist() == list(range(24, 48))
    assert site.module.gate_up_proj_input_quantizer.pre_quant_scale.tolist() == list(range(32))


def test_only_a_cut_module_is_described():
    site = find_experts(make_quantized("mixtral", "FP8_DEFAULT_CFG"))[0]
    with pytest.raises(ModelError, match="has not been cut"):
        describe_buffers(site.module)


def test_structure_is_restored_and_then_the_values():
    model = make_quantized("mixtral", "INT8_DEFAULT_CFG")
    saved = structure_of(model)
    fresh = make_model("mixtral", seed=5)
    with pytest.raises(ModelError, match="restore_structure"):
        check_structure(saved, fresh)
    restore_structure(fresh, saved)
    check_structure(saved, fresh)
    assert all(value.isnan().all() for key, value in fresh.named_buffers() if "quantizer" in key)
    fresh.load_state_dict(model.state_dict())
    batch = make_batches(1, 4, 9)[0]
    assert torch.equal(fresh(input_ids=batch).logits, model(input_ids=batch).logits)
    with pytest.raises(ModelError, match="already"):
        restore_structure(fresh, saved)


def test_a_plain_model_has_no_structure():
    model = make_model("mixtral")
    assert structure_of(model) == {} and restore_structure(model, {}) is model
    check_structure({}, model)
    with pytest.raises(ModelError, match="the model is changed by Model-Optimizer and the checkpoint is not"):
        check_structure({}, make_quantized("mixtral", "INT8_DEFAULT_CFG"))


def test_the_first_difference_is_named():
    saved = structure_of(make_quantized("mixtral", "INT8_DEFAULT_CFG"))
    model = make_quantized("mixtral", "INT8_DEFAULT_CFG")
    check_structure(saved, model)
    dict(quantizers_of(model))["model.layers.1.mlp.experts.down_proj_weight_quantizers.5"].disable()
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.experts.down_proj_weight_quantizers.5' has _disabled=True in the model and False"):
        check_structure(saved, model)
    with pytest.raises(ModelError, match="weight_quantizer' has _axis=None in the model and 0"):
        check_structure(saved, make_quantized("mixtral", "INT8_TENSOR"))
    with pytest.raises(ModelError, match=r"quantizer 'model.layers.0.mlp.experts.down_proj_weight_quantizers.10' is in the checkpoint and not"):
        check_structure(structure_of(make_quantized("mixtral", "INT8_DEFAULT_CFG", num_local_experts=16)), model)


def test_a_structure_that_does_not_fit_is_refused():
    saved = structure_of(make_quantized("mixtral", "INT8_DEFAULT_CFG"))
    with pytest.raises(ModelError, match="cannot restore this structure in GptOssForCausalLM"):
        restore_structure(make_model("gpt_oss"), saved)
