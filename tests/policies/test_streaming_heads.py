"""Heads that keep all tokens beside heads that keep the first and last ones: RazorAttention and DuoAttention."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.base import ModelFacts, Policy
from policies.duo_attention import DuoAttention
from policies.duo_table import DuoTable
from policies.full import Full
from policies.head_scores import HeadScores
from policies.layer_view import PromptPart
from policies.razor_attention import RazorAttention
from policies.streaming_heads import StreamingHeads, best_heads
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, Model, Ranks
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.thinning.cutting import cut_back
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.running import Run, model_with, prompts, require_answers
from tests.policies.test_adakv import kept_by
from tests.ranks.tasks import tiny_model
from tests.thinning.test_ragged_layer import KEY_DIM, PROMPT, SCALING, TOLERANCE, Both

# Legend: B batch, N query heads, K kv heads, n stored slots, m kept ones, H key dim.

SINKS, RECENT, EVERY = 3, 9, 5
LENGTHS = (40, 31, 9)
GENERATED = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]
GATES = [[0.1, 0.9, 0.3, 0.0], [0.2, 0.05, 0.0, 1.0], [0.4, 0.6, 0.7, 0.25]]


def facts(model: Model) -> ModelFacts:
    heads = [(shape.num_kv_heads, shape.key_dim) for shape in model.kv_shapes]
    return ModelFacts(name=model.name, fingerprint=model.fingerprint, heads=heads)


def duo(folder: Path, model: Model, share: float, **options: Any) -> DuoAttention:
    """With the gates above, which it has read."""
    kv_heads = model.kv_shapes[0].num_kv_heads
    gates = [torch.tensor(gates_K[:kv_heads]) for gates_K in GATES]
    for name, content in DuoTable(gates=gates, sinks=SINKS, recent=RECENT).files().items():
        (folder / name).write_text(content, encoding="utf-8")
    policy = DuoAttention(heads=str(folder), retrieval_share=share, evict_every=EVERY, **options)
    policy.require(facts(model))
    return policy


def answers(run: Run) -> list[Tensor]:
    return [run.prefill(), *(run.decode(token) for token in GENERATED)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_if_all_heads_retrieve_it_is_the_full_cache_bit_by_bit(tmp_path: Path, kv_heads: int) -> None:
    model = model_with(kv_heads)
    ours, full = (Run(model, [policy], prompts(LENGTHS)) for policy in (duo(tmp_path, model, 1.0), Full()))
    for mine, expected in zip(answers(ours), answers(full), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_if_none_does_it_is_streaming_llm_bit_by_bit(tmp_path: Path, kv_heads: int) -> None:
    """Through two cuts while decoding, in rows of different lengths, of which one is short at first."""
    model = model_with(kv_heads)
    streaming = StreamingLLM(budget=SINKS + RECENT, sinks=SINKS, evict_every=EVERY)
    ours, theirs = (Run(model, [policy], prompts(LENGTHS)) for policy in (duo(tmp_path, model, 0.0), streaming))
    for mine, expected in zip(answers(ours), answers(theirs), strict=True):
        assert torch.equal(mine, expected)
    for layer, other in zip(ours.kept.layers, theirs.kept.layers, strict=True):
        assert type(layer) is KeptLayer and layer.pads == other.pads
        assert torch.equal(layer.positions_BKn(), other.positions_BKn())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_head_keeps_what_it_is_for(tmp_path: Path, kv_heads: int) -> None:
    """After the prompt and after each generated token: all, or what StreamingLLM alone would have by then."""
    model = model_with(kv_heads)
    run = Run(model, [duo(tmp_path, model, 0.5)], prompts(LENGTHS))
    alone = Run(model, [StreamingLLM(budget=SINKS + RECENT, sinks=SINKS, evict_every=EVERY)], prompts(LENGTHS))
    by_gate = sorted((gate for gates_K in GATES for gate in gates_K[:kv_heads]), reverse=True)
    least = by_gate[3 * kv_heads // 2 - 1]
    for step in range(len(GENERATED) + 1):
        for each in (run, alone):
            each.decode(GENERATED[step - 1]) if step else each.prefill()
        for layer in range(3):
            for row, length in enumerate(LENGTHS):
                for head, kept in enumerate(kept_by(run, layer, row)):
                    everything = list(range(length + step))
                    streams = kept_by(alone, layer, row)[head]
                    assert kept == (everything if GATES[layer][head] >= least else streams), (step, layer, row, head)
    assert any(isinstance(layer, RaggedLayer) for layer in run.kept.layers)


def test_keys_are_read_only_when_something_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read those of a ragged layer is to copy them."""
    model, reads = model_with(4), list[int]()
    run = Run(model, [duo(tmp_path, model, 0.5)], prompts(LENGTHS))
    run.prefill()
    layers = [type(layer) for layer in run.kept.layers]
    assert layers == [RaggedLayer] * 3
    read = RaggedLayer.read
    monkeypatch.setattr(RaggedLayer, "read", lambda layer: (reads.append(1), read(layer))[1])
    for token in GENERATED[: EVERY - 1]:
        run.decode(token)
    assert not reads
    run.decode(5)
    assert len(reads) == 3


def test_another_turn_and_a_fork_go_on(tmp_path: Path) -> None:
    model = model_with(4)
    with throughout(torch.float64):
        talk = Conversation(model, RankPolicies(last=[duo(tmp_path, model, 0.25)]))
        talk.feed(torch.tensor([prompt(40)]))
        assert sorted(tokens_of(talk)) == [SINKS + RECENT] * 9 + [40] * 3
        fork = talk.fork()
        for each in (talk, fork):
            each.follow(torch.tensor([GENERATED]))
            each.feed(torch.tensor([prompt(8, seed=2)]))
            assert sorted(tokens_of(each)) == [SINKS + RECENT] * 9 + [40 + len(GENERATED) + 8] * 3
        assert talk.logits_BV is not None and fork.logits_BV is not None
        assert torch.equal(talk.logits_BV, fork.logits_BV)


def tokens_of(talk: Conversation) -> list[int]:
    """Number of tokens of every head of the first row."""
    assert talk.cache is not None
    return [tokens for layer in talk.cache.layers for tokens in layer.tokens_BK[0]]


@pytest.mark.parametrize(
    ("share", "chosen"),
    [
        (0.0, [[], [], []]),
        (1e-9, [[], [3], []]),
        (0.25, [[1], [3], [2]]),
        (0.5, [[1, 2], [3], [0, 1, 2]]),
        (1.0, [[0, 1, 2, 3]] * 3),
    ],
)
def test_the_heads_with_the_largest_scores_are_chosen(share: float, chosen: list[list[int]]) -> None:
    """A share that is not 0 is at least one head."""
    found = best_heads([torch.tensor(gates_K) for gates_K in GATES], share)
    assert [[head for head, is_in in enumerate(of_layer) if is_in] for of_layer in found] == chosen
    assert best_heads([torch.zeros(2), torch.zeros(2)], 0.5) == [[True, True], [False, False]]  # the earlier of equals


class TestCompensation:
    """RazorAttention's slot that stands for what a head dropped."""

    FIRST, LAST = 2, 6

    def dropped(self, both: Both, until: int) -> None:
        """Make tokens [2, until) of the second KV head equal, in the layer and in the dense text."""
        key, value = both.random(KEY_DIM) * 2, both.random(KEY_DIM)
        for row, pad in enumerate(both.pads):
            span = slice(pad + self.FIRST, pad + until)
            both.dense.k_BKnH[row, 1, span], both.dense.v_BKnV[row, 1, span] = key, value
        n = both.num_tokens
        both.layer.slab_TBKX[:n] = torch.cat([both.dense.k_BKnH, both.dense.v_BKnV], dim=-1).permute(2, 0, 1, 3)

    def cut(self, both: Both, until: int) -> None:
        """Drop tokens [2, until) of the second KV head."""
        positions_BKn = both.layer.positions_BKn().expand(-1, 2, -1)
        goes_BKn = (positions_BKn >= self.FIRST) & (positions_BKn < until)
        goes_BKn[:, 0] = False
        slots_BKn = torch.arange(positions_BKn.shape[2]).masked_fill(goes_BKn | (positions_BKn < 0), -1)
        both.layer = cut_back(both.layer, slots_BKn.sort(dim=-1).values, room=1, compensates=True)

    @pytest.mark.parametrize(
        "terms",
        [AttentionTerms(scaling=SCALING), AttentionTerms(scaling=SCALING, softcap=1.5)],
        ids=["plain", "softcap"],
    )
    def test_it_is_exact_where_all_dropped_are_equal(self, terms: AttentionTerms) -> None:
        """For one new token and for several, in padded rows, and after a second cut that drops some more."""
        both = Both(2, 2, 2, seed=1)
        self.dropped(both, 15)
        for until in (11, 15):
            self.cut(both, until)
            layer = both.layer
            assert isinstance(layer, RaggedLayer)
            assert layer.dropped is not None and layer.dropped.count_BK.tolist() == [[0, until - 2]] * 2
            assert layer.lengths[1] == both.num_tokens - (until - 2)
            for num_new in (1, 4, 1):
                both.check(both.append(num_new), num_new, terms)

    def test_it_is_not_where_they_are_not(self) -> None:
        both = Both(2, 2, 2, seed=1)
        self.cut(both, 15)
        tokens, q_BNCH = both.append(1), both.random(2, 4, 1, KEY_DIM)
        terms = AttentionTerms(scaling=SCALING)
        ours, lse = both.layer.seen(q_BNCH, tokens).attend(terms)
        exact, exact_lse = both.dense.attend(q_BNCH, terms)
        torch.testing.assert_close(ours[:, :2], exact[:, :2], atol=TOLERANCE, rtol=0)  # nothing dropped
        assert ((ours - exact)[:, 2:].abs().amax(dim=-1) > 1e-3).all()
        # A mean of exponentials is at least the exponential of the mean (Jensen).
        assert (lse < exact_lse)[:, 2:].all()

    def test_it_takes_one_token_of_memory(self) -> None:
        plain, with_slot = Both(2, 2, 2, seed=1), Both(2, 2, 2, seed=1)
        assert plain.num_tokens == PROMPT
        self.cut(with_slot, 15)
        with_slot_bytes = with_slot.layer.num_bytes
        assert isinstance(with_slot.layer, RaggedLayer)
        with_slot.layer.dropped = None
        assert with_slot_bytes - with_slot.layer.num_bytes == 2 * 2 * (2 * KEY_DIM + 1) * 8

    def test_heads_that_all_stream_have_it_too(self) -> None:
        """And without it they are StreamingLLM's."""
        model = tiny_model("llama")
        with_slot, without = (razor(model, 0.0, compensate=compensate) for compensate in (True, False))
        streaming = StreamingLLM(budget=SINKS + RECENT, sinks=SINKS, evict_every=EVERY)
        runs = [Run(model, [policy], prompts(LENGTHS)) for policy in (with_slot, without, streaming)]
        ours, plain, theirs = map(answers, runs)
        for mine, expected in zip(plain, theirs, strict=True):
            assert torch.equal(mine, expected)
        assert torch.equal(ours[0], theirs[0])
        assert not torch.allclose(ours[1], theirs[1], atol=1e-3)
        for layer in runs[0].kept.layers:
            assert isinstance(layer, RaggedLayer) and layer.dropped is not None
            in_all = layer.dropped.count_BK + torch.tensor(layer.tokens_BK)
            assert in_all.tolist() == [[length + len(GENERATED)] * 2 for length in LENGTHS]


def razor(model: Model, share: float, *, compensate: bool = True) -> RazorAttention:
    """With scores by layer and head, which it has read: later heads have more."""

    class Scored(RazorAttention):
        def require(self, model: ModelFacts) -> None:
            scores = [torch.arange(float(num)) + layer for layer, (num, _) in enumerate(model.heads)]
            self._retrieving = best_heads(scores, share)

    policy = Scored(sinks=SINKS, recent=RECENT, evict_every=EVERY, compensate=compensate)
    policy.require(facts(model))
    return policy


def test_a_kv_head_looks_for_copies_as_much_as_its_best_query_head(tmp_path: Path) -> None:
    """Induction and echo have shares of their own."""
    model, path = tiny_model("llama"), tmp_path / "heads.safetensors"
    induction = [torch.tensor(x) for x in ([0.0, 0.9, 0.1, 0.1], [0.5, 0.5, 0.6, 0.0], [0.0, 0.0, 0.3, 0.3])]
    echo = [torch.tensor(x) for x in ([0.0, 0.0, 0.0, 0.1], [0.0, 0.0, 0.0, 0.0], [0.0, 0.4, 0.0, 0.3])]
    path.write_bytes(HeadScores(induction=induction, echo=echo).packed(model.fingerprint))
    policy = RazorAttention(heads=str(path), induction_share=2 / 6, echo_share=1 / 6)
    policy.require(facts(model))
    assert [policy.retrieving(layer, 2) for layer in range(3)] == [[True, False], [False, True], [True, False]]


def test_the_window_is_a_share_of_the_prompt_but_no_less_than_said() -> None:
    assert RazorAttention().first_and_last(30_000) == (4, 6_000)
    assert RazorAttention().first_and_last(9_000) == (4, 4_000)
    assert RazorAttention(recent=100).first_and_last(30_000) == (4, 100)


TSV = "0.000\t0.532\n1.000\t0.120\n0.010\t1.213\n"
CONFIG = {"model_name": "some/model", "sink_size": 64, "recent_size": 256, "lr": 0.02}


class TestTables:
    """In the format of DuoAttention's authors."""

    def folder(self, path: Path, tsv: str | None = TSV, config: Any = CONFIG) -> str:
        if tsv is not None:
            (path / "full_attention_heads.tsv").write_text(tsv, encoding="utf-8")
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (path / "config.json").write_text(text, encoding="utf-8")
        return str(path)

    def test_one_of_the_authors_is_taken(self, tmp_path: Path) -> None:
        """It has no fingerprint, gates beyond 1, and more in its config than is read."""
        model = tiny_model("llama")
        policy = DuoAttention(heads=self.folder(tmp_path), retrieval_share=0.5)
        policy.require(facts(model))
        assert [policy.retrieving(layer, 2) for layer in range(3)] == [[False, True], [True, False], [False, True]]
        assert policy.first_and_last(1000) == (64, 256)
        assert DuoTable.load(tmp_path).gates[2].tolist() == [0.01, 1.0]
        own = DuoAttention(heads=str(tmp_path), sinks=5, recent=17)
        own.require(facts(model))
        assert own.first_and_last(1000) == (5, 17)

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        table = DuoTable(gates=[torch.tensor([0.25, 1.0])] * 2, sinks=4, recent=16, fingerprint="abc")
        for name, content in table.files(by="kvzip").items():
            (tmp_path / name).write_text(content, encoding="utf-8")
        found = DuoTable.load(tmp_path)
        assert [gates_K.tolist() for gates_K in found.gates] == [[0.25, 1.0]] * 2
        assert (found.sinks, found.recent, found.fingerprint) == (4, 16, "abc")

    @pytest.mark.parametrize(
        ("tsv", "config", "says"),
        [
            (None, CONFIG, "has no file full_attention_heads.tsv"),
            ("", CONFIG, "is empty or has gates that are no numbers"),
            ("0.5\tnan\n", CONFIG, "is empty or has gates that are no numbers"),
            ("0.5\tx\n", CONFIG, "cannot be read .*could not convert"),
            (TSV, "{", "cannot be read"),
            (TSV, "[1]", "is no JSON object"),
            (TSV, {"sink_size": -1, "recent_size": 3}, "is no number of tokens"),
            (TSV, {"sink_size": True, "recent_size": 3}, "is no number of tokens"),
            (TSV, None, "stay; give policy.sinks=<number> and policy.recent=<number>$"),
            (TSV, {"sink_size": 3}, "stay; give policy.recent=<number>$"),
        ],
    )
    def test_a_bad_one_is_told_in_one_line(self, tmp_path: Path, tsv: str | None, config: Any, says: str) -> None:
        heads = self.folder(tmp_path, tsv, config)
        with pytest.raises(ValueError, match=says) as raised:
            DuoAttention(heads=heads)
        assert f"policy.heads={tmp_path}" in str(raised.value) and "\n" not in str(raised.value)

    def test_one_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"there is no such folder; make one for this model with python -m"):
            DuoAttention(heads=str(tmp_path / "x"))

    @pytest.mark.parametrize(
        ("tsv", "more", "says"),
        [
            ("1.0\t0.5\n", {}, "gates of 1 layers with 2 KV heads, and model llama has 3 layers with 2 KV heads"),
            ("1.0\n0.5\n0.1\n", {}, "gates of 3 layers with 1 KV heads"),
            (TSV, {"fingerprint": "abc"}, "was made for another model"),
        ],
    )
    def test_one_of_another_model_is_refused(self, tmp_path: Path, tsv: str, more: dict[str, str], says: str) -> None:
        policy = DuoAttention(heads=self.folder(tmp_path, tsv, CONFIG | more))
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            RankPolicies(last=[policy]).check(tiny_model("llama"))
        assert "\n" not in str(raised.value)


def test_a_part_of_a_prompt_has_its_share_of_the_window(tmp_path: Path) -> None:
    """Whether its length is in the options or in the table. Seen to fail: every part with the whole window.

    A part without sinks has no room for them either.
    """
    part = PromptPart(chunk=range(1_000, 4_000), num_tokens=9_000, row_pads=[0])
    of_part = duo(tmp_path, tiny_model("llama"), 0.0).of_part(part)
    assert of_part.first_and_last(3_000) == (SINKS, RECENT // 3)
    most = RECENT // 3 + of_part.evict_every - 1
    assert of_part.rests(0, [[most, most]], 3_000) and not of_part.rests(0, [[most, most + 1]], 3_000)
    assert RazorAttention(recent=90).of_part(part).first_and_last(3_000) == (4, 30)
    assert RazorAttention(recent=0.2, least_recent=300).of_part(part).first_and_last(3_000) == (4, 600)
    assert RazorAttention(recent=0.2, least_recent=3_000).of_part(part).first_and_last(3_000) == (4, 1_000)


@pytest.mark.parametrize("policy", [RazorAttention(), DuoAttention()], ids=["razor", "duo"])
def test_without_a_table_it_says_what_makes_one(policy: StreamingHeads) -> None:
    with (
        throughout(torch.float64),
        pytest.raises(ValueError, match=r"give policy\.heads=<.*python -m policies\.\w+") as e,
    ):
        RankPolicies(last=[policy]).check(tiny_model("llama"))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (RazorAttention, {"induction_share": 1.5}, "policy.induction_share=1.5 must be a share of the heads"),
        (RazorAttention, {"echo_share": -0.1}, "policy.echo_share=-0.1"),
        (RazorAttention, {"recent": 0}, "policy.recent=0 must be a whole number of tokens"),
        (RazorAttention, {"sinks": -1}, "policy.sinks=-1"),
        (DuoAttention, {"retrieval_share": math.nan}, "policy.retrieval_share=nan"),
        (DuoAttention, {"recent": 0}, "policy.recent=0 must be at least 1"),
        (DuoAttention, {"evict_every": 0}, "policy.evict_every=0"),
    ],
)
def test_a_bad_option_is_refused(kind: type[Policy], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**options)


def test_the_engine_decodes_what_the_policy_left(tmp_path: Path, ranks: Ranks) -> None:
    """Its bytes are those of the tokens that heads keep, with room for new ones."""
    model = model_with(4)
    batch = require_answers(ranks, model, duo(tmp_path, model, 0.5), LENGTHS, 8)
    room, per_token, places = 7, 2 * 8 * 8 + 4, 4 * (2 * 3 * 4 + 1) + 8 * 3 * 4
    tokens = sum(6 * (length + room) + 6 * (min(SINKS + RECENT, length) + room) for length in LENGTHS)
    assert batch.ranks[0].kv_kept_bytes == tokens * per_token + 3 * places


def test_generated_tokens_are_new_ones_for_the_first_cut(tmp_path: Path) -> None:
    """A prompt shorter than what stays is kept whole; what follows is cut back as its own."""
    model = model_with(2)
    run = Run(model, [duo(tmp_path, model, 0.5)], [prompt(10)])
    run.prefill()
    assert [layer.num_slots for layer in run.kept.layers] == [10] * 3
    for token in GENERATED:
        run.decode(token)
    kept = {tuple(len(head) for head in kept_by(run, layer, 0)) for layer in range(3)}
    assert {number for each in kept for number in each} == {22, SINKS + RECENT}
    assert run.kept.layers[0].tokens_BK == [[SINKS + RECENT, 22]]
