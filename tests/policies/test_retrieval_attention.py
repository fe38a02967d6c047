"""RetrievalAttention: keys that the prompt's queries have linked, and a search that follows their links."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.retrieval_attention import KeyGraph, RetrievalAttention
from policies.retriever import DECODED_SOON, PromptView
from runahead.model.model import Model
from runahead.retrieval import indices
from tests.families import build, prompt, throughout
from tests.policies.test_indices import drawn, slots_of, view
from tests.policies.test_retrieval import GENERATED, NUM_TOKENS, Turns
from tests.policies.written_out import WrittenOut
from tests.ranks.tasks import tiny_model

DEGREE, NEAREST, WIDTH = 3, 5, 4
OPTIONS: dict[str, Any] = {"min_tokens": 0, "sinks": 1, "recent": 2, "degree": DEGREE, "nearest": NEAREST}


def written_graph(k_nH: Tensor, q_XH: Tensor, pad: int) -> tuple[list[list[int]], list[int]]:
    """Links of each key (of the queries whose best key it is, or one of the others), and where a search begins."""
    counts, times = [dict[int, int]() for _ in range(len(k_nH))], [0] * len(k_nH)
    for q_H in q_XH:
        if not q_H.any():
            continue
        nearest = sorted(range(pad, len(k_nH)), key=lambda slot: -float(q_H @ k_nH[slot]))[:NEAREST]
        for slot in nearest:
            times[slot] += 1
        for other in nearest[1:]:
            counts[nearest[0]][other] = counts[nearest[0]].get(other, 0) + 1
            counts[other][nearest[0]] = counts[other].get(nearest[0], 0) + 1
    links = [sorted(each, key=lambda slot: (-each[slot], slot))[:DEGREE] for each in counts]
    return links, sorted(range(pad, len(k_nH)), key=lambda slot: -times[slot])[:WIDTH]


def written_search(
    k_nH: Tensor, q_H: Tensor, links: list[list[int]], entries: list[int], pad: int, number: int, hops: int
) -> tuple[list[int], int]:
    """The best slots of a search, and the number of keys that were scored."""
    scores = {slot: float(q_H @ k_nH[slot]) for slot in [*entries, *range(len(links), len(k_nH))] if slot >= pad}
    pool, followed = sorted(scores, key=scores.__getitem__, reverse=True), set[int]()
    for _ in range(hops):
        front = [slot for slot in pool if slot < len(links) and slot not in followed][:WIDTH]
        followed |= set(front)
        for slot in front:
            for to in [*links[slot], slot - 1, slot + 1]:
                if pad <= to < len(k_nH) and to not in scores:
                    scores[to] = float(q_H @ k_nH[to])
                    pool.append(to)
        pool = sorted(pool, key=scores.__getitem__, reverse=True)[: max(number, WIDTH)]
    return pool, len(scores)


@pytest.mark.parametrize("pads", [[0], [0, 9]], ids=["alone", "padded"])
@pytest.mark.parametrize("hops", [1, 3, 20])
def test_a_search_finds_what_one_in_dictionaries_finds(pads: list[int], hops: int) -> None:
    """Also among tokens that came after the graph."""
    seen = view(50, pads, observed=20)
    index = KeyGraph(seen, RetrievalAttention(**OPTIONS, width=WIDTH, hops=hops))
    more = drawn(len(pads), 2, 3, 8, seed=7)
    k_BKnH = torch.cat([seen.k_BKnH, more], dim=2)
    index.append(more, more)
    index.stored = lambda: k_BKnH
    q_BNH, num_seen = drawn(len(pads), 4, 8, seed=5), 0
    slots_BKGf, scores_BKGf, seen_BKGn = index.search(q_BNH, 12)
    for row, pad in enumerate(pads):
        for head in range(2):
            q_XH = seen.q_BNwH[row].unflatten(0, (2, 2))[head].flatten(0, 1)
            links, entries = written_graph(seen.k_BKnH[row, head], q_XH, pad)
            ours = [[to for to in each if to != slot] for slot, each in enumerate(index.links_BKnD[row, head].tolist())]
            assert ours == links
            assert index.entries_BKE[row, head].tolist() == entries
            for member in range(2):
                q_H = q_BNH[row, head * 2 + member] * seen.scaling
                expected, scored = written_search(k_BKnH[row, head], q_H, links, entries, pad, 12, hops)
                held = scores_BKGf[row, head, member] > -torch.inf
                assert set(slots_BKGf[row, head, member][held].tolist()) == set(expected)
                num_seen += pad + scored
    assert int(seen_BKGn.sum()) == num_seen


class Searching(WrittenOut):
    """A Llama with a KV head per query head, in which each searches the graph of its layer for tokens after the prompt.

    Args:
        wrong: what it does otherwise; none if it is empty.
    """

    def __init__(self, module: Any, policy: RetrievalAttention, wrong: str) -> None:
        super().__init__(module)
        self.policy, self.wrong = policy, wrong
        self.graphs: dict[tuple[int, int], tuple[list[list[int]], list[int]]] = {}

    def _attended(self, layer: int, head: int, q_CH: Tensor) -> Tensor:
        num, policy = self.k_KnH[layer].shape[1], self.policy
        k_nH = self.rotated(self.k_KnH[layer][head], self.places(num))
        if len(q_CH) == num:
            asked = (k_nH if self.wrong == "keys in place of queries" else q_CH)[-policy.observed :]
            places = torch.arange(num - policy.observed, num) + DECODED_SOON
            self.graphs[layer, head] = written_graph(k_nH, self.rotated(asked, places), 0)
            return super()._attended(layer, head, q_CH)
        q_H = self.rotated(q_CH, torch.tensor([num - 1]))[0] / math.sqrt(self.head_dim)
        number, hops = int(policy.fetch or 0), policy.hops - (self.wrong == "a hop less")
        found, _ = written_search(k_nH[:-1], q_H, *self.graphs[layer, head], 0, number, hops)
        others = [slot for slot in range(num - 2, -1, -1) if slot not in found]
        sinks = [] if self.wrong == "no sinks" else list(range(policy.sinks))
        order = [*sinks, *range(num - 1 - policy.recent, num - 1), *found, *others]
        chosen = [*list(dict.fromkeys(order))[:number], *([] if self.wrong == "no own token" else [num - 1])]
        return ((k_nH[chosen] @ q_H).softmax(dim=0) @ self.v_KnH[layer][head, chosen])[None]


@pytest.mark.parametrize("wrong", ["", "keys in place of queries", "a hop less", "no sinks", "no own token"])
def test_logits_are_those_of_a_search_written_out(wrong: str) -> None:
    policy = RetrievalAttention(**OPTIONS, fetch=12, observed=10, width=WIDTH, hops=2)
    module = build("llama", num_key_value_heads=4)
    with torch.inference_mode(), throughout(torch.float64):
        turns, reference = Turns(Model(module), [policy]), Searching(module, policy, wrong)
        expected = [reference.feed(prompt(NUM_TOKENS)), *(reference.feed([token]) for token in GENERATED * 2)]
    torch.testing.assert_close(turns.prefill()[0], expected[0], atol=1e-9, rtol=0)
    error = (turns.decode(GENERATED * 2)[0] - torch.stack(expected[1:])).abs().max()
    assert error > 1e-3 if wrong else error < 1e-8


def test_a_graph_is_made_anew_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "DECODED_SOON", 3)
    turns = Turns(tiny_model("llama"), [RetrievalAttention(**OPTIONS, fetch=12, observed=10)])
    turns.prefill()
    turns.decode(GENERATED * 2)
    graphs = [found.index for found in turns.retrieval.layers if found is not None]
    # After three tokens and three more, after four, after five: layers take turns.
    assert [graph.links_BKnD.shape[2] - NUM_TOKENS for graph in graphs if isinstance(graph, KeyGraph)] == [6, 4, 5]


def test_a_prompt_of_one_token_has_a_graph_without_links() -> None:
    index = KeyGraph(view(1, [0], observed=1), RetrievalAttention(**OPTIONS, width=WIDTH, hops=2))
    assert index.links_BKnD.tolist() == [[[[0] * DEGREE]] * 2] and index.entries_BKE.tolist() == [[[0]] * 2]
    assert index.search(drawn(1, 4, 8, seed=5), 3)[0].unique().tolist() == [0]


def recall(index: KeyGraph, k_BKnH: Tensor, q_BNH: Tensor, number: int) -> tuple[float, float]:
    """Share of the best slots that is found, and share of the keys that is scored for that."""
    slots_BKGf, _, seen_BKGn = index.search(q_BNH, number)
    hits = 0
    for head, q_H in enumerate(q_BNH[0]):
        best = (k_BKnH[0, head // 2] @ q_H).topk(number).indices.tolist()
        hits += len(set(best) & set(slots_BKGf[0, head // 2, head % 2].tolist()))
    return hits / (number * q_BNH.shape[1]), seen_BKGn.double().mean().item()


def test_a_graph_of_queries_leads_queries_further_than_one_of_keys() -> None:
    """Queries here lie elsewhere than keys. A graph of keys in place of queries finds less at as many scores."""
    n, dim = 1500, 16
    spread = torch.linspace(2, 0.2, dim, dtype=torch.float64)
    k_BKnH = drawn(1, 2, n, dim, seed=1) * spread
    asked = drawn(1, 4, 420, dim, seed=2) * spread.flip(0) + 1.5 * drawn(dim, seed=3)
    shares = []
    for q_BNwH in (asked[:, :, :400], k_BKnH[:, :, :400].repeat_interleave(2, dim=1)):
        index = KeyGraph(of(k_BKnH, q_BNwH), RetrievalAttention(nearest=24, degree=16, width=8, hops=4))
        each = [recall(index, k_BKnH, asked[:, :, at], 20) for at in range(400, 420)]
        shares.append([sum(values) / len(values) for values in zip(*each, strict=True)])
    (by_queries, scored), (by_keys, _) = shares
    assert by_queries > by_keys + 0.1 and scored < 0.6


def of(k_BKnH: Tensor, q_BNwH: Tensor) -> PromptView:
    n = k_BKnH.shape[2]
    more = {"positions_BKn": torch.arange(n)[None, None], "next_B": torch.tensor([n]), "stored": lambda: k_BKnH}
    return replace(view(8, [0]), k_BKnH=k_BKnH, v_BKnV=k_BKnH, q_BNwH=q_BNwH, **more)


@pytest.mark.parametrize("pads", [[0], [0, 30]], ids=["alone", "padded"])
def test_found_slots_are_chosen_before_others_and_no_padding(pads: list[int]) -> None:
    """With hops enough to score all, it is the exact choice."""
    seen, slots = view(50, pads, observed=20), slots_of(50, pads)
    policy = RetrievalAttention(**OPTIONS, fetch=15, hops=60, observed=20)
    q_BNH = drawn(len(pads), 4, 8, seed=3)
    choice = policy.index(seen).choose(q_BNH, slots)
    assert choice is not None
    for row, pad in enumerate(pads):
        scores_KGn = q_BNH[row].unflatten(0, (2, 2)) @ seen.k_BKnH[row].mT * seen.scaling
        scores_KGn[..., :pad] = -torch.inf
        need_Kn = (scores_KGn - scores_KGn.amax(dim=-1, keepdim=True)).amax(dim=1)
        need_Kn[:, [pad, 48, 49]] = torch.inf
        for head in range(2):
            expected = need_Kn[head].topk(15).indices.tolist()
            assert sorted(choice.slots_BKm[row, head].tolist()) == sorted(expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nearest": 1}, "policy.nearest=1 must be at least 2"),
        ({"fetch": None}, "policy.fetch=None must be given"),
        ({"group": "mean"}, "policy.group=mean does not go with retrieval_attention"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RetrievalAttention(**options)
