"""Real models of transformers' experts families against one process: a dozen in CI, all of them with ``make test-families``."""

import pytest

from tests.families.catalogue import list_families
from tests.families.parity import FOLDINGS, errors_of, has_tp_plan, limits_of

# All weight layouts: gpt_oss (interleaved, transposed, biased), aria (transposed), nemotron_h (no gate; state-space layers),
# muse_spark (a norm after the experts), the others concatenated. Latent attention: deepseek_v3, deepseek_v2. Linear
# attention: qwen3_next. Multimodal: qwen3_vl_moe. State-space: granitemoehybrid. Shared weights: diffusion_gemma.
DOZEN = (
    "aria",
    "deepseek_v2",
    "deepseek_v3",
    "diffusion_gemma",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "muse_spark",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
)
EVERY = [family.name for family in list_families()]


def check(name, folding):
    if folding.tp > 1 and not has_tp_plan(name):
        pytest.skip("transformers has no tp_plan for it")
    errors, limits = errors_of(name, folding), limits_of(name)
    assert all(errors[key] <= limits[key] for key in limits), (errors, limits)


@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
@pytest.mark.parametrize("name", [name for name in DOZEN if name in EVERY])
def test_family(name, folding):
    check(name, folding)


@pytest.mark.full
@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in DOZEN])
def test_family_full(name, folding):
    check(name, folding)


def test_the_installed_transformers_has_the_families():
    """A release that renames the decorator would leave nothing to test, without a word."""
    assert len(EVERY) >= 40 and len(set(EVERY)) == len(EVERY) and sum(name in EVERY for name in DOZEN) >= 12
