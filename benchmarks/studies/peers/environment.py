"""An environment of its own for packages that do not go with ours, made once in the cache folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from runahead.files import cache_folder
from runahead.model.loading.cache_folder import obtain
from runahead.model.loading.quiet import one_line

ENVIRONMENT, LINES_OF_REASON = "environment", 40


def python_with(name: str, packages: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The Python of an environment with these packages, as pip requirements.

    Args:
        without: names of packages that come with them and are removed.

    Raises:
        ValueError: pip cannot install them; nothing is kept, and the next call tries again.
        OSError: the cache folder cannot be written, or is full.
    """
    about = "\n".join([*packages, "without", *without, sys.version]).encode()
    folder = peers_folder() / f"{name}-{hashlib.sha256(about).hexdigest()[:8]}"

    def make(work: Path) -> Path:
        made = work / ENVIRONMENT
        venv.create(made)
        python = made / "bin" / "python"
        _pip(python, name, ["install", *packages])
        if without:
            _pip(python, name, ["uninstall", "--yes", *without])
        return made

    return obtain(folder, make, label=f"the environment of {name}", has="bin/python") / "bin" / "python"


def peers_folder() -> Path:
    """Folder of the environments, the models that were converted in them, and what peers said."""
    return cache_folder() / "peers"


def _pip(python: Path, name: str, words: Sequence[str]) -> None:
    """Run pip for an environment; its lines are shown as they come. Raises: ValueError."""
    pip = [sys.executable, "-m", "pip", f"--python={python}", "--disable-pip-version-check", "--no-input"]
    last = deque[str](maxlen=LINES_OF_REASON)
    with (
        subprocess.Popen([*pip, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as shown,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            shown.set_description_str(f"{name}: {one_line(line)[:80]}")
    if process.returncode:
        lines = [line for line in last if line.strip()] or [f"status {process.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ValueError(f"pip {' '.join(words)} failed: {one_line(reason.removeprefix('ERROR: '))}")
