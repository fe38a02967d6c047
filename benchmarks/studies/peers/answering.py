"""A program that keeps one model, answers prompts of token ids greedily, and times its tokens: a JSON line per prompt.

It needs Python alone, as each peer runs in an environment of its own. Its first line says which version is there:

    {"version": "vllm 0.32.0"}
    {"ids": [5, 9, ...], "new": 16}   ->   {"ttft_s": 1.6, "tpot_s": 0.065, "tokens": [7, ...]}
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], int, Callable[[int], object]], object]
"""Answers token ids with so many new ones, ends of text among them, and calls the function with each as it comes."""

Opened = Callable[[Namespace], AbstractContextManager[tuple[str, Answer]]]
"""Opens the model that the options name: the version of what computes it, and the answering."""

Convert = Callable[[Path, Path, str], object]
"""Writes a model as a peer wants it: from a folder of transformers' files, into another one, of a kind of numbers."""


def run(opened: Opened, convert: Convert | None = None) -> None:
    """Convert a model, with --convert, or open it and answer requests until standard input ends."""
    parser = ArgumentParser()
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--form", default="float32", help="kind of numbers of its weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--room", type=int, default=0, help="tokens of the longest prompt with its answer")
    parser.add_argument("--convert", type=Path, metavar="FOLDER", help="write the model in the peer's format and end")
    parser.add_argument("--given", nargs="*", default=[], help="further options")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    if options.convert is not None:
        assert convert is not None, "this peer reads the model as it is"
        convert(options.model, options.convert, options.form)
        return
    with opened(options) as (version, answer):
        print(json.dumps({"version": version}), file=answers, flush=True)
        for request in sys.stdin:
            asked = json.loads(request)
            print(json.dumps(timed(answer, asked["ids"], asked["new"])), file=answers, flush=True)


def timed(
    answer: Answer, ids: list[int], num_new: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Seconds to the first token and per token after it, and the tokens; None of a rank that is given none."""
    tokens, moments = list[int](), list[float]()

    def on_token(token: int) -> None:
        moments.append(clock())
        tokens.append(int(token))

    began = clock()
    answer(ids, num_new, on_token)
    after = len(moments) - 1
    return {
        "ttft_s": moments[0] - began if moments else None,
        "tpot_s": (moments[-1] - moments[0]) / after if after > 0 else None,
        "tokens": tokens,
    }
