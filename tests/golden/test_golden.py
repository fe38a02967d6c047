"""Answers in every pair of features are those of the code that recorded them (`python -m tests.golden record`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runahead.config import DecodeName, DecodeOptions, PrefillName, PrefillOptions
from runahead.features.refused import check
from runahead.features.setup import Setup
from tests.conftest import RankPools
from tests.families import FAMILIES, MARKING, SHARING
from tests.golden.combinations import DIMENSIONS, covering, every_pair, pairs_of, plain
from tests.golden.comparing import answers_of, differences, differing, root_mean_square
from tests.golden.records import Record, load, save
from tests.golden.running import is_refusal

RECORDS = load()
MOST_MORE, MOST_MORE_IN_ALL = 2.0, 1.25
"""Factors by which errors in bfloat16 may exceed the recorded ones, one and the geometric mean of all: they are of
other kernels on another CPU, and a place more at which one rounds makes all of them larger."""


def has_family(record: Record) -> bool:
    """Whether the installed transformers has the record's family."""
    return any(record.combination["family"] in families for families in (FAMILIES, MARKING, SHARING))


def require_family(record: Record) -> None:
    if not has_family(record):
        pytest.skip(f"{record.combination['family']} needs a newer transformers")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.sampled(3)
def test_tokens_and_logits_are_those_recorded(rank_pools: RankPools, record: Record) -> None:
    require_family(record)
    assert differing(answers_of(rank_pools.run, record.combination, record.seed), record) is None


def test_every_pair_that_goes_together_alone_is_recorded(rank_pools: RankPools) -> None:
    covered = {pair for record in RECORDS for pair in pairs_of(record.combination)}
    for pair in every_pair():
        if pair not in covered:
            found = answers_of(rank_pools.run, plain(pair), 0)
            assert isinstance(found, str), f"{pair} goes together by now; add it by: python -m tests.golden record"


def test_an_error_is_a_refusal_only_if_a_row_of_the_table_says_so() -> None:
    """Any other one would hide that a combination, or the set itself, is broken."""
    with pytest.raises(ValueError) as raised:
        check(Setup(decode=DecodeOptions(name=DecodeName.sharded), prefill=PrefillOptions(name=PrefillName.tsp)))
    assert is_refusal(str(raised.value))
    assert not is_refusal("not enough values to unpack (expected 2, got 1)")


@pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_errors_in_bfloat16_are_no_larger_than_recorded(rank_pools: RankPools, one_in: int) -> None:
    logs = []
    rounded = [record for record in RECORDS if record.bfloat16_error is not None and has_family(record)]
    for record in rounded[::one_in]:
        found = answers_of(rank_pools.run, record.combination, record.seed, torch.bfloat16)
        assert not isinstance(found, str), found
        ratio = root_mean_square(differences(found, record.answers)) / (record.bfloat16_error or 0.0)
        assert ratio <= MOST_MORE, record.name
        logs.append(math.log(ratio))
    assert math.exp(sum(logs) / len(logs)) <= MOST_MORE_IN_ALL


def test_margins_are_wide() -> None:
    assert min(record.margin for record in RECORDS) >= 1e-6


def test_a_changed_token_and_a_changed_number_are_told() -> None:
    record = RECORDS[0]
    [first, *others] = record.answers
    assert differing(record.answers, record) is None
    token = replace(first, tokens=[first.tokens[0] + 1, *first.tokens[1:]])
    assert "has the tokens" in (differing([token, *others], record) or "")
    for change, is_told in ((1e-7, True), (1e-12, False)):
        values = [[first.logprobs[0][0] + change, *first.logprobs[0][1:]], *first.logprobs[1:]]
        changed = differing([replace(first, logprobs=values), *others], record)
        assert ("differ by" in (changed or "")) == is_told
    assert "is refused" in (differing("why", record) or "")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    save(RECORDS[:5], tmp_path / "index.json", tmp_path / "numbers.npz")
    assert load(tmp_path / "index.json", tmp_path / "numbers.npz") == RECORDS[:5]


def test_combinations_cover_what_is_allowed_and_nothing_else() -> None:
    """Refusals are made up: a pair that is never allowed, and one that needs a third value."""

    def is_allowed(chosen: dict[str, str]) -> bool:
        if chosen["bits"] == "4" and chosen["speculate"] != "none":
            return False
        return chosen["rows"] != "padded" or chosen["use"] != "server" or chosen["ranks"] == "2"

    found = list(covering([], is_allowed))
    assert all(is_allowed(each) and list(each) == list(DIMENSIONS) for each in found)
    covered = set().union(*map(pairs_of, found))
    never = {(("bits", "4"), ("speculate", kind)) for kind in DIMENSIONS["speculate"][1:]}
    assert covered == set(every_pair()) - never
    assert found == list(covering([], is_allowed))
    assert list(covering(found, is_allowed)) == []
