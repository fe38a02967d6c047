"""Building the kernels of our own into the cache folder, and loading them from there.

A build takes about ten seconds of a C++ compiler. A run never builds: beside it a compiler would take the processors
that are timed. `python -m launch.kernels` does, once for each torch, source, compiler and processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from runahead.attention.partial import cpu_flash
from runahead.kernels import operators
from runahead.model.loading.cache_folder import cache_folder, obtain

FLAGS = ("-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
"""How the compiler is called; it warns of nothing that users could mend."""

LIBRARY = "kernels.so"
LABEL = "the kernels for this processor"
BUILD_S = 600.0
"""Seconds after which a compiler is taken for stuck."""

REMEDY = "python -m launch.kernels builds them, once"


def compiler() -> str | None:
    """Path of the C++ compiler: CXX, else c++; None if there is none."""
    found = shutil.which(os.environ.get("CXX") or "c++")
    return None if found is None else os.path.realpath(found)


def unsupported() -> str:
    """Why this machine cannot have kernels; "" if it can."""
    if platform.system() != "Linux" or not torch.cpu._is_avx2_supported():
        return "kernels of our own are for processors with AVX2 on Linux"
    return ""


def library_folder(folder: Path | None = None) -> Path:
    """Where the library for this source, torch, compiler and processor is, or will be.

    Args:
        folder: cache folder; by default the user's.
    """
    processor = [
        line for line in _lines("/proc/cpuinfo") if line.partition("\t")[0] in ("model name", "flags")
    ]  # of the first of all processors, which are alike
    abi = torch._C._GLIBCXX_USE_CXX11_ABI
    about = [*FLAGS, torch.__version__, str(abi), str(compiler()), platform.machine(), *processor[:2]]
    digest = hashlib.sha256("\n".join([operators.SOURCE.read_text(), *about]).encode()).hexdigest()
    return (cache_folder() if folder is None else folder) / "kernels" / digest[:20]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def load_if_built(folder: Path | None = None) -> str:
    """Load the kernels, if they have been built; whether they are used is `KERNELS.in_use`.

    Returns:
        why they are not there, in a sentence; "" if they are.
    """
    if reason := unsupported():
        return reason
    try:
        library = library_folder(folder) / LIBRARY
        if not library.is_file():
            return f"kernels of our own are not built; {REMEDY}"
        operators.load(library)
    except OSError as error:
        return f"kernels of our own cannot be loaded ({error}); {REMEDY}"
    return ""


def build(folder: Path | None = None) -> Path:
    """Build the kernels, unless they are there. One of several processes builds, the others wait.

    Args:
        folder: cache folder; by default the user's.

    Returns:
        the library.

    Raises:
        ValueError: there is no compiler, it fails, or what it has made computes something else than PyTorch.
        OSError: the cache folder cannot be written.
    """
    if reason := unsupported():
        raise ValueError(reason)
    if compiler() is None:
        wanted = os.environ.get("CXX") or "c++"
        raise ValueError(f"there is no C++ compiler {wanted}; install g++, or name one with CXX=<path>")
    return obtain(library_folder(folder), _make, label=LABEL) / LIBRARY


def _make(work: Path) -> Path:
    library, torch_folder = work / LIBRARY, Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [str(compiler()), *FLAGS, "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{torch_folder / 'include' / each}" for each in ("", "torch/csrc/api/include")]
    command += [str(operators.SOURCE), "-o", str(library), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command[0]} has not ended after {BUILD_S:.0f} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise ValueError(f"{command[0]} failed with status {done.returncode}: {' '.join(errors[:1])}")
    check(library)
    return work


def check(library: Path) -> None:
    """Compare attention of the kernels with PyTorch's on two small cases. Raises: ValueError."""
    operators.load(library)
    generator = torch.Generator().manual_seed(0)
    for num_queries, num_keys in ((80, 80), (1, 300)):
        q, k, v = (
            torch.randn(1, heads, tokens, 64, generator=generator)
            for heads, tokens in ((4, num_queries), (2, num_keys), (2, num_keys))
        )
        found = operators.attend(q, k, v, num_queries == num_keys, 0.125)
        known = cpu_flash(q, k, v, num_queries == num_keys, 0.125)
        apart = max((a - b).abs().max().item() for a, b in zip(found, known, strict=True))
        if not apart < 1e-4:  # a few hundred roundings of numbers near 1; also where it is NaN
            raise ValueError(f"attention of {library.name} is {apart:.1e} from PyTorch's, so it is not used")
