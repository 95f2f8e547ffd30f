"""DeepSpeed training of Hugging Face mixture-of-experts models under folded tensor and expert parallelism."""

from __future__ import annotations

__version__ = "0.1.0"

_LAZY = {
    "initialize": "deepspeed_autoep.engine.initialize",
    "consolidated_state_dict": "deepspeed_autoep.checkpoint.consolidate",
    "AutoEPEngine": "deepspeed_autoep.engine.engine",
    "AutoEPMoELayer": "deepspeed_autoep.moe.layer",
    "GradientStatistics": "deepspeed_autoep.gradients.norms",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    """Import on first use: the pure parts (topology, families) must not pull in DeepSpeed."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
