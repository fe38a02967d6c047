"""MagicPIG: tokens are sampled by hashes, with weights that make sums right on average over the seed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.magicpig import MagicPIG, sampling_probability
from policies.retriever import Slots
from tests.families import build, prompt, throughout
from tests.policies.test_indices import BARE, drawn, slots_of, view
from tests.policies.test_retrieval import GENERATED, NUM_TOKENS, Turns
from tests.policies.written_out import WrittenOut
from tests.ranks.tasks import tiny_model

BITS, TABLES = 2, 6
OPTIONS: dict[str, Any] = {
    "min_tokens": 0,
    "sinks": 2,
    "recent": 3,
    "bits": BITS,
    "tables": TABLES,
    "dense_every": 0,
    "first_layer": 0,
}
SEEDS, SIGMAS = 1500, 4.5


def closed_form(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """The paper's probability."""
    x = (1 - cosine.acos() / math.pi) ** bits
    return 1 - (1 - x) ** tables - tables * x * (1 - x) ** (tables - 1)


@pytest.mark.parametrize(("bits", "tables"), [(2, 6), (4, 20), (10, 150)])
def test_the_probability_is_the_papers_and_a_count_of_random_hashes(bits: int, tables: int) -> None:
    cosines = torch.tensor([-0.7, 0.0, 0.4, 0.8, 0.95], dtype=torch.float64)
    ours = sampling_probability(cosines, bits, tables)
    torch.testing.assert_close(ours, closed_form(cosines, bits, tables), atol=1e-12, rtol=1e-6)
    draws, generator = 4000, torch.Generator().manual_seed(0)
    for cosine, expected in zip(cosines.tolist(), ours.tolist(), strict=True):
        planes_DLb2 = torch.randn(draws, tables, bits, 2, generator=generator)  # of the plane of both vectors
        a, b = (planes_DLb2 @ torch.tensor(v) > 0 for v in ([1.0, 0.0], [cosine, math.sqrt(1 - cosine**2)]))
        counted = float(((a == b).all(dim=-1).sum(dim=-1) >= 2).float().mean())
        assert abs(counted - expected) <= SIGMAS * math.sqrt(expected * (1 - expected) / draws) + 2 / draws


def test_small_probabilities_are_right_and_no_angle_gives_nan() -> None:
    """Nearly opposite vectors are sampled once in 1e13 times; the first term of the probability then is nearly all."""
    cosine = torch.tensor([-0.9], dtype=torch.float64)
    x = (1 - cosine.acos() / math.pi) ** 10
    leading = 150 * 149 / 2 * x**2
    assert 1e-13 < leading < 2e-13
    torch.testing.assert_close(sampling_probability(cosine, 10, 150), leading, atol=0, rtol=1e-4)
    edges = sampling_probability(torch.tensor([-1.0, 1.0, 1.0 + 1e-6]), 10, 150)
    assert edges[1] == edges[2] == 1 and 0 < edges[0] < 1e-100


def sums(options: dict[str, Any], seed: int, wrong: str = "") -> Tensor:
    """Denominator and numerators (N, 1 + V) of attention to what a seed's hashes sample of 30 tokens."""
    policy = MagicPIG(**{**OPTIONS, "sinks": 0, "recent": 0, **options, "seed": seed})
    given = view(30, [0])
    index = policy.index(given)
    q_BNH = drawn(1, 4, 8, seed=7)
    if wrong == "another seed's queries":
        index._planes_HP = replace(policy, seed=seed + 10**6).index(given)._planes_HP
    choice = index.choose(q_BNH, slots_of(30, [0]))
    assert choice is not None and choice.weigh is not None
    slots_BKm = choice.slots_BKm
    k_BKmH, v_BKmV = (x.take_along_dim(slots_BKm[..., None], dim=2) for x in (given.k_BKnH, given.v_BKnV))
    scores_BKGm = q_BNH.unflatten(1, (2, -1)) @ k_BKmH.mT * 0.3
    logs_BKGm = choice.weigh(slots_BKm, k_BKmH).unflatten(1, (2, -1))
    if wrong == "weights left out":
        logs_BKGm = torch.where(logs_BKGm.isneginf(), logs_BKGm, 0.0)
    weights_BKGm = (scores_BKGm + logs_BKGm).exp()
    return torch.cat([weights_BKGm.sum(-1, keepdim=True), weights_BKGm @ v_BKmV], dim=-1)[0].flatten(0, 1)


def exact_sums() -> Tensor:
    given, q_BNH = view(30, [0]), drawn(1, 4, 8, seed=7)
    weights_BKGn = (q_BNH.unflatten(1, (2, -1)) @ given.k_BKnH.mT * 0.3).exp()
    return torch.cat([weights_BKGn.sum(-1, keepdim=True), weights_BKGn @ given.v_BKnV], dim=-1)[0].flatten(0, 1)


def errors(options: dict[str, Any], wrong: str = "") -> Tensor:
    """How many standard errors the means over seeds are from the exact sums (N, 1 + V)."""
    found_SNX = torch.stack([sums(options, seed, wrong) for seed in range(SEEDS)])
    return (found_SNX.mean(dim=0) - exact_sums()) / (found_SNX.std(dim=0) / math.sqrt(SEEDS))


@pytest.mark.parametrize("options", [{}, {"fetch": 9}], ids=["as many as are sampled", "at most 9"])
def test_numerator_and_denominator_are_right_on_average_over_seeds(options: dict[str, Any]) -> None:
    assert errors(options).abs().max() < SIGMAS


@pytest.mark.parametrize("options", [{}, {"fetch": 9}], ids=["as many as are sampled", "at most 9"])
@pytest.mark.parametrize("wrong", ["weights left out", "another seed's queries"])
def test_wrong_variants_are_not(wrong: str, options: dict[str, Any]) -> None:
    assert errors(options, wrong).abs().max() > 2 * SIGMAS


def test_other_tokens_are_left_out_in_each_step_and_layer() -> None:
    """All are sampled, and told by how far they are from the next one. Padding has no effect."""
    policy = MagicPIG(**BARE, bits=1, tables=40, dense_every=0, fetch=5)
    given, q_BNH = view(30, [0, 7]), drawn(2, 4, 8, seed=7)

    def left(slots: Slots, layer: int = 0) -> Tensor:
        index = policy.index(replace(given, layer=layer))
        extra = slots.num_slots - 30
        index.append(given.k_BKnH[:, :, :extra], given.v_BKnV[:, :, :extra])
        assert index.samples(q_BNH).all()
        choice = index.choose(q_BNH, slots)
        assert choice is not None
        return slots.num_slots - choice.slots_BKm.sort(dim=-1).values

    found = [left(slots_of(30, [0, 7])), left(slots_of(31, [0, 7])), left(slots_of(30, [0, 7]), layer=1)]
    for row in (0, 1):
        assert len({tuple(each[row].flatten().tolist()) for each in found}) == 3
    by_positions = replace(slots_of(30, [0, 7]), positions_BKn=given.positions_BKn, next_B=given.next_B)
    assert torch.equal(left(by_positions), found[0]) and not torch.equal(found[0][0], found[0][1])
    assert torch.equal(left(slots_of(30, [0, 0]))[0], found[0][0])


class Sampled(WrittenOut):
    """A Llama whose heads sample by the hashes of each layer, for each token after the prompt."""

    given = NUM_TOKENS

    def _attended(self, layer: int, head: int, q_CH: Tensor) -> Tensor:
        own = head * self.kv_heads // self.heads
        k_nH, v_nH = self.k_KnH[layer][own], self.v_KnH[layer][own]
        num, start = len(k_nH), len(k_nH) - len(q_CH)
        if start == 0:
            return super()._attended(layer, head, q_CH)
        places_n = self.places(num)
        q_CH, k_nH = self.rotated(q_CH, places_n[start:]), self.rotated(k_nH, places_n)
        draw = torch.Generator().manual_seed(layer)
        planes_HP = torch.randn(self.head_dim, BITS * TABLES, generator=draw).double()
        centre_H = k_nH[: self.given].mean(dim=0)
        logits_Cn = q_CH @ k_nH.T / math.sqrt(self.head_dim)
        for new, q_H in enumerate(q_CH):
            logits_Cn[new, start + new + 1 :] = -math.inf
            for place in range(2, start - 3):  # neither a sink, nor recent, nor of the turn itself
                key_H = k_nH[place] - centre_H
                agree = ((key_H @ planes_HP > 0) == (q_H @ planes_HP > 0)).view(TABLES, BITS).all(dim=1)
                cosine = torch.nn.functional.cosine_similarity(key_H, q_H, dim=0)
                weight = 1 / closed_form(cosine, BITS, TABLES) if agree.sum() >= 2 else torch.tensor(0.0)
                logits_Cn[new, place] += weight.log()
        return logits_Cn.softmax(dim=-1) @ v_nH


def test_logits_are_those_of_attention_written_out() -> None:
    """Of generated tokens, and of a turn whose tokens are fetched for together and sample each for itself."""
    turns, turn = Turns(tiny_model("llama"), [MagicPIG(**OPTIONS, turn_tokens=4)]), [19, 23, 29]
    reference = Sampled(build("llama"))
    with torch.inference_mode(), throughout(torch.float64):
        expected = [reference.feed(prompt(NUM_TOKENS)), *(reference.feed([token]) for token in GENERATED * 2)]
        after = reference.feed(turn)
    torch.testing.assert_close(turns.prefill()[0], expected[0], atol=1e-9, rtol=0)
    ours = turns.decode(GENERATED * 2)[0]
    torch.testing.assert_close(ours, torch.stack(expected[1:]), atol=1e-8, rtol=0)
    with throughout(torch.float64):
        torch.testing.assert_close(turns.conversation.feed(torch.tensor([turn]))[0], after, atol=1e-8, rtol=0)
    shares = [share for share in turns.retrieval.report().fetched_share if share is not None]
    assert len(shares) == 3 and all(0.1 < share < 0.95 for share in shares)
    other = Turns(tiny_model("llama"), [MagicPIG(**OPTIONS | {"seed": 1})])
    other.prefill()
    assert (other.decode(GENERATED * 2)[0] - ours).abs().max() > 1e-3


def test_what_is_stored_is_hashed_whenever_it_comes() -> None:
    """In one piece, token by token, in a fork, after slots were dropped or written over: by the prompt's mean."""
    first, more = view(20, [0, 7]), drawn(2, 2, 30, 8, seed=9)
    policy = MagicPIG(**OPTIONS)
    index = policy.index(first)
    fork = index.fork(first.stored)
    for at in range(30):
        index.append(more[:, :, at : at + 1], more[:, :, at : at + 1])
    fork.append(more, more)
    q_BNH, keys = drawn(2, 6, 8, seed=3), torch.cat([first.k_BKnH, more], dim=2)
    planes_HP = torch.randn(8, BITS * TABLES, generator=torch.Generator().manual_seed(0)).double()
    centre = torch.stack([first.k_BKnH[row, :, pad:].mean(dim=1, keepdim=True) for row, pad in enumerate((0, 7))])
    bits_of_keys, bits_of_q = (
        (x @ planes_HP > 0).unflatten(3, (TABLES, BITS)) for x in (keys - centre, q_BNH.unflatten(1, (2, 3)))
    )
    expected = (bits_of_keys[:, :, None] == bits_of_q[:, :, :, None]).all(dim=-1).sum(dim=-1) >= 2
    assert torch.equal(index.samples(q_BNH), expected) and torch.equal(fork.samples(q_BNH), expected)
    slots = torch.tensor([3, 9, 10, 44]).expand(2, 2, 4)
    index.keep(slots, keys, keys)
    assert torch.equal(index.samples(q_BNH), expected[..., [3, 9, 10, 44]])
    index.overwrite(torch.tensor([[2, 2], [2, 2]]), keys[:, :, 30], keys[:, :, 30])
    assert torch.equal(index.samples(q_BNH), expected[..., [3, 9, 30, 44]])


def test_some_layers_see_everything_and_what_cannot_be_is_refused() -> None:
    turns = Turns(tiny_model("llama"), [MagicPIG(**OPTIONS | {"dense_every": 2})])
    assert turns.prefill() is not None
    turns.decode(GENERATED)
    assert [share is None for share in turns.retrieval.report().fetched_share] == [True, False, True]
    for option, value in (("bits", 0), ("bits", 15), ("tables", 1), ("seed", -1), ("group", "mean")):
        with pytest.raises(ValueError, match=f"policy.{option}={value} "):
            MagicPIG(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention of its own query is estimated"):
        MagicPIG(fetch=100, late=0.8)
