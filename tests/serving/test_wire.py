"""Work items and reports as ranks send them."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_type_hints

import pytest

from policies.reuse import GivenPrompt, ReusingPrompt, Segment, SegmentUse
from runahead.config import GenerationOptions, Speculate
from runahead.decoding.scored_tokens import ScoredToken
from runahead.report import (
    MemoryReport,
    RankReport,
    RetrievalReport,
    ReuseReport,
    SparseReport,
    SpeculationReport,
    TokenLogprobs,
)
from runahead.reuse.prefix_tree import Dropped, Stored
from runahead.serving import items
from runahead.serving.mail.wire import CLASSES, from_bytes, to_bytes
from runahead.timeline.trace import TraceSpan

SEGMENT = Segment(
    name="trip é \ud800", ids=(5, 6, 7), positions=(0, 1, 3), placeholders=(range(1, 2),), context_ids=(), pinned=True
)
PROMPT = ReusingPrompt(
    uses=(SegmentUse(segment=SEGMENT, parts=(range(0, 2),)),), new_ids=(8, 9), new_positions=(4, 5), share=0.25
)
OPTIONS = GenerationOptions(
    temperature=0.1 + 0.2,
    seed=2**62,
    logit_bias={3: -1.5, 40: 2.0},
    stop=["\n", "é"],
    json_schema='{"type": "object"}',
    speculate=Speculate.lookup,
)
MESSAGES = [
    items.PrefillItem(
        number=1, prompts=[[1, 2, 3], PROMPT], options=[OPTIONS] * 2, boundaries=(0, 2, 3), to_prefetch=[([4], "a")]
    ),
    items.PrefillItem(number=2, prompts=((1, 2), [3]), options=[], boundaries=(0, 2), stored=(1, 0), salts=["a", ""]),
    items.Generate(number=3, prompts=[[1] * 1000], options=[OPTIONS]),
    items.Cancel([(1, 0), (3, 2)]),
    items.Stop(4),
    items.Check(),
    items.End(),
    items.Tokens(tokens={(1, 0): 7, (1, 1): 9}, ended={(1, 1): "eos"}, step_s=1e-9, cached={(1, 0): 3}),
    items.Part(
        number=1,
        rank=2,
        prefill_s=0.1,
        wait_s=math.inf,
        is_alone=True,
        report=RankReport(
            rank=2,
            kept_tokens=[1, 2],
            retrieval=RetrievalReport(
                fetched_share=[None, 0.5], hit_mass=[None], evicted=[0], host_bytes=1, chosen_again=[None]
            ),
            reuse=ReuseReport(found_bytes={"host": 3}),
            attention=SparseReport(density=[None, 0.5], covered=[None, 0.9]),
            speculation=SpeculationReport(drafts="lookup", within=SpeculationReport(drafts="model")),
            memory=MemoryReport(base_bytes=1, weights_bytes=2, load_peak_bytes=3, predicted_load_peak_bytes=4),
        ),
        spans=[TraceSpan(kind="wait", layer=None, start_s=0.5, end_s=0.75, detail="8 tokens")],
        prefix_bytes={"device": 5},
    ),
    items.Progress(number=1, rank=0, layers=2, of=4),
    Stored(key="a model", ids=(1, 2), states=False),
    Dropped(key="a model", ids=(1, 2), num_left=0),
    items.Alive(1, True),
    items.Stopping(9),
    None,
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    """As a pickle of it does, with tuples as tuples and numbers to the last bit."""
    arrived = from_bytes(to_bytes(message))
    assert arrived == pickle.loads(pickle.dumps(message))
    assert repr(arrived) == repr(message)  # 1 == 1.0 == True, and (1,) is no [1]


def test_not_a_number_arrives_as_such() -> None:
    span = TraceSpan(kind="wait", layer=0, start_s=math.nan, end_s=-math.inf)
    arrived = from_bytes(to_bytes(span))
    assert math.isnan(arrived.start_s) and arrived.end_s == -math.inf


def test_a_token_arrives_with_its_log_probabilities() -> None:
    scores = TokenLogprobs(logprob=-0.1, top=[(7, -0.1), (9, -2.5)])
    arrived = from_bytes(to_bytes(items.Tokens(tokens={(1, 0): ScoredToken(7, scores), (1, 1): 8})))
    token = arrived.tokens[1, 0]
    assert token == 7 and isinstance(token, ScoredToken) and token.logprobs == scores
    assert type(arrived.tokens[1, 1]) is int


def made_of(kind: Any) -> set[type]:
    """The dataclasses and enums that values of a type may hold."""
    found = set[type]()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and (is_dataclass(each) or issubclass(each, Enum)) and each not in found:
            found.add(each)
            waiting += get_type_hints(each).values() if is_dataclass(each) else []
        waiting += get_args(each)
    return found


def test_all_that_messages_are_made_of_is_known() -> None:
    assert made_of(items.Item | items.Report) | made_of(GivenPrompt) | {TokenLogprobs} == set(CLASSES.values())
    tried = {type(each) for each in MESSAGES}
    assert tried >= set(get_args(items.Item)) | made_of(items.Report) & tried
    assert all(each.init for cls in CLASSES.values() if is_dataclass(cls) for each in fields(cls))


class Harm:
    """Its pickle calls a function when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import tests.serving.test_wire as it; it.harmed.append(1)",)


harmed: list[int] = []


def test_nothing_but_messages_is_made_of_what_arrives() -> None:
    for data in (
        pickle.dumps(Harm()),
        json.dumps({"Harm": {}}).encode(),
        json.dumps({"exec": "1"}).encode(),
        json.dumps({"Stop": {"number": 1}, "End": {}}).encode(),
        json.dumps({"Stop": {"number": 1, "more": 2}}).encode(),
        json.dumps({"Stop": []}).encode(),
        json.dumps({"Speculate": "none of these"}).encode(),
        json.dumps({"dict": [[[1], 2]]}).encode(),
        b"[" * 100_000,
        b"\xff",
        b"",
    ):
        with pytest.raises(ValueError):
            from_bytes(data)
    assert harmed == []


def test_what_has_no_form_is_not_sent() -> None:
    with pytest.raises(TypeError, match="object has no form in which ranks send it"):
        to_bytes([object()])
