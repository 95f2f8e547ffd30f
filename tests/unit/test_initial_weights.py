"""Models built on the meta device, their weights streamed from safetensors files."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, reference_of, train, worst_errors

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


@functools.cache
def _folders() -> dict:
    return {}


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
