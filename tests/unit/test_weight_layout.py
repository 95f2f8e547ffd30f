"""How experts modules are recognised and how their weights lie."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.cutting import cut_expert_tensor, join_etp_parts
from deepspeed_autoep.moe.discovery import check_expert_sizes, find_experts
from deepspeed_autoep.moe.weight_layout import (
    ExpertShard,
    describe_layout,
    expected_tensor_names,
    expert_range,
)
from tests.unit.models import EXPERTS, HIDDEN, make_model

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)
E, H, I = 4, 6, 10  # noqa: E741 - the names of the shapes, all different
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
# (has_gate, is_transposed) -> shapes of the up projection and its bias, of the down projection and its bias, with the
# dimension that holds the intermediate size.
SHAPES = {
    (True, False): {
        "gate_up_proj": ((E, 2 * I, H), 1),
        "down_proj": ((E, H, I), 2),
        "gate_up_proj_bias": ((E, 2 * I), 1),
        "down_proj_bias": ((E, H), None),
    },
    (True, True): {
        "gate_up_proj": ((E, H, 2 * I), 2),
        "down_proj": ((E, I, H), 1),
        "gate_up_proj_bias": ((E, 2 * I), 1),
        "down_proj_bias": ((E, H), None),
    },
    (False, False): {
        "up_proj": ((E, I, H), 1),
        "down_proj": ((E, H, I), 2),
        "up_proj_bias": ((E, I), 1),
        "down_proj_bias": ((E, H), None),
    },
    (False, True): {
        "up_proj": ((E, H, I), 2),
        "down_proj": ((E, I, H), 1),
        "up_proj_bias": ((E, I), 1),
        "down_proj_bias": ((E, H), None),
    },
}
TINY = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
COMBINATIONS = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product([True, False], repeat=4)]


def tensors_of(flags: dict) -> dict:
    tensors = SHAPES[flags["has_gate"], flags["is_transposed"]]
    return {name: value for name, value in tensors.items() if flags["has_bias"] or not name.endswith("_bias")}


def shapes_of(flags: dict) -> dict:
    return {name: shape for name, (shape, _) in tensors_of(flags).items()}


def flag_ids(flags: dict) -> str:
    return "-".join(name for name, value in flags.items() if value) or "none"


every_layout = pytest.mark.parametrize("flags", COMBINATIONS, ids=flag_ids)


@every_layout
def test_layout_of_every_flag_combination(flags):
    layout = describe_layout(**flags, shapes=shapes_of(flags))
    assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (E, H, I)
    assert {name: getattr(layout, name) for name in FLAGS} == flags
    assert {t.name: (t.shape, t.intermediate_dim) for t in layout.tensors} == tensors_of(flags)
    concatenated = {name for name in tensors_of(flags) if "gate_up" in name and flags["is_concatenated"]}
    assert {t.name for t in layout.tensors if t.halves == 2} == concatenated
    assert layout.up_name == ("gate_up_proj" if flags["has_gate"] else "up_proj")


@every_layout
def test_a_cut_of_the_intermediate_size_is_the_layout_of_half_of_it(flags):
    """Halving each tensor along its ``intermediate_dim`` is again a layout: with I/2 and the same E and H."""
    halves = {}
    for tensor in describe_layout(**flags, shapes=shapes_of(flags)).tensors:
        shape = list(tensor.shape)
        if tensor.intermediate_dim is not None:
            shape[tensor.intermediate_dim] //= 2
        halves[tensor.name] = tuple(shape)
    layout = describe_layout(**flags, shapes=halves)
    assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (E, H, I // 2)


def forward(flags: dict, weights: dict, x: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert as the interface defines it, without the down projection's bias; x [R, H]."""
    up_name = "gate_up_proj" if flags["has_gate"] else "up_proj"
    up, down = weights[up_name][expert], weights["down_proj"][expert]
    up, down = (up, down) if flags["is_transposed"] else (up.T, down.T)
    inner = x @ up + (weights[f"{up_name}_bias"][expert] if flags["has_bias"] else 0.0)
    if flags["has_gate"]:
        gate, value = inner.chunk(2, -1) if flags["is_concatenated"] else (inner[:, ::2], inner[:, 1::2])
        inner = torch.nn.functional.silu(gate) * value
    else:
        inner = torch.nn.functional.relu(inner).square()
    return inner @ down


@every_layout
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2, 5, 10])
def test_cut_then_join_is_the_identity_and_parts_add_up(flags, ep, etp):
    layout = describe_layout(**flags, shapes=shapes_of(flags))
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes_of(flags).items()}
    x = torch.randn(3, H, generator=generator, dtype=torch.float64)
    joined = {name: [] for name in whole}
    for ep_rank in range(ep):
        shards = [ExpertShard.of(E, ep, ep_rank, etp, rank) for rank in range(etp)]
        parts = [{t.name: cut_expert_tensor(whole[t.name], t, shard) for t in layout.tensors} for shard in shards]
        for t in layout.tensors:
            for shard, part in zip(shards, parts, strict=True):
                assert part[t.name].shape == shard.shape(t) and part[t.name].is_contiguous()
                assert part[t.name].data_ptr() != whole[t.name].data_ptr(), "a view would keep the whole tensor alive"
            joined[t.name].append(join_etp_parts([part[t.name] for part in parts], t))
        for local in range(shards[0].last - shards[0].first):
            right = forward(flags, whole, x, shards[0].first + local)
            assert torch.allclose(sum(forward(flags, part, x, local) for part in parts), right, atol=1e-12)
    assert all(torch.equal(torch.cat(joined[name]), whole[name]) for name in whole)


@every_layout
def test_runs_of_all_peers_cover_the_intermediate_dimension_once(flags):
    for tensor in describe_layout(**flags, shapes=shapes_of(flags)).tensors:
        size = tensor.shape[tensor.intermediate_dim] if tensor.intermediate_dim is not None else 0
        for etp in (1, 2, 5):
            covered = sorted(i for rank in range(etp) for run in tensor.runs(etp, rank) for i in range(*run))
            assert covered == list(range(size))


@every_layout
def test_missing_and_unknown_tensors(flags):
    shapes = shapes_of(flags)
    names = list(expected_tensor_names(flags["has_gate"], flags["has_bias"]))
    assert sorted(names) == sorted(shapes)
    wrong = [{n: s for n, s in shapes.items() if n != missing} for missing in shapes] + [shapes | {"extra_scale": (E,)}]
    for found in wrong:
        with pytest.raises(ValueError) as caught:
            describe_layout(**flags, shapes=found)
        assert str(sorted(found)) in str(caught.value) and str(names) in str(caught.value)


@every_layout
def test_a_wrong_shape_names_the_tensor_and_what_was_expected(flags):
    for name, shape in shapes_of(flags).items():
        if name == "down_proj":
            continue  # the other shapes are judged by it
        for wrong in ((shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] + 1), shape[:-1]):
            with pytest.raises(ValueError) as caught:
                describe_layout(**flags, shapes=shapes_of(flags) | {name: wrong})
            assert str(caught.value).startswith(f"{name} has shape {list(wrong)}, expected {list(shape)}")


@every_layout
@pytest.mark.parametrize("wrong", [(E, H), (E * H * I,), (1, E, H, I)], ids=str)
def test_down_projection_must_be_stacked(flags, wrong):
    with pytest.raises(ValueError, match="down_proj has shape .* expected three dimensions") as caught:
        describe_layout(**flags, shapes=shapes_of(flags) | {"down_proj": wrong})
    assert str(list(wrong)) in str(caught.value)


@pytest.mark.parametrize(
    "flags, named",
    [
        *((flags, "gate_up_proj") for flags in COMBINATIONS if flags["has_gate"]),
        # Without a gate the up projection fits both ways round; only a bias tells H from I.
        *((flags, "up_proj_bias") for flags in COMBINATIONS if not flags["has_gate"] and flags["has_bias"]),
    ],
    ids=lambda value: flag_ids(value) if isinstance(value, dict) else value,
)
def test_a_wrong_transposed_flag_contradicts_the_shapes(flags, named):
    wrong = flags | {"is_transposed": not flags["is_transposed"]}
    with pytest.raises(ValueError, match=f"^{named} has shape"):
        describe_layout(**wrong, shapes=shapes_of(flags))


@PROPERTY
@given(st.integers(1, 64), st.integers(1, 64))
def test_expert_ranges_partition_the_experts(per_rank, ep_size):
    owned = [range(*expert_range(per_rank * ep_size, ep_size, rank)) for rank in range(ep_size)]
    assert {len(block) for block in owned} == {per_rank}
    assert [expert for block in owned for expert in block] == list(range(per_rank * ep_size))


@pytest.mark.parametrize(
    "family, layers, intermediate",
    [("mixtral", [0, 1], 48), ("qwen3_moe", [0, 1], 48), ("olmoe", [0, 1], 48), ("deepseek_v3", [1], 32)],
)
def test_experts_of_real_models_are_found(family, layers, intermediate):
    model = make_model(family)
    sites = find_experts(model)
    assert [site.name for site in sites] == [f"model.layers.{layer}.mlp.experts" for layer in layers]
    for site in sites:
        assert site.module is model.get_submodule(site.name)
        layout = site.layout
        assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (EXPERTS, HIDDEN, intermediate)
        assert {t.name: t.shape for t in layout.tensors} == {
            name: tuple(value.shape) for name, value in site.module.named_parameters()
        }


def test_gpt_oss_layout_is_transposed_interleaved_and_biased():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12, "pad_token_id": 0}
    (site,) = find_experts(transformers.GptOssForCausalLM(transformers.GptOssConfig(**TINY, **sizes)))
    layout = site.layout
    assert (layout.num_experts, layout.hidden_size, layout.intermediate_size) == (4, 8, 12)
    assert (layout.is_transposed, layout.is_concatenated, layout.has_bias) == (True, False, True)
    cut_dims = {"gate_up_proj": 2, "down_proj": 1, "gate_up_proj_bias": 1, "down_proj_bias": None}
    assert {t.name: t.intermediate_dim for t in layout.tensors} == cut_dims


class ListedExperts(nn.Module):
    """Experts in a list, as before transformers 5: no interface."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4)])


class StackedWithoutFlags(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(2, 3, 4))


def tiny_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, intermediate_size=16))


@pytest.mark.parametrize(
    "make, words",
    [
        (tiny_llama, ["LlamaForCausalLM", "It looks like a dense model"]),
        (lambda: nn.Sequential(ListedExperts()), ["look like experts without it: 0.experts (ModuleList)"]),
        (lambda: nn.Sequential(StackedWithoutFlags()), ["look like experts without it: 0 (StackedWithoutFlags)"]),
    ],
    ids=["dense", "list", "stacked"],
)
def test_a_model_without_experts_says_what_was_looked_for_and_where(make, words):
    model = make()
    with pytest.raises(ModelError) as caught:
        find_experts(model)
    for word in [*words, *FLAGS, "use_experts_implementation", "expert_parallel.enabled"]:
        assert word in str(caught.value)
    assert f"all {len(list(model.modules()))} modules" in str(caught.value)


def add_parameter(experts: nn.Module) -> None:
    experts.extra_scale = nn.Parameter(torch.ones(EXPERTS))


def flatten_weights(experts: nn.Module) -> None:
    for name, value in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(value.detach().flatten(0, 1)))


def add_adapter(experts: nn.Module) -> None:
    experts.adapter = nn.Linear(HIDDEN, 2, bias=False)


def set_attribute(name: str, value):
    return lambda experts: setattr(experts, name, value)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (add_parameter, ["extra_scale", "gate_up_proj", "down_proj"]),
        (flatten_weights, [f"down_proj has shape [{EXPERTS * HIDDEN}, 48]", "three dimensions"]),
        (add_adapter, ["submodules", "adapter.weight"]),
        (set_attribute("num_experts", 6), ["num_experts=6", f"{EXPERTS} experts"]),
        (set_attribute("num_experts", None), ["num_experts=None", f"{EXPERTS} experts"]),
        (set_attribute("is_transposed", True), ["gate_up_proj has shape", "'is_transposed': True"]),
        (set_attribute("has_bias", True), ["gate_up_proj_bias", "down_proj_bias"]),
        (set_attribute("has_post_expert_norm", True), ["has_post_expert_norm=True", "no module 'post_expert_norm'"]),
    ],
)
def test_an_experts_module_that_breaks_its_promise_is_named(spoil, words):
    model = make_model("mixtral")
    spoil(model.get_submodule("model.layers.1.mlp.experts"))
    with pytest.raises(ModelError) as caught:
        find_experts(model)
    for word in ["'model.layers.1.mlp.experts'", "MixtralExperts", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("ep_size", range(1, EXPERTS + 2))
def test_expert_counts(ep_size):
    sites = find_experts(make_model("mixtral"))
    if ep_size in (1, 2, 4, 8):
        check_expert_sizes(sites, ep_size)
        return
    with pytest.raises(ModelError) as caught:
        check_expert_sizes(sites, ep_size)
    words = [f"expert_parallel.autoep_size={ep_size}", "'model.layers.0.mlp.experts' has 8", "[1, 2, 4, 8]"]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("etp_size", [1, 2, 5, 7, 48])
def test_intermediate_sizes(etp_size):
    sites = find_experts(make_model("mixtral"))
    if 48 % etp_size == 0:
        check_expert_sizes(sites, 1, etp_size)
        return
    with pytest.raises(ModelError) as caught:
        check_expert_sizes(sites, 1, etp_size)
    for word in (f"expert_parallel.expert_tensor_parallel_size={etp_size}", "'model.layers.0.mlp.experts' has 48", "[1, 2, 3, 4, 6,"):
        assert word in str(caught.value)


def test_expert_counts_are_checked_in_every_module():
    sites = find_experts(make_model("mixtral")) + find_experts(make_model("deepseek_v3", n_routed_experts=6, n_group=1))
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.experts' has 6.*\[1, 2, 3, 6\]"):
        check_expert_sizes(sites, 4)
