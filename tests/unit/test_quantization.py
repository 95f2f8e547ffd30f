"""Experts that Model-Optimizer has quantized, trained over ranks and in one plain process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("modelopt", reason="needs nvidia-modelopt, of the extra 'quantization'")

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.layer import AutoEPMoELayer
from deepspeed_autoep.moe.weight_layout import ExpertShard
from deepspeed_autoep.quantization import check_structure, describe_buffers, experts, structure_of
from deepspeed_autoep.quantization.quantizers import is_active, quantizers_of
from tests.unit.lora import Lora, adapt
from tests.unit.models import make_batches, make_model, plain_curve
from tests.unit.pool import run_on
from tests.unit.quantized import EXPERTS_ONLY, make_quantized
from tests.unit.test_parity import LOSS_AND_NORM, PARAMETER
from tests.unit.training import Case, build_engine, mean_over_data, my_share, train, worst_errors

MIXTRAL = Case("mixtral", 4, 2, 2, 1, "SGD", steps=2)
FOLDINGS = [MIXTRAL, replace(MIXTRAL, ep=4), replace(MIXTRAL, etp=2, zero=2)]
GPT_OSS = replace(MIXTRAL, family="gpt_oss")
LATENT = ("*self_attn*", "*lm_head*", "*embed_tokens*", "*shared_experts*", "*mlp.gate_proj.*", "*mlp.up_proj.*", "*mlp.down_proj.*")
CASES = [
    *((case, name, EXPERTS_ONLY) for name in ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG") for case in FOLDINGS),
    (FOLDINGS[1], "INT8_PER_TOKEN", EXPERTS_ONLY),
    (FOLDINGS[2], "INT4_BLOCKS_OF_8", EXPERTS_ONLY),
    (FOLDINGS[2], "INT8_TILES", EXPERTS_ONLY),
    (FOLDINGS[2], "INT4_THEN_FP8", EXPERTS_ONLY),
    (FOLDINGS[2], "INT8_DEFAULT_CFG+KV", EXPERTS_ONLY),
    # Dense layers keep their quantizers where tensor parallelism leaves them alone.
    (replace(MIXTRAL, tp=1, ep=4), "INT8_SMOOTHQUANT_CFG", ()),
    (replace(MIXTRAL, tp=1, etp=2, zero=0), "FP8_DEFAULT_CFG", ()),
    # Two tokens a sample: some ranks get no rows.
    (replace(MIXTRAL, ep=4, samples=2, length=2), "INT8_DEFAULT_CFG", EXPERTS_ONLY),
    (replace(MIXTRAL, etp=2, options=(("checkpointing", "nonreentrant"),)), "INT8_DEFAULT_CFG", EXPERTS_ONLY),
    (replace(GPT_OSS, ep=4), "FP8_DEFAULT_CFG", EXPERTS_ONLY),
    (replace(GPT_OSS, etp=2), "INT8_DEFAULT_CFG", EXPERTS_ONLY),
    (replace(GPT_OSS, etp=2, options=(("checkpointing", "reentrant"),)), "INT4_BLOCKS_OF_8", EXPERTS_ONLY),
    (replace(MIXTRAL, family="deepseek_v3", etp=2), "INT8_DEFAULT_CFG", LATENT),
]


def name_of(value) -> str:
    return "all" if value == () else "experts" if isinstance(value, tuple) else str(value)


def make(case: Case, name: str, left_alone: tuple = EXPERTS_ONLY) -> torch.nn.Module:
    return make_quantized(case.family, name, left_alone, **dict(case.overrides))


def train_quantized(case: Case, name: str, left_alone: tuple = EXPERTS_ONLY):
    return train(case, make(case, name, left_alone))


@functools.cache
def _reference(family: str, samples: int, length: int, name: str, left_alone: tuple):
    case = Case(family)
    return plain_curve(make(case, name, left_alone), "SGD", MIXTRAL.steps, samples, length, MIXTRAL.clip)


def reference(case: Case, name: str, left_alone: tuple = EXPERTS_ONLY):
    return _reference(case.family, case.samples, case.length, name, left_alone)


@pytest.mark.parametrize(("case", "name", "left_alone"), CASES, ids=name_of)
def test_parity(case, name, left_alone):
    """The consolidated state holds the quantizers' buffers, under the names of the whole model."""
    right = reference(case, name, left_alone)
    errors = worst_errors(run_on(case.world, train_quantized, case, name, left_alone)[0], right)
    assert errors["loss"] <= LOSS_AND_NORM and errors["norm"] <= LOSS_AND_NORM and errors["parameter"] <= PARAMETER, errors


def test_quantization_is_not_vacuous():
    """What is compared above is far from the same model without quantizers."""
    plain = plain_curve(make_model(MIXTRAL.family), "SGD", MIXTRAL.steps, MIXTRAL.samples, MIXTRAL.length, MIXTRAL.clip)
    for name in ("FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "INT4_BLOCKS_OF_8"):
        assert abs(reference(MIXTRAL, name).losses[0] - plain.losses[0]) / plain.losses[0] > 10 * LOSS_AND_NORM


def _of_first_experts(num_experts, ep_size, _ep_rank, etp_size=1, etp_rank=0) -> ExpertShard:
    return ExpertShard(0, num_experts // ep_size, etp_size, etp_rank)


_extents = experts._weight_extents


def _halves_as_one(tensor, layout, of_stack):
    return _extents(replace(tensor, halves=1), layout, of_stack)


SWITCHED_OFF = {
    "own_experts": lambda: [mock.patch.object(experts, "ExpertShard", SimpleNamespace(of=_of_first_experts))],
    "cut_of_halves": lambda: [mock.patch.object(experts, "_weight_extents", _halves_as_one)],
    "own_forward": lambda: [
        mock.patch("deepspeed_autoep.engine.construction.is_quantized_site", lambda _site: False),
        mock.patch.object(experts, "QuantizerGuard", lambda _site: None),
    ],
}


def losses_switched_off(case: Case, name: str, what: str) -> list[float]:
    with contextlib.ExitStack() as stack:
        for patch in SWITCHED_OFF[what]():
            stack.enter_context(patch)
        engine = build_engine(case, make(case, name))
        batch = my_share(make_batches(1, case.samples, case.length)[0], case)
        loss = mean_over_data(engine(input_ids=batch, labels=batch).loss, engine)
        engine.destroy()
        return loss


@pytest.mark.parametrize("what", SWITCHED_OFF)
def test_parity_sees_it_switched_off(what):
    loss = run_on(4, losses_switched_off, FOLDINGS[2], "INT8_DEFAULT_CFG", what)[0]
    right = reference(FOLDINGS[2], "INT8_DEFAULT_CFG").losses[0]
    assert abs(loss - right) / right > 10 * LOSS_AND_NORM


def train_beside_lora(case: Case, name: str):
    return train(case, adapt(make(case, name), Lora()))


def test_lora_on_dense_layers_beside_quantized_experts():
    model = adapt(make(MIXTRAL, "INT8_DEFAULT_CFG"), Lora())
    right = plain_curve(model, "SGD", MIXTRAL.steps, MIXTRAL.samples, MIXTRAL.length, MIXTRAL.clip)
    errors = worst_errors(run_on(4, train_beside_lora, FOLDINGS[2], "INT8_DEFAULT_CFG")[0], right)
    assert errors["loss"] <= LOSS_AND_NORM and errors["norm"] <= LOSS_AND_NORM and errors["parameter"] <= PARAMETER, errors


def shared_ranges(case: Case, name: str) -> list[float]:
    """Of each layer's inputs, after ranks came with ranges of their own."""
    model = make(case, name)
    for _, quantizer in quantizers_of(model):
        if quantizer.amax is not None:
            quantizer._amax.mul_(1 + dist.get_rank())
    engine = build_engine(case, model)
    found = [part.value.item() for layer in engine.module.modules() if isinstance(layer, AutoEPMoELayer) for part in describe_buffers(layer) if part.shared]
    engine.destroy()
    return found


def test_ranges_are_those_of_rank_0():
    right = [value.item() for key, value in make(MIXTRAL, "INT8_DEFAULT_CFG").named_buffers() if "_input_quantizer" in key]
    assert len(right) == 4 and run_on(4, shared_ranges, MIXTRAL, "INT8_DEFAULT_CFG") == [right] * 4


def structures(case: Case, name: str) -> list[str]:
    """What is wrong with the structure of an engine's module, against that of the whole model."""
    saved = structure_of(make(case, name))
    engine = build_engine(case, make(case, name))
    wrong = []
    check_structure(saved, engine.module)
    if structure_of(engine.module).keys() != saved.keys():
        wrong.append("keys")
    for kind, model, structure in (("part", engine.module.model, saved), ("plain", engine.module, {}), ("other", engine.module, structure_of(make(case, "INT8_TENSOR")))):
        try:
            check_structure(structure, model)
        except ModelError:
            continue
        wrong.append(kind)
    engine.destroy()
    return wrong


def test_the_structure_is_that_of_the_whole_model():
    assert run_on(4, structures, FOLDINGS[2], "INT8_DEFAULT_CFG") == [[]] * 4


def forced_backend(case: Case, name: str) -> str:
    """The text of what the guard raises when the grouped backend runs quantized experts."""
    with mock.patch("deepspeed_autoep.engine.construction.is_quantized_site", lambda _site: False):
        engine = build_engine(case, make(case, name))
    batch = my_share(make_batches(1, case.samples, case.length)[0], case)
    try:
        engine(input_ids=batch, labels=batch)
    except ModelError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


@pytest.mark.parametrize("case", [FOLDINGS[1], replace(GPT_OSS, etp=2)], ids=str)
def test_quantizers_that_are_not_called_are_an_error_on_every_rank(case):
    for message in run_on(4, forced_backend, case, "INT8_DEFAULT_CFG"):
        assert "did not call" in message and "experts'" in message and "_quantizer" in message, message


def counted(case: Case, name: str) -> dict:
    """Of one forward and backward: calls of each quantizer by its logical name, experts with a gradient, all by layer."""
    engine = build_engine(case, make(case, name))
    found: dict = {"calls": {}, "trained": {}, "experts": []}
    for layer_name, layer in engine.module.named_modules():
        if not isinstance(layer, AutoEPMoELayer):
            continue
        shard = layer.autoep.shard
        found["experts"].append((shard.first, shard.last, len(layer.gate_up_proj_weight_quantizers), len(layer.down_proj_weight_quantizers)))
        for path, quantizer in quantizers_of(layer):
            parts = path.split(".")
            if len(parts) > 1:
                parts[1] = str(shard.first + int(parts[1]))
            key = ".".join([layer_name, *parts])
            found["calls"][key] = 0
            quantizer.register_forward_hook(lambda *_, key=key: found["calls"].update({key: found["calls"][key] + 1}))
    batch = my_share(make_batches(1, case.samples, case.length)[0], case)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    for layer_name, layer in engine.module.named_modules():
        if isinstance(layer, AutoEPMoELayer):
            for key in ("gate_up_proj", "down_proj"):
                seen = getattr(layer, key).grad.abs().amax((1, 2)) > 0
                found["trained"][f"{layer_name}.{key}"] = [layer.autoep.shard.first + index for index in seen.nonzero().flatten().tolist()]
    engine.destroy()
    return found


@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
def test_every_quantizer_is_there_and_called(folding):
    case = replace(folding, zero=0)
    results = run_on(4, counted, case, "INT8_DEFAULT_CFG")
    per_rank = 8 // case.ep
    for found in results:
        assert [(last - first, up, down) for first, last, up, down in found["experts"]] == [(per_rank,) * 3] * 2
        assert all(count > 0 for key, count in found["calls"].items() if "_input_quantizer" in key), "shared by all experts"
    calls = {key for found in results for key, count in found["calls"].items() if count}
    model = make(case, "INT8_DEFAULT_CFG")
    assert calls == {name for name, quantizer in quantizers_of(model) if is_active(quantizer)} and len(calls) == 2 * (2 * 8 + 2)
    for key in results[0]["trained"]:
        assert {expert for found in results for expert in found["trained"][key]} == set(range(8))


def parts_of(case: Case, name: str) -> list[tuple]:
    """Every buffer that this rank holds, as :func:`describe_buffers` says, and whether it holds the whole model's objects."""
    model = make(case, name)
    whole = {key: value.clone() for key, value in model.named_buffers()}
    objects = dict(quantizers_of(model))
    engine = build_engine(case, model)
    found = []
    for layer_name, layer in engine.module.named_modules():
        if not isinstance(layer, AutoEPMoELayer):
            continue
        first = layer.autoep.shard.first
        for index, quantizer in enumerate(layer.gate_up_proj_weight_quantizers):
            assert quantizer is objects[f"{layer_name}.gate_up_proj_weight_quantizers.{first + index}"]
        for part in describe_buffers(layer):
            expected = whole[part.name].reshape(part.shape)
            for dim, runs in enumerate(part.runs):
                expected = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in runs], dim)
            found.append((part.name, part.shape, part.runs, part.shared, torch.equal(expected, part.value)))
    engine.destroy()
    return found


@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
@pytest.mark.parametrize("name", ["INT8_DEFAULT_CFG", "NVFP4_STATIC"])
def test_description(folding, name):
    """Every entry of every buffer is held, each by the ranks that hold the weights: NVFP4 can be cut where it cannot run."""
    case = replace(folding, zero=0)
    held: dict[str, list] = {}
    for rank, parts in enumerate(run_on(4, parts_of, case, name)):
        for key, shape, runs, shared, equal in parts:
            assert equal, (rank, key)
            assert shared == ("_input_quantizer" in key)
            held.setdefault(key, []).append((shape, runs))
    names = {key for key, _ in make(case, name).named_buffers() if "experts" in key}
    assert held.keys() == names and any("_weight_quantizers.7._amax" in key for key in names)
    for key, copies in held.items():
        shape = copies[0][0]
        assert all(other == shape for other, _ in copies)
        entries = torch.zeros(shape, dtype=torch.int64)
        for _, runs in copies:
            index = [torch.cat([torch.arange(*run) for run in of_dim]) for of_dim in runs]
            entries[torch.meshgrid(*index, indexing="ij") if index else ...] += 1
        whole = "_input_quantizer" in key or not ("gate_up" in key or name == "NVFP4_STATIC") or "_global_amax" in key
        assert entries.unique().tolist() == [4 if "_input_quantizer" in key else 4 // case.ep if whole else 4 // case.ep // case.etp], key
