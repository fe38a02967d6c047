"""Agreement with kvpress on the tokens that policies keep, and on left-padded batches.

    python -m benchmarks.studies.kvpress
    python -m benchmarks.studies.kvpress --lengths 1024 2048 --budgets 0.2 0.5 --text book.txt

kvpress runs in an environment of its own (environment.py). Both read the same folder of weights and the same prompts.
Measured are:

- per layer and KV head, the share of the tokens that both keep, with our options set to kvpress's definitions as far as
  they can be (methods.py), and with one of them at a time set to another value;
- prompts of different lengths as one left-padded batch, against each of them alone, for both.

Appends a JSON line per comparison to benchmarks/results/kvpress.jsonl, which docs/studies/kvpress.md discusses.
kvpress_quality.py compares answers.
"""

# Legend: B batch, K kv heads, m kept slots, T tokens after the prompt, V vocabulary.

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.evaluation.contenders import contenders
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, last_run, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows, markdown
from benchmarks.studies.kvpress.environment import environment, start, versions
from benchmarks.studies.kvpress.methods import CHUNK, METHODS, Method, adakv, snapkv
from policies.kvzip import KVzip
from runahead import Model, ModelOptions
from runahead.conversation import Conversation
from runahead.model import loading
from runahead.thinning.rank_policies import RankPolicies


class SameRequest(KVzip):
    """KVzip that asks the model to repeat the prompt in kvpress's words."""

    request: ClassVar[str] = "\n\nRepeat the previous context exactly.\n"


DIFFERENT = {
    "snapkv": {
        "pool=max": snapkv(pooling="max"),  # as in the result lines
        "kernel=7": snapkv(kernel=7),
        "window=32": snapkv(window=32),
        "our defaults": Method(ours={"name": "snapkv"}, press="snapkv", options=snapkv().options),
    },
    "adakv over snapkv": {"alpha=0.2": adakv(snapkv(), 0.2)},
    "kvzip": {"kvpress's request": METHODS["kvzip"]},
}
"""By method: definitions that are not those of METHODS."""
FOLLOWING = 32
"""Number of tokens decoded after a padded batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompts under a method with a budget in tokens, for kvpress and for Runahead."""

    policy: str
    method: Method
    definitions: str = "alike"
    budget: int
    rows: list[list[int]]
    following: list[list[int]]

    def request(self) -> dict[str, Any]:
        return self.method.asked(self.budget) | {"rows": self.rows, "following": self.following}

    @property
    def key(self) -> str:
        """Key that is equal for cases that are the same for kvpress."""
        return repr(self.request())

    def our_policies(self) -> RankPolicies:
        if self.definitions == "kvpress's request":
            return RankPolicies(last=[SameRequest(budget=self.budget, chunk_tokens=CHUNK)])
        [contender] = contenders([self.method.ours], [self.budget])
        return contender.policies


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per comparison."""
    options, model_options = run.options, ModelOptions()
    python = environment()
    loaded = loading.load(model_options, device=torch.device("cpu"), attn_implementation="sdpa")
    assert loaded.path is not None
    model = Model.load(model_options, torch.device("cpu"))
    ids = text_ids(model, options.text)
    needed = max(max(options.lengths) + options.prompts, max(options.padded, default=0) + FOLLOWING)
    if len(ids) < needed:
        raise SystemExit(f"--text={options.text} has {len(ids)} tokens, but {needed} are needed; use a longer text")

    agreeing = list(agreement_cases(ids, options))
    padded = list(padded_cases(ids, options.padded, min(options.padded) // 2)) if options.padded else []
    theirs = ask(python, loaded.path, agreeing + [case for batch, alone in padded for case in (batch, *alone)])
    about = {
        "text": Path(options.text).name,
        "kvpress": versions(python),
        "ours": {name: version(name) for name in ("transformers", "torch")},
    }
    for case in run.bar(agreeing, "prompt"):
        found = agreement(model, case, theirs[case.key])
        yield about | {"kind": "agreement", "definitions": case.definitions} | found
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
    return "\n".join(markdown(rows) for rows in (same, padded) if len(rows) > 1)


def agreement_cases(ids: list[int], options: argparse.Namespace) -> Iterator[Case]:
    """Cases of single prompts: all methods, and at the shortest length other definitions of them."""
    for length in options.lengths:
        stride = max(1, (len(ids) - length) // options.prompts)
        for prompt, share, name in product(range(options.prompts), options.budgets, options.methods):
            row = ids[prompt * stride : prompt * stride + length]
            others = DIFFERENT.get(name, {}) if length == min(options.lengths) else {}
            for definitions, method in ({"alike": METHODS[name]} | others).items():
                given: dict[str, Any] = {"budget": round(share * length), "rows": [row], "following": [[]]}
                yield Case(policy=name, method=method, definitions=definitions, **given)


def padded_cases(ids: list[int], lengths: list[int], budget: int) -> Iterator[tuple[Case, list[Case]]]:
    """(a left-padded batch, its rows alone)."""
    rows = [ids[:length] for length in lengths]
    following = [ids[length : length + FOLLOWING] for length in lengths]
    for policy in ("streaming_llm", "snapkv"):
        given: dict[str, Any] = {"policy": policy, "method": METHODS[policy], "budget": budget}
        alone = [Case(rows=[row], following=[behind], **given) for row, behind in zip(rows, following, strict=True)]
        yield Case(rows=rows, following=following, **given), alone


def ask(python: Path, model: str, cases: list[Case]) -> dict[str, Any]:
    """Run kvpress in its own environment. Returns its results by `Case.key`."""
    requests = {case.key: case.request() for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch) / "request.pt", Path(scratch) / "answer.pt"
        torch.save({"model": model, "cases": list(requests.values())}, request)
        if start(python, "kept", [request, answer], scratch=scratch).wait() != 0:
            raise SystemExit("kvpress failed; see its message above")
        answered = torch.load(answer, weights_only=True)
    return dict(zip(requests, answered, strict=True))


Kept = list[list[list[int]]]
"""Positions of kept tokens of one row by layer and KV head, ascending."""


def kept_by_us(model: Model, case: Case) -> tuple[list[Kept], Tensor]:
    """Positions kept of each row's prompt, and logits (B, T, V) of the tokens that follow."""
    longest = max(map(len, case.rows))
    pads = [longest - len(row) for row in case.rows]
    conversation = Conversation(model, case.our_policies())
    ids_BS = torch.tensor([[0] * pad + row for pad, row in zip(pads, case.rows, strict=True)])
    conversation.feed(ids_BS, pads=pads)
    assert conversation.cache is not None
    heads = model.kv_shapes[0].num_kv_heads
    layers = [layer.positions_BKn().expand(-1, heads, -1).tolist() for layer in conversation.cache.layers]
    kept = [[[_tokens(head) for head in layer[row]] for layer in layers] for row in range(len(case.rows))]
    following_BT = torch.tensor(case.following)
    return kept, conversation.peek(following_BT) if following_BT.numel() else torch.empty(0)


def _tokens(positions: list[int]) -> list[int]:
    """Positions of tokens; those of padding are below 0."""
    return [position for position in positions if position >= 0]


def share(ours: Kept, theirs: Kept) -> float:
    """Share of the kept tokens that both keep."""
    heads = list(_heads(ours, theirs))
    return sum(len(a & b) for a, b in heads) / sum(max(len(a), len(b)) for a, b in heads)


def _heads(ours: Kept, theirs: Kept) -> Iterator[tuple[set[int], set[int]]]:
    for own_layer, their_layer in zip(ours, theirs, strict=True):
        yield from ((set(own), set(other)) for own, other in zip(own_layer, their_layer, strict=True))


def agreement(model: Model, case: Case, theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare the tokens of a prompt that kvpress and Runahead keep."""
    ours, others = kept_by_us(model, case)[0][0], theirs["positions"][0]
    shares = [len(a & b) / max(len(a), len(b)) for a, b in _heads(ours, others)]
    return {
        "policy": case.policy,
        "tokens": len(case.rows[0]),
        "budget": case.budget,
        "share": share(ours, others),
        "lowest_share": min(shares),
        "equal_heads": sum(each == 1 for each in shares) / len(shares),
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
        (own_alone,), alone_1TV = ours_alone[row]
        kept = {"ours": ours_positions[row], "theirs": theirs["positions"][row]}
        kept_alone = {"ours": own_alone, "theirs": theirs_alone[row]["positions"][0]}
        alone_TV = {"ours": alone_1TV[0], "theirs": theirs_alone[row]["logits"]["no mask"][0]}
        padded_TV = {"ours": ours_logits[row]}
        padded_TV |= {f"theirs, {name}": logits[row] for name, logits in theirs["logits"].items()}
        off_TV = {name: logits_TV - alone_TV[name.split(",")[0]] for name, logits_TV in padded_TV.items()}
        found: dict[str, Any] = {
            "tokens": len(prompt),
            "pads": max(map(len, batch.rows)) - len(prompt),
            "same_tokens": {who: share(kept[who], kept_alone[who]) for who in kept},
            "padding_kept": {who: padding_share(kept[who], batch.budget) for who in kept},
            "nll_alone": {name: _nll(logits_TV, target_T) for name, logits_TV in alone_TV.items()},
            "nll_padded": {name: _nll(logits_TV, target_T) for name, logits_TV in padded_TV.items()},
            "logits_off_by": {name: difference_TV.abs().max().item() for name, difference_TV in off_TV.items()},
        }
        rows.append(found)
    return {"policy": batch.policy, "budget": batch.budget, "rows": rows}


def padding_share(kept: Kept, budget: int) -> float:
    """Share of the kept slots that hold padding."""
    heads = [head for layer in kept for head in layer]
    return 1 - sum(map(len, map(_tokens, heads))) / (budget * len(heads))


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
        "methods": option([*METHODS], choices=[*METHODS]),
        "lengths": option([1024, 2048], "tokens of a prompt"),
        "budgets": option([0.2, 0.5], "shares of the prompt"),
        "prompts": option(2, "prompts per length"),
        "padded": option([1024, 700, 450], "lengths of the padded batch, or none", nargs="*"),
    },
)

if __name__ == "__main__":
    STUDY.main()
