"""Bad input: the same clear error on every rank within seconds, whichever ranks it was given to."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.families.tiny import build as build_family
from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, ds_config, my_share

SECONDS = 60.0
BASE = ds_config(Case(ep=4))


def config_with(path: str, value) -> dict:
    config = copy.deepcopy(BASE)
    *blocks, key = path.split(".")
    place = config
    for block in blocks:
        place = place.setdefault(block, {})
    place[key] = value
    return config


def dense_model():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def misshapen_model():
    model = make_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.extra = torch.nn.Parameter(torch.zeros(8, 2, 2))
    return model


def meta_model():
    with torch.device("meta"):
        return make_model("mixtral")


def pipeline_model():
    from deepspeed import PipelineModule

    return PipelineModule.__new__(PipelineModule)


MODELS = {
    "mixtral": lambda: make_model("mixtral"),
    "kv_heads_2": lambda: make_model("mixtral", num_key_value_heads=2),
    "dense": dense_model,
    "misshapen": misshapen_model,
    "meta": meta_model,
    "pipeline": pipeline_model,
    "two latent heads": lambda: build_family("axk2", num_attention_heads=2, num_key_value_heads=2),
    "six latent heads": lambda: build_family("axk2", hidden_size=48, num_attention_heads=6, num_key_value_heads=6),
    "ddp": lambda: torch.nn.parallel.DistributedDataParallel(make_model("mixtral")),
}


def attempt(model: str, config: dict, only_on: int | None, arguments: dict):
    """initialize() with ``config`` on rank ``only_on`` (or all) and the base elsewhere: the error's type and text."""
    import deepspeed_autoep

    mine = config if only_on in (None, dist.get_rank()) else BASE
    built = MODELS[model if only_on in (None, dist.get_rank()) else "mixtral"]()
    try:
        stepper = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        deepspeed_autoep.initialize(model=built, optimizer=stepper, config=mine, **arguments)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


BAD_CONFIGS = {
    "misspelt key": ("expert_parallel.autoep_sise", 4, "ConfigError", ["autoep_sise", "autoep_size"]),
    "misspelt tensor key": ("tensor_parallel.autotp_sise", 2, "ConfigError", ["autotp_sise", "autotp_size"]),
    "misspelt block": ("expert_paralel", {}, "ConfigError", ["expert_paralel", "expert_parallel"]),
    "ep does not divide experts": ("expert_parallel.autoep_size", 3, "TopologyError", ["3", "4"]),
    "tp * dp != world": ("tensor_parallel.autotp_size", 3, "TopologyError", ["autotp_size=3", "[1, 2, 4]"]),
    "batch": ("train_batch_size", 7, "ConfigError", ["train_batch_size=7"]),
    "etp": ("expert_parallel.expert_tensor_parallel_size", 3, "TopologyError", ["expert_tensor_parallel_size", "3", "[1, 2, 4]"]),
    "ZeRO-3": ("zero_optimization.stage", 3, "UnsupportedError", ["zero_optimization.stage=3", "0, 1 or 2"]),
    "offload": (
        "zero_optimization.offload_optimizer",
        {"device": "cpu"},
        "UnsupportedError",
        ["offload_optimizer.device='cpu'", "remove"],
    ),
    "sequence parallelism": ("sequence_parallel_size", 2, "UnsupportedError", ["sequence_parallel_size=2", "autotp_size"]),
    "clipping": ("gradient_clipping", -1, "ConfigError", ["gradient_clipping=-1"]),
    "no object": ("bf16", [1], "ConfigError", ["bf16", "[1]"]),
    "muon": ("optimizer", {"type": "Muon"}, "UnsupportedError", ["optimizer.type='Muon'", "AdamW"]),
}


@pytest.mark.parametrize("only_on", [None, 2])
@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configuration(name, only_on):
    path, value, error, words = BAD_CONFIGS[name]
    results = run_on(4, attempt, "mixtral", config_with(path, value), only_on, {}, timeout=SECONDS)
    for rank, (kind, message) in enumerate(results):
        assert kind == (error if only_on in (None, rank) else "RankMismatchError")
        for word in words:
            assert word in message, message


def test_experts_that_ep_does_not_divide():
    config = config_with("expert_parallel.autoep_size", 4)
    config["tensor_parallel"]["autotp_size"] = 1
    for kind, message in run_on(6, attempt, "mixtral", {**config, "expert_parallel": {"enabled": True, "autoep_size": 3}}, None, {}):
        assert kind == "ModelError"
        assert "autoep_size=3" in message and "has 8" in message and "[1, 2, 4, 8]" in message


BAD_MODELS = {
    "dense": ("ModelError", ["LlamaForCausalLM", "looked in all", "has_gate", "expert_parallel.enabled"]),
    "misshapen": ("ModelError", ["model.layers.1.mlp.experts", "extra", "gate_up_proj"]),
    "meta": ("ConfigError", ["meta device", "expert_parallel.initial_weights"]),
    "pipeline": ("UnsupportedError", ["PipelineModule", "plain model"]),
    "ddp": ("UnsupportedError", ["DistributedDataParallel", "plain model"]),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_model(name):
    error, words = BAD_MODELS[name]
    for kind, message in run_on(4, attempt, name, BASE, None, {}, timeout=SECONDS):
        assert kind == error, message
        for word in words:
            assert word in message, message


def test_tp_that_does_not_divide_key_value_heads():
    config = config_with("tensor_parallel.autotp_size", 4)
    for kind, message in run_on(4, attempt, "kv_heads_2", config, None, {}, timeout=SECONDS):
        assert kind == "ModelError"
        assert "autotp_size=4" in message and "num_key_value_heads" in message and "k_proj" in message and "is 2" in message


@pytest.mark.parametrize(("model", "words"), [("two latent heads", ["kv_b_proj", "nothing for rank 2"]), ("six latent heads", ["q_gate_proj", "kv_b_proj"])])
def test_tp_that_does_not_divide_latent_heads(model, words):
    """Layers that AutoTP cuts unevenly, and not all of them alike."""
    for kind, message in run_on(4, attempt, model, config_with("tensor_parallel.autotp_size", 4), None, {}, timeout=SECONDS):
        assert kind == "ModelError"
        assert all(word in message for word in [*words, "autotp_size=4", "number of heads"]), message


@pytest.mark.parametrize("what", ["mpu", "mesh_param"])
def test_unsupported_arguments(what):
    for kind, message in run_on(4, attempt, "mixtral", BASE, None, {what: (2, 2)}, timeout=SECONDS):
        assert kind == "UnsupportedError" and what in message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("gradient_clipping", 0.25, ["gradient_clipping", "0.5", "0.25", "rank 0", "rank 1"]),
        ("expert_parallel.autoep_size", 2, ["ep_size", "4", "2", "rank 1"]),
        ("expert_parallel.enabled", False, ["expert_parallel.enabled", "True", "False"]),
    ],
)
def test_ranks_with_different_configurations(path, value, words):
    for kind, message in run_on(4, attempt, "mixtral", config_with(path, value), 1, {}, timeout=SECONDS):
        assert kind == "RankMismatchError", message
        for word in words:
            assert word in message, message


def test_ranks_with_different_models():
    results = run_on(4, attempt, "kv_heads_2", BASE, 3, {}, timeout=SECONDS)
    assert {kind for kind, _ in results} == {"RankMismatchError"}
    assert all("model" in message for _, message in results)


def different_samples(case: Case, after: int, one_group_only: bool):
    """From step ``after`` on every rank reads its own samples, as a loader that shards by global rank does."""
    engine = build_engine(case)
    batches = make_batches(6, 8, 9)
    for step, batch in enumerate(batches):
        own = step >= after and not (one_group_only and dist.get_rank() >= case.tp)
        share = batch[dist.get_rank() : dist.get_rank() + 1] if own else my_share(batch[:2], case)
        try:
            engine.backward(engine(input_ids=share, labels=share).loss)
            engine.step()
        except Exception as caught:
            engine.autoep.binding.restore()
            return step, type(caught).__name__, str(caught)
    engine.destroy()
    return None


@pytest.mark.parametrize("one_group_only", [False, True])
@pytest.mark.parametrize(("after", "always"), [(0, False), (1, False), (4, True)])
def test_lanes_with_different_samples(after, always, one_group_only):
    case = Case(samples=2, expert_config=(("validate_folding_routing", always),))
    for step, kind, message in run_on(4, different_samples, case, after, one_group_only, timeout=SECONDS):
        assert (step, kind) == (after, "RankMismatchError")
        assert "same samples" in message and "data-parallel rank" in message


def different_routing(case: Case):
    """Equal samples, but lanes draw their own router noise."""
    engine = build_engine(case)
    torch.manual_seed(dist.get_rank())
    share = my_share(make_batches(1, case.samples, case.length)[0], case)
    try:
        engine(input_ids=share, labels=share)
    except Exception as caught:
        engine.autoep.binding.restore()
        return type(caught).__name__, str(caught)
    return "nothing", ""


def test_lanes_with_different_random_states():
    case = Case(overrides=(("router_jitter_noise", 0.5),), expert_config=(("validate_folding_routing", True),))
    for kind, message in run_on(4, different_routing, case, timeout=SECONDS):
        assert kind == "RankMismatchError" and "model.layers.0.mlp.experts" in message and "random state" in message


def misused(case: Case):
    """Calls that would lose data, each with its error."""
    import deepspeed_autoep

    engine = build_engine(case)
    errors = []
    for call in (
        lambda: deepspeed_autoep.initialize(model=engine.module, config=BASE),
    ):
        try:
            call()
        except Exception as caught:
            errors.append((type(caught).__name__, str(caught)))
    engine.destroy()
    return errors


def test_calls_that_would_lose_data():
    for errors in run_on(4, misused, Case(), timeout=SECONDS):
        assert [kind for kind, _ in errors] == ["ModelError"]
        assert "folded already" in errors[0][1]


def optimizer_of(what: str):
    import deepspeed_autoep

    model, other = make_model("mixtral"), make_model("mixtral", seed=5)
    if what == "foreign":
        stepper = torch.optim.AdamW(other.parameters(), lr=1e-3)
    else:
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        stepper.step()
    try:
        deepspeed_autoep.initialize(model=model, optimizer=stepper, config=BASE)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


@pytest.mark.parametrize(("what", "words"), [("foreign", ["group 0", "model.parameters()"]), ("used", ["state already", "fresh"])])
def test_optimizers_that_cannot_be_taken(what, words):
    for kind, message in run_on(4, optimizer_of, what, timeout=SECONDS):
        assert kind == "ModelError", message
        assert all(word in message for word in words)


def without_the_block(config):
    import deepspeed

    import deepspeed_autoep

    config = {key: value for key, value in BASE.items() if key not in ("expert_parallel", "tensor_parallel")} | config
    engine, *_ = deepspeed_autoep.initialize(
        model=dense_model(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), config=config
    )
    kind = type(engine)
    engine.destroy()
    return kind is deepspeed.DeepSpeedEngine


@pytest.mark.parametrize("config", [{}, {"expert_parallel": {"enabled": False}}])
def test_without_the_block_it_is_deepspeed(config):
    assert run_on(4, without_the_block, config) == [True] * 4


def unknown_ops(rank: int | None):
    """The environment names implementations that do not exist, on one rank or on all."""
    import os

    import deepspeed_autoep

    if rank in (None, dist.get_rank()):
        os.environ["DEEPSPEED_AUTOEP_OPS"] = "foo"
    try:
        deepspeed_autoep.initialize(model=make_model("mixtral"), config=ds_config(Case()))
    except Exception as caught:
        return type(caught).__name__, str(caught)
    finally:
        os.environ.pop("DEEPSPEED_AUTOEP_OPS", None)
    return "nothing", ""


@pytest.mark.parametrize("rank", [None, 2])
def test_unknown_gradient_ops(rank):
    for own, (kind, message) in enumerate(run_on(4, unknown_ops, rank)):
        assert kind == ("ConfigError" if rank in (None, own) else "RankMismatchError")
        assert "DEEPSPEED_AUTOEP_OPS='foo': legal are" in message
