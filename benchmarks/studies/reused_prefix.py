"""How much sooner does a running server begin its answer to the second question about a long text?

    torchrun --nproc-per-node=2 launch/serve.py model=smollm2 &
    python -m benchmarks.studies.reused_prefix

Each of some documents of random token ids is asked about twice, with other questions, one request at a time. TTFT is
the time from sending a request to the first event of its stream. The bound of the ratio is the share of tokens that the
second question leaves to compute; attention to the stored ones, decoding and the way there and back come on top.
"""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Iterator
from statistics import median

from benchmarks.harness.declared import Table
from benchmarks.harness.lines import Line
from benchmarks.harness.study import Study, Variant, newest, option
from benchmarks.studies.serving import ask

FIELDS = ("server", "tokens", "question")


def variants(options: Namespace) -> Iterator[Variant]:
    """The documents, one after the other, after one that warms up the server."""
    for number in range(-1, options.documents):
        yield {"server": options.server, "tokens": options.tokens, "question": options.question, "document": number}


def measure(options: Namespace, _: None, variant: Variant) -> Iterator[Line]:
    """Ask twice about a document. Raises: SystemExit: the server gives no answer."""
    draw = random.Random(f"{options.seed} {variant['document']}")

    def drawn(length: int) -> list[int]:
        return draw.choices(range(options.vocabulary), k=length)

    text = drawn(options.tokens)
    asked = [[*text, *drawn(options.question)] for _ in range(2)]
    replies = [asyncio.run(ask(options.url, ids, options.new_tokens, options.key)) for ids in asked]
    if not all(each.is_answered for each in replies):
        raise SystemExit(f"{options.url} has not answered: {[each.reason or each.status for each in replies]}")
    if variant["document"] >= 0:
        first, second = replies
        cached = {"cached_tokens": second.cached_tokens, "first_cached_tokens": first.cached_tokens}
        yield variant | cached | {"first_s": first.events_s[0], "second_s": second.events_s[0]}


def medians(found: list[Line]) -> list[Line]:
    """Of each server, length and question: the medians over its documents, the newest line of each."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in newest(*FIELDS, "document")(found):
        groups.setdefault(tuple(line[name] for name in FIELDS), []).append(line)
    return [
        dict(zip(FIELDS, key, strict=True))
        | {"documents": len(each), "ratio": median(line["second_s"] / line["first_s"] for line in each)}
        | {name: median(line[name] for line in each) for name in ("first_s", "second_s", "cached_tokens")}
        for key, each in groups.items()
    ]


TABLE = Table(
    lines=medians,
    columns={
        "server": lambda line: line["server"],
        "document": lambda line: f"{line['tokens']:,} tokens",
        "question": lambda line: f"{line['question']:,}",
        "documents": lambda line: str(line["documents"]),
        "cached": lambda line: f"{line['cached_tokens']:,.0f}",
        "first": lambda line: f"{line['first_s']:.3f} s",
        "second": lambda line: f"{line['second_s']:.3f} s",
        "ratio": lambda line: f"{line['ratio']:.3f}",
        "bound": lambda line: f"{line['question'] / (line['tokens'] + line['question']):.3f}",
    },
)

STUDY = Study(
    name="reused_prefix",
    text=__doc__,
    has="second_s",
    variants=variants,
    measure=measure,
    table=TABLE,
    options={
        "url": option("http://127.0.0.1:8000", "address of the server"),
        "key": option(None, "its key"),
        "server": option("default", "what its settings are called in the table"),
        "documents": option(5, "documents that are asked about"),
        "tokens": option(4000, "of a document"),
        "question": option(20, "tokens of a question"),
        "new_tokens": option(8, "tokens of an answer"),
        "vocabulary": option(10_000, "texts are drawn from the token ids below it"),
        "seed": option(0, "of the texts"),
    },
)

if __name__ == "__main__":
    STUDY.main()
