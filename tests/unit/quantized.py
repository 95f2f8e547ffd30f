"""Tiny models whose experts Model-Optimizer has quantized, the same in every process."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings

import torch
from torch import nn

from tests.unit.models import make_batches, make_model

with warnings.catch_warnings():  # it warns of every version of transformers that it has not been tested with
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq

EXPERTS_ONLY = ("*self_attn*", "*lm_head*", "*embed_tokens*")  # patterns of what is left alone
INT4_BLOCKS = {"num_bits": 4, "block_sizes": {-1: 8, "type": "static"}}


def nvfp4(kind: str) -> dict:
    """In blocks of 8: parts of the tiny models' intermediate size, 48 / 2, are no whole number of the usual 16."""
    return {"num_bits": (2, 1), "block_sizes": {-1: 8, "type": kind, "scale_bits": (4, 3)}}


# Name -> quant_cfg entries of weights and inputs; the others are Model-Optimizer's own presets.
OWN = {
    "INT4_BLOCKS_OF_8": (INT4_BLOCKS, None),
    "INT4_BLOCKS_OF_16": ({"num_bits": 4, "block_sizes": {-1: 16, "type": "static"}}, None),
    "INT8_TILES": ({"num_bits": 8, "block_sizes": {-1: 8, -2: 12}}, None),
    "INT8_TENSOR": ({"num_bits": 8}, {"num_bits": 8}),
    "NVFP4_STATIC": (nvfp4("static"), nvfp4("dynamic")),
    "INT4_THEN_FP8": ([INT4_BLOCKS, {"num_bits": (4, 3)}], {"num_bits": (4, 3)}),
    "INT8_DYNAMIC": ({"num_bits": 8, "axis": 0}, {"num_bits": 8, "type": "dynamic"}),
    "INT8_DYNAMIC_WEIGHTS": ({"num_bits": 8, "axis": 0, "type": "dynamic"}, {"num_bits": 8}),
    "INT8_PER_TOKEN": ({"num_bits": 8, "axis": 0}, {"num_bits": 8, "type": "dynamic", "block_sizes": {-1: None}}),
}


def configuration(name: str, left_alone: tuple = EXPERTS_ONLY) -> dict:
    name, _, with_cache = name.partition("+")  # "+KV": keys and values of attention too
    if name in OWN:
        weight, inputs = OWN[name]
        entries = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": weight}]
        if inputs is not None:
            entries.append({"quantizer_name": "*input_quantizer", "cfg": inputs})
        config = {"quant_cfg": entries, "algorithm": "max"}
    else:
        config = copy.deepcopy(getattr(mtq, name))
    config["quant_cfg"] += [{"quantizer_name": pattern, "enable": False} for pattern in left_alone]
    if with_cache:
        config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3)}})
    return config


def quantize(model: nn.Module, name: str, left_alone: tuple = EXPERTS_ONLY) -> nn.Module:
    """Calibrated on the batches that the tests train with, before the process knows of any other."""
    data = make_batches(1, 4, 9)[0]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(model, configuration(name, left_alone), lambda inner: inner(input_ids=data))
    return model


def make_quantized(family: str, name: str, left_alone: tuple = EXPERTS_ONLY, **overrides) -> nn.Module:
    return quantize(make_model(family, **overrides), name, left_alone)
