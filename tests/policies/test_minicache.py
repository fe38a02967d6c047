"""MiniCache: pairs of layers that share directions, on one rank and on several, beside what the matrix tests."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.experiments.merged_layers import BLOCK, MergedLayer, merged_bytes, paired_layers
from policies.experiments.minicache import MiniCache
from policies.experiments.shared_directions import SharedDirections, angles, interpolated
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from runahead import Conversation, GenerationOptions, PrefillOptions
from runahead.cache.slabs import KVShape
from runahead.config import CacheOptions, DecodeName, Positions
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import prompt
from tests.policies.running import Run
from tests.ranks import mesh_tasks, policy_tasks
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 60
TOLERANCE = 1e-9  # float64
SOME = MiniCache(start_share=0.0, retain_share=0.25)
EXACT = MiniCache(start_share=0.0, retain_share=1.0)


def vectors(num_tokens: int = 40, dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors of two layers (1, 2, n, D), more and less alike."""
    random = torch.Generator().manual_seed(seed)
    lower, other = (torch.randn(1, 2, num_tokens, dim, dtype=torch.float64, generator=random) for _ in range(2))
    return lower, 3 * lower + other * torch.linspace(0, 6, num_tokens, dtype=torch.float64)[:, None]


def units(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("towards_upper", [0.0, 0.3, 0.6, 1.0])
def test_a_direction_divides_the_angle_and_lengths_stay(towards_upper: float) -> None:
    """Along the line between the two directions, or by their mean, the angle is divided otherwise."""
    lower, upper = vectors()
    shared = SharedDirections.merge(lower, upper, towards_upper=towards_upper, exact_share=0)
    whole = angles(units(lower), units(upper))
    for layer, exact, share in ((False, lower, towards_upper), (True, upper, 1 - towards_upper)):
        read = shared.read(upper=layer)
        torch.testing.assert_close(read.norm(dim=-1), exact.norm(dim=-1))
        torch.testing.assert_close(angles(units(read), units(exact)), share * whole, atol=1e-7, rtol=0)


def test_vectors_on_a_line_or_of_length_zero_are_finite() -> None:
    x, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    lower, upper = torch.stack([x, x, zero, zero, x])[None, None], torch.stack([2 * x, -x, x, zero, zero])[None, None]
    shared = SharedDirections.merge(lower, upper, towards_upper=0.6, exact_share=0)
    below, above = shared.read(upper=False)[0, 0], shared.read(upper=True)[0, 0]
    assert torch.allclose(below[0], x) and torch.allclose(above[0], 2 * x)
    assert torch.allclose(above[1], -x)  # nearer to the upper one
    assert torch.equal(below[2], zero) and torch.allclose(above[2], x)
    assert torch.equal(below[3], zero) and torch.equal(above[3], zero)
    assert torch.allclose(below[4], x) and torch.equal(above[4], zero)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tokens_at_the_largest_angles_are_exact(dtype: torch.dtype) -> None:
    """Where published code retains those at the smallest (xKV), and where an exact vector is read by its length."""
    lower, upper = (x.to(dtype) for x in vectors())
    shared = SharedDirections.merge(lower, upper, towards_upper=0.6, exact_share=0.25)
    exact = [set(head) for head in shared.exact_BKm[0].tolist()]
    for head, of_head in enumerate(angles(units(lower.double()), units(upper.double()))[0].tolist()):
        assert exact[head] == set(sorted(range(40), key=lambda token: -of_head[token])[:10])
    for layer, given in ((False, lower), (True, upper)):
        is_same = (shared.read(upper=layer) == given).all(dim=-1)[0]
        assert [{token for token in range(40) if same[token]} >= exact[head] for head, same in enumerate(is_same)]
        for head in range(2):
            assert is_same[head, sorted(exact[head])].all() and not is_same[head].all()


def test_merging_rotated_or_unrotated_keys_is_the_same() -> None:
    """Both layers rotate a token alike, and angles stay."""
    model, ids = tiny_model("llama"), [prompt(NUM_TOKENS), prompt(23, seed=1)]
    rotated, unrotated = (Run(model, [SOME], ids, reencoded=reencoded) for reencoded in (False, True))
    for run in (rotated, unrotated):
        run.prefill()
    torch.testing.assert_close(rotated.decode(5), unrotated.decode(5), atol=TOLERANCE, rtol=0)


def test_layers_are_paired_in_the_upper_half() -> None:
    shapes = [KVShape(num_kv_heads=2, key_dim=8, value_dim=8, dtype=torch.float32)] * 9
    every = [True] * 9
    assert paired_layers(shapes, every, 0.5, range(9)) == [(4, 5), (6, 7)]
    assert paired_layers(shapes, every, 0.0, range(9))[0] == (0, 1)
    windows = [True, True, False, True, True, True, False, True, True]
    assert paired_layers(shapes, windows, 0.0, range(9)) == [(0, 1), (3, 4), (7, 8)]
    wider = [*shapes[:5], KVShape(num_kv_heads=2, key_dim=16, value_dim=8, dtype=torch.float32), *shapes[6:]]
    assert paired_layers(wider, every, 0.5, range(9)) == [(6, 7)]
    with_others_between = [0, 1, 3, 7, 8, 9, 10, 20, 21]
    assert paired_layers(shapes, every, 0.0, with_others_between) == [(0, 1), (3, 4), (5, 6), (7, 8)]
    assert paired_layers(shapes, every, 0.0, range(3, 39, 4)) == []


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "deepseek_v3"])
def test_bytes_are_known_to_the_byte(family: str) -> None:
    """And at the published setting those of a pair are little more than half, in bytes that are allocated."""
    model, ids = tiny_model(family), torch.tensor([prompt(NUM_TOKENS), prompt(NUM_TOKENS, seed=1)])
    for retain_share in (0.05, 0.3, 1.0):
        conversation = Conversation(model, RankPolicies(last=[MiniCache(start_share=0.0, retain_share=retain_share)]))
        conversation.feed(ids)
        expected = merged_bytes(model.kv_shapes, [(0, 1)], NUM_TOKENS, exact_share=retain_share, batch=2)
        assert conversation.kv_bytes == expected
        cache = conversation.cache
        assert cache is not None
        storages = {}
        for layer in cache.layers[:2]:
            assert isinstance(layer, MergedLayer)
            parts = [getattr(part, name) for part in layer.merged.parts for name in ("keys", "values")]
            for x in (layer.slab_TBKX, layer.positions_TBK, *(x for part in parts for x in vars(part).values())):
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        third = cache.layers[2]
        assert sum(storages.values()) == expected - third.num_bytes


def test_bytes_of_a_model_are_three_quarters_and_a_bit() -> None:
    """Half of the layers at little more than half of their bytes: keys and values in 16 bits, lengths in 32."""
    shapes = [KVShape(num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)] * 32
    pairs = paired_layers(shapes, [True] * 32, 0.5, range(32))
    full = sum(shape.bytes_per_token() * 8000 for shape in shapes)
    assert len(pairs) == 8
    assert merged_bytes(shapes, pairs, 8000, exact_share=0.05) / full == pytest.approx(0.772, abs=1e-3)


def test_generated_tokens_are_exact_until_a_block_of_them_is_merged() -> None:
    """So that memory grows by a pair's bytes; two layers without what is stored: the first ones of the model."""
    model, tokens = tiny_model("llama"), [3 + token % 40 for token in range(2 * BLOCK + 5)]
    runs = [Run(model, steps, [prompt(NUM_TOKENS)]) for steps in ([SOME], [])]
    for run in runs:
        run.prefill()
        for token in tokens:
            run.decode(token)
    ours, exact = (run.kept.layers[0] for run in runs)
    assert isinstance(ours, MergedLayer)
    assert ours.merged.end == NUM_TOKENS + 2 * BLOCK
    assert ours.num_slots - ours.merged.end == 5
    first = [part for part in (ours.slab().slab_TBKX, exact.slab().slab_TBKX)]
    assert torch.equal(first[0][-5:], first[1][-5:])
    num_same = (first[0] == first[1]).all(dim=-1)[:, 0].sum(dim=0)
    keys = ours.merged.parts[0].keys
    assert keys.num_tokens == NUM_TOKENS + 2 * BLOCK
    assert keys.exact_BKm.shape[2] == 0.25 * keys.num_tokens
    assert (num_same < keys.num_tokens / 2).all()
    blocks = keys.exact_BKm[0].sort(dim=-1).values
    for start in (NUM_TOKENS, NUM_TOKENS + BLOCK):  # of every block its own
        assert ((start <= blocks) & (blocks < start + BLOCK)).sum(dim=-1).tolist() == [BLOCK / 4] * 2


def test_both_layers_of_a_pair_read_one_direction() -> None:
    """Each has lengths of its own and exact tokens; the third layer stays as it was."""
    run, exact = (Run(tiny_model("llama"), steps, [prompt(NUM_TOKENS)]) for steps in ([SOME], []))
    assert torch.equal(run.prefill(), exact.prefill())
    lower, upper, alone = (layer.slab().slab_TBKX[:, 0] for layer in run.kept.layers)
    stored = run.kept.layers[0]
    assert isinstance(stored, MergedLayer)
    for dims, part in ((slice(0, 8), "keys"), (slice(8, 16), "values")):
        shared = getattr(stored.merged.parts[0], part)
        for head in range(2):
            merged = sorted(set(range(NUM_TOKENS)) - set(shared.exact_BKm[0, head].tolist()))
            x, y = (layer[merged, head, dims] for layer in (lower, upper))
            torch.testing.assert_close(units(x), units(y))
    assert torch.equal(alone, exact.kept.layers[2].slab().slab_TBKX[:, 0])


def test_given_tokens_see_each_other_exactly_and_are_merged_after_that() -> None:
    """In chunks of a turn, too, of which the last one says that it is over."""
    ids = prompt(NUM_TOKENS)
    exact, whole, pieces = (Conversation(tiny_model("llama"), RankPolicies(last=last)) for last in ([], [SOME], [SOME]))
    expected = exact.feed(torch.tensor([ids]))
    assert torch.equal(whole.feed(torch.tensor([ids])), expected)
    for start, end in ((0, 17), (17, 18), (18, NUM_TOKENS)):
        logits = pieces.feed(torch.tensor([ids[start:end]]), cut_back=end == NUM_TOKENS)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert pieces.kv_bytes == whole.kv_bytes < exact.kv_bytes
    more = torch.tensor([prompt(50, seed=3)])
    torch.testing.assert_close(pieces.feed(more), whole.feed(more), atol=TOLERANCE, rtol=0)
    layer = None if whole.cache is None else whole.cache.layers[1]
    assert isinstance(layer, MergedLayer) and layer.merged.end == layer.num_slots == NUM_TOKENS + 50


def answers(
    rank_pools: RankPools,
    bounds: tuple[int, ...],
    policy: MiniCache = SOME,
    prefill: PrefillOptions | None = None,
    prompts: list[list[int]] | None = None,
) -> GenerationBatch:
    prompts, policies = prompts or [prompt(NUM_TOKENS), prompt(44, seed=3)], RankPolicies.everywhere([policy])
    task = policy_tasks.generate
    return rank_pools.run(len(bounds) - 1, task, "llama", prompts, bounds, policies, 6, prefill)[-1]


def assert_same(ours: GenerationBatch, theirs: GenerationBatch) -> None:
    for a, b in zip(ours.generations, theirs.generations, strict=True):
        assert a.new_token_ids == b.new_token_ids
        assert dict(a.first_token_logits_top5) == pytest.approx(dict(b.first_token_logits_top5), abs=TOLERANCE)


class TestRanks:
    """Chains and chunks; ranks that share a model are in test_mesh_places.py."""

    def test_the_last_of_a_chain_merges_what_one_rank_does(self, rank_pools: RankPools) -> None:
        alone = answers(rank_pools, (0, NUM_TOKENS))
        together = answers(rank_pools, (0, 35, NUM_TOKENS))
        chunked = answers(rank_pools, (0, NUM_TOKENS), prefill=PrefillOptions(chunk_tokens=17))
        full = answers(rank_pools, (0, NUM_TOKENS), EXACT)
        for each in (together, chunked):
            assert_same(each, alone)
            assert each.ranks[-1].kv_kept_bytes == alone.ranks[0].kv_kept_bytes < full.ranks[0].kv_kept_bytes

    def test_each_rank_merges_its_own_tokens(self, rank_pools: RankPools) -> None:
        """If none is merged, the answer is that of one rank; else each stores less."""
        task = partial(mesh_tasks.generate, boundaries=(0, 35, NUM_TOKENS))
        options = GenerationOptions(max_new_tokens=8, ignore_eos=True)

        def generated(policy: MiniCache, decode: DecodeName) -> GenerationBatch:
            merging = partial(task, policies=RankPolicies.everywhere([policy]), decode=decode)
            batch: GenerationBatch = rank_pools.run(2, merging, 1, "llama", [prompt(NUM_TOKENS)], options)[0][0]
            return batch

        merged, exact = (generated(policy, DecodeName.sharded) for policy in (SOME, EXACT))
        assert_same(exact, generated(EXACT, DecodeName.last))
        for ours, theirs in zip(merged.ranks, exact.ranks, strict=True):
            assert 0 < ours.kv_kept_bytes < theirs.kv_kept_bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MiniCache(start_share=1.0), "policy.start_share=1.0 must be at least 0 and less than 1"),
        (lambda: MiniCache(interpolation=-0.1), "policy.interpolation=-0.1 must be from 0 to 1"),
        (lambda: MiniCache(retain_share=math.nan), "policy.retain_share=nan must be from 0 to 1"),
        (
            lambda: RankPolicies(last=[SOME], storage=CacheOptions(bits=4)).check(tiny_model("llama")),
            "cache.bits=4 does not go with policy minicache",
        ),
        (lambda: RankPolicies(last=[SOME, SnapKV(budget=64)]).check(tiny_model("llama")), "must be the only one"),
        (
            lambda: RankPolicies(last=[SOME], others=[PyramidInfer()]).check(tiny_model("llama")),
            "must be the only one on all ranks",
        ),
        (lambda: RankPolicies(last=[SOME]).check(tiny_model("gemma2")), "use a smaller policy.start_share, or another"),
        (
            lambda: RankPolicies(last=[MiniCache(start_share=0.9)]).check(tiny_model("llama")),
            "has none among its layers",
        ),
        (lambda: check(Setup(drafting=RankPolicies(last=[SOME]))), "a drafting policy minicache"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_positions_may_be_encoded_anew() -> None:
    RankPolicies(last=[SOME], positions=Positions.reencoded).check(tiny_model("llama"))


def test_directions_are_of_unit_length_at_any_angle() -> None:
    lower, upper = (units(x) for x in vectors())
    for share in (0.25, 0.6):
        found = interpolated(lower, upper, angles(lower, upper), share)
        torch.testing.assert_close(found.norm(dim=-1), torch.ones_like(found[..., 0]))
