"""The wheel, installed without the checkout: it has what the programs read, and they run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
DATA = ("conf", "examples", "launch", "benchmarks/models", "partitioner", "policies", "runahead")
"""Folders all of whose files the programs may read."""


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment.

    Attributes:
        wheel: its file.
        python: of the environment.
        folder: to run programs in.
    """

    wheel: Path
    python: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        return {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}

    def run(self, module: str, *options: str) -> str:
        """Standard output of a program."""
        command = [self.python, "-m", module, *options]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def files_of_checkout(*folders: str) -> list[str]:
    """Paths of what git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, since a build leaves files behind, and put into an environment that sees our dependencies."""
    copy, built, environment, folder = map(tmp_path_factory.mktemp, ("copy", "built", "environment", "folder"))
    packages = ("runahead", "partitioner", "policies", "launch", "benchmarks", "conf", "examples")
    for path in files_of_checkout(*packages, "pyproject.toml", "README.md", "LICENSE"):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((ROOT / path).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", built, copy], check=True)
    [wheel] = built.iterdir()
    venv.create(environment)
    python = environment / "bin" / "python"
    names = {"base": str(environment), "platbase": str(environment)}
    ours = Path(sysconfig.get_path("purelib", vars=names))
    # Not the .pth file of an editable installation in that folder: Python reads those of its own folder alone.
    (ours / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    subprocess.run([*pip, f"--python={python}", "install", "--no-deps", "--no-index", wheel], check=True)
    return Installed(wheel, python, folder)


def test_the_wheel_has_every_file_that_programs_read(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert not [path for path in files_of_checkout(*DATA) if path not in names and Path(path).suffix != ".md"]


def test_programs_run_without_the_checkout(installed: Installed) -> None:
    script = "from importlib.util import find_spec; print(find_spec('launch.infer').origin)"
    where = subprocess.run(
        [installed.python, "-c", script],
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.python.parent.parent), where
    model = save_tiny_llama(installed.folder / "model", chat_tokenizer(), max_position_embeddings=4096)
    of_model = ["model=hf", f"model.path={model}", "ranks.device=cpu", "ranks.threads=1"]

    site = next(installed.python.parent.parent.glob("lib/python*/site-packages"))
    large = site / "benchmarks" / "models" / "llama-70b.json"
    plan = installed.run(
        "partitioner.plan", "model=random", f"model.config={large}", "gpus=8", "device=h100", "tokens=8192"
    )
    assert "torchrun" in plan

    evaluated = installed.run(
        "launch.evaluate",
        *of_model,
        *(
            "tasks=[perplexity]",
            "policies=[full,window]",
            "budgets=[0.5]",
            "perplexity.tokens=64",
            "perplexity.chunk=16",
        ),
        *("report=eval.json", "lines=eval.jsonl"),
    )
    assert "window" in evaluated and (installed.folder / "eval.json").is_file()


@pytest.mark.slow
def test_the_doctor_runs_without_the_checkout(installed: Installed) -> None:
    """It takes its own model's shape, with few layers."""
    few = ["model.layers=2", "doctor.lengths=[64]", "doctor.rounds=1", "ranks.device=cpu", "doctor.out=page"]
    assert "exactness" in installed.run("launch.doctor", *few)
    assert (installed.folder / "page" / "doctor.json").is_file()


def test_a_server_runs_without_the_checkout(installed: Installed) -> None:
    model = save_tiny_llama(installed.folder / "served", chat_tokenizer(), max_position_embeddings=512)
    with served(installed, "model=hf", f"model.path={model}", "ranks.device=cpu", "ranks.threads=1") as client:
        assert "<html" in client.get("/").text
        body = {"prompt": "the ice", "max_tokens": 3, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3


@contextmanager
def served(installed: Installed, *options: str) -> Iterator[httpx2.Client]:
    """A client of a server that has ended with status 0 at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [installed.python, "-m", "launch.serve", f"serve.port={port}", *options]
    with (
        subprocess.Popen(
            command, cwd=installed.folder, env=installed.environment, stderr=subprocess.PIPE, text=True
        ) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):

        def is_ready() -> bool:
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            try:
                return client.get("/ready").status_code == 200
            except httpx2.HTTPError:
                return False

        try:
            until(is_ready, 120.0)
            yield client
            server.terminate()
            _, errors = server.communicate(timeout=60)
            assert server.returncode == 0, errors
        finally:
            server.kill()
