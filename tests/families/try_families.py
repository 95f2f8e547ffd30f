"""Build and train every family for two steps, one line each: ``python -m tests.families.try_families [names...]``."""

from __future__ import annotations

import sys
import time
import traceback

import torch
from torch import Tensor, nn

from deepspeed_autoep import compat
from tests.families.catalogue import Family, list_families
from tests.families.tiny import build, loss_of, make_batches

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def _experts(model: nn.Module, family: Family) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, family.experts)]


def _gradients(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the gradients of ``batches`` by parameter's name."""
    model.zero_grad()
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


def _off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a parameter's gradients, in parts of the larger of its and 1% of the largest one."""
    floor = 0.01 * max(value.abs().max() for value in one.values())
    return max(((one[key] - other[key]).abs().max() / max(one[key].abs().max(), floor)).item() for key in one)


def _built_twice(name: str) -> tuple[nn.Module, nn.Module]:
    # Filling what is uninitialised with NaN shows the weights that the model's initialisation forgets.
    torch.use_deterministic_algorithms(True)
    try:
        model, again = build(name), build(name)
    finally:
        torch.use_deterministic_algorithms(False)
    weights = again.state_dict()
    wrong = [key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])]
    if wrong:
        raise AssertionError(f"two builds differ, or are not numbers, in {wrong}")
    return model, again


def check(family: Family) -> str:
    """What the family is, in one line; raises where it does not train as a parity test needs."""
    model, again = _built_twice(family.name)
    experts = _experts(model, family)
    if not experts:
        raise AssertionError("no experts module")
    batches = make_batches(model, steps=2, samples=4, length=8)
    first, second = (loss_of(each, batches[0]).item() for each in (model, again))
    if first != second:
        raise AssertionError(f"two forwards differ: {first} and {second}")
    halves = [{key: value.chunk(2)[half] for key, value in batches[0].items()} for half in (0, 1)]
    whole = _gradients(model, batches[:1])
    repeat_off, halves_off = _off(whole, _gradients(again, batches[:1])), _off(whole, _gradients(again, halves))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        for module in experts:
            for key, value in module.named_parameters():
                if value.grad is None or not value.grad.isfinite().all() or not value.grad.any():
                    raise AssertionError(f"the experts' {key} has no gradient, or a zero or infinite one")
        optimizer.step()
    after = loss_of(model, batches[0]).item()
    if not all(torch.tensor([*losses, after]).isfinite()) or after == losses[0]:
        raise AssertionError(f"losses {losses}, then {after}")
    flags = ",".join(flag for flag in FLAGS if getattr(experts[0], flag))
    unused = sum(key not in whole for key, _ in model.named_parameters())
    return (
        f"ok tp_plan={bool(compat.hf_tp_plan(model))} {type(model).__name__} experts={len(experts)} {flags}"
        f" loss={losses[0]:.4f}->{after:.4f} repeat_off={repeat_off:.0e} halves_off={halves_off:.0e} unused={unused}"
    )


def main() -> None:
    names = sys.argv[1:]
    for family in list_families():
        if names and family.name not in names:
            continue
        start = time.perf_counter()
        try:
            outcome = check(family)
        except Exception as error:  # noqa: BLE001
            outcome = "FAILED " + traceback.format_exception_only(error)[-1].strip().replace("\n", " ")[:300]
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome += f" [{place.filename.rsplit('/', 1)[-1]}:{place.lineno}]"
        print(f"{family.name}: {outcome} {time.perf_counter() - start:.1f}s", flush=True)


if __name__ == "__main__":
    main()
