"""FastGen: the cheapest rule that recovers a head's attention, special tokens and punctuation among the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from policies.fastgen import FastGen
from policies.layer_view import TokenKind
from runahead import Conversation, Model
from runahead.model.token_kinds import token_kinds
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.launch.test_retrieval_heads import Noting
from tests.policies.running import Run
from tests.policies.test_adakv import kept_by
from tests.policies.test_scorers import view_of
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level

# Legend: B batch, N query heads, K kv heads, G query heads of a KV head, C new tokens, n tokens.

WINDOW, SINKS, FREQUENT, LOCAL = 5, 2, 9, 12
OTHER, MARK, SPECIAL = TokenKind.other.value, TokenKind.punctuation.value, TokenKind.special.value


def fastgen(recovered: float) -> FastGen:
    return FastGen(recovered=recovered, window=WINDOW, sinks=SINKS, frequent=FREQUENT, local=LOCAL)


def attention_of(model: Model, ids: list[int]) -> list[Tensor]:
    """Mean attention (N, n) of the last queries in each layer, from whole matrices."""
    with throughout(torch.float64):
        noting = Noting(model.empty_cache(len(ids)), start=0, pads=[0])
        model.forward(torch.tensor([ids]), noting, start=0, pads=[0], all_hidden=True)
    return [attention_Nnn[:, -WINDOW:].mean(dim=1) for attention_Nnn, _ in noting.found]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
def test_every_query_head_recovers_what_is_asked_for_and_no_cheaper_rule_does(family: str) -> None:
    """Expected from whole attention matrices: a KV head keeps what its worst query head needs."""
    model, found = tiny_model(family), set[int]()
    for seed, recovered in enumerate((0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)):
        ids = prompt(40, seed)
        run = Run(model, [fastgen(recovered)], [ids])
        run.prefill()
        for layer, attention_Nn in enumerate(attention_of(model, ids)):
            heads = kept_by(run, layer, 0)
            attention_KGn = attention_Nn.unflatten(0, (len(heads), -1))
            for kept, attention_Gn in zip(heads, attention_KGn, strict=True):
                assert attention_Gn[:, kept].sum(dim=-1).min() >= recovered - 1e-6  # scores are float32
                rules = rules_by_hand(attention_Gn.mean(dim=0))
                rule = rules.index(kept)
                found.add(rule)
                for cheaper in rules[:rule]:
                    assert attention_Gn[:, cheaper].sum(dim=-1).min() < recovered + 1e-6
    assert {2, 3, 4} <= found


def rules_by_hand(attention_n: Tensor) -> list[list[int]]:
    """Tokens that the rules keep of a text without special tokens and punctuation."""
    n = len(attention_n)
    special = {*range(SINKS), n - 1}
    others = [token for token in range(n) if token not in special]
    best = sorted(others, key=lambda token: -float(attention_n[token]))[:FREQUENT]
    local = {*special, *best, *range(n - LOCAL, n)}
    return [sorted(kept) for kept in (special, special, {*special, *best}, local, range(n))]


def test_the_more_is_to_be_recovered_the_more_is_kept() -> None:
    model, totals, before = tiny_model("llama"), list[int](), list[set[int]]()
    for recovered in (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0):
        run = Run(model, [fastgen(recovered)], [prompt(40)])
        run.prefill()
        kept = [set(head) for layer in range(3) for head in kept_by(run, layer, 0)]
        assert all(less <= more for less, more in zip(before, kept, strict=bool(before)))
        before = kept
        totals.append(sum(map(len, kept)))
    assert totals[0] == 6 * (SINKS + 1) and totals[-1] == 6 * 40
    assert len(set(totals)) > 3


class Votes:
    """Signals of given attention."""

    def __init__(self, votes_BNn: Tensor) -> None:
        self.votes_BNn = votes_BNn

    def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
        assert (num_queries, newest) == (WINDOW, 1.0)
        return self.votes_BNn


def test_each_head_has_the_rule_that_suits_its_attention() -> None:
    """Five KV heads of one query head each, in a row with two tokens of padding."""
    n, pad = 30, 2
    marks, special, favourites = [9, 15, 21], [12], [5, 6, 8, 11, 13, 14, 17, 19, 20]
    votes_Kn, tokens = torch.zeros(5, n), range(pad, n)
    targets = [[pad, pad + 1, *special], marks, favourites, range(n - LOCAL, n), tokens]
    for votes_n, targeted in zip(votes_Kn, targets, strict=True):
        votes_n[list(targeted)] = 1 / len(targeted)
    votes_Kn[2] *= torch.linspace(1.0, 1.01, n)
    votes_Kn /= votes_Kn.sum(dim=-1, keepdim=True)
    view = view_of(torch.zeros(1, 5, n, 8), signals=Votes(votes_Kn[None]), pads=[pad])
    kinds_BC = torch.tensor([[MARK if at in marks else SPECIAL if at in special else OTHER for at in range(n)]])
    policy = fastgen(0.95)
    view = with_kinds(view, policy, kinds_BC)
    slots_BKm = policy.keep(view)
    assert slots_BKm is not None
    kept = [[slot for slot in head if slot >= 0] for head in slots_BKm[0].tolist()]
    first = [pad, pad + 1, *special, n - 1]
    assert kept[0] == first
    assert kept[1] == sorted({*first, *marks})
    assert kept[2] == sorted({*first, *marks, *favourites})
    assert len(kept[3]) == len({*kept[3]}) and set(kept[3]) >= {*first, *marks, *range(n - LOCAL, n)}
    assert len(kept[3]) < len(tokens) and kept[4] == list(tokens)


def with_kinds(view: Any, policy: FastGen, kinds_BC: Tensor) -> Any:
    from dataclasses import replace

    view = replace(view, new_kinds_BC=kinds_BC)
    return replace(view, carried_BKn=policy.carry(view))


def test_kinds_of_tokens_are_those_of_their_texts() -> None:
    tokenizer = byte_level()
    kinds = token_kinds(tokenizer, len(tokenizer) + 3).tolist()
    assert len(kinds) == len(tokenizer) + 3 and kinds[-3:] == [OTHER] * 3
    for text, kind in ((".", MARK), (",", MARK), ("a", OTHER), ("7", OTHER), ("\n", OTHER), (" ", OTHER)):
        (token,) = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert kinds[token] == kind, text
    assert {kinds[token] for token in tokenizer.all_special_ids} <= {SPECIAL}
    assert token_kinds(None, 7).tolist() == [OTHER] * 7


def test_punctuation_is_kept_whatever_chunk_it_came_in() -> None:
    """In rows of different lengths, and after another turn."""
    tokenizer = byte_level()
    module = build("llama", vocab_size=len(tokenizer))
    with throughout(torch.float64):
        model = Model(module, tokenizer)
    texts = ["a letter, from the ice; to my sister. and more of it", "short, is. it", "x, y and z"]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    marks = [{at for at, token in enumerate(row) if tokenizer.decode([token]).strip() in list(",;.")} for row in ids]
    assert all(marks)
    whole, pieces = (Run(model, [Punctuated(**vars(fastgen(0.0)))], ids[:2]) for _ in range(2))
    whole.prefill()
    pieces.prefill([9, 1, len(ids[0]) - 10])
    for run in (whole, pieces):
        for row in range(2):
            expected = sorted({0, 1, len(ids[row]) - 1} | marks[row])
            for layer in range(3):
                assert kept_by(run, layer, row) == [expected] * 2
    whole.next_prompt(ids[2])
    behind = len(ids[0])
    expected = sorted({0, 1, behind + len(ids[2]) - 1} | marks[0] | {behind + at for at in marks[2]})
    for layer in range(3):
        assert kept_by(whole, layer, 0) == [expected] * 2
        assert isinstance(whole.kept.layers[layer], RaggedLayer)


@pytest.mark.parametrize("at_once", [False, True])
def test_punctuation_of_an_answer_is_kept_in_a_later_turn(at_once: bool) -> None:
    tokenizer = byte_level()
    with throughout(torch.float64):
        model = Model(build("llama", vocab_size=len(tokenizer)), tokenizer)
        talk = Conversation(model, RankPolicies.everywhere([Punctuated(**vars(fastgen(0.0)))]))
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a letter", "x, y; z", "more")]
        talk.feed(torch.tensor(ids[:1]))
        talk.follow(torch.tensor(ids[1:2]), at_once=at_once)
        talk.feed(torch.tensor(ids[2:]))
    before, answer = len(ids[0]), ids[1]
    marks = [before + at for at, token in enumerate(answer) if tokenizer.decode([token]).strip() in list(",;")]
    assert len(marks) == 2 and talk.cache is not None
    for layer in talk.cache.layers:
        assert layer.positions_BKn()[0, 0].tolist() == [0, 1, *marks, sum(map(len, ids)) - 1]


class Punctuated(FastGen):
    """Without the cheapest rule."""

    def rules(self, view: Any, votes_BKn: Tensor) -> list[Tensor]:
        return super().rules(view, votes_BKn)[1:]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recovered": 1.1}, "policy.recovered=1.1 must be a share of the attention"),
        ({"window": 0}, "policy.window=0 must be at least 1"),
        ({"sinks": -1}, "policy.sinks=-1"),
        ({"frequent": 0}, "policy.frequent=0 must be a whole number of tokens"),
        ({"local": 1.5}, "policy.local=1.5 must be"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FastGen(**options)
