"""ShadowKV: landmarks, outliers that stay on the device, and keys that are rebuilt there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.low_rank_keys import LowRankKeys
from policies.quest import Digest, Quest
from policies.retriever import Group, PromptView
from policies.shadowkv import ShadowKV, ShadowPages
from runahead.rotary import Rotary
from tests.policies.test_indices import KV_HEADS, drawn, slots_of, view
from tests.policies.test_retrieval import GENERATED, NUM_TOKENS, PADDED, Turns
from tests.ranks.tasks import tiny_model

OPTIONS: dict[str, Any] = {"fetch": 12, "page": 4, "sinks": 2, "recent": 3, "min_tokens": 0, "group": Group.max}
ALL = 1000
"""A rank above any."""
TOLERANCE = 1e-9  # float64


@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "deepseek_v3", "gemma2"])
def test_with_keys_of_full_rank_it_is_quest_with_the_same_pages(family: str, lengths: tuple[int, ...]) -> None:
    """With a rank of 3 the answers are others."""
    model = tiny_model(family)
    if len(lengths) > 1 and model.uneven_limit is not None:
        pytest.skip("its rows cannot be of different lengths")
    logits = []
    for policy in (
        ShadowKV(**OPTIONS, outliers=0, rank=ALL),
        ShadowKV(**OPTIONS, outliers=0, rank=None),
        Quest(**OPTIONS, first_layer=0, digest=Digest.mean),
        ShadowKV(**OPTIONS, outliers=0, rank=3),
    ):
        turns = Turns(model, [policy], lengths)
        turns.prefill()
        logits.append(turns.decode(GENERATED))
    torch.testing.assert_close(logits[0], logits[2], atol=TOLERANCE, rtol=0)
    assert torch.equal(logits[1], logits[2])
    assert (logits[3] - logits[2]).abs().max() > 1e-5


@pytest.mark.parametrize("rank", [None, ALL])
@torch.inference_mode()
def test_neither_outliers_nor_keys_that_are_rebuilt_are_read(rank: int | None) -> None:
    """Where they are stored is nan. If the outliers, or the keys of other pages, are fetched, answers are too."""
    ours, theirs = (Turns(tiny_model("llama"), [ShadowKV(**OPTIONS, outliers=3, rank=rank)]) for _ in range(2))
    ours.prefill(), theirs.prefill()
    expected = theirs.decode(GENERATED)
    for number, kept in enumerate(ours.retrieval.pool):
        k_BKnH, v_BKnV = kept.read()
        index = ours.retrieval.layers[number].index  # type: ignore[union-attr]
        assert isinstance(index, ShadowPages) and index.num_held == 3
        for x in (k_BKnH, v_BKnV):
            x.scatter_(2, index.held_slots_BKm.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]), torch.nan)
        if rank is not None:
            k_BKnH.fill_(torch.nan)
    torch.testing.assert_close(ours.decode(GENERATED), expected, atol=TOLERANCE, rtol=0)
    shares = ours.retrieval.report().fetched_share
    assert all(share is not None and share < 16 / NUM_TOKENS for share in shares)  # without the outliers


@pytest.mark.parametrize("pads", [[0], [0, 11]], ids=["alone", "padded"])
def test_outliers_are_the_pages_with_the_key_least_like_their_mean(pads: list[int]) -> None:
    """With the keys' mean similarity, or the most similar pages, it fails; each page is attended to once.

    It fails as well with pages of padding or of sink tokens, with outliers that are also chosen, or of which some are
    left out, and with the values of other slots.
    """
    policy, seen = ShadowKV(**OPTIONS, outliers=3, rank=None), view(42, pads)
    index = ShadowPages(seen, policy)
    choice = index.choose(drawn(len(pads), 4, 8, seed=5), slots_of(42, pads))
    assert choice is not None and choice.on_device is not None
    for row, pad in enumerate(pads):
        for head in range(KV_HEADS):
            likeness = {}
            for page in range(-(-(pad + 2) // 4), 10):
                k_SH = seen.k_BKnH[row, head, page * 4 : page * 4 + 4]
                likeness[page] = float(torch.cosine_similarity(k_SH, k_SH.mean(dim=0), dim=-1).min())
            expected = sorted(likeness, key=likeness.__getitem__)[:3]
            slots = choice.slots_BKm[row, head].tolist()
            assert sorted(slots[-12:]) == sorted(page * 4 + slot for page in expected for slot in range(4))
            assert len(set(slots)) == len(slots)
    held_kv = torch.cat([seen.k_BKnH, seen.v_BKnV], dim=-1).take_along_dim(choice.slots_BKm[..., -12:, None], dim=2)
    assert torch.equal(choice.on_device.kv_BKoX, held_kv)


def test_outliers_raise_the_attention_that_is_seen() -> None:
    """Keys of which some pages hide one that queries look for; as many pages in all.

    With the most similar pages it fails.
    """
    seen = view(160, [0], observed=8)
    q_BNH = drawn(1, 4, 8, seed=7)
    hidden = torch.arange(9, 120, 16)  # in the mean of their pages others outweigh them
    looked_for = q_BNH.unflatten(1, (2, 2)).mean(dim=2)[:, :, None]
    seen.k_BKnH[:, :, hidden] = 6 * looked_for
    seen.k_BKnH[:, :, hidden + 1] = -7 * looked_for
    masses = []
    for outliers, fetch in ((0, 64), (8, 32)):
        policy = ShadowKV(**OPTIONS | {"fetch": fetch}, outliers=outliers, rank=None)
        choice = ShadowPages(seen, policy).choose(q_BNH, slots_of(160, [0]))
        assert choice is not None and choice.slots_BKm.shape[2] == 64
        scores = (q_BNH.unflatten(1, (2, 2)) @ seen.k_BKnH.mT * seen.scaling).softmax(dim=-1)
        masses.append(float(scores.take_along_dim(choice.slots_BKm.unsqueeze(2), dim=3).sum(-1).mean()))
    assert masses[1] > masses[0] + 0.1


def rotated_view(num_slots: int, rank: int) -> PromptView:
    """Keys that have this rank over all heads before RoPE, at positions that differ between heads."""
    rotary = Rotary(1.0 / 100 ** (torch.arange(4, dtype=torch.float64) / 4))
    plain_BnZ = drawn(1, num_slots, rank, seed=1) @ drawn(1, rank, KV_HEADS * 8, seed=2)
    positions_BKn = torch.stack([torch.arange(num_slots), 3 * torch.arange(num_slots)])[None]
    plain_BKnH = plain_BnZ.unflatten(2, (KV_HEADS, 8)).transpose(1, 2)
    k_BKnH = torch.cat(
        [rotary.turned(plain_BKnH[:, [head]], positions_BKn[:, head]) for head in range(KV_HEADS)], dim=1
    )
    return replace(view(num_slots, [0]), k_BKnH=k_BKnH, positions_BKn=positions_BKn, turn=rotary.turned)


def test_keys_are_of_low_rank_before_rope() -> None:
    """At equal rank the error is that of rounding before RoPE, and large after it.

    With keys that are not rotated before they are taken apart, or not after they are rebuilt, or to the positions of
    another head, it fails, as with the least eigenvectors.
    """
    seen, slots_BKm = rotated_view(60, 5), torch.randperm(60)[:20].expand(1, KV_HEADS, -1)
    asked = seen.k_BKnH.take_along_dim(slots_BKm.unsqueeze(-1), dim=2)
    torch.testing.assert_close(LowRankKeys(seen, 5).keys(slots_BKm), asked, atol=1e-7, rtol=0)
    after = LowRankKeys(replace(seen, turn=None), 5).keys(slots_BKm) - asked
    assert after.square().mean() > 0.05 * asked.square().mean()


def test_padding_takes_no_part_in_the_factors() -> None:
    """With the keys of padding among those that are taken apart it fails."""
    seen = rotated_view(40, 5)
    k_BKnH = torch.cat([100 * drawn(1, KV_HEADS, 8, 8, seed=6), seen.k_BKnH], dim=2)
    before_BKn = torch.arange(-8, 0).expand(1, KV_HEADS, -1)
    positions_BKn = torch.cat([before_BKn, seen.positions_BKn], dim=2)
    padded = LowRankKeys(replace(seen, k_BKnH=k_BKnH, positions_BKn=positions_BKn, pads=[8]), 5)
    slots_BKm = torch.arange(8, 48).expand(1, KV_HEADS, -1)
    torch.testing.assert_close(padded.keys(slots_BKm), seen.k_BKnH, atol=1e-7, rtol=0)


def test_keys_after_the_prompt_are_exact_and_forks_have_their_own() -> None:
    """It fails if they are rebuilt, if those of a later step take the place of earlier ones, or if a fork's join."""
    seen, policy = rotated_view(40, 16), ShadowKV(**OPTIONS, outliers=0, rank=3)
    index, new = ShadowPages(seen, policy), drawn(1, KV_HEADS, 3, 8, seed=4)
    fork = index.fork(seen.stored)
    assert isinstance(fork, ShadowPages)
    index.append(new[:, :, :2], new[:, :, :2])
    index.append(new[:, :, 2:], new[:, :, 2:])
    fork.append(-new[:, :, :1], new[:, :, :1])
    slots_BKm = torch.tensor([42, 39, 40]).expand(1, KV_HEADS, -1)
    keys, of_fork = index.on_device().keys, fork.on_device().keys
    assert keys is not None and of_fork is not None
    assert torch.equal(keys(slots_BKm)[:, :, [2, 0]], new[:, :, [0, 2]])
    assert (keys(slots_BKm)[:, :, 1] - seen.k_BKnH[:, :, 39]).abs().max() > 1e-3
    assert torch.equal(of_fork(slots_BKm[..., 2:]), -new[:, :, :1])


def test_the_device_holds_landmarks_outliers_and_factors() -> None:
    """It fails where factors are not counted, or two keys per page."""
    turns = Turns(tiny_model("llama"), [ShadowKV(**OPTIONS, outliers=2, rank=6)])
    turns.prefill()
    turns.decode(GENERATED)
    shape, index = turns.model.kv_shapes[0], turns.retrieval.layers[0].index  # type: ignore[union-attr]
    heads, dim, pages, n = shape.num_kv_heads, shape.key_dim, 11, NUM_TOKENS
    landmarks, outliers = pages * heads * dim, 2 * 4 * heads * 2 * dim
    factors, new = n * 6 + 6 * heads * dim, 4 * heads * dim
    numbers = 8 * 2 * heads * (1 + 4) + 4 * n  # of held pages and slots, and positions
    assert index.num_bytes == 8 * (landmarks + outliers + factors + new) + numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outliers": -1}, "policy.outliers=-1"),
        ({"rank": 0}, "policy.rank=0 must be at least 1"),
        ({"late": 0.8}, "policy.late=0.8 does not go with shadowkv"),
        ({"pool": {"bytes": "1MiB"}}, "leave policy.pool.bytes out"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShadowKV(**options)
