"""Programs that learn something about a model: a mistake is one line and writes nothing; one rank does the work."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import pytest

from launch import duo_gates, fit_kvzap, retrieval_heads, skew
from tests.exit_status import exit_status, one_line_error
from tests.launch.learning import PROGRAMS, ended

MISTAKES: dict[str, list[tuple[str, str]]] = {
    "skew": [
        ("out=null", "out=<file.safetensors> is needed"),
        ("tokens=0", "tokens=0 must be at least 1"),
        ("chunk=0", "chunk=0 must be at least 1"),
        ("sample={short}", "tokens but tokens=96; give a longer sample, or use tokens="),
        ("tokens=1000", "tokens=1000 is more than the model's 512 positions"),
        ("sample=missing.txt", "sample=missing.txt does not exist"),
        ("out=missing/skew.safetensors", "there is no folder"),
        ("token=1", "did you mean tokens?"),
    ],
    "retrieval_heads": [
        ("out=null", "out=<file.safetensors> is needed"),
        ("tokens=1", "tokens=1 must be at least 2"),
        ("copies=1", "copies=1 must be at least 2"),
        ("tokens=200", "tokens=200 and copies=4 are 800 tokens, more than the model's 512 positions; use tokens=128"),
        ("out=missing/x.safetensors", "there is no folder"),
    ],
    "duo_gates": [
        ("out=null", "out=<folder> is needed"),
        ("steps=0", "steps=0 must be at least 1"),
        ("recent=158", "tokens=160 must be more than the sinks=2 and recent=158 tokens"),
        ("penalty=-1", "penalty=-1.0 must be a number of at least 0"),
        ("by=guessing", "by=guessing"),
        ("tokens=1000", "tokens=1000 is more than the model's 512 positions"),
        ("passkeys=9", "tokens=160 has no room for passkeys=9"),
        ("out=missing/gates", "there is no folder"),
        ("out={short}", "is a file; name a folder"),
    ],
    "fit_kvzap": [
        ("out=null", "out=<file.safetensors> is needed"),
        ("context=7", "context=7 must be at least 8"),
        ("contexts=1", "contexts=1 must be at least 2"),
        ("ridge=0", "ridge=0.0 must be a number above 0"),
        ("context=300", "context=300 and its repetition are more than the model's 512 positions; use at most context="),
        ("random_tokens=true", "samples has no effect with random_tokens=true"),
        ("samples=[missing.txt]", "samples=missing.txt does not exist"),
        ("samples=['{short}']", "the texts have 0 runs of context=96 tokens"),
        ("out=missing/x", "there is no folder"),
    ],
}


@pytest.mark.parametrize(
    ("name", "option", "message"), [(name, *each) for name, mistakes in MISTAKES.items() for each in mistakes]
)
def test_a_mistake_is_one_line(
    folder: Path,
    sample: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    option: str,
    message: str,
) -> None:
    out, short = tmp_path / "x", tmp_path / "short.txt"
    short.write_text("hello world", encoding="utf-8")
    assert ended(name, folder, sample, out, option.format(short=short)) != 0
    assert message in one_line_error(capsys)
    assert not out.exists() and short.read_text(encoding="utf-8") == "hello world"


@pytest.mark.parametrize(
    ("prepare", "options"),
    [
        (skew._prepare, skew.SkewRun),
        (retrieval_heads._check, retrieval_heads.HeadsRun),
        (duo_gates._prepare, duo_gates.GatesRun),
        (fit_kvzap._prepare, fit_kvzap.FitRun),
    ],
)
def test_more_ranks_than_one_are_refused(prepare: Any, options: Any) -> None:
    class TwoRanks:
        size = 2

    with pytest.raises(ValueError, match="on one rank but 2 were started"):
        prepare(options(out="x"), TwoRanks())


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[name][0].main(["--help"]) == 0
    assert f"python -m policies.{name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "short", "needs"),
    [(skew, "tokens=9", "a sample text needs a tokenizer"), (fit_kvzap, "context=40", "texts need a tokenizer")],
)
def test_a_model_without_a_tokenizer_is_told(
    program: Any, short: str, needs: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy(folder / "config.json", tmp_path)
    given = ["model=random", f"model.config={config}", f"out={tmp_path / 'x'}", "ranks.device=cpu"]
    assert exit_status(program.main, [*given, short]) != 0
    assert needs in capsys.readouterr().err
