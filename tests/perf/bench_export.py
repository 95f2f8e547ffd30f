"""Memory and time of writing a Hugging Face folder: tensor by tensor, or by save_pretrained.

    python -m tests.perf.bench_export [--gib 0.5] [--shard-mb 100] [--csv PATH]

A Mixtral of about ``--gib`` GiB in fp32 lies in files under its in-memory names. Each way runs in a fresh process:
``export`` reads tensors from these files, a copy of each as if gathered; ``groups`` does too, with all experts of a layer at a
time; ``whole`` loads the model and calls save_pretrained. Measured: the peak of the process's anonymous memory (RssAnon,
sampled each 2 ms; mapped files are not the process's own) above that before, and the time. The limit in time is one plain copy of
the files, flushed to disk as exported files are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.perf.bench_load import AnonymousPeak, config_of
from tests.perf.report import Report, hardware, load_average, table, today

WAYS = ("export", "groups", "whole")


class FolderSource:
    """Files with a model's own names."""

    def __init__(self, folder: str) -> None:
        from deepspeed_autoep.weights.files import SafetensorsFolder

        self.folder = SafetensorsFolder.open(folder)

    def names(self) -> list[str]:
        return list(self.folder.tensors)

    def describe(self, name: str):
        return self.folder.tensors[name].shape, self.folder.tensors[name].dtype

    def read(self, name: str, expert: int | None = None):
        return self.folder.read(name, expert).clone()


def write(way: str, source: str, out: str, shard: int) -> dict[str, float]:
    """One way, in this process."""
    import torch
    import transformers

    from deepspeed_autoep.weights import reversal
    from deepspeed_autoep.weights.export import export_folder

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with torch.device("meta"):
        meta = transformers.MixtralForCausalLM(transformers.AutoConfig.from_pretrained(source))
    if way == "groups":
        reversal._by_expert = lambda group, *_: group
    if way != "whole":
        with torch.device("cpu"):
            tiny = transformers.MixtralForCausalLM(config_of(0.001, hidden=64))  # imports and caches
        tiny.save_pretrained(f"{out}-tiny", save_original_format=False)
        export_folder(f"{out}-tiny-made", FolderSource(f"{out}-tiny"), tiny)
    with AnonymousPeak() as held:
        start = time.perf_counter()
        if way == "whole":
            transformers.MixtralForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(out, max_shard_size=shard)
        else:
            export_folder(out, FolderSource(source), meta, max_shard_bytes=shard)
        seconds = time.perf_counter() - start
    return {"peak": held.peak, "seconds": seconds}


def run(way: str, source: str, out: str, shard: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.perf.bench_export", "--one", way, source, out, str(shard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def plain_copy(source: str, out: str) -> float:
    start = time.perf_counter()
    os.mkdir(out)
    for path in Path(source).glob("*.safetensors"):
        with open(path, "rb") as read, open(f"{out}/{path.name}", "wb") as written:
            shutil.copyfileobj(read, written, 2**24)
            written.flush()
            os.fsync(written.fileno())
    return time.perf_counter() - start


def same_files(one: str, other: str) -> bool:
    from deepspeed_autoep.weights.files import SafetensorsFolder

    first, second = SafetensorsFolder.open(one), SafetensorsFolder.open(other)
    return first.tensors.keys() == second.tensors.keys() and all(first.read(name).equal(second.read(name)) for name in first.tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--shard-mb", type=int, default=100)
    parser.add_argument("--csv")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if options.one:
        way, source, out, shard = options.one
        print(json.dumps(write(way, source, out, int(shard))))
        return

    import torch
    import transformers

    shard = options.shard_mb * 10**6
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config_of(options.gib))
        model.save_pretrained(f"{folder}/source", max_shard_size="500MB", save_original_format=False)
        size = sum(parameter.nbytes for parameter in model.parameters())
        stack = model.model.layers[0].mlp.experts.gate_up_proj.nbytes
        del model
        context = {"date": today(), "bytes": str(size), "shard_bytes": str(shard), **hardware(), "torch": torch.__version__}
        report = Report(context | {"transformers": transformers.__version__, "load_average": load_average()})
        report.add("limit", "seconds", "plain copy", "s", plain_copy(f"{folder}/source", f"{folder}/copy"))
        rows = []
        for way in WAYS:
            # A model that is loaded from its own names is saved under them.
            measured = run(way, f"{folder}/export" if way == "whole" else f"{folder}/source", f"{folder}/{way}", shard)
            report.add(way, "peak", "process", "bytes", measured["peak"])
            report.add(way, "seconds", "process", "s", measured["seconds"])
            rows.append([way, f"{measured['peak'] / 2**20:.0f}", f"{measured['seconds']:.1f}"])
            if not same_files(f"{folder}/{way}", f"{folder}/{WAYS[0]}"):
                raise SystemExit(f"{way} and {WAYS[0]} wrote different tensors")
        rows.append(["one plain copy", "", f"{report.find('limit', 'seconds', 'plain copy').median:.1f}"])
        title = f"a model of {size / 2**20:.0f} MiB, files of {options.shard_mb} MB, largest stack of experts {stack / 2**20:.0f} MiB"
        print(table(title, ["way", "peak MiB", "seconds"], rows))
        report.save(options.csv)


if __name__ == "__main__":
    main()
