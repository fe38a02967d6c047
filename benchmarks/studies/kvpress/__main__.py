"""Agreement of SnapKV and StreamingLLM with kvpress on the kept tokens, and on left-padded batches.

    python -m benchmarks.studies.kvpress
    python -m benchmarks.studies.kvpress --lengths 1024 2048 --budgets 0.2 0.5 --text book.txt

kvpress 0.5 needs another version of transformers than Runahead, so it gets a virtual environment in the cache folder
(RUNAHEAD_CACHE), made with pip on the first run. Both read the same folder of weights and the same prompts. Measured
are:

- per layer and KV head, the share of the tokens that both keep, with our options set to kvpress's definitions, and with
  one of them at a time set to another value;
- prompts of different lengths as one left-padded batch, against each of them alone, for both.

Appends a JSON line per comparison to benchmarks/results/kvpress.jsonl, which docs/kvpress.md discusses.
"""

# Legend: B batch, K kv heads, m kept slots, T tokens after the prompt, V vocabulary.

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows, markdown
from policies.base import Policy
from policies.snapkv import Pooling, SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.model import loading
from runahead.model.loading.cache_folder import cache_folder
from runahead.thinning.rank_policies import RankPolicies

TORCH = version("torch").split("+")[0]
REQUIREMENTS = ["kvpress>=0.5,<0.6", "transformers<5.3"]

WINDOW, KERNEL, SINKS = 64, 5, 4
"""kvpress's defaults. It pools by the mean over neighbours, which commutes with the mean over a group's query heads."""
ALIKE: dict[str, Any] = {"window": WINDOW, "kernel": KERNEL, "pooling": Pooling.avg}
DIFFERENT = {
    "pool=max": ALIKE | {"pooling": Pooling.max},  # as in the result lines
    "kernel=7": ALIKE | {"kernel": 7},
    "window=32": ALIKE | {"window": 32},
    "our defaults": {},
}
FOLLOWING = 32
"""Number of tokens decoded after a padded batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompts under a policy with a budget in tokens, for kvpress and for Runahead."""

    policy: str
    budget: int
    rows: list[list[int]]
    following: list[list[int]]
    ours: dict[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        theirs = {"window_size": WINDOW, "kernel_size": KERNEL} if self.policy == "snapkv" else {"n_sink": SINKS}
        asked = {"press": self.policy, "options": theirs, "budget": self.budget}
        return asked | {"rows": self.rows, "following": self.following}

    @property
    def key(self) -> str:
        """Key that is equal for cases that are the same for kvpress."""
        return repr(self.request())

    def our_policy(self) -> Policy:
        if self.policy == "snapkv":
            return SnapKV(budget=self.budget, **self.ours)
        return StreamingLLM(budget=self.budget, sinks=SINKS)


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per comparison."""
    options, model_options = run.options, ModelOptions()
    python = environment(cache_folder() / f"kvpress-0.5-torch-{TORCH}")
    loaded = loading.load(model_options, device=torch.device("cpu"), attn_implementation="sdpa")
    assert loaded.path is not None
    model = Model.load(model_options, torch.device("cpu"))
    ids = text_ids(model, options.text)
    needed = max(max(options.lengths) + options.prompts, max(options.padded) + FOLLOWING)
    if len(ids) < needed:
        raise SystemExit(f"--text={options.text} has {len(ids)} tokens, but {needed} are needed; use a longer text")

    agreeing = list(agreement_cases(ids, options))
    padded = list(padded_cases(ids, options.padded, min(options.padded) // 2))
    asked = [case for case, _ in agreeing] + [case for batch, alone in padded for case in (batch, *alone)]
    theirs, versions = ask(python, loaded.path, asked)
    about = {
        "text": Path(options.text).name,
        "kvpress": versions,
        "ours": {name: version(name) for name in ("transformers", "torch")},
    }
    for case, name in agreeing:
        yield about | {"kind": "agreement", "definitions": name} | agreement(model, case, theirs[case.key])
    for batch, alone in padded:
        apart = [theirs[case.key] for case in alone]
        yield about | {"kind": "padding"} | padding(model, batch, alone, theirs[batch.key], apart)


def table(found: list[Line]) -> str:
    """Tables of the last run: shares of kept tokens that both keep, and rows of a padded batch against each alone."""
    same: Rows = [("policy", "definitions", "prompt", "budget", "both keep", "lowest head")]
    padded: Rows = [("policy", "prompt", "kept as alone", "kvpress", "padding kept by kvpress", "logits off by")]
    for line in last_run(found):
        if line["kind"] == "agreement":
            of = line["policy"], line["definitions"], f"{line['tokens']:,}", f"{line['budget']:,}"
            same.append((*of, f"{line['share']:.1%}", f"{line['lowest_share']:.0%}"))
        for row in line.get("rows", ()):
            kept = [f"{row['same_tokens'][who]:.1%}" for who in ("ours", "theirs")]
            off = ", ".join(f"{name} {value:.2g}" for name, value in row["logits_off_by"].items())
            of_padding = f"{row['padding_kept']['theirs']:.1%}"
            padded.append((line["policy"], f"{row['tokens']:,}", *kept, of_padding, off))
    return f"{markdown(same)}\n{markdown(padded)}"


def environment(folder: Path) -> Path:
    """Python of kvpress's environment, which is made first unless it is complete.

    Raises:
        SystemExit: pip failed.
    """
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


def agreement_cases(ids: list[int], options: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """(case, name of the definition that differs) for all prompts of one row."""
    for length in options.lengths:
        stride = max(1, (len(ids) - length) // options.prompts)
        names = ["alike", *(DIFFERENT if length == min(options.lengths) else ())]
        for prompt, share in product(range(options.prompts), options.budgets):
            row = ids[prompt * stride : prompt * stride + length]
            given: dict[str, Any] = {"budget": round(share * length), "rows": [row], "following": [[]]}
            yield Case(policy="streaming_llm", **given), "alike"
            for name in names:
                yield Case(policy="snapkv", ours=DIFFERENT.get(name, ALIKE), **given), name


def padded_cases(ids: list[int], lengths: list[int], budget: int) -> Iterator[tuple[Case, list[Case]]]:
    """(a left-padded batch, its rows alone)."""
    rows = [ids[:length] for length in lengths]
    following = [ids[length : length + FOLLOWING] for length in lengths]
    for policy in ("streaming_llm", "snapkv"):
        given: dict[str, Any] = {"policy": policy, "budget": budget, "ours": ALIKE if policy == "snapkv" else {}}
        alone = [Case(rows=[row], following=[behind], **given) for row, behind in zip(rows, following, strict=True)]
        yield Case(rows=rows, following=following, **given), alone


def ask(python: Path, model: str, cases: list[Case]) -> tuple[dict[str, Any], dict[str, str]]:
    """Run kvpress in its own environment. Returns its results by `Case.key`, and the versions there."""
    requests = {case.key: case.request() for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch) / "request.pt", Path(scratch) / "answer.pt"
        torch.save({"model": model, "cases": list(requests.values())}, request)
        script = Path(__file__).with_name("kept.py")
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run([python, script, request, answer], check=True, env=quiet, cwd=scratch)
        answered = torch.load(answer, weights_only=True)
    return dict(zip(requests, answered["cases"], strict=True)), answered["versions"]


def kept_by_us(model: Model, case: Case) -> tuple[list[Tensor], Tensor]:
    """Positions (layers, K, m) kept of each row's prompt, and logits (B, T, V) of the tokens that follow."""
    longest = max(map(len, case.rows))
    pads = [longest - len(row) for row in case.rows]
    conversation = Conversation(model, RankPolicies(last=[case.our_policy()]))
    ids_BS = torch.tensor([[0] * pad + row for pad, row in zip(pads, case.rows, strict=True)])
    conversation.feed(ids_BS, pads=pads)
    assert conversation.cache is not None
    heads = model.kv_shapes[0].num_kv_heads
    layers = [layer.positions_BKn().expand(-1, heads, -1).long() for layer in conversation.cache.layers]
    positions_BLKm = torch.stack(layers, dim=1)
    following_BT = torch.tensor(case.following)
    return list(positions_BLKm), conversation.peek(following_BT) if following_BT.numel() else torch.empty(0)


def shares(ours_LKm: Tensor, theirs_LKm: Tensor) -> Tensor:
    """Share of the tokens kept in each layer and KV head that both keep, (L, K)."""
    assert ours_LKm.shape == theirs_LKm.shape, (ours_LKm.shape, theirs_LKm.shape)
    both = [
        [len(set(a) & set(b)) / len(a) for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(ours_LKm.tolist(), theirs_LKm.tolist(), strict=True)
    ]
    return torch.tensor(both)


def agreement(model: Model, case: Case, theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare the tokens of a prompt that kvpress and Runahead keep."""
    shares_LK = shares(kept_by_us(model, case)[0][0], theirs["positions"][0])
    return {
        "policy": case.policy,
        "tokens": len(case.rows[0]),
        "budget": case.budget,
        "share": shares_LK.mean().item(),
        "lowest_share": shares_LK.min().item(),
        "equal_heads": (shares_LK == 1).float().mean().item(),
    }


def padding(
    model: Model, batch: Case, alone: list[Case], theirs: dict[str, Any], theirs_alone: list[dict[str, Any]]
) -> dict[str, Any]:
    """Compare rows of a padded batch with each of them alone: kept tokens, and logits of the tokens that follow."""
    ours_positions, ours_logits = kept_by_us(model, batch)
    ours_alone = [kept_by_us(model, case) for case in alone]
    rows = []
    for row, prompt in enumerate(batch.rows):
        target_T = torch.tensor(batch.following[row][1:])
        (alone_LKm,), alone_1TV = ours_alone[row]
        kept = {"ours": ours_positions[row], "theirs": theirs["positions"][row]}
        kept_alone = {"ours": alone_LKm, "theirs": theirs_alone[row]["positions"][0]}
        alone_TV = {"ours": alone_1TV[0], "theirs": theirs_alone[row]["logits"]["no mask"][0]}
        padded_TV = {"ours": ours_logits[row]}
        padded_TV |= {f"theirs, {name}": logits[row] for name, logits in theirs["logits"].items()}
        off_TV = {name: logits_TV - alone_TV[name.split(",")[0]] for name, logits_TV in padded_TV.items()}
        found: dict[str, Any] = {
            "tokens": len(prompt),
            "pads": max(map(len, batch.rows)) - len(prompt),
            "same_tokens": {who: shares(kept[who], kept_alone[who]).mean().item() for who in kept},
            "padding_kept": {who: (kept[who] < 0).float().mean().item() for who in kept},
            "nll_alone": {name: _nll(logits_TV, target_T) for name, logits_TV in alone_TV.items()},
            "nll_padded": {name: _nll(logits_TV, target_T) for name, logits_TV in padded_TV.items()},
            "logits_off_by": {name: difference_TV.abs().max().item() for name, difference_TV in off_TV.items()},
        }
        rows.append(found)
    return {"policy": batch.policy, "budget": batch.budget, "rows": rows}


def _nll(logits_TV: Tensor, target_T: Tensor) -> float:
    """Mean negative log-likelihood over the tokens that follow, in nats."""
    return torch.nn.functional.cross_entropy(logits_TV[: len(target_T)].float(), target_T).item()


STUDY = Study(
    name="kvpress",
    text=__doc__,
    has="kind",
    measure=measure,
    table=table,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip; prompts are taken from it in order"),
        "lengths": option([1024, 2048], "tokens of a prompt"),
        "budgets": option([0.2, 0.5], "shares of the prompt"),
        "prompts": option(2, "prompts per length"),
        "padded": option([1024, 700, 450], "lengths of the padded batch"),
    },
)

if __name__ == "__main__":
    STUDY.main()
