"""What the server that workers are forked from imports, once: the engine, and what it and the tests' models import when they are
first used (transformers' modeling files; torch's compiler, by DeepSpeed's look at a ZeRO optimizer).

Ends by taking all of it out of the garbage collector's sight: to look through it takes as long as a small test.
"""

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import transformers

import deepspeed_autoep.checkpoint.load
import deepspeed_autoep.checkpoint.save
import deepspeed_autoep.engine.initialize  # noqa: F401
from tests.unit.models import FAMILIES
from tests.unit.pool import die_with_parent

die_with_parent()
for _name, _ in FAMILIES.values():
    getattr(transformers, f"{_name}ForCausalLM")

gc.collect()
gc.freeze()
