"""What is measured: a Mixtral, its weights, batches, and the engines that train it. Runs inside the workers."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5


@dataclass(frozen=True)
class Workload:
    """One model on one topology. ``tokens`` is what each TP group (data-parallel rank) sees in a step."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    experts: int = 16
    top_k: int = 2
    heads: int = 8
    vocab: int = 128
    tokens: int = 512
    sequence: int = 128
    world: int = 4
    tp: int = 2
    ep: int = 4
    zero: int = 1
    shard_head: bool = False
    fused_adam: bool = False
    correction: str = "auto"  # ours only: expert_parallel.tp_gradient_correction

    def __post_init__(self) -> None:
        if self.tokens % self.sequence:
            raise ValueError(f"tokens={self.tokens} must be a multiple of sequence={self.sequence}")
        if self.world % self.tp or self.world % self.ep or self.experts % self.ep:
            raise ValueError(f"world={self.world} must be a multiple of tp={self.tp} and ep={self.ep}, experts of ep")

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def micro_batch(self) -> int:
        return self.tokens // self.sequence

    def describe(self) -> str:
        return (
            f"Mixtral hidden {self.hidden}, intermediate {self.intermediate}, {self.layers} layers, {self.experts} experts, "
            f"top-{self.top_k}, vocabulary {self.vocab}, {self.tokens} tokens a TP group ({self.micro_batch} x {self.sequence}), "
            f"tp{self.tp}/ep{self.ep} on {self.world} processes, fp32, ZeRO-{self.zero}, torch AdamW{' (fused)' if self.fused_adam else ''}, clipping at {CLIP}, "
            f"lm_head {'column-parallel, gathered' if self.shard_head else 'whole'}"
        )


def make_model(work: Workload) -> torch.nn.Module:
    """The same weights on every version of transformers: each tensor is drawn from a seed made of its name."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        num_local_experts=work.experts,
        num_experts_per_tok=work.top_k,
        max_position_embeddings=max(work.sequence, 64),
    )
    model = transformers.MixtralForCausalLM(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
            else:
                parameter.fill_(1.0)
    return model


def make_batch(work: Workload, step: int) -> torch.Tensor:
    """[dp * micro_batch, sequence] token ids of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(3, work.vocab, (work.dp * work.micro_batch, work.sequence), generator=generator)


def ds_config(work: Workload, *, stock: bool) -> dict:
    """The configuration of both engines. Stock needs a partition_config; ours reads the same cuts from the model."""
    tensor: dict = {"autotp_size": work.tp}
    if work.tp > 1 and (stock or not work.shard_head):
        columns = [r".*\.self_attn\.[qkv]_proj\.weight$"]
        specs = [
            {"patterns": columns, "partition_type": "column"},
            {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
        ]
        if work.shard_head:
            specs.append({"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True})
        tensor["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_clipping": CLIP,
        # The default bucket of 5e8 elements would be 2 GB of address space; the model fits this one as well.
        "zero_optimization": {"stage": work.zero, "reduce_bucket_size": 10_000_000},
        # Declared here, not passed: stock cannot split a client's optimizer into expert and dense groups.
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True, "fused": work.fused_adam}},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": work.ep,
            **({"preset_model": "mixtral"} if stock else {"tp_gradient_correction": work.correction}),
        },
        "tensor_parallel": tensor,
        "steps_per_print": 10**9,
    }


def build_engine(work: Workload, *, stock: bool):
    """``deepspeed.initialize`` or ``deepspeed_autoep.initialize``, with the same arguments."""
    if stock:
        import deepspeed as package
    else:
        import deepspeed_autoep as package

    model = make_model(work)
    engine, *_ = package.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(work, stock=stock)
    )
    return engine


def reference(work: Workload, steps: int) -> dict[str, list[float]]:
    """One plain PyTorch process on the whole batch: loss and gradient norm before clipping of each step."""
    model = make_model(work)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(steps):
        batch = make_batch(work, step)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        # In fp64: clip_grad_norm_ sums the squares of millions of elements in fp32, which is 3e-5 off here.
        norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, torch.tensor(norms[-1]))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}
