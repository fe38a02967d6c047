"""Prompts in 8, 4 or 2 bits that reuse keys and values: every number is as if all of each prompt was computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from policies.reuse import ReusingPrompt, Segment, SegmentUse, ids_of
from runahead import Engine, GenerationOptions, Ranks
from runahead.config import CacheOptions, Device, RanksOptions
from runahead.report import GenerationBatch
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.thinning.rank_policies import RankPolicies
from tests.decoding.test_speculation import DRAFTED, PLAIN, knowing
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import ROOMY, Texts, computed_and_cached, longest, require_same
from tests.serving.test_prefixes import Serving

OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
RESIDUAL = 8
WHOLE = 1000
"""A window of all tokens, which then are in the model's dtype."""


def engine_of(family: str, tree: PrefixTree | None = None, *, bits: int | None = 4, residual: int = RESIDUAL) -> Engine:
    storage = CacheOptions(bits=bits, residual=residual, residual_bits=None)
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(tiny_model(family), ranks, tree=tree, policies=RankPolicies(storage=storage))


def kept_bytes(batch: GenerationBatch) -> int:
    [report] = batch.ranks
    return report.kv_kept_bytes


MORE_FAMILIES = ["mistral", "gemma2", "gpt_oss", "bloom", "deepseek_v3", "gpt_bigcode"]


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 4), *(pytest.param(each, 2, marks=pytest.mark.slow) for each in MORE_FAMILIES)],
)
def test_a_prefix_from_the_tree_gives_the_quantised_cache_of_the_whole_prompt(family: str, bits: int) -> None:
    """Wherever the prefix ends: groups begin at a row's first token, and nothing is quantised twice."""
    texts, tree, num_cached = Texts(seed=3), PrefixTree(ROOMY), 0
    engine, plain = engine_of(family, tree, bits=bits), engine_of(family, bits=bits)
    for num_rows in (1, 3, 2):
        prompts = texts.prompts(num_rows)
        reused = [longest(ids, texts.known) for ids in prompts]
        with throughout(torch.float64):
            ours, theirs = engine.generate(prompts, OPTIONS), plain.generate(prompts, OPTIONS)
        require_same(ours, theirs)
        assert kept_bytes(ours) == kept_bytes(theirs)
        assert computed_and_cached(ours)[1] == sum(reused)
        num_cached += sum(reused)
        texts.known += prompts  # an answer was computed from few bits
    assert num_cached > 40
    assert all(node.holds == 0 for node in tree.nodes())


def test_the_tree_has_prompts_as_they_are_and_no_answers() -> None:
    """So that another run, with other bits or none, finds them."""
    tree, ids = PrefixTree(ROOMY), prompt(150)
    engine = engine_of("llama", tree)
    with throughout(torch.float64):
        first = engine.generate([ids], GenerationOptions(max_new_tokens=8, ignore_eos=True))
        token_bytes = sum(shape.bytes_per_token() for shape in engine.model.kv_shapes)
        assert tree.num_bytes == 150 * token_bytes
        assert kept_bytes(first) < 0.8 * tree.num_bytes < first.ranks[0].kv_peak_bytes
        for bits in (None, 2):
            following = [ids + first.generations[0].new_token_ids[:-1]]
            ours = engine_of("llama", tree, bits=bits).generate(following, OPTIONS)
            theirs = engine_of("llama", bits=bits).generate(following, OPTIONS)
            require_same(ours, theirs)
            assert computed_and_cached(ours)[1] == (150 if bits is None else 156)


def test_prefixes_come_from_host_memory_and_files(tmp_path: Path) -> None:
    ids, other = prompt(70), prompt(75, seed=1)
    plain, token_bytes = engine_of("llama"), sum(each.bytes_per_token() for each in tiny_model("llama").kv_shapes)
    with throughout(torch.float64):
        expected = plain.generate([[*ids, 5]], OPTIONS)
        tree = PrefixTree(80 * token_bytes, host_bytes=ROOMY)
        engine = engine_of("llama", tree)
        for each in (ids, other):  # of which the device has room for one
            engine.generate([each], OPTIONS)
        tree.wait_for_copies()
        assert tree.bytes_by_tier["host"] > 0
        require_same(engine.generate([[*ids, 5]], OPTIONS), expected)
        written = PrefixTree(ROOMY, folder=tmp_path)
        engine_of("llama", written).generate([ids], OPTIONS)
        written.save()
        ours = engine_of("llama", PrefixTree(ROOMY, folder=tmp_path)).generate([[*ids, 5]], OPTIONS)
    require_same(ours, expected)
    assert computed_and_cached(ours) == (1, 70)


def segment(first: int, end: int, *more: int) -> Segment:
    ids = tuple(prompt(end - first + len(more), seed=first))
    return Segment(name=f"{first}", ids=ids, positions=(*range(first, end), *more))


def test_a_segment_at_the_beginning_is_as_the_text_itself() -> None:
    begin = segment(0, 61)
    rests = [prompt(23, seed=1), prompt(9, seed=2)]
    reusing = [
        ReusingPrompt(
            uses=(SegmentUse(segment=begin, parts=(range(61),)),),
            new_ids=tuple(rest),
            new_positions=tuple(range(61, 61 + len(rest))),
        )
        for rest in rests
    ]
    engine = engine_of("llama")
    with throughout(torch.float64):
        ours, theirs = (engine.generate(each, OPTIONS) for each in (reusing, [[*begin.ids, *rest] for rest in rests]))
    require_same(ours, theirs)
    assert kept_bytes(ours) == kept_bytes(theirs)


def test_all_tokens_of_a_row_are_in_the_order_of_their_positions() -> None:
    """Reused ones before, between and behind each other and new ones, some for one row alone."""
    at = [range(3, 6), range(20, 22), range(9, 12)]
    parts = [
        ReusedPart(layers_TKX=[torch.tensor(run)[:, None, None] + 100], positions_T=torch.tensor(run), rows=rows)
        for run, rows in zip(at, [(0, 1), (0,), (0, 1)], strict=True)
    ]
    positions_BS = torch.tensor([[0, 7, 13, 25], [0, 0, 1, 14]])
    new_SBKX = positions_BS.T[:, :, None, None] + 100
    reused = ReusedKV(parts=parts, positions_BS=positions_BS, ends=[26, 15])
    texts = reused.whole([0, 2])
    rows = [[0, 3, 4, 5, 7, 9, 10, 11, 13, 20, 21, 25], [1, 3, 4, 5, 9, 10, 11, 14]]
    assert texts.lengths == list(map(len, rows)) and texts.gaps == [26 - 12, 15 - 8]
    found = texts.kv(0, new_SBKX, room=0)[:, :, 0, 0]
    assert found[:, 0].tolist() == [position + 100 for position in rows[0]]
    assert found[:, 1].tolist() == [0] * 4 + [position + 100 for position in rows[1]]


def with_gaps() -> list[ReusingPrompt]:
    """Two prompts of different lengths, with gaps between their positions."""
    outer, inner = segment(0, 30, *range(45, 55)), segment(34, 44)
    uses = SegmentUse(segment=outer, parts=(range(3, 28), range(30, 40))), SegmentUse(segment=inner, parts=(range(10),))
    gaps = ReusingPrompt(uses=uses, new_ids=tuple(prompt(24, seed=7)), new_positions=(1, 31, 32, 44, *range(60, 80)))
    return [gaps, ReusingPrompt(uses=uses[1:], new_ids=(5, 6, 7), new_positions=(2, 33, 46))]


@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])
def test_segments_with_gaps_and_between_new_tokens_keep_their_positions(family: str) -> None:
    """With a window of all tokens the answer is the exact one; with a smaller one the order of tokens stays.

    Also of layers with windows and with a bias by distance, for which gaps count.
    """
    gaps, alone = with_gaps()
    with throughout(torch.float64):
        exact, window, few = (
            engine_of(family, bits=bits, residual=residual).generate([gaps, alone], OPTIONS)
            for bits, residual in ((None, RESIDUAL), (4, WHOLE), (4, RESIDUAL))
        )
        few_alone = engine_of(family).generate([gaps], OPTIONS)
    require_same(window, exact)
    assert [each.first_token_logits_top5 for each in few.generations] == [
        each.first_token_logits_top5 for each in exact.generations
    ]
    assert few.generations[0].new_token_ids == few_alone.generations[0].new_token_ids
    assert few.generations[0].logprobs != exact.generations[0].logprobs


@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])
def test_rows_with_gaps_part_as_their_drafts_are_verified(family: str) -> None:
    """Each keeps its positions. The reference is a token per forward of all rows."""
    engine, prompts = engine_of(family), with_gaps()
    with throughout(torch.float64):
        plain = engine.generate(prompts, PLAIN)
        texts = [ids_of(each) + answer.new_token_ids for each, answer in zip(prompts, plain.generations, strict=True)]
        with knowing(texts, vocab_size=engine.model.vocab_size):
            drafted = engine.generate(prompts, DRAFTED)
    assert [each.new_token_ids for each in drafted.generations] == [each.new_token_ids for each in plain.generations]
    report = drafted.ranks[0].speculation
    assert report is not None and 3 < report.accepted < report.drafted


def test_a_server_decodes_prompts_with_segments_beside_others() -> None:
    """Also two answers to one prompt, which has gaps."""
    begin = segment(0, 50)
    reusing = ReusingPrompt(
        uses=(SegmentUse(segment=begin, parts=(range(45),)),),
        new_ids=tuple(prompt(9, seed=1)),
        new_positions=tuple(range(60, 69)),
    )
    serving = Serving("llama", policies=RankPolicies(storage=CacheOptions(bits=4, residual=RESIDUAL)))
    with throughout(torch.float64):
        serving.prefill(reusing, reusing, num_new=4)
        serving.step(1)
        serving.prefill(prompt(60, seed=2), num_new=4)
        serving.executor.decode_all()
        options = GenerationOptions(max_new_tokens=4, ignore_eos=True)
        expected = [serving.plain.generate([each], options) for each in (reusing, reusing, prompt(60, seed=2))]
    rows = [(1, 0), (1, 1), (2, 0)]
    assert [serving.tokens[row] for row in rows] == [each.generations[0].new_token_ids for each in expected]
