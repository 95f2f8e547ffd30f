"""The model stays the user's: names, ties, hooks, files; and one that goes around its experts modules is an error."""

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, my_share, parameter_error, relative


def names_of(model) -> dict[str, list[str]]:
    return {
        "state": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "every parameter": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
    }


def kept(case: Case):
    """Names before and after; identities of the parameters; whether a plain model takes the gathered state."""
    import deepspeed_autoep

    model = make_model(case.family, **dict(case.overrides))
    before, objects = names_of(model), {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    engine = build_engine(case, model=model)
    tokens = torch.arange(3, 12).view(1, 9)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    after = names_of(engine.module)
    changed = [key for key in before if before[key] != after[key]]
    moved = [name for name, p in engine.module.named_parameters(remove_duplicate=False) if id(p) != objects[name]]
    unhooked = [name for name in before["parameters"] if calls.get(name) != 1]
    state = deepspeed_autoep.consolidated_state_dict(engine)
    tied = engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    engine.destroy()
    loaded = True
    if state is not None:
        fresh = make_model(case.family, seed=9, **dict(case.overrides))
        fresh.load_state_dict(state, strict=True)
        loaded = all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items()) and list(state) == before["state"]
    return changed, moved, unhooked, tied, loaded


TIED = (("tie_word_embeddings", True),)
KEPT = [
    Case("mixtral", 4, 2, 4, 1, samples=2),
    Case("gpt_oss", 4, 2, 2, 0, samples=2, etp=2),
    Case("deepseek_v3", 4, 2, 2, 2, samples=2),
    Case("mixtral", 4, 2, 1, 2, samples=2, etp=2, overrides=TIED),
    Case("gpt_oss", 4, 4, 2, 1, samples=1, etp=1, overrides=TIED),
    Case("deepseek_v3", 4, 1, 4, 0, samples=4),
]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_names_objects_hooks_and_ties_stay(case):
    for changed, moved, unhooked, tied, loaded in run_on(case.world, kept, case):
        assert (changed, moved, unhooked) == ([], [], [])
        assert tied == bool(case.overrides)
        assert loaded


def from_files(case: Case, folder: str):
    """Loaded by each rank from a folder, trained folded and in one process, written, and loaded again."""
    import deepspeed_autoep

    load = lambda where: transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).train()  # noqa: E731
    engine, plain = build_engine(case, model=load(f"{folder}/start")), load(f"{folder}/start")
    stepper, worst = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9), 0.0
    for batch in make_batches(3, case.samples, case.length):
        stepper.zero_grad()
        right = plain(input_ids=batch, labels=batch).loss
        right.backward()
        share = my_share(batch, case)
        loss = engine(input_ids=share, labels=share).loss
        engine.backward(loss)
        engine.step()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        stepper.step()
        total = loss.detach().double()
        dist.all_reduce(total, group=engine.autoep.handles.dense_dp_group)
        worst = max(
            worst,
            relative(total.item() / engine.autoep.handles.spec.dp_size, right.item()),
            relative(float(engine.get_global_grad_norm()), norm.item()),
        )
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=batch).logits
    state = deepspeed_autoep.consolidated_state_dict(engine)
    if state is not None:
        engine.module.save_pretrained(f"{folder}/end", state_dict=state)
    dist.barrier()
    engine.destroy()
    again = load(f"{folder}/end").eval()
    with torch.no_grad():
        worst = max(worst, parameter_error(logits, again(input_ids=batch).logits))
    if state is not None:
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
        worst = max(worst, *(parameter_error(state[name], value) / 10 for name, value in plain.state_dict().items()))
    return worst, again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_from_pretrained_and_back(family, tied, tmp_path):
    overrides = TIED if tied else ()
    make_model(family, **dict(overrides)).save_pretrained(tmp_path / "start")
    case = Case(family, 4, 2, 2, int(tied), "SGD", etp=2 if family == "gpt_oss" else 1, overrides=overrides, clip=0.2)
    for worst, still_tied in run_on(4, from_files, case, str(tmp_path)):
        assert worst < 1e-5 and still_tied == tied


def going_around(how: str):
    """A block that computes with the experts' weights itself. What training says, and how often layers were called."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    class Around(MixtralSparseMoeBlock):
        def forward(self, hidden_states):
            if how == "asks":  # of its dtype and size, and calls
                rows = hidden_states.to(self.experts.gate_up_proj.dtype)
                assert self.experts.gate_up_proj.dim() == 3 and self.experts.down_proj.shape[1] == rows.shape[-1]
                return super().forward(rows)
            if how == "skips":  # as image experts without an image
                return hidden_states
            if how == "both":
                return super().forward(hidden_states) + self.experts.down_proj[0].mean()
            first = self.experts.gate_up_proj[0] if how == "reads" else self.experts.gate_up_proj.data[0]
            gate, up = torch.nn.functional.linear(hidden_states, first).chunk(2, dim=-1)
            return torch.nn.functional.linear(gate * up, self.experts.down_proj[0])

    case = Case(ep=4, zero=0)
    model = make_model("mixtral")
    model.model.layers[1].mlp.__class__ = Around
    engine = build_engine(case, model=model)
    watching = []
    try:
        for batch in make_batches(2, case.samples, case.length):
            share = my_share(batch, case)
            engine.backward(engine(input_ids=share, labels=share).loss)
            engine.step()
            watching.append(engine._autoep_interface_check is not None)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    finally:
        engine.autoep.binding.restore()
    return "nothing", watching


@pytest.mark.parametrize("how", ["reads", "data", "both"])
def test_a_block_that_goes_around_its_experts_module(how):
    for kind, message in run_on(4, going_around, how, timeout=60.0):
        assert kind == "ModelError", message
        assert "'model.layers.1.mlp.experts'" in message and "outside of its own forward" in message


@pytest.mark.parametrize(("how", "watching"), [("asks", [False, False]), ("skips", [True, True])])
def test_blocks_that_may(how, watching):
    assert run_on(4, going_around, how) == [("nothing", watching)] * 4
