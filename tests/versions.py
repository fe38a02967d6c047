"""Tests with the oldest and the newest versions of torch and transformers that pyproject.toml takes.

Each pair has an environment of its own in the cache folder, which has what this process's environment has, but for the
two: made once, whole or not at all. Of torch only builds for CPUs are taken, which an index may not have.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from runahead.features.versions import LIBRARIES, ranges
from runahead.files import cache_folder
from runahead.model.loading.cache_folder import obtain

ROOT = Path(__file__).resolve().parent.parent

CHOSEN = (
    *("tests/model", "tests/cache", "tests/attention", "tests/decoding", "tests/test_engine.py"),
    *("tests/policies/test_matrix.py", "tests/reuse/test_prefixes.py", "tests/launch/test_skew_program.py"),
    *("tests/ranks/test_exactness.py", "tests/ranks/test_shares.py", "tests/ranks/test_tensor.py"),
    *("tests/ranks/test_states.py", "tests/ranks/test_prompt_scores.py", "tests/serving/test_prefixes.py"),
)
"""What depends on these libraries: models of all families, loading, shares, caches, and what goes over ranks."""

INSTALL_S = 900


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Tests with one version of each library, by name; pytest's last line, its exit status, and the time."""

    libraries: dict[str, str]
    outcome: str
    status: int
    minutes: float


def ends(library: str, there: Sequence[str], taken: str) -> list[str]:
    """The oldest and the newest version in a range, of those that an index has; one if they are the same."""
    fit = [each for each in there if SpecifierSet(taken).contains(each) and not Version(each).is_prerelease]
    if library == "torch":
        fit = [each for each in fit if each.endswith("+cpu")]
    fit = sorted(fit, key=Version)
    return list(dict.fromkeys([fit[0], fit[-1]])) if fit else []


def on_the_index(library: str) -> list[str]:
    """Versions that pip finds. Raises: OSError."""
    command = [sys.executable, "-m", "pip", "index", "versions", library, "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Available versions: (.*)", done.stdout)
    if found is None:
        raise OSError(f"pip finds no versions of {library}: {done.stderr.strip().splitlines()[-1:]}")
    return found[1].split(", ")


def pairs(given: dict[str, str]) -> tuple[list[dict[str, str]], list[str]]:
    """The versions to try: the oldest of each with the other's oldest, and the newest with the newest.

    Args:
        given: versions that are tried alone.

    Returns:
        also the libraries of which the index has none that fits; the installed version stands for both ends of them.
    """
    found, lacking = {name: [version] for name, version in given.items()}, []
    for name, taken in ranges().items():
        if name not in found:
            found[name] = ends(name, on_the_index(name), str(taken))
        if not found[name]:
            lacking.append(name)
            found[name] = [metadata.version(name)]
    tried = [{name: found[name][place] for name in LIBRARIES} for place in (0, -1)]
    return (tried if tried[0] != tried[1] else tried[:1]), lacking


def environment(libraries: dict[str, str]) -> Path:
    """Python of an environment with these versions. Raises: OSError: they do not install."""
    name = "-".join(f"{library}-{version}" for library, version in sorted(libraries.items()))
    ours = sysconfig.get_paths()["purelib"]
    kind = f"python-{sys.version_info.major}.{sys.version_info.minor}-{hashlib.sha256(ours.encode()).hexdigest()[:8]}"
    folder = cache_folder() / "versions" / f"{name}-{kind}"

    def make(work: Path) -> Path:
        made = work / "environment"
        venv.create(made, symlinks=True)
        [site] = made.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(ours + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", f"--python={made / 'bin' / 'python'}", "--disable-pip-version-check"]
        wanted = [f"{library}=={version}" for library, version in libraries.items()]
        done = subprocess.run([*pip, "install", "-q", *wanted], capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            raise OSError(f"{' '.join(wanted)} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
        return made

    return obtain(folder, make, label=name, has="pyvenv.cfg") / "bin" / "python"


def tried(libraries: dict[str, str], tests: Sequence[str], arguments: Sequence[str]) -> Trial:
    """Run tests with these versions."""
    start = time.monotonic()
    command = [str(environment(libraries)), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    print(f"{libraries}", flush=True)
    last = ""
    with subprocess.Popen([*command, *arguments, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    outcome = re.sub(r"^=+ | =+$| in [\d.]+s.*", "", last)
    minutes = (time.monotonic() - start) / 60
    return Trial(libraries=libraries, outcome=outcome, status=run.returncode, minutes=minutes)


def table(trials: Sequence[Trial]) -> str:
    """The table of what was seen, as docs/development.md has it."""
    head = f"| {' | '.join(LIBRARIES)} | tests | minutes |\n|{'---|' * (len(LIBRARIES) + 2)}"
    lines = [
        f"| {' | '.join(each.libraries[name] for name in LIBRARIES)} | {each.outcome} | {each.minutes:.1f} |"
        for each in trials
    ]
    return "\n".join([head, *lines])


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="this version alone, in place of the oldest and the newest")
    parser.add_argument("--transformers", help="likewise")
    parser.add_argument(
        "--tests", nargs="+", default=list(CHOSEN), help="files or folders, in place of the chosen ones"
    )
    parser.add_argument("--workers", default="2", help="tests that run side by side")
    options = parser.parse_args(args)
    given = {name: getattr(options, name) for name in LIBRARIES if getattr(options, name)}
    wanted, lacking = pairs(given)
    side_by_side = ["-n", options.workers, "--dist", "loadfile"]
    trials = [tried(each, options.tests, side_by_side) for each in wanted]
    print(table(trials))
    for name in lacking:
        print(f"the index has no {name} that fits, so neither its oldest nor its newest version was tried")
    return int(bool(lacking) or any(each.status for each in trials))


if __name__ == "__main__":
    raise SystemExit(main())
