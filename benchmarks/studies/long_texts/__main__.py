"""How much does a model know of a text several times its length, under `infllm` and a window of the same bytes?

    python -m benchmarks.studies.long_texts --text wikitext2.txt --tokens 32768

Two texts of `tokens` tokens go through the model in chunks. `keys` is repetitive, with a pass key of a person at each
depth, and each is asked for at the end: the loss of its digits in nats, and whether all of them are the likeliest ones.
`text` is a piece of the given text: the loss of the tokens that follow, and of a passage from each depth that comes
again (copy). `infllm` attends to `fetch` tokens, the window to the first ones and to as many in all.
Appends a JSON line per policy and text to benchmarks/results/long_texts.jsonl, skipping those that are there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import cycle
from statistics import mean

import torch

from benchmarks.evaluation.tasks.retrieval import FILLER
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, samples, text_ids
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from policies.base import Policy
from policies.infllm import InfLLM
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, Model, ModelOptions
from runahead.config import Positions
from runahead.thinning.rank_policies import RankPolicies

DEPTHS = {"Anna": 0.1, "Boris": 0.35, "Clara": 0.6, "David": 0.85}
FACT = " The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}."
QUESTION = " What is the pass key of {name}? The pass key of {name} is"
PASSAGE, AFTER = 64, 256
Tail = tuple[str, list[int], list[int]]
"""Name, tokens that are given, and tokens whose loss counts."""


def keys_text(model: Model, num_tokens: int, seed: int) -> tuple[list[int], list[Tail]]:
    """A repetitive text with a pass key at each depth, and the questions with their answers."""

    def ids(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    draw = random.Random(seed)
    keys = {name: str(draw.randrange(10_000, 100_000)) for name in DEPTHS}
    left = [(round(depth * num_tokens), name) for name, depth in DEPTHS.items()]
    text: list[int] = []
    for sentence in cycle(FILLER):
        if left and len(text) >= left[0][0]:
            name = left.pop(0)[1]
            text += ids(FACT.format(name=name, key=keys[name]))
        if len(text) >= num_tokens:
            break
        text += ids(" " + sentence)
    return text[:num_tokens], [(name, ids(QUESTION.format(name=name)), ids(" " + key)) for name, key in keys.items()]


def plain_text(model: Model, num_tokens: int, path: str) -> tuple[list[int], list[Tail]]:
    """A piece of a text, what follows it, and passages of it."""
    (_, piece), *_ = samples(text_ids(model, path), 1, num_tokens + AFTER, option=f"--text={path}")
    text, following = piece[:num_tokens], piece[num_tokens:]
    starts = [round(depth * num_tokens) for depth in DEPTHS.values()]
    copies = [
        (f"copy {name}", text[at : at + 8], text[at + 8 : at + PASSAGE])
        for name, at in zip(DEPTHS, starts, strict=True)
    ]
    return text, [("following", following[:1], following[1:]), *copies]


def policies_of(name: str, fetch: int, recent: int, sinks: int) -> RankPolicies:
    """The policies of a name in the table."""
    if name == "infllm":
        policy: Policy = InfLLM(fetch=fetch, recent=recent, sinks=sinks)
        return RankPolicies.everywhere([policy])
    return RankPolicies.everywhere([StreamingLLM(budget=fetch, sinks=sinks)], Positions.reencoded)


def measure(run: Run) -> Iterator[Line]:
    """Measure one line."""
    options = run.options
    torch.set_num_threads(1)
    model = Model.load(ModelOptions(), torch.device("cpu"))
    for kind in options.texts:
        for name in options.policies:
            about: Line = {
                "text": kind,
                "policy": name,
                **{each: getattr(options, each) for each in ("tokens", "fetch", "recent", "sinks", "seed")},
            }
            if run.has(about):
                continue
            text, tails = (
                keys_text(model, options.tokens, options.seed)
                if kind == "keys"
                else plain_text(model, options.tokens, options.text)
            )
            policies = policies_of(name, options.fetch, options.recent, options.sinks)
            conversation, began_s = Conversation(model, policies), time.perf_counter()
            for start in run.bar(range(0, len(text), options.chunk), "chunk"):
                conversation.feed(torch.tensor([text[start : start + options.chunk]]))
            prefill_s, losses, found = time.perf_counter() - began_s, {}, {}
            for tail, given, wanted in tails:
                logits_1CV = conversation.fork().follow(torch.tensor([given + wanted[:-1]]))[:, len(given) - 1 :]
                targets = torch.tensor(wanted)
                losses[tail] = float(torch.nn.functional.cross_entropy(logits_1CV[0].float(), targets))
                found[tail] = bool((logits_1CV[0].argmax(-1) == targets).all())
            yield about | {"prefill_s": prefill_s, "nll": losses, "found": found}


def table(found: list[Line]) -> str:
    """The last line of each policy, text and length."""
    rows: Rows = [("text", "policy", "tokens", "attended", "losses, nats", "mean", "found", "prefill")]
    for line in newest(found, "text", "policy", "tokens", "fetch", "recent").values():
        losses = {name: loss for name, loss in line["nll"].items() if name != "following"}
        shown = ", ".join(f"{name} {loss:.2f}" for name, loss in line["nll"].items())
        share = f"{sum(line['found'].values())} of {len(losses)}" if line["text"] == "keys" else "-"
        rows.append(
            (
                line["text"],
                line["policy"],
                f"{line['tokens']:,}",
                f"{line['fetch']:,}",
                shown,
                f"{mean(losses.values()):.2f}",
                share,
                f"{line['prefill_s']:.0f} s",
            )
        )
    return text_table(rows, left=(0, 1, 4))


STUDY = Study(
    name="long_texts",
    text=__doc__,
    has="found",
    measure=measure,
    table=table,
    options={
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
        "texts": option(["keys", "text"], choices=["keys", "text"]),
        "policies": option(["infllm", "streaming_llm"], choices=["infllm", "streaming_llm"]),
        "tokens": option(32768, "tokens of a text"),
        "fetch": option(3200, "tokens that are attended to"),
        "recent": option(1024, "tokens of the window of infllm, which is its longest distance, too"),
        "sinks": option(128, "first tokens that both attend to"),
        "chunk": option(512, "tokens that are computed at a time"),
        "seed": option(0, "of the pass keys"),
    },
    key=("text", "policy", "tokens", "fetch", "recent", "sinks", "seed", "code"),
)

if __name__ == "__main__":
    STUDY.main()
