"""Rows of a server that grow past LongRoPE's threshold: they leave, are computed anew, and join again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from policies.exact_topk import ExactTopK
from policies.snapkv import SnapKV
from runahead import GenerationOptions
from runahead.config import CacheOptions, Speculate
from runahead.serving.items import Cancel, Report, RowId, Tokens
from runahead.serving.limits import QueueLimits
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, oracle_tokens, prompt, throughout
from tests.serving.test_answers_of_one_prompt import Answers

FAMILY = "phi3_longrope"
NEW = GenerationOptions(max_new_tokens=16, ignore_eos=True)
PROMPTS = [prompt(ROPE_THRESHOLD - before, seed=before) for before in (9, 2, 7, 7)]
OTHER = prompt(8)
POLICIES = {
    "full": RankPolicies(),
    "snapkv": RankPolicies.everywhere([SnapKV(budget=16, window=4)]),
    "retrieving": RankPolicies.everywhere([ExactTopK(fetch=20)]),
    "few bits": RankPolicies(storage=CacheOptions(bits=4, residual=4)),
}


class Served(Answers):
    """One rank's executor, which decodes other rows after each layer of a text that is computed anew.

    Attributes:
        meanwhile: tokens that came while rows were away.
        ended: how rows ended.
        when_away: called with the rows that are away when such a token comes.
    """

    def __init__(self, policies: RankPolicies) -> None:
        self.meanwhile, self.ended = 0, dict[RowId, str]()
        self.when_away: Callable[[list[RowId]], object] = lambda away: None
        super().__init__(FAMILY, policies=policies or None)
        self.executor._limits = QueueLimits(itl_s=1e-9)

    def _hear(self, report: Report) -> None:
        super()._hear(report)
        if isinstance(report, Tokens):
            self.ended |= report.ended
            if (away := list(self.executor.live._away)) and report.tokens:
                self.meanwhile += 1
                assert not report.tokens.keys() & set(away)
                self.when_away(away)


@pytest.mark.parametrize("how", POLICIES)
def test_answers_are_those_of_each_row_alone_and_others_go_on_meanwhile(how: str) -> None:
    served = Served(POLICIES[how])
    with throughout(served.model.dtype):
        served.prefill([OTHER], [replace(NEW, max_new_tokens=40)])
        for ids in PROMPTS:  # the last two cross in one step
            served.prefill([ids], [NEW])
        served.require_answers()
    assert served.meanwhile > 0
    if how == "full":
        assert served.tokens[1, 0] == oracle_tokens(FAMILY, tuple(PROMPTS[0]), 16)


def test_answers_of_one_prompt_and_drafts_cross_as_well() -> None:
    served = Served(RankPolicies())
    drafted = replace(NEW, speculate=Speculate.lookup, speculate_always=True, speculate_match=1)
    with throughout(served.model.dtype):
        served.prefill([PROMPTS[0]] * 2, [NEW, replace(NEW, do_sample=True, seed=3)])
        served.prefill([[*range(3, 9)] * 6], [drafted])
        served.require_answers()


def test_a_row_that_is_cancelled_while_it_is_away_leaves() -> None:
    served = Served(RankPolicies())
    served.when_away = lambda away: served.executor._inbox.put(Cancel(away))
    with throughout(served.model.dtype):
        served.prefill([OTHER], [replace(NEW, max_new_tokens=40)])
        served.prefill([PROMPTS[0]], [NEW])
        served.executor.decode_all()
    assert served.ended == {(0, 0): "length", (1, 0): "cancelled"} and not served.executor.live._away
    assert len(served.tokens[0, 0]) == 40 and len(served.tokens[1, 0]) == 10
    assert served.executor.live.num_bytes == 0
