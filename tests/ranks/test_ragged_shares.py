"""Heads that keep different numbers of tokens, where ranks share a model: what is kept is what one rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from policies.adakv import AdaKV
from policies.base import ModelFacts, Policy
from policies.cake import CAKE
from policies.duo_attention import DuoAttention
from policies.duo_table import DuoTable
from policies.fastgen import FastGen
from policies.head_scores import HeadScores
from policies.kvzip import KVzip
from policies.score_maps import ScoreMaps
from policies.snapkv import SnapKV
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from tests.conftest import RankPools
from tests.families import prompt
from tests.ranks import ragged_tasks
from tests.ranks.ragged_tasks import KVzapOfShare
from tests.ranks.tensor_tasks import SIZES

PROMPTS = [prompt(50), prompt(31, seed=3)]
NEW = [5, 7, 11, 13, 17, 19]
KV_HEADS = SIZES["num_key_value_heads"]
GATES = [[0.9, 0.1, 0.4, 0.3], [0.2, 0.8, 0.7, 0.6], [0.1, 0.1, 0.1, 0.5]]
POLICIES: dict[str, Policy] = {
    "adakv": AdaKV(scorer=SnapKV(budget=12, window=4, kernel=3), alpha=0.1),
    "adakv, scores of all heads alike": AdaKV(scorer=TOVA(budget=12), alpha=0.0),
    "kvzip": KVzip(budget=12, sinks=2, chunk_tokens=20),
    "zigzagkv": ZigZagKV(budget=12, window=4, kernel=3, least_share=0.3),
    "cake": CAKE(budget=12, window=4, kernel=3),
    "fastgen": FastGen(window=4, sinks=2, frequent=6, local=6, recovered=0.5),
    "kvzap": KVzapOfShare(sinks=2, recent=3, evict_every=2, threshold=0.5),
}


@pytest.mark.parametrize("chunk_tokens", [None, 17])
@pytest.mark.sampled(2)
def test_shares_keep_what_one_rank_keeps(rank_pools: RankPools, tmp_path: Path, chunk_tokens: int | None) -> None:
    """Budgets are shared out over all heads. If each share divided one over its own heads, it would keep others."""
    table = DuoTable(gates=[torch.tensor(gates_K) for gates_K in GATES], sinks=3, recent=9)
    for name, content in table.files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    policies = POLICIES | {"duo_attention": DuoAttention(heads=str(tmp_path), retrieval_share=0.4, evict_every=2)}
    given = list(policies.values()), PROMPTS, NEW, chunk_tokens
    [whole] = rank_pools.run(1, ragged_tasks.kept_by, 1, *given)
    shares = rank_pools.run(2, ragged_tasks.kept_by, 2, *given)
    for place, name in enumerate(policies):
        (kept, logits), of_shares = whole[place], [share[place] for share in shares]
        joined = [
            [[*first, *second] for first, second in zip(*rows, strict=True)]
            for rows in zip(*(kept_by_share for kept_by_share, _ in of_shares), strict=True)
        ]
        assert joined == kept, name
        lengths = {len(head) for layer in kept for head in layer[0]}
        assert len(lengths) > 1 or name == "adakv, scores of all heads alike", name
        for _, found in of_shares:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(logits), atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize(("num_shares", "copies"), [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_a_share_reads_its_heads_of_a_models_file(num_shares: int, copies: int) -> None:
    """The files have head scores, gates and maps of the whole model; several shares may have the same KV head."""
    own = KV_HEADS * copies // num_shares
    induction = [torch.rand(8, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
    scores = HeadScores(induction=induction, echo=induction)
    maps = ScoreMaps(weights={0: torch.arange(KV_HEADS * 2.0).view(-1, 2)}, biases={0: torch.arange(KV_HEADS * 1.0)})
    for share in range(num_shares):
        facts = ModelFacts(
            name="it", fingerprint="", heads=[(own, 8)] * 3, share=share, num_shares=num_shares, copies=copies
        )
        heads = list(range(KV_HEADS))[share * KV_HEADS // num_shares :][:own]
        assert facts.heads_of_all == [KV_HEADS] * 3
        assert list(range(KV_HEADS))[facts.own_heads(1)] == heads
        found, _ = scores.by_kv_head(facts)
        assert torch.equal(found[0], induction[0].view(KV_HEADS, -1).amax(dim=1))
        assert maps.of_share(share, num_shares).biases[0].tolist() == heads
