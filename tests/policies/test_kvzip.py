"""KVzip: a prompt is repeated as tokens that leave no trace, and one threshold decides on all layers and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from policies.kvzip import KVzip
from policies.options import budget_tokens
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from runahead import Conversation, DecodeOptions, Engine, Model, PrefillOptions, Ranks
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.replay import score_prompt
from tests.families import build, prompt, throughout
from tests.policies.running import Run, prompts, require_answers
from tests.policies.test_adakv import kept_by
from tests.ranks.tasks import tiny_model

SINKS, CHUNK, BUDGET = 3, 15, 12
LENGTHS = (40, 31, 9)
KVZIP = KVzip(budget=BUDGET, sinks=SINKS, chunk_tokens=CHUNK)
GENERATED = [5, 7, 11, 13]
TOLERANCE = 1e-5  # scores are float32


class Noting(CausalAttention):
    """Causal attention that notes the queries, and all keys and values, of each layer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.seen.append((q_BNCH * terms.scaling, k_BKCH, v_BKCV))
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


def attention_inputs(model: Model, attention: CausalAttention, ids_1S: Tensor) -> list[Tensor]:
    """Hidden states (S, D) that the family's attention modules are given in a forward, by layer."""
    name = {"llama": "model.layers.{}.self_attn"}.get(model.config.model_type, "transformer.h.{}.attn")
    given: list[Tensor] = []
    hooks = [
        model.module.get_submodule(name.format(layer)).register_forward_pre_hook(
            lambda _, args, keywords: given.append(args[0][0] if args else keywords["hidden_states"][0]),
            with_kwargs=True,
        )
        for layer in range(model.num_layers)
    ]
    model.forward(ids_1S, attention, start=0, pads=[0], all_hidden=True)
    for hook in hooks:
        hook.remove()
    return given


def scores_by_hand(model: Model, ids: list[int], *, plus: bool = False) -> list[Tensor]:
    """Scores (K, n) of each layer, of the prompt and a chunk again as one text, from whole matrices."""
    n, parts = len(ids), list[list[Tensor]]()
    for start in range(0, n, CHUNK):
        chunk = range(start, min(start + CHUNK, n))
        again = torch.tensor([[*ids, *ids[chunk.start : chunk.stop]]])
        attention = Noting(model.empty_cache(again.shape[1]), start=0, pads=[0])
        inputs = attention_inputs(model, attention, again)
        keys = [*range(min(SINKS, start)), *chunk, *range(n, again.shape[1])]
        of_layers = []
        for layer, (q_1NCH, k_1KCH, v_1KCV) in enumerate(attention.seen):
            k_NCH = k_1KCH[0].repeat_interleave(q_1NCH.shape[1] // k_1KCH.shape[1], dim=0)
            scores_NCn = q_1NCH[0] @ k_NCH.mT
            scores_NCn.masked_fill_(torch.ones_like(scores_NCn[0], dtype=torch.bool).triu(1), -torch.inf)
            shares = scores_NCn[:, n:, keys].softmax(dim=-1)[..., len(keys) - 2 * len(chunk) : len(keys) - len(chunk)]
            if plus:  # the length of what a token adds to the residual stream, over that of what it is added to
                v_NnV = v_1KCV[0, :, chunk.start : chunk.stop].repeat_interleave(len(k_NCH) // k_1KCH.shape[1], dim=0)
                weight_NVD = model.output_projections[layer].T.unflatten(0, (len(v_NnV), -1))
                shares = shares * (v_NnV @ weight_NVD).norm(dim=-1)[:, None] / inputs[layer][n:].norm(dim=-1)[:, None]
            of_layers.append(shares.amax(dim=1).unflatten(0, (k_1KCH.shape[1], -1)).amax(dim=1))
        parts.append(of_layers)
    return [torch.cat(of_layer, dim=1) for of_layer in zip(*parts, strict=True)]


@pytest.mark.parametrize("plus", [False, True], ids=["", "plus"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
def test_scores_are_the_largest_shares_of_attention_and_leave_no_trace(family: str, plus: bool) -> None:
    """KVzip+ weighs each share by the lengths of the projected value and of the hidden state that attends."""
    model = tiny_model(family)
    policy = KVzip(budget=BUDGET, sinks=SINKS, chunk_tokens=CHUNK, plus=plus)
    lengths = prompts(LENGTHS)[:1] if model.uneven_limit is not None else prompts(LENGTHS)
    run, full = (Run(model, [], lengths) for _ in range(2))
    run.prefill()
    full.prefill()
    with throughout(torch.float64):
        scores = score_prompt(model, policy, run.kept, run.ids_BS, run.pads)
        for row, ids in enumerate(lengths):
            for ours, expected_Kn in zip(scores, scores_by_hand(model, ids, plus=plus), strict=True):
                assert ours is not None and ours[row, :, : run.pads[row]].isneginf().all()
                ours_Kn, relative = ours[row, :, run.pads[row] :].double(), TOLERANCE if plus else 0
                torch.testing.assert_close(ours_Kn, expected_Kn, atol=TOLERANCE, rtol=relative)
    for ours, theirs in zip(run.kept.layers, full.kept.layers, strict=True):
        assert torch.equal(ours.slab_TBKX, theirs.slab_TBKX) and ours.num_slots == theirs.num_slots
    for token in GENERATED:
        assert torch.equal(run.decode(token), full.decode(token))


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
@pytest.mark.parametrize("budget", [BUDGET, 0.5])
def test_one_threshold_decides_on_all_layers_and_heads(budget: int | float, family: str) -> None:
    """Sinks stay, and together heads keep what the budget allows; a row that has fewer tokens keeps them."""
    model, policy = tiny_model(family), KVzip(budget=budget, sinks=SINKS, recent=2, chunk_tokens=CHUNK)
    whole, run = Run(model, [], prompts(LENGTHS)), Run(model, [policy], prompts(LENGTHS))
    assert torch.equal(whole.prefill(), run.prefill())
    with throughout(torch.float64):
        scores = score_prompt(model, policy, whole.kept, whole.ids_BS, whole.pads)
    counts = set()
    for row, length in enumerate(LENGTHS):
        kept, dropped, total = [], [], 0
        for layer, scores_BKn in enumerate(scores):
            assert scores_BKn is not None
            for head, positions in enumerate(kept_by(run, layer, row)):
                assert set(positions) >= {*range(min(SINKS, length)), length - 2, length - 1}
                total += len(positions)
                counts.add(len(positions))
                of_head = scores_BKn[row, head, whole.pads[row] :].tolist()
                judged = range(SINKS, length - 2)
                kept += [of_head[at] for at in judged if at in positions]
                dropped += [of_head[at] for at in judged if at not in positions]
        heads = model.kv_shapes[0].num_kv_heads
        assert total == 3 * heads * min(budget_tokens(budget, 40), length)
        assert not dropped or min(kept) >= max(dropped)
    assert len(counts) > 4
    per_token, places = 2 * 8 * 8 + 4, 4 * (2 * 3 * heads + 1) + 8 * 3 * heads
    tokens = heads * sum(min(budget_tokens(budget, 40), length) for length in LENGTHS)
    assert all(isinstance(layer, RaggedLayer) for layer in run.kept.layers)
    assert run.kept.num_bytes == 3 * (tokens * per_token + places)


def test_a_prompt_within_the_budget_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.thinning.replay.score_prompt", lambda *_, **__: pytest.fail("it was repeated"))
    Run(tiny_model("llama"), [KVzip(budget=40)], prompts(LENGTHS)).prefill()


def test_chunks_are_shorter_where_the_positions_of_the_model_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(build("llama"))
    run = Run(model, [], prompts(LENGTHS)[:1])
    run.prefill()
    monkeypatch.setattr(Model, "max_positions", 40 + CHUNK)
    expected = score_prompt(model, KVZIP, run.kept, run.ids_BS, run.pads)
    longer = KVzip(budget=BUDGET, sinks=SINKS, chunk_tokens=2000)
    for ours, theirs in zip(score_prompt(model, longer, run.kept, run.ids_BS, run.pads), expected, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    monkeypatch.setattr(Model, "max_positions", 40)
    with pytest.raises(ValueError, match="leaves no room to repeat it among the 40 positions"):
        score_prompt(model, KVZIP, run.kept, run.ids_BS, run.pads)


def test_the_request_comes_before_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has a tokenizer; the request is at the positions after the prompt."""
    model, said = Model(build("llama")), list[str]()

    class Tokenizer:
        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            said.append(text)
            return type("Encoding", (), {"input_ids": [] if add_special_tokens else [9, 8]})

    run = Run(model, [], prompts(LENGTHS)[:1])
    run.prefill()
    model.tokenizer, forward, fed = Tokenizer(), model.forward, []
    monkeypatch.setattr(
        model, "forward", lambda ids, *args, **given: fed.append((ids, given)) or forward(ids, *args, **given)
    )
    score_prompt(model, KVZIP, run.kept, run.ids_BS, run.pads)
    assert said == ["\n\nRepeat the previous context:"]
    ids = prompts(LENGTHS)[0]
    assert [each.tolist() for each, _ in fed] == [[[9, 8, *ids[at : at + CHUNK]]] for at in range(0, 40, CHUNK)]
    assert {given["start"] for _, given in fed} == {40}


@pytest.mark.parametrize("prefill", [PrefillOptions(), PrefillOptions(chunk_tokens=7)], ids=["whole", "in chunks"])
def test_the_engine_decodes_what_the_policy_left(ranks: Ranks, prefill: PrefillOptions) -> None:
    batch = require_answers(ranks, tiny_model("llama"), KVZIP, LENGTHS, 6, prefill)
    room, per_token, places = 5, 2 * 8 * 8 + 4, 4 * (2 * 3 * 2 + 1) + 8 * 3 * 2
    tokens = sum(min(BUDGET, length) + room for length in LENGTHS)
    assert batch.ranks[0].kv_kept_bytes == 3 * (2 * tokens * per_token + places)


def test_a_conversation_is_cut_back_once() -> None:
    """After its first turn; all later tokens are kept."""
    model = tiny_model("llama")
    with throughout(torch.float64):
        talk = Conversation(model, RankPolicies(last=[KVZIP]))
        talk.feed(torch.tensor([prompt(30)]), cut_back=False)
        assert talk.kept_tokens == [30] * 3
        talk.feed(torch.tensor([prompt(10, seed=1)]))
        first = talk.kept_tokens
        assert talk.cache is not None
        assert sum(int((layer.positions_BKn() >= 0).sum()) for layer in talk.cache.layers) == 3 * 2 * BUDGET
        fork = talk.fork()
        for each in (talk, fork):
            each.follow(torch.tensor([GENERATED]))
            each.feed(torch.tensor([prompt(8, seed=2)]))
            assert each.kept_tokens == [tokens + 12 for tokens in first]
        assert talk.logits_BV is not None and fork.logits_BV is not None
        assert torch.equal(talk.logits_BV, fork.logits_BV)


def test_what_cannot_be_is_refused(ranks: Ranks) -> None:
    model = tiny_model("llama")
    for policies, says in (
        (RankPolicies(last=[KVZIP], others=[PyramidInfer()]), "use policy.ranks.others=full"),
        (RankPolicies(last=[KVZIP, SnapKV()]), "must be the only one"),
    ):
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            policies.check(model)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="use decode=last"):
        decode = DecodeOptions(name="sharded")  # type: ignore[arg-type]
        Engine(model, ranks, policies=RankPolicies.everywhere([KVZIP]), decode=decode)
    limits = PromptLimits(max_positions=100, policies=RankPolicies.everywhere([KVZIP]))
    check_prompts([[1] * 36], limits, num_new=4)
    with pytest.raises(ValueError, match="use at most 36 tokens"):
        check_prompts([[1] * 37], limits, num_new=4)
    check_prompts(
        [[1] * 90], PromptLimits(max_positions=100, policies=RankPolicies(last=[KVzip(budget=90)])), num_new=4
    )
