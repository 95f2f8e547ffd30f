"""Train a small mixture-of-experts model on bytes of real text, and compare it with one plain PyTorch process.

    deepspeed --num_accelerators 4 examples/train.py --deepspeed_config examples/ds_config.json
    torchrun --nproc_per_node 4 examples/train.py --deepspeed_config examples/ds_config.json

The configuration decides how the model is spread (tensor_parallel, expert_parallel), the batch and the optimizer.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from corpus import VOCAB, Corpus, CorpusError, load_corpus
from deepspeed.utils import logger as deepspeed_logger
from options import RANK, default_steps, fail, parse_arguments, read_config
from reference import NotComparable, OptimizerRecipe, Step, largest_difference, train_plain
from report import Metrics, plot
from small_models import ModelChoiceError, build_model, model_config, randomness
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig

import deepspeed_autoep
from deepspeed_autoep.errors import AutoEPError

VALIDATION_BATCH = 16
TEMPERATURE = 0.7
TEXTS = 3


@dataclass(frozen=True)
class Data:
    """The corpus as one rank sees it: every rank draws the same batch, the lanes of a TP group take the same share."""

    corpus: Corpus
    length: int
    seed: int
    micro: int  # samples of one forward on one data-parallel rank
    accumulation: int
    dp_size: int
    dp_index: int

    def batch(self, step: int) -> torch.Tensor:
        """[accumulation * dp * micro, length]."""
        return self.corpus.batch(step, self.accumulation * self.dp_size * self.micro, self.length, self.seed)

    def micro_batches(self, step: int) -> torch.Tensor:
        """[accumulation, micro, length], of this rank."""
        return self.batch(step).view(self.accumulation, self.dp_size, self.micro, self.length)[:, self.dp_index]

    def validation(self, samples: int) -> torch.Tensor:
        """[samples, length], made equally many for each data-parallel rank."""
        return self.corpus.validation_windows(-(-samples // self.dp_size) * self.dp_size, self.length)

    def my_validation(self, samples: int) -> torch.Tensor:
        return self.validation(samples).chunk(self.dp_size)[self.dp_index]


@dataclass(frozen=True)
class Outcome:
    """What rank 0 keeps of the distributed run."""

    metrics: Metrics
    data: Data
    recipe: OptimizerRecipe | NotComparable
    clipping: float
    dtype: torch.dtype
    layout: str


def mean_over_ranks(value: torch.Tensor) -> float:
    """Lanes of a TP group hold equal values, so the mean over all ranks is the mean over data-parallel ranks."""
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def validation_loss(model, windows: torch.Tensor, device) -> torch.Tensor:
    """Mean nats a byte over [samples, length] windows, without a model's auxiliary losses."""
    model.eval()
    losses = []
    for batch in windows.to(device).split(VALIDATION_BATCH):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        losses.append(cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    model.train()
    return torch.stack(losses).sum() / windows[:, 1:].numel()


def build_engine(config: PreTrainedConfig, arguments):
    model = build_model(config, arguments.seed)
    try:
        engine, *_ = deepspeed_autoep.initialize(
            model=model, model_parameters=model.parameters(), config=arguments.deepspeed_config
        )
    except AutoEPError as error:
        fail(str(error))
    return engine


def resume(engine, folder: str | None, steps: int) -> int:
    """Load the last checkpoint of ``folder``, if there is one. Returns the number of steps that were taken before."""
    if folder is None or not (Path(folder) / "latest").exists():
        return 0
    try:
        _, client_state = engine.load_checkpoint(folder)
    except AutoEPError as error:
        fail(str(error))
    # Batches follow from the step, so this is the position in the data, too.
    if client_state["step"] >= steps:
        fail(f"--checkpoints {folder} is at step {client_state['step']} already: give more --steps")
    return client_state["step"]


def train(engine, data: Data, before: int, steps: int, arguments, metrics: Metrics | None) -> None:
    """The training loop, after ``before`` steps. ``metrics`` is rank 0's."""
    windows = data.my_validation(arguments.eval_windows)
    interval = 0.2 if sys.stderr.isatty() else 10.0
    bar = tqdm(range(before + 1, steps + 1), disable=metrics is None, mininterval=interval, desc="training", dynamic_ncols=True)
    for step in bar:
        start = time.perf_counter()
        rate = engine.get_lr()[0]
        total = torch.zeros((), device=engine.device)
        batches = data.micro_batches(step).to(engine.device)
        for batch in batches:
            loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        loss = mean_over_ranks(total / data.accumulation)
        norm = float(engine.get_global_grad_norm())
        speed = batches.numel() * data.dp_size / (time.perf_counter() - start)
        if metrics is not None:
            metrics.add_step(step=step, loss=loss, grad_norm=norm, lr=rate, tokens_per_s=speed)
            bar.set_postfix(loss=f"{loss:.3f}", grad_norm=f"{norm:.2f}", tokens_per_s=f"{speed:.0f}", refresh=False)
        if step % arguments.eval_every == 0 or step == steps:
            loss = mean_over_ranks(validation_loss(engine, windows, engine.device))
            if metrics is not None:
                metrics.add_validation(step, loss)
        if arguments.checkpoints and (step % arguments.checkpoint_every == 0 or step == steps):
            engine.save_checkpoint(arguments.checkpoints, client_state={"step": step}, asynchronous=True)
    engine.wait_for_checkpoint()


def run_distributed(config: PreTrainedConfig, corpus: Corpus, steps: int, arguments) -> tuple[Outcome, Path] | None:
    """Train and save on all ranks. Rank 0 gets the outcome and the run's folder."""
    engine = build_engine(config, arguments)
    spec = engine.autoep.handles.spec
    data = Data(
        corpus,
        arguments.length,
        arguments.seed,
        micro=engine.train_micro_batch_size_per_gpu(),
        accumulation=engine.gradient_accumulation_steps(),
        dp_size=spec.dp_size,
        dp_index=dist.get_rank() // spec.tp_size,
    )
    before = resume(engine, arguments.checkpoints, steps)
    folder = metrics = None
    if RANK == 0:
        folder = Path(arguments.output) / (arguments.name or datetime.now().strftime("%Y-%m-%d-%H%M%S"))
        folder.mkdir(parents=True)
        metrics = Metrics(folder)
    train(engine, data, before, steps, arguments, metrics)

    state = deepspeed_autoep.consolidated_state_dict(engine)
    outcome = None
    if RANK == 0:
        engine.module.save_pretrained(folder / "model", state_dict=state)
        try:
            if before:
                raise NotComparable(f"the run went on from step {before}")
            recipe = OptimizerRecipe.of(engine.basic_optimizer)
        except NotComparable as reason:
            recipe = reason
        dtype = next(engine.module.parameters()).dtype
        layout = f"{config.model_type}, dp {spec.dp_size} x tp {spec.tp_size}, ep {spec.ep_size}"
        outcome = Outcome(metrics, data, recipe, engine.gradient_clipping(), dtype, layout)
    engine.destroy()
    dist.destroy_process_group()
    return None if outcome is None else (outcome, folder)


def run_reference(config: PreTrainedConfig, outcome: Outcome, arguments) -> list[Step]:
    """The first steps again, in this process alone, with the learning rates that were used. Raises NotComparable."""
    if isinstance(outcome.recipe, NotComparable):
        raise outcome.recipe
    if setting := randomness(config):
        raise NotComparable(f"the model draws random numbers in training ({setting})")
    data, first = outcome.data, outcome.metrics.training[: arguments.compare_steps]
    has_auxiliary_loss = getattr(config, "output_router_logits", False)
    return train_plain(
        build_model(config, arguments.seed),
        outcome.recipe,
        (data.batch(entry["step"]) for entry in first),
        [entry["lr"] for entry in first],
        outcome.clipping,
        shares=data.accumulation * (data.dp_size if has_auxiliary_loss else 1),
    )


def compare(outcome: Outcome, reference: list[Step]) -> str:
    first = outcome.metrics.training[: len(reference)]
    loss = largest_difference([entry["loss"] for entry in first], [step.loss for step in reference])
    norm = largest_difference([entry["grad_norm"] for entry in first], [step.grad_norm for step in reference])
    name = str(outcome.dtype).removeprefix("torch.")
    return (
        f"first {len(reference)} steps in {name} against one plain PyTorch process in float32: "
        f"largest relative difference of the loss {loss:.1e}, of the gradient norm {norm:.1e}"
    )


@torch.no_grad()
def generate(model, corpus: Corpus, arguments) -> list[str]:
    prompt = arguments.prompt.encode() if arguments.prompt else bytes(corpus.validation[:32].tolist())
    tokens = torch.tensor([list(prompt)])
    torch.manual_seed(arguments.seed)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=TEMPERATURE,
        num_return_sequences=TEXTS,
        min_new_tokens=arguments.generate,
        max_new_tokens=arguments.generate,
        pad_token_id=0,
    )
    # A model of a larger vocabulary may draw tokens that are no bytes.
    return [bytes(token for token in text if token < VOCAB).decode(errors="replace") for text in output.tolist()]


def finish(config: PreTrainedConfig, outcome: Outcome, folder: Path, arguments) -> None:
    """Rank 0, alone: the other ranks have ended."""
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        reference = run_reference(config, outcome, arguments) if arguments.compare_steps else []
        verdict = compare(outcome, reference) if reference else "no comparison: --compare_steps 0"
    except NotComparable as reason:
        reference, verdict = [], f"no comparison with one plain process: {reason}"
    entropy = outcome.data.corpus.unigram_entropy()
    outcome.metrics.add_reference(reference)
    outcome.metrics.close()
    plot(folder / "loss.png", outcome.metrics, reference, entropy, outcome.layout)

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for text in generate(model, outcome.data.corpus, arguments):
        print(f"\n--- text by the saved model\n{text}")
    reloaded = validation_loss(model, outcome.data.validation(arguments.eval_windows), "cpu").item()
    print(f"\nmetrics.jsonl, loss.png and the model are in {folder}")
    print(
        f"validation loss {outcome.metrics.validation[-1]['validation_loss']:.4f} nats a byte ({reloaded:.4f} by the "
        f"saved model), unigram entropy of {outcome.data.corpus.source} {entropy:.4f} nats a byte"
    )
    print(verdict, flush=True)


def quieten() -> None:
    """Leave out what every rank would say in each run without a consequence."""
    deepspeed_logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning)


def main() -> None:
    arguments = parse_arguments(__doc__)
    steps = arguments.steps or default_steps(read_config(arguments.deepspeed_config))
    quieten()
    try:
        corpus = load_corpus(arguments.data, arguments.length)
        config = model_config(arguments.model)
    except (CorpusError, ModelChoiceError) as error:
        fail(str(error))
    positions = getattr(config, "max_position_embeddings", arguments.length)
    if arguments.length > positions:
        fail(f"--length {arguments.length}: the model has {positions} positions")
    result = run_distributed(config, corpus, steps, arguments)
    if result is not None:
        finish(config, *result, arguments)


if __name__ == "__main__":
    main()
