"""Building the kernels of our own into the cache folder, and loading them from there.

A build takes up to a minute of a C++ compiler. A run never builds: beside it a compiler would take the processors
that are timed. `python -m launch.kernels` does, once for each torch, sources and processor.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.attention.partial import softmax_attention
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.model.layers.int8 import Int8Linear, wrong_product
from runahead.model.loading.cache_folder import obtain

FLAGS = ("-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
"""How the compiler is called; it warns of nothing that users could mend."""

LIBRARY = "kernels.so"
COMPILER = "compiler"
"""File beside the library that names the compiler; a run on a host without it, or with another, takes the library."""

LABEL = "the kernels for this processor"
BUILD_S, CHECK_S = 600.0, 120.0
"""Seconds after which a compiler, or what it has made, is taken for stuck."""

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
    """Folder of the library for these sources, torch and processor, built or not.

    Args:
        folder: cache folder; by default the user's.
    """
    processor = [
        line for line in _lines("/proc/cpuinfo") if line.partition("\t")[0] in ("model name", "flags")
    ]  # of the first of all processors, which are alike
    abi = torch._C._GLIBCXX_USE_CXX11_ABI
    about = [*FLAGS, torch.__version__, str(abi), platform.machine(), *processor[:2]]
    texts = [source.read_text() for source in operators.SOURCES]
    digest = hashlib.sha256("\n".join([*texts, *about]).encode()).hexdigest()
    return (cache_folder() if folder is None else folder) / "kernels" / digest[:20]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def load_if_built(folder: Path | None = None) -> str:
    """Load the kernels, if they have been built; whether they are used is `KERNELS.in_use`.

    Returns:
        why they are not there, in a sentence; "" if they are.
    """
    try:
        if not (reason := lacking(folder)):
            operators.load(library_folder(folder) / LIBRARY)
    except OSError as error:
        return f"kernels of our own cannot be loaded ({error}); {REMEDY}"
    return reason


def lacking(folder: Path | None = None) -> str:
    """Why the kernels are not built, in a sentence; "" if they are. Raises: OSError: the source cannot be read."""
    if reason := unsupported():
        return reason
    return "" if (library_folder(folder) / LIBRARY).is_file() else f"kernels of our own are not built; {REMEDY}"


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
    return obtain(library_folder(folder), _make, label=LABEL, has=LIBRARY) / LIBRARY


def _make(work: Path) -> Path:
    library, torch_folder = work / LIBRARY, Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [str(compiler()), *FLAGS, "-w", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    sources = [str(source) for source in operators.SOURCES if source.suffix == ".cpp"]
    command += [f"-I{torch_folder / 'include' / each}" for each in ("", "torch/csrc/api/include")]
    command += [*sources, "-o", str(library), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = _run(command, BUILD_S)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise ValueError(f"{command[0]} failed with status {done.returncode}: {' '.join(errors[:1])}")
    check(library)
    (work / COMPILER).write_text(f"{command[0]}\n")
    return work


def check(library: Path) -> None:
    """Compare what a library computes with the same in float64, in a process of its own, which has loaded no other.

    Raises:
        ValueError: it computes something else, or the process fails.
    """
    root = str(Path(__file__).resolve().parent.parent.parent.parent)
    script = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import farthest; print(farthest(sys.argv[1]))"
    done = _run([sys.executable, "-c", script, str(library)], CHECK_S)
    if done.returncode != 0:
        last = " ".join(done.stderr.splitlines()[-1:])
        raise ValueError(f"{library.name} fails with status {done.returncode}, so it is not used: {last}")
    if not (apart := float(done.stdout)) < 1:  # also where it is NaN
        raise ValueError(
            f"{library.name} is {apart:.3g} times what rounding allows from a computation in float64, so it is not used"
        )


def farthest(library: str) -> float:
    """Largest difference of what the library computes from the same in float64, by what rounding allows.

    Args:
        library: path of what this process loads; it has loaded no other.
    """
    assert not operators.is_loaded()
    operators.load(Path(library))
    generator = torch.Generator().manual_seed(0)
    found = 0.0
    for num_queries, num_keys, dtype, window in (
        (80, 80, torch.float32, None),
        (80, 80, torch.float32, 30),
        (80, 80, torch.bfloat16, None),
        (30, 300, torch.float32, 250),
        (1, 300, torch.float32, None),
        (1, 300, torch.bfloat16, None),
    ):
        q, k, v = (
            torch.randn(1, heads, tokens, 64, generator=generator).to(dtype)
            for heads, tokens in ((4, num_queries), (2, num_keys), (2, num_keys))
        )
        queries_C = torch.arange(num_keys - num_queries, num_keys)
        firsts_C = None if window is None else (queries_C - window + 1).clamp(min=0)
        out, lse = operators.attend(q, k, v, num_queries > 1, 0.125, firsts_C)
        keys_S = torch.arange(num_keys)
        hidden_CS = keys_S > queries_C[:, None]
        if firsts_C is not None:
            hidden_CS |= keys_S < firsts_C[:, None]
        known_out, known_lse = softmax_attention(q, k, v, 0.125, hidden_CS)
        # Some hundred roundings of numbers near 1. bfloat16's last bit of outputs up to 2 is 2^-7; sums are in float32.
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        for apart in ((out - known_out).abs() / tolerance, (lse - known_lse).abs() / 1e-4):
            found = torch.tensor([found, apart.max().item()]).max().item()  # NaN if one is
    with_all = [*_apart_in_rows(generator), *_apart_in_products(generator)]
    torch.set_num_threads(1)  # whole blocks of rows a thread, as for long prompts; the check is a process of its own
    for apart in (*with_all, *_apart_in_products(generator)):
        found = torch.tensor([found, apart.abs().max().item() / 1e-5]).max().item()
    layer = nn.Linear(130, 70)
    Int8Linear.take(layer)
    x_RI = torch.randn(9, 130, generator=generator)
    return math.inf if wrong_product(layer, lambda: layer(x_RI)) else found


def _apart_in_rows(generator: torch.Generator) -> Iterator[Tensor]:
    """Differences of the library's norm and rotation from those in float64."""
    x = torch.randn(2, 3, 5, 64, generator=generator)
    cos, sin = torch.randn(2, 1, 5, 64, generator=generator)
    normed, rotated = operators.rms_norm(x, x[0, 0, 0], 1e-6), operators.rotate(x, x[:, :2], cos, sin)
    wide = x.double()
    yield normed - wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide[0, 0, 0]
    for found, own in zip(rotated, (wide, wide[:, :2]), strict=True):
        first, second = own.chunk(2, dim=-1)
        yield found - own * cos - torch.cat([-second, first], dim=-1) * sin


def _apart_in_products(generator: torch.Generator) -> Iterator[Tensor]:
    """Differences of the library's products of many rows from those in float64, whose sums are near 1."""
    for rows, inputs, inner in ((70, 40, 50), (300, 500, 700)):  # below a tile and a panel, and with several of all
        x = torch.randn(rows, inputs, generator=generator)
        gate, up = torch.randn(2, inner, inputs, generator=generator) / inputs**0.5
        down, bias = (
            torch.randn(inputs, inner, generator=generator) / inner**0.5,
            torch.randn(inner, generator=generator),
        )
        wide, *weights = (each.double() for each in (x, gate, up, down))
        yield operators.linear(x, gate, bias) - (wide @ weights[0].T + bias)
        expected = (F.silu(wide @ weights[0].T + bias) * (wide @ weights[1].T)) @ weights[2].T
        yield operators.gated_mlp(x, gate, bias, up, None, down, None, "swish") - expected


def _run(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a group of its own, so that those that it has started end with it.

    Raises:
        ValueError: it has not ended after `limit_s`.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except BaseException as error:  # also Ctrl-C, which the terminal does not send to another session
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ValueError(f"{command[0]} has not ended after {limit_s:.0f} s") from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
