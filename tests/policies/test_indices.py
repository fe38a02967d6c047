"""Indices of retrieving policies: what each finds, estimates and costs, against formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies import clustering, columns
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.clusters import Clusters
from policies.exact_topk import ExactTopK
from policies.full import Full
from policies.infinigen import InfiniGen
from policies.magicpig import MagicPIG
from policies.quest import Digest, Pages, Quest
from policies.retriever import Group, PromptView, Rest, Slots, need_of_group
from policies.retroinfer import RetroInfer
from policies.snapkv import SnapKV
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention, ThresholdClusters
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.kv_cache import seen_in
from runahead.cache.slabs import KVSlab
from runahead.retrieval.cache import estimate
from runahead.thinning.steps import PolicySteps
from tests.families import prompt, throughout
from tests.policies.test_retrieval import (
    ALL,
    GENERATED,
    NAMES,
    NUM_TOKENS,
    PADDED,
    SOME,
    Turns,
    policy,
    with_forwards_of,
)
from tests.ranks.tasks import tiny_model

KV_HEADS, GROUP, DIM, VALUE_DIM = 2, 2, 8, 6
ONE_LEVEL = SqueezedAttention.coarse_quantile
"""The second level's quantile where there is none."""
BARE: dict[str, Any] = {"min_tokens": 0, "sinks": 0, "recent": 0}
"""Options of a policy that fetches what it finds and nothing else."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def view(num_slots: int, pads: list[int], seed: int = 0, observed: int = 8) -> PromptView:
    rows = len(pads)
    q_BNwH = drawn(rows, KV_HEADS * GROUP, observed, DIM, seed=seed + 1)
    for row, pad in enumerate(pads):
        q_BNwH[row, :, : max(0, pad - (num_slots - observed))] = 0
    k_BKnH = drawn(rows, KV_HEADS, num_slots, DIM, seed=seed + 2)
    return PromptView(
        layer=0,
        num_layers=1,
        q_BNwH=q_BNwH,
        k_BKnH=k_BKnH,
        v_BKnV=drawn(rows, KV_HEADS, num_slots, VALUE_DIM, seed=seed + 3),
        scaling=0.9,
        softcap=None,
        pads=pads,
        positions_BKn=(torch.arange(num_slots) - torch.tensor(pads)[:, None])[:, None],
        next_B=num_slots - torch.tensor(pads),
        turn=None,
        room=4,
        stored=lambda: k_BKnH,
    )


def slots_of(num_slots: int, pads: list[int]) -> Slots:
    return Slots(num_slots=num_slots, pads=pads, positions_BKn=None, next_B=None)


def scores_of(q_BNH: Tensor, k_BKnH: Tensor, pads: list[int], scaling: float = 0.9) -> Tensor:
    scores_BKGn = q_BNH.unflatten(1, (KV_HEADS, -1)) @ k_BKnH.mT * scaling
    for row, pad in enumerate(pads):
        scores_BKGn[row, ..., :pad] = -math.inf
    return scores_BKGn


@pytest.mark.parametrize("group", Group)
def test_a_group_needs_what_its_rule_says(group: Group) -> None:
    """With clusters of several tokens a probability is that of one of them."""
    scores, sizes = drawn(1, 2, 3, 5, seed=0), torch.tensor([1.0, 4, 2, 1, 3]).expand(1, 2, 5)
    weights = scores.exp() / (scores.exp() * sizes[:, :, None]).sum(dim=-1, keepdim=True)
    expected = {
        Group.union: (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=2),
        Group.mean: weights.mean(dim=2),
        Group.max: weights.amax(dim=2),
        Group.sum: scores.sum(dim=2),
    }[group]
    torch.testing.assert_close(need_of_group(scores.clone(), group, sizes), expected)


@pytest.mark.parametrize("name", ["exact_topk", "quest", "sparq", "clusterkv", "infinigen"])
def test_groups_choose_differently(name: str) -> None:
    """Whatever the index. Heads of one KV head disagree in a random model."""
    logits = []
    for group in Group:
        turns = Turns(tiny_model("llama"), [policy(name, SOME[name] | {"group": group, "fetch": 10})])
        turns.prefill()
        logits.append(turns.decode(GENERATED))
    for at, each in enumerate(logits):
        assert all((each - other).abs().max() > 1e-4 for other in logits[:at])


@pytest.mark.parametrize("pads", [[0], [0, 11, 36]], ids=["alone", "padded"])
def test_every_token_is_in_one_cluster_which_has_its_mean(pads: list[int]) -> None:
    """After blocks, single tokens and a fork, too, which leaves the index that it was made of."""
    first = view(40, pads)
    more = drawn(len(pads), KV_HEADS, 30, DIM, seed=9)
    index = RetroInfer(cluster=5, iterations=4, block=6, sinks=2, recent=3).index(first)
    keys = {id(index): first.k_BKnH}
    for part in (more[:, :, :1], more[:, :, 1:21], more[:, :, 21:22]):
        index.append(part, drawn(*part.shape[:3], VALUE_DIM, seed=4))
        keys[id(index)] = torch.cat([keys[id(index)], part], dim=2)
    fork = index.fork(first.stored)
    fork.append(more[:, :, 22:], drawn(len(pads), KV_HEADS, 8, VALUE_DIM, seed=4))
    keys[id(fork)] = torch.cat([keys[id(index)], more[:, :, 22:]], dim=2)
    for each, num_slots in ((index, 62), (fork, 70)):
        assert isinstance(each, Clusters) and each.num_slots == num_slots
        of_BKn, sizes_BKY = each.of_BKn, each.sizes_BKY(slots_of(num_slots, pads))
        means = torch.cat([each._clusters.means_BKPH, each._k_BKWH], dim=2)
        assert of_BKn.shape == (len(pads), KV_HEADS, num_slots) and sizes_BKY.shape == means.shape[:3]
        for row, pad in enumerate(pads):
            for head in range(KV_HEADS):
                members = of_BKn[row, head, pad:]
                counts = members.bincount(minlength=sizes_BKY.shape[2])
                assert counts.tolist() == sizes_BKY[row, head].tolist()
                for cluster in members.unique().tolist():
                    mean = keys[id(each)][row, head, pad:][members == cluster].mean(dim=0)
                    torch.testing.assert_close(means[row, head, cluster], mean)


class LargestMemory(TorchDispatchMode):
    """Notes the bytes of the largest tensor in new memory that any operation returns while it is open."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, each.nbytes)
        return result


def test_temporaries_of_clustering_do_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are all widened, or all copied, at once are larger."""
    monkeypatch.setattr(clustering, "RUN", 20)
    keys, how = drawn(1, KV_HEADS, 200, DIM, seed=0).bfloat16(), RetroInfer(cluster=20, iterations=2).clustering
    with LargestMemory() as largest:
        made = how.clustered(keys, keys)
    assert made.of_BKn.nbytes <= largest.num_bytes < keys.nbytes // 2


def test_similar_keys_share_a_cluster() -> None:
    """Three directions that come in turn: no cluster has two of them, wherever in the text they are."""
    given = view(41, [0])
    directions = torch.eye(DIM, dtype=torch.float64)[:3]
    given.k_BKnH[:] = directions[torch.arange(41) // 7 % 3] + 0.05 * given.k_BKnH
    of_BKn = ClusterKV(cluster=9, iterations=5, block=9, sinks=2, recent=3).index(given).of_BKn
    for head in range(KV_HEADS):
        for cluster in of_BKn[0, head, 2:-3].unique().tolist():
            assert len({at // 7 % 3 for at in range(2, 38) if of_BKn[0, head, at] == cluster}) == 1


@pytest.mark.parametrize("first", [40, 29, 14], ids=["prompt", "appended", "short_prompt"])
@pytest.mark.parametrize("pads", [[0], [0, 11]], ids=["alone", "padded"])
def test_clusters_are_taken_whole_until_the_budget_is_full(pads: list[int], first: int) -> None:
    """Best first, and the last one cut: the budget exactly, each token once.

    After blocks, too, of a prompt that is shorter than sinks and recent tokens. Fails if a block takes sinks in, or if
    clusters of blocks begin where those before do.
    """
    given, q_BNH = view(40, pads), drawn(len(pads), KV_HEADS * GROUP, DIM, seed=7)
    chooses = ClusterKV(cluster=5, iterations=4, block=6, sinks=2, recent=3, fetch=17)
    first = min(first, 4) if pads == [0] and first < 20 else first
    begun = replace(given, k_BKnH=given.k_BKnH[:, :, :first], v_BKnV=given.v_BKnV[:, :, :first])
    index, slots = chooses.index(begun), slots_of(40, pads)
    for part in given.k_BKnH[:, :, first:].split(5, dim=2):
        index.append(part, part[..., :VALUE_DIM])
    choice = index.choose(q_BNH, slots)
    assert choice is not None and choice.slots_BKm.shape == (len(pads), KV_HEADS, 17)
    scores = scores_of(q_BNH, torch.cat([index._clusters.means_BKPH, index._k_BKWH], dim=2), [0] * len(pads))
    scores.masked_fill_((index.sizes_BKY(slots) == 0)[:, :, None], -math.inf)
    need = (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=2)
    for row, pad in enumerate(pads):
        for head in range(KV_HEADS):
            chosen, of_n = set(choice.slots_BKm[row, head].tolist()), index.of_BKn[row, head].tolist()
            assert len(chosen) == 17 and min(chosen) >= pad
            expected = {pad, pad + 1, 37, 38, 39}
            for cluster in need[row, head].argsort(descending=True).tolist():
                members = [at for at in range(40 - 1, pad - 1, -1) if of_n[at] == cluster and at not in expected]
                expected |= set(members[: 17 - len(expected)])
            assert chosen == expected


@pytest.mark.parametrize("fetch", [12, 25])
@pytest.mark.parametrize("pads", [[0], [0, 11, 33]], ids=["alone", "padded"])
def test_what_is_estimated_is_never_above_what_is_there(pads: list[int], fetch: int) -> None:
    """And more than nothing. Of one-token clusters it is what is there."""
    given, q_BNH = view(40, pads), drawn(len(pads), KV_HEADS * GROUP, DIM, seed=7)
    scores_BKGn = scores_of(q_BNH, given.k_BKnH, pads)
    for size in (1, 5):
        chooses = RetroInfer(cluster=size, iterations=4, block=6, sinks=2, recent=3, fetch=fetch)
        choice = chooses.index(given).choose(q_BNH, slots_of(40, pads))
        assert choice is not None and choice.rest is not None
        slots_BKGm = choice.slots_BKm.unsqueeze(2).expand(-1, -1, GROUP, -1)
        left_BKGn = scores_BKGn.scatter(3, slots_BKGm, -math.inf)
        there_BN = left_BKGn.logsumexp(dim=-1).flatten(1, 2)
        if size == 1:
            torch.testing.assert_close(choice.rest.lse_BN, there_BN)
            weights = left_BKGn.softmax(dim=-1).nan_to_num(0.0)
            torch.testing.assert_close(choice.rest.out_BNV, (weights @ given.v_BKnV).flatten(1, 2))
        else:
            assert (choice.rest.lse_BN <= there_BN).all()
            index = chooses.index(given)
            means, sizes = (
                torch.cat([index._clusters.means_BKPH, index._k_BKWH], dim=2),
                index.sizes_BKY(slots_of(40, pads)),
            )
            fetched_BKn = torch.zeros(scores_BKGn[:, :, 0].shape).scatter(2, choice.slots_BKm, 1.0)
            cut_BKY = torch.zeros(sizes.shape).scatter_add(2, index.of_BKn, fetched_BKn) > 0
            weights = scores_of(q_BNH, means, [0] * len(pads)).exp() * (sizes * ~cut_BKY).unsqueeze(2)
            torch.testing.assert_close(choice.rest.lse_BN, weights.sum(dim=-1).log().flatten(1, 2))
            values = torch.cat([index._clusters.values_BKPV, index._v_BKWV], dim=2)
            out = (weights @ values / weights.sum(dim=-1, keepdim=True)).nan_to_num(0.0)
            torch.testing.assert_close(choice.rest.out_BNV, out.flatten(1, 2))
            assert choice.rest.lse_BN[0].isfinite().all()  # of a short row all may be fetched


def error(one: Policy) -> float:
    """Difference to the full cache."""
    ours, full = Turns(tiny_model("llama"), [one]), Turns(tiny_model("llama"), [Full()])
    ours.prefill(), full.prefill()
    return float((ours.decode(GENERATED) - full.decode(GENERATED)).abs().mean())


def test_an_estimate_of_the_rest_is_closer_to_full_attention_than_none() -> None:
    options: dict[str, Any] = {"min_tokens": 0, "sinks": 2, "recent": 3, "fetch": 20}
    pairs = options | {"cluster": 2, "first_layer": 0}  # keys of a random model have little in common
    assert error(RetroInfer(**pairs)) < 0.9 * error(RetroInfer(**pairs, estimate=0.0))
    alone = [error(RetroInfer(**(pairs | {"cluster": 1, "estimate": estimate}))) for estimate in (0.0, 0.3, 1.0)]
    assert alone == sorted(alone, reverse=True) and alone[1] < 0.5 * alone[0] and alone[2] < 1e-9
    assert error(SparQ(**options, dims=4)) < 0.95 * error(SparQ(**options, dims=4, mean_value=False))


@pytest.mark.parametrize("dims", [4, DIM])
def test_the_mean_value_helps_most_where_few_tokens_are_fetched(dims: int) -> None:
    """The error of what a query reads falls most by it there (SparQ).

    With the last value for the mean, or what is fetched and the rest the wrong way round, this fails.
    """
    helps = []
    for fetch in (2, 4, 8, 16, 32):
        with_mean, without = (sparq_error(fetch, dims, mean_value=is_used) for is_used in (True, False))
        helps.append(without - with_mean)
    assert helps == sorted(helps, reverse=True) and helps[0] > 0.7 and helps[-1] > 0


def sparq_error(fetch: int, dims: int, *, mean_value: bool) -> float:
    """Mean distance of attention to what is fetched, with its rest, from attention to all tokens."""
    policy, slots, pads = SparQ(**BARE, fetch=fetch, dims=dims, mean_value=mean_value), slots_of(40, [0] * 8), [0] * 8
    distances = []
    for seed in range(6):
        given, q_BNH = view(40, pads, seed=10 * seed), drawn(8, KV_HEADS * GROUP, DIM, seed=500 + seed)
        choice = policy.index(given).choose(q_BNH, slots)
        assert choice is not None and (choice.rest is not None) is mean_value
        scores_BKGn, v_BKnV = scores_of(q_BNH, given.k_BKnH, pads), given.v_BKnV
        is_chosen_BK1n = torch.zeros_like(v_BKnV[..., 0]).scatter(2, choice.slots_BKm, 1.0).bool().unsqueeze(2)
        out_BNV = (scores_BKGn.masked_fill(~is_chosen_BK1n, -math.inf).softmax(dim=-1) @ v_BKnV).flatten(1, 2)
        if choice.rest is not None:
            share_BN1 = choice.rest.lse_BN.sigmoid().unsqueeze(-1)  # relative: of the rest to what is fetched
            out_BNV = torch.lerp(out_BNV, choice.rest.out_BNV, share_BN1)
        exact_BNV = (scores_BKGn.softmax(dim=-1) @ v_BKnV).flatten(1, 2)
        distances.append((out_BNV - exact_BNV).norm(dim=-1).mean())
    return float(torch.stack(distances).mean())


@pytest.mark.parametrize("fetch", [4, 8, 16])
def test_the_fewer_dims_sparq_looks_at_the_more_each_of_them_finds(fetch: int) -> None:
    """Dims are taken from the largest on, and find slots with the highest scores. With the smallest dims this fails."""
    given, slots = view(40, [0] * 8), slots_of(40, [0] * 8)
    best = ExactTopK(**BARE, fetch=fetch, group=Group.sum)
    found = dict.fromkeys((1, 2, 4, 8), 0)
    for seed in range(30):
        q_BNH = drawn(8, KV_HEADS * GROUP, DIM, seed=seed)
        exact = best.index(given).choose(q_BNH, slots)
        for dims in found:
            ours = SparQ(**BARE, fetch=fetch, dims=dims, mean_value=False)
            chosen = ours.index(given).choose(q_BNH, slots)
            assert exact is not None and chosen is not None
            found[dims] += int((chosen.slots_BKm[..., None] == exact.slots_BKm[..., None, :]).sum())
    shares = [found[dims] / (30 * 8 * KV_HEADS * fetch) for dims in found]
    assert shares[3] == 1
    each = [(more - fewer) / dims for fewer, more, dims in zip(shares, shares[1:], (1, 2, 4), strict=False)]
    assert each[0] > each[1] > each[2] > 0


@pytest.mark.parametrize("pads", [[0], [0, 11]], ids=["alone", "padded"])
def test_sparq_is_its_formula(pads: list[int]) -> None:
    """Scores by the dims with the largest queries, at their temperature; the mean value for the share that is left."""
    given, q_BNH = view(40, pads), drawn(len(pads), KV_HEADS * GROUP, DIM, seed=7)
    chooses = SparQ(dims=3, fetch=9, sinks=1, recent=2)
    index = chooses.index(given)
    new_k, new_v = drawn(len(pads), KV_HEADS, 5, DIM, seed=20), drawn(len(pads), KV_HEADS, 5, VALUE_DIM, seed=21)
    index.append(new_k, new_v)
    k_BKnH, v_BKnV = torch.cat([given.k_BKnH, new_k], dim=2), torch.cat([given.v_BKnV, new_v], dim=2)
    choice = index.choose(q_BNH, slots_of(45, pads))
    assert choice is not None and choice.rest is not None and choice.rest.is_relative
    for row, pad in enumerate(pads):
        for head in range(KV_HEADS):
            q_GH = q_BNH[row, head * GROUP : (head + 1) * GROUP]
            dims = q_GH.abs().sum(dim=0).topk(3).indices
            share_G1 = q_GH[:, dims].abs().sum(dim=1, keepdim=True) / q_GH.abs().sum(dim=1, keepdim=True)
            scores_Gn = q_GH[:, dims] @ k_BKnH[row, head, pad:, dims].T * 0.9 / share_G1.sqrt()
            need_n = scores_Gn.sum(dim=0)
            need_n[[0, -1, -2]] = math.inf
            best = need_n.topk(9).indices
            assert set(choice.slots_BKm[row, head].tolist()) == {int(at) + pad for at in best}
            alpha_G = scores_Gn.softmax(dim=1)[:, best].sum(dim=1)
            heads = slice(head * GROUP, (head + 1) * GROUP)
            torch.testing.assert_close(choice.rest.lse_BN[row, heads], ((1 - alpha_G) / alpha_G).log())
            torch.testing.assert_close(
                choice.rest.out_BNV[row, heads], v_BKnV[row, head, pad:].mean(dim=0).expand(GROUP, -1)
            )


def test_the_mean_value_has_the_share_that_the_chosen_tokens_leave() -> None:
    """A share alpha of the layer is attention to the chosen tokens, and the new one comes on top."""
    num_new, terms = 2, AttentionTerms(scaling=0.9)
    k, v = drawn(1, KV_HEADS, 7 + num_new, DIM, seed=1), drawn(1, KV_HEADS, 7 + num_new, DIM, seed=2)
    q, mean = drawn(1, KV_HEADS * GROUP, num_new, DIM, seed=3), drawn(1, KV_HEADS * GROUP * num_new, DIM, seed=4)
    alpha = drawn(1, KV_HEADS * GROUP * num_new, seed=5).sigmoid()
    slab = KVSlab(slab_TBKX=torch.cat([k, v], dim=-1).permute(2, 0, 1, 3), key_dim=DIM, first=0)
    seen = seen_in(slab, q, start=7, pads=[0])
    rest = Rest(out_BNV=mean, lse_BN=((1 - alpha) / alpha).log(), is_relative=True)
    seen.rest = partial(estimate, rest, q, (k[:, :, 7:], v[:, :, 7:]))
    out, lse = seen.attend(terms)
    weights = (q.unflatten(1, (KV_HEADS, -1)) @ k.unsqueeze(2).mT * 0.9).exp()
    weights[..., 0, 8] = 0  # the first new token does not see the second
    values = v.unsqueeze(2)
    share, mean = alpha.view(1, KV_HEADS, GROUP, num_new, 1), mean.view(1, KV_HEADS, GROUP, num_new, DIM)
    chosen = weights[..., :7].sum(dim=-1, keepdim=True)
    total = chosen / share + weights[..., 7:].sum(dim=-1, keepdim=True)
    expected = (weights @ values + chosen * (1 - share) / share * mean) / total
    torch.testing.assert_close(out, expected.flatten(1, 2))
    torch.testing.assert_close(lse, total.log().squeeze(-1).flatten(1, 2))


def test_all_dims_and_pages_of_a_token_find_what_the_exact_scores_find() -> None:
    options: dict[str, Any] = {"min_tokens": 0, "fetch": 12, "sinks": 2, "recent": 3}
    for group in Group:
        same = [
            SparQ(**options, dims=64, mean_value=False, group=group),
            ClusterKV(**options, cluster=1, iterations=1, first_layer=0, group=group),
            *(Quest(**options, page=1, first_layer=0, digest=digest, group=group) for digest in Digest),
        ]
        expected = error(ExactTopK(**options, group=group))
        assert [error(each) for each in same] == pytest.approx([expected] * len(same), abs=1e-9)


def test_digests_of_a_page_are_their_formulas() -> None:
    k_BKnH, q_BNH = drawn(2, KV_HEADS, 37, DIM, seed=1), drawn(2, KV_HEADS * GROUP, DIM, seed=2)
    scores = {}
    for digest in Digest:
        pages = Pages(replace(view(18, [0, 0]), k_BKnH=k_BKnH[:, :, :18], scaling=0.5), Quest(page=5, digest=digest))
        pages.append(k_BKnH[:, :, 18:19], k_BKnH[:, :, 18:19])
        pages.append(k_BKnH[:, :, 19:], k_BKnH[:, :, 19:])
        scores[digest] = pages.page_scores(q_BNH)
    q_BKGH = q_BNH.unflatten(1, (KV_HEADS, -1)) * 0.5
    for page in range(7):  # the last one is not full yet
        inside = k_BKnH[:, :, page * 5 : page * 5 + 5]
        torch.testing.assert_close(
            scores[Digest.mean][..., page], (q_BKGH @ inside.mean(dim=2).unsqueeze(-1)).squeeze(-1)
        )
        centre = (inside.amin(dim=2) + inside.amax(dim=2)) / 2
        spread = (inside - centre.unsqueeze(2)).abs().mean(dim=2)
        shrunk = torch.maximum(q_BKGH * (centre + spread)[:, :, None], q_BKGH * (centre - spread)[:, :, None]).sum(-1)
        torch.testing.assert_close(scores[Digest.shrunk][..., page], shrunk)
    assert (scores[Digest.shrunk] <= scores[Digest.bounds] + 1e-12).all()  # of two keys both are the same
    exact = (q_BKGH @ k_BKnH[:, :, :35].mT).unflatten(3, (7, 5)).amax(dim=-1)
    assert (scores[Digest.bounds] >= exact).all()
    assert not (scores[Digest.shrunk] >= exact).all()  # no bound any more


@pytest.mark.parametrize("coarse_quantile", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("pads", [[0], [0, 70, 215]], ids=["alone", "padded"])
def test_each_of_two_levels_has_its_quantile(pads: list[int], coarse_quantile: float) -> None:
    """As many of all tokens are above the second threshold as with one level: the first one takes off others.

    Wrong variant: the quantile of the tokens that are left above the first threshold, which leaves too few.
    """
    chooses = SqueezedAttention(
        quantile=0.8, cluster=4, coarse=3, coarse_quantile=coarse_quantile, observed=8, sinks=1, recent=6, iterations=4
    )
    given, slots = view(220, pads), slots_of(220, pads)
    index = chooses.index(given)
    assert isinstance(index, ThresholdClusters) and index.coarse is not None
    one = (
        chooses.index(given) if coarse_quantile else replace(chooses, coarse=0, coarse_quantile=ONE_LEVEL).index(given)
    )
    for row, pad in enumerate(pads):
        q_BNH = given.q_BNwH[:, :, max(0, pad - 212) :].unflatten(1, (KV_HEADS, -1)).flatten(1, 3)
        score_Kn = index.slot_scores(q_BNH, slots)[row, :, pad:]
        size = float(index.sizes_BKY(slots)[row].max()) * (1 if coarse_quantile else 0) + 5
        for score_n, least in zip(score_Kn, index.least_BK[row], strict=True):
            above = float((score_n >= least - 1e-15).double().mean())
            assert 0.2 <= above <= 0.2 + size / len(score_n), (row, above)
            below = float((score_n < 0).double().mean())
            assert below <= coarse_quantile and (below > 0 or not coarse_quantile or len(score_n) < 20), (row, below)
    if not coarse_quantile:  # all are compared
        assert isinstance(one, ThresholdClusters)
        torch.testing.assert_close(index.least_BK, one.least_BK)


def test_every_cluster_is_in_one_coarse_cluster_which_has_the_mean_of_its_tokens() -> None:
    given, more = view(90, [0]), drawn(1, KV_HEADS, 30, DIM, seed=9)
    index = SqueezedAttention(cluster=4, coarse=3, observed=8, sinks=1, recent=6, block=8).index(given)
    assert isinstance(index, ThresholdClusters) and index.coarse is not None
    bytes_before = index.num_bytes
    index.append(more, drawn(1, KV_HEADS, 30, VALUE_DIM, seed=4))
    assert index.coarse is not None and index.num_bytes - bytes_before > more.nbytes // 8
    keys, coarse = torch.cat([given.k_BKnH, more], dim=2), index.coarse
    clustered = index._clusters.of_BKn.shape[2]
    of_BKn = coarse.of_BKP.take_along_dim(index._clusters.of_BKn.long(), dim=2)
    for head in range(KV_HEADS):
        assert (
            of_BKn[0, head].bincount(minlength=coarse.sizes_BKZ.shape[2]).tolist() == coarse.sizes_BKZ[0, head].tolist()
        )
        for cluster in of_BKn[0, head].unique().tolist():
            mean = keys[0, head, :clustered][of_BKn[0, head] == cluster].mean(dim=0)
            torch.testing.assert_close(coarse.means_BKZH[0, head, cluster], mean)


@pytest.mark.parametrize("coarse", [0, 3])
def test_appended_tokens_join_clusters_and_renewal_makes_thresholds_alone(
    coarse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variant: thresholds of the prompt are kept, whose quantile the queries of later positions do not have."""
    monkeypatch.setattr("runahead.retrieval.indices.DECODED_SOON", 2)
    chooses = SqueezedAttention(
        min_tokens=0,
        first_layer=0,
        sinks=1,
        recent=2,
        cluster=3,
        block=2,
        observed=8,
        quantile=0.5,
        coarse=coarse,
        coarse_quantile=0.2 if coarse else ONE_LEVEL,
        max_fetch=1.0,
    )
    turns = Turns(tiny_model("llama"), [chooses])
    turns.prefill()
    before = [layer.index for layer in turns.retrieval.layers if layer is not None]
    least = [each.least_BK.clone() for each in before if isinstance(each, ThresholdClusters)]
    made = [each._clusters.of_BKn.clone() for each in before if isinstance(each, ThresholdClusters)]
    turns.decode([*GENERATED, *GENERATED])
    after = [layer.index for layer in turns.retrieval.layers if layer is not None]
    for old, index, thresholds, clusters in zip(before, after, least, made, strict=True):
        assert index is old and isinstance(index, ThresholdClusters)
        assert index._clusters.of_BKn.shape[2] > clusters.shape[2]  # later tokens are in clusters
        assert torch.equal(index._clusters.of_BKn[..., : clusters.shape[2]], clusters)
        assert not torch.equal(index.least_BK, thresholds)


@pytest.mark.parametrize("quantile", [0.5, 0.8])
@pytest.mark.parametrize("pads", [[0], [0, 70, 215]], ids=["alone", "padded"])
def test_the_threshold_is_the_quantile_of_the_queries_that_it_is_made_of(pads: list[int], quantile: float) -> None:
    """Its share of the tokens' mean scores is above it, but for tokens of one cluster, which are all on one side."""
    chooses = SqueezedAttention(quantile=quantile, cluster=4, observed=8, sinks=1, recent=6, iterations=4)
    given = view(220, pads)
    index = chooses.index(given)
    assert isinstance(index, ThresholdClusters)
    sizes_BKY = index.sizes_BKY(slots_of(220, pads))
    for row, pad in enumerate(pads):
        q_KXH = given.q_BNwH[row, :, max(0, pad - 212) :].unflatten(0, (KV_HEADS, -1)).flatten(1, 2)
        means_KYH = torch.cat([index._clusters.means_BKPH, index._k_BKWH], dim=2)[row]
        weights = (q_KXH @ means_KYH.mT * 0.9).exp()
        mean_KY = (weights / (weights * sizes_BKY[row][:, None]).sum(dim=-1, keepdim=True)).mean(dim=1)
        score_Kn = mean_KY.take_along_dim(index.of_BKn[row, :, pad:], dim=1)
        above_K = (score_Kn >= index.least_BK[row, :, None] - 1e-12).double().mean(dim=1)
        slack = (float(sizes_BKY[row].max()) + 1) / score_Kn.shape[1]
        assert all(1 - quantile <= above <= 1 - quantile + slack for above in above_K.tolist()), (row, above_K)


def test_a_higher_quantile_fetches_less() -> None:
    shares = []
    for quantile in (0.0, 0.5, 0.9):
        one = SqueezedAttention(
            min_tokens=0, first_layer=0, sinks=1, recent=1, cluster=3, observed=8, quantile=quantile, max_fetch=1.0
        )
        turns = Turns(tiny_model("llama"), [one])
        turns.prefill()
        turns.decode(GENERATED)
        shares.append(turns.retrieval.report().mean_fetched_share or 0.0)
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5 and 0 < shares[-1] < 0.7 * shares[0]


RETRIEVED_TURN = prompt(9, seed=5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lengths", [pytest.param((NUM_TOKENS,), marks=pytest.mark.slow), PADDED], ids=["alone", "padded"]
)
def test_a_turn_that_retrieves_all_is_the_full_cache_bit_by_bit(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model("llama"), "last_layer", None)  # as turns that retrieve have it
    with_forwards_of(name, tiny_model("llama"), monkeypatch)
    ours = Turns(tiny_model("llama"), [policy(name, ALL[name] | {"turn_tokens": 9})], lengths)
    full = Turns(tiny_model("llama"), [Full()], lengths)
    ours.prefill(), full.prefill()
    more = torch.tensor([RETRIEVED_TURN])
    with throughout(torch.float64):
        assert torch.equal(ours.conversation.feed(more), full.conversation.feed(more))
    assert torch.equal(ours.decode(GENERATED), full.decode(GENERATED))
    found = ours.retrieval.layers[-1]
    assert found is not None and found.steps == 1 + len(GENERATED)
    assert found.index.num_slots == NUM_TOKENS + 9 + len(GENERATED)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("offload", "em_llm")])
@pytest.mark.parametrize(
    "lengths", [pytest.param((NUM_TOKENS,), marks=pytest.mark.slow), PADDED], ids=["alone", "padded"]
)
def test_a_turn_of_one_token_that_retrieves_is_a_generated_token(name: str, lengths: tuple[int, ...]) -> None:
    """Same slots, same estimate; and a longer turn sees everything. To em_llm its surprise is known."""
    options = SOME[name] | ({"ahead": False} if name == "infinigen" else {})
    one, other = (Turns(tiny_model("llama"), [policy(name, options | {"turn_tokens": 1})], lengths) for _ in range(2))
    one.prefill(), other.prefill()
    with throughout(torch.float64):
        fed = one.conversation.feed(torch.tensor([[5]]))
        torch.testing.assert_close(fed, other.decode([5])[:, -1], atol=1e-9, rtol=0)
        torch.testing.assert_close(one.decode([7, 11]), other.decode([7, 11]), atol=1e-9, rtol=0)
        steps = [found.steps for found in one.retrieval.layers if found is not None]
        one.conversation.feed(torch.tensor([[5, 6]]))
    assert [found.steps for found in one.retrieval.layers if found is not None] == steps


def test_the_tokens_of_a_turn_choose_together() -> None:
    """All of them see the tokens that one of them needs, and those of their turn before them."""
    model = tiny_model("llama")
    turns = Turns(model, [policy("exact_topk", {"fetch": 12, "turn_tokens": 3})])
    turns.prefill()
    cache, q_BNCH = turns.conversation.cache, drawn(1, 4, 3, model.kv_shapes[1].key_dim, seed=3)
    fetched = turns.retrieval.fetched(1, q_BNCH, NUM_TOKENS, [0], room=q_BNCH.shape[2])
    assert cache is not None and fetched is not None and fetched.slots_BKm is not None
    assert fetched.slab(model.kv_shapes[1].key_dim).end == 12 + 3
    k_BKnH, _ = cache.layers[1].slab().read(0, NUM_TOKENS)
    scores = torch.einsum("kgch,knh->kgcn", q_BNCH[0].unflatten(0, (2, 2)), k_BKnH[0]) * q_BNCH.shape[-1] ** -0.5
    need = (scores - scores.amax(-1, keepdim=True)).amax((1, 2))
    need[:, [0, 1, 37, 38, 39]] = math.inf
    for head, slots in enumerate(fetched.slots_BKm[0].tolist()):
        assert set(slots) == set(need[head].topk(12).indices.tolist())


@pytest.mark.parametrize("name", ["exact_topk", "quest", "retroinfer", "sparq"])
def test_pieces_of_a_turn_retrieve_from_the_ones_before(name: str) -> None:
    """Also if nothing was indexed between them; with a fork in between, which leaves the conversation as it is."""
    pieces, told = (Turns(tiny_model("llama"), [policy(name, SOME[name] | {"turn_tokens": 4})]) for _ in range(2))
    pieces.prefill(), told.prefill()
    with throughout(torch.float64):
        pieces.conversation.feed(torch.tensor([[5, 7, 11]]), cut_back=False)
        pieces.conversation.fork().feed(torch.tensor([[1, 2, 3, 4]]))
        ours = pieces.conversation.feed(torch.tensor([[13, 17]]), cut_back=False)
        told.conversation.feed(torch.tensor([[5, 7, 11]]))
        theirs = told.conversation.feed(torch.tensor([[13, 17]]))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    torch.testing.assert_close(pieces.decode(GENERATED), told.decode(GENERATED), atol=1e-9, rtol=0)
    found = pieces.retrieval.layers[-1]
    assert found is not None and found.steps == 2 + len(GENERATED)


def test_the_first_turn_sees_everything_in_pieces_too() -> None:
    one, full = (
        Turns(tiny_model("llama"), [each]) for each in (policy("quest", SOME["quest"] | {"turn_tokens": 64}), Full())
    )
    assert torch.equal(one.prefill([17, 1, 12, 10]), full.prefill([17, 1, 12, 10]))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ClusterKV, {"cluster": 0}, "policy.cluster=0 must be at least 1"),
        (ClusterKV, {"pool": {"bytes": "1MiB"}}, "clusterkv looks for tokens in the order of the text"),
        (Quest, {"pool": {"bytes": "1MiB"}}, "quest looks for tokens in the order of the text"),
        (Quest, {"digest": "median"}, "policy.digest=median is not one of bounds, shrunk, mean"),
        (ExactTopK, {"group": "median"}, "policy.group=median is not one of union, mean, max, sum"),
        (ExactTopK, {"turn_tokens": -1}, "policy.turn_tokens=-1 must not be negative"),
        (InfiniGen, {"group": "mean"}, "policy.group=mean has no scores within policy.alpha"),
        (SparQ, {"dims": 0}, "policy.dims=0 must be at least 1"),
        (RetroInfer, {"estimate": 1.5}, "policy.estimate=1.5 must be from 0 to 1"),
        (SqueezedAttention, {"quantile": 1.0}, "policy.quantile=1.0 must be at least 0 and below 1"),
        (SqueezedAttention, {"max_fetch": 0.0}, "policy.max_fetch=0.0"),
        (SqueezedAttention, {"observed": 0}, "policy.observed=0"),
        (SqueezedAttention, {"coarse": -1}, "policy.coarse=-1 must not be negative"),
        (SqueezedAttention, {"coarse": 5, "coarse_quantile": 0.95}, "policy.coarse_quantile=0.95 must be from 0 to"),
        (SqueezedAttention, {"coarse": 5, "fetch": 0.1}, "policy.coarse=5 has a threshold"),
        (SqueezedAttention, {"group": "sum"}, "policy.group=sum has no probabilities"),
    ],
)
def test_options_out_of_range_are_refused(kind: type[Policy], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
def test_a_turn_that_retrieves_is_cut_back_by_its_attention_to_all_tokens(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SnapKV's votes written out, over all that is stored. Seen to fail: over what the turn has retrieved."""
    ours = Turns(tiny_model("llama"), cut_before_retrieval(), lengths)
    ours.prefill()
    found: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}
    run = PolicySteps.run

    def noting(self: PolicySteps, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms) -> KeptLayer:
        positions_BKn = kept.positions_BKn().expand(-1, 2, -1).clone()
        found[layer] = seen.q_BNCH[:, :, -4:].clone(), kept.read()[0].clone(), positions_BKn, terms.scaling
        return run(self, layer, kept, seen, terms)

    monkeypatch.setattr(PolicySteps, "run", noting)
    with throughout(torch.float64):
        ours.conversation.feed(torch.tensor([RETRIEVED_TURN]))
    for layer, kept in enumerate(ours.conversation.cache.layers):
        q_BNwH, k_BKnH, positions_BKn, scaling = found[layer]
        assert k_BKnH.shape[2] > kept.num_slots == 24
        for row, length in enumerate(lengths):
            for head in range(2):
                positions_n, q_GwH = positions_BKn[row, head], q_BNwH[row, 2 * head : 2 * head + 2]
                scores_Gwn = q_GwH @ k_BKnH[row, head].T * scaling
                sees_wn = (positions_n >= 0) & (positions_n <= length + 5 + torch.arange(4)[:, None])
                votes_n = scores_Gwn.masked_fill(~sees_wn, -math.inf).softmax(dim=-1).mean(dim=(0, 1))
                votes_n[-4:] = 2.0  # the window stays
                tokens_t = (positions_n >= 0).nonzero()[:, 0]
                best_m = tokens_t[votes_n[tokens_t].topk(min(24, len(tokens_t))).indices].sort().values
                is_token_n = kept.positions_BKn()[row, head] >= 0
                assert kept.positions_BKn()[row, head, is_token_n].tolist() == positions_n[best_m].tolist()
    steps = [each.steps for each in ours.retrieval.layers if each is not None]
    assert steps == [1] * 3, "the turn has retrieved"


def cut_before_retrieval(name: str = "exact_topk", **options: Any) -> list[Policy]:
    return [SnapKV(budget=24, window=4, kernel=1), policy(name, {"fetch": 12, "turn_tokens": 9, **options})]


def test_columns_are_made_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than the index and one part are in memory at once; parts of one token give the same columns."""
    given = view(40, [0, 7])
    for one in (SparQ(**BARE, dims=4), MagicPIG(**BARE), InfiniGen(**BARE)):
        whole, parts = one.index(given), list[int]()
        kind = type(whole)
        assert isinstance(whole, columns.Columns)
        with monkeypatch.context() as patch:
            made = kind.columns

            def noted(index: Any, k_BKCH: Tensor, made: Any = made, parts: list[int] = parts) -> Tensor:
                parts.append(k_BKCH.shape[2])
                return made(index, k_BKCH)

            patch.setattr(kind, "columns", noted)
            patch.setattr(columns, "PART", 16)
            found = one.index(given)
        assert parts == [0, 16, 16, 8] and isinstance(found, columns.Columns)
        assert found.num_slots == 40 and found.num_bytes == whole.num_bytes
        torch.testing.assert_close(found._columns_BKrT[..., :40], whole._columns_BKrT[..., :40])
