"""Exceptions of the package.

Each message names the key, module or parameter at fault, the value found, and what is legal.
"""

from __future__ import annotations


class AutoEPError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(AutoEPError, ValueError):
    """A configuration key is unknown, of a wrong type, out of range or in conflict with another."""


class TopologyError(AutoEPError, ValueError):
    """Sizes that do not tile the world, or ranks that do not agree on the topology."""


class ModelError(AutoEPError, ValueError):
    """The model cannot be parallelised as asked: no experts, an unknown layout, an indivisible size."""


class FamilyError(AutoEPError, ValueError):
    """A trainable parameter whose gradient family cannot be decided."""


class RankMismatchError(AutoEPError, RuntimeError):
    """Ranks that must hold the same data (samples, routing, gradients, settings) do not."""


class UnsupportedError(AutoEPError, NotImplementedError):
    """A combination that this version does not support; the message says what to use instead."""


class CheckpointError(AutoEPError, RuntimeError):
    """A checkpoint that is incomplete, damaged, of another model, or that could not be written."""
