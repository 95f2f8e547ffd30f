"""What of a quantized model cannot be spread over ranks: the same clear error on every rank, before anything is cut."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("modelopt", reason="needs nvidia-modelopt, of the extra 'quantization'")

from deepspeed_autoep.quantization.quantizers import quantizers_of
from tests.unit.lora import EXPERTS, Lora, adapt
from tests.unit.models import make_batches
from tests.unit.pool import run_on
from tests.unit.quantized import make_quantized
from tests.unit.training import Case, build_engine, ds_config, my_share

BASE = ds_config(Case(ep=4))
ETP2 = ds_config(Case(ep=2, etp=2))
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj_"


def with_backend(backend: str) -> dict:
    return BASE | {"expert_parallel": BASE["expert_parallel"] | {"expert_backend": backend}}


def changed(change, family: str = "mixtral", name: str = "INT8_DEFAULT_CFG"):
    model = make_quantized(family, name)
    change(model, dict(quantizers_of(model)))
    return model


def learnable(model, quantizers) -> None:
    quantizers[f"{GATE_UP}weight_quantizers.0"].enable_lsq(quantize_scales=False)


def calibrating(model, quantizers) -> None:
    quantizers[f"{GATE_UP}weight_quantizers.3"].enable_calib()


def compressed(model, quantizers) -> None:
    quantizers[f"{GATE_UP}weight_quantizers.3"]._fake_quant = False


def grouped(model, quantizers) -> None:
    model.set_experts_implementation("grouped_mm")


def uneven(model, quantizers) -> None:
    quantizers[f"{GATE_UP}weight_quantizers.5"].reset_amax()


def uncalibrated_input(model, quantizers) -> None:
    quantizers[f"{GATE_UP}input_quantizer"].reset_amax()


def unknown_buffer(model, quantizers) -> None:
    quantizers[f"{GATE_UP}input_quantizer"].register_buffer("_svdquant_lora_a", torch.ones(2))


def unknown_shape(model, quantizers) -> None:
    quantizers[f"{GATE_UP}weight_quantizers.0"]._buffers["_amax"] = torch.ones(1, 95)


def unknown_quantizer(model, quantizers) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.output_quantizer = type(quantizers[f"{GATE_UP}input_quantizer"])()


def on_meta() -> torch.nn.Module:
    model = make_quantized("mixtral", "INT8_DEFAULT_CFG")
    return model.to("meta")


def with_lora():
    return adapt(make_quantized("mixtral", "INT8_DEFAULT_CFG"), Lora((), EXPERTS, injected=True))


BAD = {
    # name: (model, configuration, error, words of the message)
    "loop": (lambda: make_quantized("mixtral", "INT8_DEFAULT_CFG"), with_backend("loop"), "ConfigError", ["expert_backend='loop'", "'auto'", "'model'"]),
    "grouped_mm": (lambda: make_quantized("gpt_oss", "FP8_DEFAULT_CFG"), with_backend("grouped_mm"), "ConfigError", ["expert_backend='grouped_mm'"]),
    "grouped implementation": (lambda: changed(grouped), BASE, "ModelError", ["mlp.experts'", "'grouped_mm'", "set_experts_implementation('eager')"]),
    "dense under tp": (
        lambda: make_quantized("mixtral", "INT8_DEFAULT_CFG", ()),
        BASE,
        "ModelError",
        ["'model.layers.0.self_attn.q_proj'", "autotp_size", "'*self_attn.q_proj.*'", "'enable': False"],
    ),
    "smoothed dense layers, disabled": (
        lambda: disabled_dense(make_quantized("mixtral", "INT8_SMOOTHQUANT_CFG", ())),
        BASE,
        "ModelError",
        ["self_attn.q_proj.input_quantizer'", "autotp_size"],
    ),
    "moving range": (lambda: make_quantized("mixtral", "INT8_DYNAMIC"), BASE, "ModelError", [f"'{GATE_UP}input_quantizer'", "amax", "block_sizes={-1: None}"]),
    "uncalibrated": (lambda: changed(uncalibrated_input), BASE, "ModelError", [f"'{GATE_UP}input_quantizer'", "forward_loop"]),
    "moving range of dense layers": (
        lambda: make_quantized("mixtral", "INT8_DYNAMIC", ("*experts*",)),
        ds_config(Case(tp=1, ep=4)),
        "ModelError",
        ["amax", "a part only"],
    ),
    "tokens under etp": (
        lambda: make_quantized("mixtral", "INT8_PER_TOKEN"),
        ETP2,
        "ModelError",
        ["down_proj_input_quantizer'", "size 48", "expert_tensor_parallel_size=2"],
    ),
    "moving weights under etp": (
        lambda: make_quantized("mixtral", "INT8_DYNAMIC_WEIGHTS"),
        ETP2,
        "ModelError",
        ["down_proj_weight_quantizers.0'", "size 48", "expert_tensor_parallel_size=2"],
    ),
    "blocks under etp": (
        lambda: make_quantized("mixtral", "INT4_BLOCKS_OF_16"),
        ETP2,
        "ModelError",
        ["down_proj_weight_quantizers.0'", "blocks of 16", "parts of 24", "size 48"],
    ),
    "moving blocks under etp": (
        lambda: make_quantized("mixtral", "NVFP4_DEFAULT_CFG"),
        ETP2,
        "ModelError",
        ["down_proj_input_quantizer'", "blocks of 16", "parts of 24"],
    ),
    "sequence on a stack": (lambda: make_quantized("gpt_oss", "INT4_THEN_FP8"), BASE, "ModelError", ["gate_up_proj_weight_quantizer'", "SequentialQuantizer", "would not train"]),
    "learnable": (lambda: changed(learnable, name="INT4_BLOCKS_OF_8"), BASE, "ModelError", ["weight_quantizers.0'", "_amax_post", "LSQ"]),
    "calibrating": (lambda: changed(calibrating), BASE, "ModelError", ["weight_quantizers.3'", "calibrat"]),
    "compressed": (lambda: changed(compressed), BASE, "ModelError", ["weight_quantizers.3'", "fake_quant=False", "fake_quant=True"]),
    "uneven": (lambda: changed(uneven), BASE, "ModelError", ["weight_quantizers.5'", "expert 0"]),
    "unknown buffer": (lambda: changed(unknown_buffer), BASE, "ModelError", ["_svdquant_lora_a'", "'_amax'"]),
    "unknown shape": (lambda: changed(unknown_shape), BASE, "ModelError", ["weight_quantizers.0", "[1, 95]", "[96, 32]"]),
    "unknown quantizer": (lambda: changed(unknown_quantizer), BASE, "ModelError", ["'output_quantizer'", "legal"]),
    "meta": (on_meta, BASE, "ModelError", ["meta device", "weights on every rank"]),
    "adapters on experts": (with_lora, BASE, "ModelError", ["mlp.experts", "PEFT", "one of both"]),
}


def disabled_dense(model):
    for name, quantizer in quantizers_of(model):
        if "experts" not in name:
            quantizer.disable()
    return model


def calibrated_alone():
    """Without Model-Optimizer's own all-reduce of ranges, in which ranks with different models would not meet."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    return mock.patch.object(TensorQuantizer, "sync_amax_across_distributed_group", lambda *_: None)


def attempts(only_on: int | None) -> list[tuple[str, str]]:
    """Of each bad input (on rank ``only_on``, or all): the error's type and text."""
    import deepspeed_autoep

    found = []
    for build, config, *_ in BAD.values():
        bad = only_on in (None, dist.get_rank())
        with calibrated_alone():
            model = build() if bad else make_quantized("mixtral", "INT8_DEFAULT_CFG")
        try:
            deepspeed_autoep.initialize(
                model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), config=config if bad else BASE
            )
        except Exception as caught:
            found.append((type(caught).__name__, str(caught)))
        else:
            found.append(("nothing", ""))
    return found


@functools.cache
def results(only_on: int | None) -> list[list[tuple[str, str]]]:
    return run_on(4, attempts, only_on)


@pytest.mark.parametrize("only_on", [None, 2])
@pytest.mark.parametrize("name", BAD)
def test_bad_quantizers(name, only_on):
    position = list(BAD).index(name)
    for rank, found in enumerate(results(only_on)):
        kind, message = found[position]
        assert kind == (BAD[name][2] if only_on in (None, rank) else "RankMismatchError"), message
        for word in BAD[name][3]:
            assert word in message, message


def other_quantizers_on_one_rank() -> str:
    """Same parameters and buffers; one quantizer is set otherwise."""
    model = make_quantized("mixtral", "INT8_DEFAULT_CFG")
    if dist.get_rank() == 1:
        dict(quantizers_of(model))[f"{GATE_UP}weight_quantizers.2"].disable()
    try:
        build_engine(Case(ep=4), model)
    except Exception as caught:
        return f"{type(caught).__name__} {caught}"
    return "nothing"


def test_ranks_must_be_quantized_alike():
    for message in run_on(4, other_quantizers_on_one_rank):
        assert message.startswith("RankMismatchError") and "quantization" in message, message


def calibrated_afterwards() -> str:
    """Calibration on an engine's module."""
    case = Case(ep=4)
    engine = build_engine(case, make_quantized("mixtral", "INT8_DEFAULT_CFG"))
    for _, quantizer in quantizers_of(engine.module):
        if quantizer.is_enabled:
            quantizer.enable_calib()
    batch = my_share(make_batches(1, 4, 9)[0], case)
    try:
        engine(input_ids=batch, labels=batch)
    except Exception as caught:
        return f"{type(caught).__name__} {caught}"
    finally:
        engine.destroy()
    return "nothing"


def test_a_calibration_after_initialize_is_refused():
    for message in run_on(4, calibrated_afterwards):
        assert message.startswith("ModelError") and "before deepspeed_autoep.initialize" in message, message
