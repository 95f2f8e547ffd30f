"""Memory and time of getting a model onto its ranks: streamed from the meta device, or loaded whole by each of them.

    python -m tests.perf.bench_load [--gib 2] [--world 4] [--tp 2 --ep 4 --etp 1] [--csv PATH]

Writes a Mixtral of about ``--gib`` GiB in fp32 to a temporary folder, in files of at most 500 MB. Each way runs in fresh
processes: ``streamed`` builds under ``torch.device("meta")`` and sets ``expert_parallel.initial_weights``; ``whole`` calls
``from_pretrained`` on every rank, as without the key. Measured on each rank until ``initialize`` has returned (ZeRO-0, SGD
without momentum: no optimizer state): the peak of its anonymous memory (RssAnon, sampled each 2 ms, above that before the
model was built, after a tiny model went the same way; mapped files are not the process's own), against the bytes of its part and of the largest tensor. The limit
in time is one plain read of the files by one process.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from pathlib import Path

from tests.perf.report import Report, hardware, load_average, table, today

WAYS = ("streamed", "whole")


def config_of(gib: float, hidden: int = 1024):
    """Almost all in the experts of eight layers; the vocabulary and attention are small beside."""
    import transformers

    layers, experts = 8, 8
    intermediate = max(1, int(gib * 2**30 / 4 / (layers * experts * 3 * hidden)) // 64) * 64
    return transformers.MixtralConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=experts,
        num_experts_per_tok=2,
    )


def build(way: str, folder: str, options):
    """An engine, in one of the two ways."""
    import torch
    import transformers

    import deepspeed_autoep

    expert = {"enabled": True, "autoep_size": options.ep, "expert_tensor_parallel_size": options.etp}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "expert_parallel": expert | ({"initial_weights": folder} if way == "streamed" else {}),
        "tensor_parallel": {"autotp_size": options.tp},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }
    if way == "streamed":
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return deepspeed_autoep.initialize(model=model, config=config)[0]


def load(rank: int, port: int, way: str, folder: str, options, results) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import deepspeed
    import torch
    import transformers

    from tests.perf.memory import AnonymousPeak, tensor_bytes

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    deepspeed.init_distributed("gloo", verbose=False)
    build(way, folder + "/tiny", options).destroy()  # imports, caches and communication buffers
    torch.distributed.barrier()
    with AnonymousPeak() as held:
        start = time.perf_counter()
        engine = build(way, folder, options)
        seconds = time.perf_counter() - start
    own = tensor_bytes(engine.module.parameters())
    largest = max(max(math.prod(tensor.shape) for tensor in site.layout.tensors) for site in engine.autoep.sites) * 4
    check = float(sum(parameter.detach().double().sum() for parameter in engine.module.parameters()))
    results.put((rank, {"own": own, "largest": largest, "peak": held.peak, "seconds": seconds, "sum": check}))
    torch.distributed.barrier()


def run(way: str, folder: str, options) -> dict[int, dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=load, args=(rank, port, way, folder, options, results)) for rank in range(options.world)]
    for process in processes:
        process.start()
    outcome = dict(results.get(timeout=900) for _ in processes)
    for process in processes:
        process.join()
    return outcome


def plain_read(folder: str) -> float:
    start = time.perf_counter()
    for path in Path(folder).glob("*.safetensors"):
        with open(path, "rb") as file:
            while file.read(2**24):
                pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    for key, value in (("world", 4), ("tp", 2), ("ep", 4), ("etp", 1)):
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="whole needs twice the model on every rank")
    parser.add_argument("--csv")
    options = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    import deepspeed
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            model = transformers.MixtralForCausalLM(config_of(options.gib))
            model.save_pretrained(folder, max_shard_size="500MB")
            transformers.MixtralForCausalLM(config_of(0.001, hidden=64)).save_pretrained(f"{folder}/tiny")
        size = sum(parameter.nbytes for parameter in model.parameters())
        del model
        report = Report(
            {
                "date": today(),
                "bytes": str(size),
                "topology": f"world {options.world}, tp {options.tp}, ep {options.ep}, etp {options.etp}",
                **hardware(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
                "transformers": transformers.__version__,
                "load_average": load_average(),
            }
        )
        report.add("limit", "seconds", "plain read", "s", plain_read(folder))
        sums, rows = {}, []
        for way in options.ways:
            outcome = run(way, folder, options)
            sums[way] = [outcome[rank]["sum"] for rank in range(options.world)]
            for measure in ("own", "largest", "peak", "seconds"):
                report.add(way, measure, "rank", "s" if measure == "seconds" else "bytes", [outcome[rank][measure] for rank in outcome])
            excess = [(each["peak"] - each["own"]) / each["largest"] for each in outcome.values()]
            report.add(way, "beyond the own part", "rank", "largest tensors", excess)
            found = {measure: report.find(way, measure, "rank") for measure in ("own", "largest", "peak", "seconds", "beyond the own part")}
            rows.append(
                [
                    way,
                    *(f"{found[measure].high / 2**20:.0f}" for measure in ("own", "largest", "peak")),
                    f"{found['beyond the own part'].high:.2f}",
                    f"{found['seconds'].high:.1f}",
                ]
            )
        if len({tuple(each) for each in sums.values()}) > 1:
            raise SystemExit(f"the two ways give different weights: {sums}")
        rows.append(["one plain read", "", "", "", "", f"{report.find('limit', 'seconds', 'plain read').median:.1f}"])
        print(table(f"a model of {size / 2**20:.0f} MiB, worst rank of {report.context['topology']}", ["way", "own part MiB", "largest tensor MiB", "peak MiB", "beyond own, in largest tensors", "seconds"], rows))
        report.save(options.csv)


if __name__ == "__main__":
    main()
