"""The virtual environment of kvpress, in which its side of a comparison runs.

kvpress 0.5 needs another version of transformers than Runahead, so it gets an environment in the cache folder
(RUNAHEAD_CACHE), made with pip on the first run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.machine import ROOT
from runahead.model.loading.cache_folder import cache_folder

TORCH = version("torch").split("+")[0]
REQUIREMENTS = ["kvpress>=0.5,<0.6", "transformers<5.3"]
PACKAGES = ("kvpress", "transformers", "torch")


def environment() -> Path:
    """Python of kvpress's environment, which is made first unless it is complete.

    Raises:
        SystemExit: pip failed.
    """
    folder = cache_folder() / f"kvpress-0.5-torch-{TORCH}"
    python, whole = folder / "bin" / "python", folder / ".whole"
    if not whole.exists():
        print(f"Making kvpress's environment in {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        # Install torch by its version alone first: pip then takes a CPU build if one is offered, and keeps it.
        torch_is = f"torch=={TORCH}"
        for packages in ([torch_is], [torch_is, *REQUIREMENTS]):
            done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-input", *packages], check=False)
            if done.returncode != 0:
                raise SystemExit(f"pip could not install {', '.join(packages)} in {folder}; see its message above")
        whole.touch()
    return python


def versions(python: Path) -> dict[str, str]:
    """Versions of kvpress and of what computes in its environment."""
    script = f"import importlib.metadata, json; print(json.dumps([*map(importlib.metadata.version, {PACKAGES})]))"
    told = subprocess.run([python, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(zip(PACKAGES, json.loads(told), strict=True))


def start(python: Path, module: str, args: Sequence[object], *, scratch: str) -> subprocess.Popen[str]:
    """Start a module of this folder in the environment, without the hub; what it prints can be read as it comes.

    Args:
        scratch: folder to start it in.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", f"{__package__}.{module}", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | quiet, cwd=scratch)
