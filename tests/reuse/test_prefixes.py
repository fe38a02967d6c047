"""Prompts that begin as earlier texts do: only the rest is computed, and every number is as if all of it was."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.config import CacheOptions, DecodeName, DecodeOptions, Device, PrefillName, RanksOptions
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.report import GenerationBatch
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.ranks.tasks import tiny_model

EXACT = 1e-9
OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
ROOMY = 1 << 40


def engine_of(
    model: Model,
    tree: PrefixTree | None = None,
    prefill: PrefillOptions | None = None,
    policies: RankPolicies | None = None,
) -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(model, ranks, tree=tree, prefill=prefill, policies=policies)


def num_common(ids: list[int], text: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, text, strict=False))))


def longest(ids: list[int], texts: list[list[int]]) -> int:
    """Length of the longest prefix of a prompt that one of the texts begins with, without its last token."""
    return max((num_common(ids[:-1], text) for text in texts), default=0)


class Texts:
    """Draws prompts that begin as earlier texts do, up to anywhere."""

    def __init__(self, seed: int) -> None:
        self.draw, self.known = random.Random(seed), list[list[int]]()

    def prompts(self, num: int) -> list[list[int]]:
        return [self._prompt() for _ in range(num)]

    def _prompt(self) -> list[int]:
        draw, begin = self.draw, list[int]()
        if self.known and draw.random() < 0.85:
            text = draw.choice(self.known)
            begin = text[: draw.randint(1, len(text))]
        num_new = draw.choice([0, 1, 2, 7, 30]) if begin else draw.randint(30, 60)
        return (begin + prompt(num_new, seed=draw.randrange(1000)))[:150]


def require_same(ours: GenerationBatch, theirs: GenerationBatch) -> None:
    for our, their in zip(ours.generations, theirs.generations, strict=True):
        assert (our.prompt_tokens, our.new_token_ids) == (their.prompt_tokens, their.new_token_ids)
        for (token, logit), (expected, value) in zip(
            our.first_token_logits_top5, their.first_token_logits_top5, strict=True
        ):
            assert token == expected and abs(logit - value) < EXACT
        assert our.logprobs is not None and their.logprobs is not None
        for at, expected_at in zip(our.logprobs, their.logprobs, strict=True):
            assert abs(at.logprob - expected_at.logprob) < EXACT
            assert [token for token, _ in at.top] == [token for token, _ in expected_at.top]


def computed_and_cached(batch: GenerationBatch) -> tuple[int, int]:
    [report] = batch.ranks
    assert report.reuse is not None
    return report.chunk_tokens, report.reuse.cached_tokens


FAMILIES = ["llama", "mistral", "gemma2"]
MORE_FAMILIES = ["gpt_oss", "llama4_text", "deepseek_v3", "gpt2", "bloom", "falcon", "gptj"]


IN_PIECES = PrefillOptions(chunk_tokens=7)


@pytest.mark.parametrize(
    ("family", "prefill"),
    [
        *((family, PrefillOptions()) for family in FAMILIES),
        *((family, IN_PIECES) for family in ("llama", "gemma2")),
        *(pytest.param(family, PrefillOptions(), marks=pytest.mark.slow) for family in MORE_FAMILIES),
        *(pytest.param(family, IN_PIECES, marks=pytest.mark.slow) for family in MORE_FAMILIES),
    ],
    ids=lambda each: each if isinstance(each, str) else each.chunk_tokens,
)
def test_texts_are_continued_as_if_all_of_them_was_computed(family: str, prefill: PrefillOptions) -> None:
    """Those that are continued piece by piece, too: what they are compared with is computed at once."""
    model, texts, tree = tiny_model(family), Texts(seed=len(family)), PrefixTree(ROOMY)
    engine, plain, seen_cached = engine_of(model, tree, prefill), engine_of(model), 0
    for num_rows in (1, 2, 3):
        prompts = texts.prompts(num_rows)
        reused = [longest(ids, texts.known) for ids in prompts]
        with throughout(model.dtype):
            ours, theirs = engine.generate(prompts, OPTIONS), plain.generate(prompts, OPTIONS)
        require_same(ours, theirs)
        lengths = [len(ids) - num for ids, num in zip(prompts, reused, strict=True)]
        assert computed_and_cached(ours) == (max(lengths), sum(reused))
        seen_cached += sum(reused)
        texts.known += [ids + each.new_token_ids[:-1] for ids, each in zip(prompts, ours.generations, strict=True)]
    assert seen_cached > 40
    assert all(node.holds == 0 for node in tree.nodes())


def test_a_tree_that_is_too_small_for_all_texts_changes_no_number() -> None:
    model, texts = tiny_model("llama"), Texts(seed=5)
    token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    dropped: list[object] = []
    tree = PrefixTree(120 * token_bytes, on_change=dropped.append)
    engine, plain = engine_of(model, tree), engine_of(model)
    for num_rows in (2, 3, 1, 2):
        prompts = texts.prompts(num_rows)
        with throughout(model.dtype):
            ours, theirs = engine.generate(prompts, OPTIONS), plain.generate(prompts, OPTIONS)
        require_same(ours, theirs)
        assert tree.num_bytes <= tree.limit_bytes
        texts.known += [ids + each.new_token_ids for ids, each in zip(prompts, ours.generations, strict=True)]
    assert any("Dropped" in repr(change) for change in dropped)


def test_in_few_bits_a_text_is_continued_in_pieces() -> None:
    """The codes after a stored prefix, and after its rest came in pieces, are those of the whole text."""
    model, texts = tiny_model("llama"), Texts(seed=8)
    policies = RankPolicies(storage=CacheOptions(bits=4, residual=8))
    ours, theirs = engine_of(model, PrefixTree(ROOMY), IN_PIECES, policies), engine_of(model, policies=policies)
    for num_rows in (1, 2, 3):
        prompts = texts.prompts(num_rows)
        with throughout(model.dtype):
            batch = ours.generate(prompts, OPTIONS)
            require_same(batch, theirs.generate(prompts, OPTIONS))
        assert computed_and_cached(batch)[1] == sum(longest(ids, texts.known) for ids in prompts)
        texts.known += prompts
    assert sum(longest(ids, texts.known) for ids in prompts) > 20


def test_a_prompt_that_is_stored_whole_computes_its_last_token() -> None:
    model, tree = tiny_model("llama"), PrefixTree(ROOMY)
    engine, ids = engine_of(model, tree), prompt(33)
    with throughout(model.dtype):
        first, second = engine.generate([ids], OPTIONS), engine.generate([ids], OPTIONS)
        token = engine.generate([ids[:1]], OPTIONS)
    require_same(second, first)
    assert [computed_and_cached(each) for each in (first, second, token)] == [(33, 0), (1, 32), (1, 0)]


def test_answers_are_stored_but_for_their_last_token() -> None:
    model, tree = tiny_model("llama"), PrefixTree(ROOMY)
    engine, ids = engine_of(model, tree), prompt(20)
    with throughout(model.dtype):
        answer = engine.generate([ids], OPTIONS).generations[0].new_token_ids
        following = engine.generate([ids + answer + prompt(4, seed=1)], OPTIONS)
    assert computed_and_cached(following) == (5, 23)


def test_rows_of_a_padded_batch_are_stored_each() -> None:
    model, tree = tiny_model("llama"), PrefixTree(ROOMY)
    engine, plain = engine_of(model, tree), engine_of(model)
    prompts = [prompt(length, seed=length) for length in (20, 33, 27)]
    following = [[*ids, 3 + row] for row, ids in enumerate(prompts)]
    with throughout(model.dtype):
        engine.generate(prompts, OPTIONS)
        ours, theirs = engine.generate(following, OPTIONS), plain.generate(following, OPTIONS)
    require_same(ours, theirs)
    assert computed_and_cached(ours)[1] >= 80


def test_texts_of_another_model_or_dtype_are_not_found() -> None:
    tree, ids = PrefixTree(ROOMY), prompt(30)
    slower, changed = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e4}), build("llama")
    with torch.no_grad():
        next(changed.parameters()).add_(1e-3)
    with throughout(torch.float64):
        models = [tiny_model("llama"), Model(slower, name="slower"), Model(changed, name="changed")]
    models.append(tiny_model("llama", torch.float32))
    for model in models:
        with throughout(model.dtype):
            engine, plain = engine_of(model, tree), engine_of(model)
            ours, theirs = engine.generate([ids], OPTIONS), plain.generate([ids], OPTIONS)
        assert computed_and_cached(ours) == (30, 0)
        assert ours.generations == theirs.generations
    assert len({node.key for node in tree.nodes()}) == len(models)


def test_memory_is_that_of_the_texts() -> None:
    """Room for tokens that were never generated, and padding, are given back."""
    model, tree = tiny_model("llama"), PrefixTree(ROOMY)
    engine = engine_of(model, tree)
    token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    prompts = [prompt(length, seed=length) for length in (10, 25, 7)]
    with throughout(model.dtype):
        for some in (prompts[:1], prompts[1:]):
            many = GenerationOptions(max_new_tokens=200, ignore_eos=True)
            engine.generate(some, many, on_tokens=lambda tokens: range(len(tokens)), cancellable=True)
    # Rows end with the second token, of which no keys and values are there.
    assert tree.num_bytes == sum(len(ids) + 1 for ids in prompts) * token_bytes


def test_a_call_that_fails_holds_nothing() -> None:
    model, tree = tiny_model("llama"), PrefixTree(ROOMY)
    engine, ids = engine_of(model, tree), prompt(20)

    def fail(tokens: list[int | None]) -> None:
        raise RuntimeError("the reader has gone")

    with throughout(model.dtype):
        engine.generate([ids], OPTIONS)
        with pytest.raises(RuntimeError, match="has gone"):
            engine.generate([ids], OPTIONS, on_tokens=fail)  # type: ignore[arg-type]
    assert all(node.holds == 0 for node in tree.nodes())


@pytest.mark.parametrize("family", ["llama_dynamic_ntk", "phi3_longrope", "bart"])
def test_models_whose_keys_depend_on_more_than_tokens_and_positions_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match="cannot be reused in other prompts; leave the tree out"):
        engine_of(tiny_model(family), PrefixTree(ROOMY))


def test_what_does_not_go_with_it_is_refused() -> None:
    last = DecodeOptions(name=DecodeName.last)
    plain = Setup(prefill=PrefillOptions(), decode=last, prefixes="reuse of prefixes")
    check(plain)
    for more, message in [
        ({"prefill": PrefillOptions(name=PrefillName.zigzag)}, "prefill=zigzag, which has.*use prefill=kv_runahead"),
        (
            {
                "decode": DecodeOptions(name=DecodeName.sharded),
                "num_stages": 2,
                "cache": CacheOptions(bits=4),
                "policies": RankPolicies(storage=CacheOptions(bits=4)),
            },
            "decode=sharded with .* cache.bits lets each rank choose among the tokens that it.*use decode=last",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            check(replace(plain, **more))
