"""lm-evaluation-harness against launch/serve.py: its figures are those that it has of transformers' own model.

It comes from the package index into an environment of its own, and where it does not the tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.serving.packages import INSTALL_S, installed
from tests.serving.test_server import Job, job

TEXT = (Path(__file__).resolve().parents[2] / "examples" / "frankenstein_letters.txt").read_text(encoding="utf-8")
RUN_S = 400
WINDOW = 256
"""Tokens of a window of a longer text."""
TOLERANCE = 1e-5
"""Relative difference of sums of log-probabilities in float32 that were added in another order."""

TASKS: dict[str, str] = {
    "letters_choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "letters_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "letters_answers": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 12}
metric_list: [{metric: chrf, aggregation: chrf, higher_is_better: true}]
""",
}


class Found(NamedTuple):
    """Outcome of a run: figures of each task, and what was computed of each of its documents."""

    figures: dict[str, dict[str, Any]]
    documents: dict[str, list[Any]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over texts of the examples, some longer than a window."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    starts = draw.sample(range(len(TEXT) - 3000), 48)
    pieces = [TEXT[start : start + draw.choice([30, 300, 2500])] for start in starts]
    documents = [
        {"text": text, "context": text[:300], "choices": draw.sample([piece[-20:] for piece in pieces], 4), "answer": 0}
        for text in pieces
    ]
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    for name, task in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {lines}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{task}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("lm_eval[api,hf]", tmp_path_factory.mktemp("environment"), sees_ours=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Job]:
    with job("model=hf", f"model.path={model}", "model.dtype=float32") as running:
        yield running


def evaluated(programs: Path, tasks: Path, names: list[str], out: Path, **how: Any) -> Found:
    """Outcome of lm_eval with these options."""
    given = [item for name, value in how.items() for item in (f"--{name}", *([] if value is True else [str(value)]))]
    options = ["--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    run = [str(programs / "lm_eval"), "run", *options, *given]
    done = subprocess.run(run, capture_output=True, text=True, timeout=RUN_S, env=os.environ | offline, cwd=tasks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Retrying" not in done.stderr and "could not" not in done.stderr.lower(), done.stderr[-3000:]
    [results] = out.glob("*/results_*.json")
    figures = json.loads(results.read_text(encoding="utf-8"))["results"]
    documents = {}
    for name in names:
        [samples] = out.glob(f"*/samples_{name}_*.jsonl")
        read = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        documents[name] = [each["resps"] for each in sorted(read, key=lambda each: each["doc_id"])]
    return Found({name: figures[name] for name in names}, documents)


def require_equal(found: Any, expected: Any) -> None:
    """Values in lists and dictionaries are equal, numbers within the tolerance, also those that are written as text."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, other in expected.items():
            require_equal(found[name], other)
    else:
        assert found == expected or float(found) == pytest.approx(float(expected), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + 2 * RUN_S)
def test_likelihoods_are_those_of_transformers(
    programs: Path, tasks: Path, server: Job, model: str, tmp_path: Path
) -> None:
    names = ["letters_choice", "letters_rolling"]
    # The harness keeps one token of the window for the answer, and one more of a rolling one.
    asked = f"model=hf,base_url={server.url}/v1/completions,tokenizer={model},max_length={WINDOW + 2}"
    given = {"model": "local-completions", "model_args": f"{asked},num_concurrent=3", "batch_size": 4}
    found = evaluated(programs, tasks, names, tmp_path / "server", **given)
    theirs = f"pretrained={model},dtype=float32,max_length={WINDOW}"
    expected = evaluated(programs, tasks, names, tmp_path / "hf", model="hf", model_args=theirs, device="cpu")
    require_equal(found.documents, expected.documents)
    require_equal(found.figures, expected.figures)
    assert 0 < found.figures["letters_choice"]["acc,none"] < 1
    values = [each[0][0] for each in found.documents["letters_rolling"]]
    assert len(set(map(str, values))) == len(values) == 48


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + 2 * RUN_S)
def test_answers_are_those_of_transformers(
    programs: Path, tasks: Path, server: Job, model: str, tmp_path: Path
) -> None:
    names = ["letters_answers"]
    theirs = f"pretrained={model},dtype=float32"
    expected = {
        chats: evaluated(
            programs,
            tasks,
            names,
            tmp_path / f"hf {chats}",
            model="hf",
            model_args=theirs,
            device="cpu",
            **({"apply_chat_template": True} if chats else {}),
        )
        for chats in (True, False)
    }
    asked = f"model=hf,base_url={server.url}/v1/chat/completions,num_concurrent=3"
    given = {"model": "local-chat-completions", "model_args": asked, "apply_chat_template": True}
    found = evaluated(programs, tasks, names, tmp_path / "chats", **given)
    require_equal(found, expected[True])
    asked = f"model=hf,base_url={server.url}/v1/completions,tokenizer={model}"
    found = evaluated(
        programs, tasks, names, tmp_path / "texts", model="local-completions", model_args=asked, batch_size=4
    )
    require_equal(found, expected[False])
    assert expected[True].documents != expected[False].documents
