"""Faults that other trainers had, each with its right value (those that no other file covers by name)."""

import pytest
import torch
import torch.distributed as dist

from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, my_share, parameter_error, reference_of, train, worst_errors


def expert_gradient(case: Case):
    """Trap 1: this rank's expert gradients after ZeRO-0's reduction, which ``step()`` starts with, against one process."""
    engine = build_engine(case)
    plain = make_model(case.family)
    batch = make_batches(1, case.samples, case.length)[0]
    share = my_share(batch, case)
    engine.backward(engine(input_ids=share, labels=share).loss)
    engine._reduce_whole_gradients()
    plain(input_ids=batch, labels=batch).loss.backward()
    handles, worst = engine.autoep.handles, 0.0
    right = dict(plain.named_parameters())
    for parameter, info in engine.autoep_families.items():
        if info.family.is_expert:
            first = handles.ep_rank * parameter.shape[0]
            worst = max(worst, parameter_error(parameter.grad, right[info.name].grad[first : first + parameter.shape[0]]))
    engine.destroy()
    return worst


@pytest.mark.parametrize(("tp", "ep"), [(1, 4), (1, 2), (1, 1), (2, 4), (4, 2)])
def test_expert_gradients_do_not_depend_on_ep(tp, ep):
    assert max(run_on(4, expert_gradient, Case(tp=tp, ep=ep, zero=0, clip=0.0))) < 1e-5


@pytest.mark.parametrize("coefficient", [0.001, 1.0, 20.0])
def test_auxiliary_loss_of_any_weight_reaches_the_router(coefficient):
    """Trap 7: neither tp times too large nor averaged away."""
    case = Case(tp=2, ep=4, optimizer="SGD", aux=True, overrides=(("router_aux_loss_coef", coefficient),))
    errors = worst_errors(run_on(4, train, case)[0], reference_of(case))
    assert max(errors["loss"], errors["norm"]) < 1e-5 and errors["parameter"] < 1e-4


def with_bias(model):
    """DeepSeek-V3's router adds a buffer to its scores when it chooses experts."""
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return model


def buffers_beside_experts(case: Case):
    """Trap 15: the buffer stays whole, keeps its value, and is used."""
    import deepspeed_autoep

    engine = build_engine(case, model=with_bias(make_model(case.family)))
    plain = with_bias(make_model(case.family))
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    batch = make_batches(1, case.samples, case.length)[0]
    share = my_share(batch, case)
    loss = engine(input_ids=share, labels=share).loss
    right = plain(input_ids=share, labels=share).loss
    without = make_model(case.family)(input_ids=share, labels=share).loss
    engine.backward(loss)
    engine.step()
    same = all(torch.equal(before[name], buffer) for name, buffer in engine.module.named_buffers())
    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    names = [name for name in plain.state_dict() if name.endswith("e_score_correction_bias")]
    saved = state is None or all(torch.equal(state[name], before[name]) for name in names)
    return len(names), same, saved, abs(loss - right).item(), abs(without - right).item()


def test_buffers_beside_experts_are_kept():
    for count, same, saved, error, effect in run_on(4, buffers_beside_experts, Case("deepseek_v3", tp=2, ep=4)):
        assert count == 1 and same and saved
        assert error < 1e-5 < effect  # without the buffer the loss is another


def tied(case: Case):
    """Trap 16: one parameter, in one group, counted once."""
    engine = build_engine(case)
    module = engine.module
    same = module.lm_head.weight is module.model.embed_tokens.weight
    share = my_share(make_batches(1, case.samples, case.length)[0], case)
    engine.backward(engine(input_ids=share, labels=share).loss)
    engine.step()
    still = module.lm_head.weight is module.model.embed_tokens.weight
    names = [info.name for info in engine.autoep_families.values() if "lm_head" in info.name or "embed_tokens" in info.name]
    engine.destroy()
    return same, still, names


def test_tied_embeddings_stay_one_parameter():
    case = Case(tp=2, ep=4, overrides=(("tie_word_embeddings", True),))
    assert run_on(4, tied, case) == [(True, True, ["model.embed_tokens.weight"])] * 4
    errors = worst_errors(run_on(4, train, case)[0], reference_of(case))
    assert max(errors["loss"], errors["norm"]) < 1e-5 and errors["parameter"] < 1e-4


def saved_and_loaded(case: Case, folder: str):
    """The consolidated model is an ordinary checkpoint: transformers loads it, with the same weights and the same loss."""
    from transformers import AutoModelForCausalLM

    import deepspeed_autoep

    engine = build_engine(case)
    share = make_batches(1, case.samples, case.length)[0]
    engine.backward(engine(input_ids=my_share(share, case), labels=my_share(share, case)).loss)
    engine.step()
    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.eval()
    with torch.no_grad():
        loss = engine(input_ids=share, labels=share).loss
    result = None
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        equal = all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
        with torch.no_grad():
            result = equal, abs(loaded(input_ids=share, labels=share).loss - loss).item()
    engine.destroy()
    return result


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe"])
def test_consolidated_state_is_an_ordinary_checkpoint(family, tmp_path):
    equal, difference = run_on(4, saved_and_loaded, Case(family, tp=2, ep=4), str(tmp_path))[0]
    assert equal and difference < 1e-5
