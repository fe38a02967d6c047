"""Speculative prefill: what is chosen, and the answer after it, are those of transformers with the kept positions."""

# Legend: N query heads, n tokens, V vocabulary.

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.quest import Quest
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.cache.attention import CausalAttention
from runahead.config import CacheOptions, DecodeName, Speculate, Speculative
from runahead.prompt_draft.choice import NEIGHBOURS, kept_tokens, num_kept, smoothed
from runahead.prompt_draft.first_layers import first_layers
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import build, largest_difference, prompt, throughout
from tests.ranks import speculative_tasks
from tests.ranks.tasks import tiny_model

PROMPT = prompt(131, seed=5)
"""Its last chunk is a part of one."""
OPTIONS = PrefillOptions(speculative=Speculative.layers, speculative_chunk=8, speculative_ahead=5)
ANSWER = GenerationOptions(max_new_tokens=6, ignore_eos=True)
TOLERANCE = 1e-9
"""Sums in another order cost about 1e-14 in float64, a wrong position or token above 1e-4."""


@dataclass(frozen=True)
class Wrong:
    """What a wrong reference does.

    Attributes:
        later: tokens of the look-ahead by which its scores are late.
        shift: tokens by which its chunks are.
        renumbered: positions have no gaps.
    """

    later: int = 0
    shift: int = 0
    renumbered: bool = False


RIGHT = Wrong()


def cut(family: str, num_layers: int) -> PreTrainedModel:
    """transformers' model of the first layers: those of the whole one, without the others."""
    module = deepcopy(build(family))
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == module.config.num_hidden_layers:
                setattr(parent, name, child[:num_layers])
    return module


@torch.inference_mode()
def kept_by_reference(
    family: str, ids: list[int], num_layers: int, options: PrefillOptions, wrong: Wrong = RIGHT
) -> list[int]:
    """The tokens that stay, by transformers' probabilities and plain sums."""
    module, text, num = cut(family, num_layers), list(ids), len(ids)
    module.set_attn_implementation("eager")
    by_step = list[list[float]]()
    for step in range(options.speculative_ahead + 1 + wrong.later):
        out = module(torch.tensor([text]), output_attentions=True, use_cache=False)
        if step > wrong.later:  # by the query of a token that was generated
            layers = [attention_1Ntt[0, :, -1, :num] for attention_1Ntt in out.attentions]
            by_step.append([max(float(each) for each in at) for at in torch.cat([*map(spread, layers)]).T])
        text.append(int(out.logits[0, -1].argmax()))
    scores = [mean(at) for at in zip(*by_step, strict=True)]
    size = options.speculative_chunk
    chunks = [list(range(max(0, start), min(start + size, num))) for start in range(-wrong.shift, num, size)]
    wanted = max(2, -(-round(len(chunks) * options.speculative_share * 1000) // 1000)) - 1
    best = sorted(chunks[:-1], key=lambda chunk: -mean(scores[at] for at in chunk))[:wanted]
    return sorted(at for chunk in (*best, chunks[-1]) for at in chunk)


def spread(probabilities_Nn: Tensor) -> Tensor:
    """Each token's mean with its neighbours."""
    num, half = probabilities_Nn.shape[1], NEIGHBOURS // 2
    return torch.stack(
        [probabilities_Nn[:, max(0, at - half) : min(num, at + half + 1)].mean(dim=1) for at in range(num)], dim=1
    )


@torch.inference_mode()
def answer_by_reference(
    family: str, ids: list[int], kept: list[int], num_new: int, *, renumbered: bool = False
) -> tuple[list[float], list[int]]:
    """First logits and new tokens of transformers' model, which is given the kept tokens at their positions."""
    module, text = build(family), [ids[at] for at in kept]
    positions, first = list(range(len(kept))) if renumbered else list(kept), list[float]()
    for _ in range(num_new):
        given = {"input_ids": torch.tensor([text]), "position_ids": torch.tensor([positions])}
        # Without a cache transformers takes gaps for the bounds of other texts.
        logits_V = module(**given, use_cache=True).logits[0, -1]
        first = first or logits_V.tolist()
        text.append(int(logits_V.argmax()))
        positions.append(positions[-1] + 1)
    return first, text[len(kept) :]


@cache
def reference(family: str = "llama_deep", num: int = len(PROMPT), wrong: Wrong = RIGHT) -> tuple[Any, ...]:
    layers, new = 2 if family == "llama_deep" else 1, ANSWER.max_new_tokens
    with throughout(torch.float64):
        kept = kept_by_reference(family, PROMPT[:num], layers, OPTIONS, wrong)
        return kept, *answer_by_reference(family, PROMPT[:num], kept, new, renumbered=wrong.renumbered)


def top(logits: list[float]) -> Tensor:
    return torch.tensor(sorted(logits, reverse=True)[:5], dtype=torch.float64)


@pytest.mark.parametrize("ratios", [(1.0,), (0.7, 0.3), (0.5, 0.1, 0.4), (0.0, 1.0)])
@pytest.mark.parametrize("family", ["llama_deep", "qwen3"])
def test_choice_and_answer_are_those_of_transformers(
    rank_pools: RankPools, family: str, ratios: tuple[float, ...]
) -> None:
    done = rank_pools.run(len(ratios), speculative_tasks.generate, family, [PROMPT], ANSWER, OPTIONS, ratios)
    kept, logits, tokens = reference(family)
    assert 0 < len(kept) == num_kept(len(PROMPT), 0.25, 8) < len(PROMPT)
    for batch, chosen in done:
        [generation] = batch.generations
        assert chosen == [kept] and batch.speculative is not None and batch.speculative.kept_tokens == [len(kept)]
        assert generation.new_token_ids == tokens and generation.prompt_tokens == len(PROMPT)
        assert largest_difference([each for _, each in generation.first_token_logits_top5], top(logits)) < TOLERANCE
        assert batch.boundaries[-1] == len(kept)


@pytest.mark.parametrize("wrong", [Wrong(later=1), Wrong(shift=1), Wrong(renumbered=True)])
def test_a_wrong_reference_is_told(wrong: Wrong) -> None:
    """By the test above: other tokens stay, or the answer's logits are others."""
    kept, logits, _ = reference()
    others, other_logits, _ = reference(wrong=wrong)
    assert others != kept or largest_difference(top(other_logits), top(logits)) > 1e-4


@pytest.mark.parametrize(
    "more",
    [
        {"decode": DecodeName.sharded},
        {"policies": RankPolicies(last=[Quest(fetch=1.0, page=4)])},
        {"policies": RankPolicies(storage=CacheOptions(bits=8, residual=512, residual_bits=None))},
    ],
    ids=["sharded", "quest", "bits of none"],
)
def test_a_padded_batch_is_answered_row_by_row(rank_pools: RankPools, more: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT[:77], PROMPT[:5]]
    done = rank_pools.run(2, _generate, prompts, ANSWER, more, (0.6, 0.4))
    for batch, chosen in done:
        for ids, generation, places in zip(prompts, batch.generations, chosen, strict=True):
            kept, logits, tokens = reference(num=len(ids))
            assert places == kept and generation.new_token_ids == tokens, len(ids)
            found = [each for _, each in generation.first_token_logits_top5]
            assert largest_difference(found, top(logits)) < TOLERANCE


def _generate(
    ranks: Ranks, prompts: list[list[int]], options: GenerationOptions, more: dict[str, Any], ratios: tuple[float, ...]
) -> tuple[GenerationBatch, list[list[int]]]:
    given = {"prefill": OPTIONS, **more}
    return speculative_tasks.generate(ranks, "llama_deep", prompts, options, ratios=ratios, **given)


def test_drafts_are_verified_after_it(rank_pools: RankPools) -> None:
    drafted = replace(ANSWER, speculate=Speculate.lookup, speculate_always=True, speculate_match=1)
    (batch, _), *_ = rank_pools.run(1, _generate, [PROMPT], drafted, {}, (1.0,))
    assert batch.generations[0].new_token_ids == reference()[2]


def test_a_smaller_model_chooses(rank_pools: RankPools) -> None:
    """The scores are those of the draft, as its own first layers have others."""
    options = replace(OPTIONS, speculative=Speculative.model)
    (batch, chosen), *_ = rank_pools.run(
        2, _generate, [PROMPT], ANSWER, {"prefill": options, "draft": "llama"}, (0.7, 0.3)
    )
    with throughout(torch.float64):
        kept = kept_by_reference("llama", PROMPT, 3, options)
        _, tokens = answer_by_reference("llama_deep", PROMPT, kept, ANSWER.max_new_tokens)
    assert chosen == [kept] and kept != reference()[0]
    assert batch.generations[0].new_token_ids == tokens


def test_a_timeline_begins_with_the_draft(rank_pools: RankPools) -> None:
    done = rank_pools.run(2, _generate, [PROMPT], ANSWER, {"records": True}, (0.6, 0.4))
    for batch, _ in done:
        for spans in batch.spans:
            draft, *others = spans
            assert draft.detail == "draft of the prompt" and draft.end_s <= min(each.start_s for each in others)
        assert batch.speculative is not None and 0 < batch.speculative.draft_s < batch.ttft_s


def test_codes_on_the_wire_go_with_it(rank_pools: RankPools) -> None:
    """In 8 bits the draft chooses the same here, and logits are off by rounding."""
    options = replace(OPTIONS, wire_bits=8)
    (batch, chosen), *_ = rank_pools.run(2, _generate, [PROMPT], ANSWER, {"prefill": options}, (0.6, 0.4))
    kept, logits, _ = reference()
    assert chosen == [kept]
    off = largest_difference([each for _, each in batch.generations[0].first_token_logits_top5], top(logits))
    assert TOLERANCE < off < 0.1


def test_all_tokens_are_kept_without_a_draft(rank_pools: RankPools) -> None:
    options = replace(OPTIONS, speculative_share=1.0)
    (batch, [places]), *_ = rank_pools.run(
        1, speculative_tasks.generate, "llama_deep", [PROMPT], ANSWER, options, (1.0,)
    )
    (exact, _), *_ = rank_pools.run(
        1, speculative_tasks.generate, "llama_deep", [PROMPT], ANSWER, PrefillOptions(), (1.0,)
    )
    assert places == list(range(len(PROMPT)))
    assert batch.generations == exact.generations  # bit by bit


@pytest.mark.parametrize("family", ["llama_deep", "gemma2", "gpt_neox", "deepseek_v3", "qwen3_moe"])
def test_first_layers_are_those_of_the_model(family: str) -> None:
    model, num = tiny_model(family), 2
    with throughout(torch.float64), torch.inference_mode():
        first = first_layers(model, num)
        attention = CausalAttention(first.empty_cache(40), start=0, pads=[0])
        ids_1C = torch.tensor([PROMPT[:40]])
        ours_CV = first.forward(ids_1C, attention, start=0, pads=[0], all_logits=True)[0]
        theirs_CV = cut(family, num)(ids_1C, use_cache=False).logits[0]
    assert (ours_CV - theirs_CV).abs().max() < TOLERANCE
    shared = {each.data_ptr() for each in model.module.parameters()}
    assert all(each.data_ptr() in shared for each in first.module.parameters())
    with pytest.raises(ValueError, match=r"speculative_layers=99 must be from 1 to"):
        first_layers(model, 99)


def test_chunks_with_the_best_means_stay_and_the_last_one() -> None:
    scores_n = torch.zeros(22)
    scores_n[[9, 12]] = torch.tensor([0.4, 0.5])
    assert kept_tokens(scores_n, 0.5, 4) == [*range(8, 16), 20, 21]
    assert kept_tokens(scores_n, 0.01, 4) == [*range(12, 16), 20, 21]
    assert kept_tokens(torch.rand(22), 1.0, 4) == list(range(22))
    assert kept_tokens(torch.ones(3), 0.5, 4) == [0, 1, 2]
    for num in range(1, 30):
        for share in (0.1, 0.25, 1 / 3, 0.75, 1.0):
            assert len(kept_tokens(torch.rand(num), share, 4)) == num_kept(num, share, 4)


@pytest.mark.parametrize("num", [1, 2, 7, 12, 13, 14, 40])
def test_neighbours_that_are_not_there_do_not_count(num: int) -> None:
    probabilities_Nn = torch.rand(3, num, dtype=torch.float64)
    torch.testing.assert_close(smoothed(probabilities_Nn), spread(probabilities_Nn))


def test_a_smaller_model_is_asked_for() -> None:
    from tests.decoding.test_speculation import engine_of

    with pytest.raises(ValueError, match="prefill.speculative=model needs a smaller model"):
        engine_of(tiny_model("llama"), prefill=PrefillOptions(speculative=Speculative.model))
    assert isinstance(engine_of(tiny_model("llama"), prefill=PrefillOptions()), Engine)
