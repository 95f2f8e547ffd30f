"""Run the parity tests on several transformers releases: ``python -m tests.on_transformers [VERSION ...] [-- PYTEST ARGS]``.

Releases other than the installed one go into build/, without touching the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

from tests.perf.processes import ROOT, transformers_beside

VERSIONS = ["5.17.0", "5.24.0"]
DEFAULT_ARGUMENTS = ["tests/unit/test_parity.py", "-q"]


def run(release: str, arguments: list[str]) -> int:
    environment = dict(os.environ)
    if release != version("transformers"):
        beside = transformers_beside(release, None)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [beside, environment.get("PYTHONPATH")]))
    check = [sys.executable, "-c", "import transformers; print('transformers', transformers.__version__)"]
    found = subprocess.run(check, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    print(found, flush=True)
    if found != f"transformers {release}":
        raise SystemExit(f"asked for transformers {release}, found {found}")
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    releases, arguments = words[:split] or VERSIONS, words[split + 1 :] or DEFAULT_ARGUMENTS
    codes = {release: run(release, arguments) for release in releases}
    print(*(f"transformers {release}: {'passed' if code == 0 else 'FAILED'}" for release, code in codes.items()), sep="\n")
    sys.exit(max(codes.values()))


if __name__ == "__main__":
    main()
