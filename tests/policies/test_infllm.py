"""InfLLM: blocks by their representatives, and distances that no text makes longer than the window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.inputs.policies import clamps
from policies import POLICIES
from policies.full import Full
from policies.infllm import Blocks, InfLLM
from policies.retriever import Choice, Retriever
from policies.snapkv import SnapKV
from runahead import Conversation, Engine, GenerationOptions, Model, Ranks, RanksOptions
from runahead.config import CacheOptions, DecodeName, DecodeOptions, Device, PrefillName, PrefillOptions
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.test_indices import drawn, slots_of, view
from tests.policies.test_retrieval import GENERATED, PADDED, Turns
from tests.policies.written_out import WrittenOut
from tests.ranks.tasks import tiny_model

LIMIT, WINDOW, LENGTH, CHUNK = 64, 24, 150, 16
BLOCKS: dict[str, Any] = {
    "sinks": 2,
    "recent": WINDOW,
    "block": 4,
    "representatives": 2,
    "observed": 8,
    "min_tokens": 0,
}
TOLERANCE = 1e-9  # float64


@pytest.fixture(scope="module")
def model() -> Model:
    """A model whose context the texts exceed."""
    with throughout(torch.float64):
        return Model(build("llama", max_position_embeddings=LIMIT))


class Clamped(WrittenOut):
    """A Llama whose tokens before the window are all as far from the newest one as the window is long."""

    def places(self, num_tokens: int) -> Tensor:
        places_n = super().places(num_tokens)
        is_whole = num_tokens == self.seen <= LIMIT
        return places_n if is_whole else (places_n - max(0, num_tokens - 1 - WINDOW)).clamp_min(0)


def limits(model: Model, policy: InfLLM, **more: Any) -> PromptLimits:
    return PromptLimits(max_positions=model.max_positions, policies=RankPolicies.everywhere([policy]), **more)


def test_a_prompt_longer_than_the_model_is_attended_to_at_clamped_distances(model: Model) -> None:
    """All of it is fetched, so nothing but distances differs. With true ones (places not clamped) this fails."""
    ids, written = prompt(LENGTH), Clamped(model.module)
    ours = Conversation(model, RankPolicies.everywhere([InfLLM(**BLOCKS, fetch=1.0)]))
    with throughout(torch.float64):
        for start in range(0, LENGTH, CHUNK):
            part = ids[start : start + CHUNK]
            theirs = written.feed(part)
            torch.testing.assert_close(ours.feed(torch.tensor([part]))[0], theirs, atol=TOLERANCE, rtol=0)
        for token in GENERATED:
            logits = ours.follow(torch.tensor([[token]]))[0, 0]
            torch.testing.assert_close(logits, written.feed([token]), atol=TOLERANCE, rtol=0)


class ClampedSlots(Clamped):
    """The same, where tokens between those that are left were dropped: they count by their places."""

    def places(self, num_tokens: int) -> Tensor:
        places_n = WrittenOut.places(self, num_tokens)
        return places_n if num_tokens <= LIMIT else (places_n - (num_tokens - 1 - WINDOW)).clamp_min(0)


@pytest.mark.parametrize("budget", [40, 90])
def test_after_policies_that_drop_tokens_those_that_are_left_are_at_clamped_distances(
    model: Model, budget: int
) -> None:
    """All that is left is fetched; more than the model's context, or less."""
    steps = [SnapKV(budget=budget, window=4, kernel=3), InfLLM(**BLOCKS, fetch=1.0)]
    ids, written = prompt(LENGTH), ClampedSlots(model.module)
    policies = RankPolicies.everywhere(steps)
    policies.check(model)
    ours = Conversation(model, policies)
    with throughout(torch.float64):
        for start in range(0, LENGTH, CHUNK):
            part = ids[start : start + CHUNK]
            theirs = written.feed(part)
            torch.testing.assert_close(ours.feed(torch.tensor([part]))[0], theirs, atol=TOLERANCE, rtol=0)
            assert ours.cache is not None
            for layer, kept in enumerate(ours.cache.layers):
                assert kept.num_slots == min(start + len(part), budget)
                written.keep(layer, kept.positions_BKn()[0].long())
        for token in GENERATED:
            logits = ours.follow(torch.tensor([[token]]))[0, 0]
            torch.testing.assert_close(logits, written.feed([token]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("bits", [None, 4])
def test_chunks_and_tokens_see_what_was_chosen_for_them(
    model: Model, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, window and some blocks, in a prompt as in an answer; with what another chunk chose this fails.

    In few bits keys are as they are stored, rotated after that.
    """
    choose, chosen = Blocks.choose, list[Tensor]()

    def noted(*args: Any) -> Choice | None:
        choice = choose(*args)
        assert choice is not None
        chosen.append(choice.slots_BKm[0])
        return choice

    monkeypatch.setattr(Blocks, "choose", noted)
    ids = prompt(LIMIT + CHUNK)
    storage = CacheOptions(bits=bits, residual=8, residual_bits=None)
    ours = Conversation(model, RankPolicies.everywhere([InfLLM(**BLOCKS, fetch=40)], storage=storage))
    with throughout(torch.float64):
        ours.feed(torch.tensor([ids[:LIMIT]]))
        assert not chosen
        for number, part in enumerate((ids[LIMIT:], [5], [7])):
            feed = ours.feed if number == 0 else lambda ids_1C: ours.follow(ids_1C)[:, -1]
            written = _of_all_before(model, ours, part)
            logits = feed(torch.tensor([part]))[0]
            for layer, tokens_Km in enumerate(chosen):
                assert {0, 1, *range(len(ours.rows[0]) - len(part) - WINDOW, len(ours.rows[0]) - len(part))} <= set(
                    tokens_Km[0].tolist()
                )
                written.keep(layer, tokens_Km)
            torch.testing.assert_close(logits, written.feed(part), atol=TOLERANCE, rtol=0)
            assert len(chosen) == model.num_layers and chosen[0].shape[1] == 40
            chosen.clear()


def _of_all_before(model: Model, ours: Conversation, part: list[int]) -> WrittenOut:
    """The written out model with the keys and values that are stored before the tokens of a part."""
    written = Clamped(model.module)
    assert ours.cache is not None
    for layer, kept in enumerate(ours.cache.layers):
        assert (kept.codes is None) is (ours.rank_policies.storage.bits is None)
        if len(part) == 1:  # which others leave the window for
            kept.flush(coming=1)
        before = kept.num_slots
        k_BKnH, v_BKnV = kept.slab().read(0, before)
        written.k_KnH[layer], written.v_KnH[layer] = k_BKnH[0], v_BKnV[0]
        written.tokens_Kn[layer] = torch.arange(before).expand(k_BKnH.shape[1], -1)
        written.seen = before
    return written


@pytest.mark.parametrize("lengths", [(40,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "falcon_multi_query"])
def test_while_everything_fits_it_is_full_attention(family: str, lengths: tuple[int, ...]) -> None:
    """At the window's distances alone (no row is whole) the long row fails."""
    options = BLOCKS | {"recent": 8, "fetch": 60}
    ours, full = (Turns(tiny_model(family), [each], lengths) for each in (InfLLM(**options), Full()))
    torch.testing.assert_close(ours.prefill(), full.prefill(), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(ours.decode(GENERATED), full.decode(GENERATED), atol=TOLERANCE, rtol=0)


def test_rows_of_a_padded_batch_are_what_they_are_alone_at_clamped_distances() -> None:
    """The second row is whole and at its own distances, though the first one is not; if all were as that, it fails."""
    model, policy = tiny_model("llama"), InfLLM(**BLOCKS | {"recent": 8, "fetch": 25})
    together = Turns(model, [policy], PADDED)
    together.prefill()
    logits = together.decode(GENERATED[:2])
    for row, length in enumerate(PADDED):
        alone = Turns(model, [policy], (length,))
        alone.conversation = Conversation(model, RankPolicies.everywhere([policy]))
        with throughout(torch.float64):
            alone.conversation.feed(torch.tensor([prompt(length, row)]))
        torch.testing.assert_close(logits[row], alone.decode(GENERATED[:2])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pads", [[0], [0, 11, 36]], ids=["alone", "padded"])
def test_blocks_are_ranked_by_their_representatives_for_all_heads(pads: list[int]) -> None:
    """With the block's mean, or a choice per KV head, in place of these it fails."""
    policy, seen, slots = InfLLM(**BLOCKS | {"recent": 5, "fetch": 20}), view(40, pads), slots_of(40, pads)
    index, asking_BKH = Blocks(seen, policy), seen.q_BNwH.unflatten(1, (2, 2)).sum(dim=(2, 3))
    for seed in range(4):
        q_BNH = drawn(len(pads), 4, 8, seed=seed)
        choice = index.choose(q_BNH, slots)
        assert choice is not None
        for row, pad in enumerate(pads):
            scores = {}
            for first in range(pad + 2, 40 - 5 - 4 + 1, 4):
                k_KSH = seen.k_BKnH[row, :, first : first + 4]
                best_KR = (k_KSH @ asking_BKH[row, :, :, None])[..., 0].topk(2).indices
                mean_KH = torch.stack([k_KSH[head, best_R].mean(0) for head, best_R in enumerate(best_KR)])
                scores[first] = float((q_BNH[row].unflatten(0, (2, 2)) * mean_KH[:, None]).sum())
            last = max(scores, default=pad + 2 - 4) + 4
            always = {*range(pad, min(pad + 2, 40)), *range(max(pad, 35), 40), *range(last, 35)}
            blocks = sorted(scores, key=scores.__getitem__, reverse=True)
            order = [slot for first in blocks for slot in reversed(range(first, first + 4))]
            expected = {*always, *order[: 20 - len(always)]}
            for slots_m in choice.slots_BKm[row].tolist():
                assert {slot for slot in slots_m if slot >= pad} == expected
                assert slots_m == sorted(slots_m)


def test_a_block_is_represented_by_what_the_newest_queries_look_for() -> None:
    """With the queries that the index was made from the mean of its representatives is another."""
    policy, seen, q_BNwH = InfLLM(**BLOCKS | {"recent": 5}), view(44, [0]), drawn(1, 4, 8, 8, seed=9)
    k_BKnH = seen.k_BKnH
    index = Blocks(replace(seen, k_BKnH=k_BKnH[:, :, :40]), policy)
    index.see(q_BNwH)
    index.append(k_BKnH[:, :, 40:], seen.v_BKnV[:, :, 40:])
    asking_KH, k_KSH = q_BNwH[0].unflatten(0, (2, 2)).sum(dim=(1, 2)), k_BKnH[0, :, 34:38]
    best_KR = (k_KSH @ asking_KH[:, :, None])[..., 0].topk(2).indices
    mean_KH = torch.stack([k_KSH[head, best_R].mean(0) for head, best_R in enumerate(best_KR)])
    assert index.parts[0].digests_bKPX.shape[2] == 9
    torch.testing.assert_close(index.parts[0].digests_bKPX[0, :, -1], mean_KH)


def test_a_block_is_in_the_index_once_it_has_left_the_window_and_costs_a_key() -> None:
    policy = InfLLM(**BLOCKS | {"recent": 8, "fetch": 20})
    turns = Turns(tiny_model("llama"), [policy])
    turns.prefill()
    other = turns.conversation.fork()
    for number in range(6):
        index = turns.retrieval.layers[0].index  # type: ignore[union-attr]
        shape = turns.model.kv_shapes[0]
        blocks = (40 + number - 2 - 8) // 4
        assert index.num_bytes == (blocks + 1) * shape.num_kv_heads * shape.key_dim * 8
        turns.decode([5])
    with throughout(torch.float64):
        forked, fresh = other.follow(torch.tensor([GENERATED])), Turns(tiny_model("llama"), [policy])
        fresh.prefill()
    torch.testing.assert_close(forked, fresh.decode(GENERATED), atol=TOLERANCE, rtol=0)


def test_a_query_chooses_and_is_measured_at_clamped_distances(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that chooses is at the distance of all blocks; not turned, or with keys at true distances, it fails."""
    ours = Conversation(model, RankPolicies.everywhere([InfLLM(**BLOCKS, fetch=40, sample_every=1)]))
    with throughout(torch.float64):
        for part in (prompt(LIMIT), prompt(16, seed=3)):
            ours.feed(torch.tensor([part]))
        ours.follow(torch.tensor([[5]]))
    assert ours.cache is not None
    retrieval, written, n = ours.cache.retrieval, Clamped(model.module), LIMIT + 17
    masses, asked = retrieval.report().hit_mass, list[Tensor]()
    assert all(mass is not None and 0 < mass < 1 for mass in masses)
    monkeypatch.setattr(Blocks, "choose", lambda self, q_BNH, slots: asked.append(q_BNH))
    q_BNH, k_BKH = drawn(1, written.heads, written.head_dim, seed=1), drawn(1, 2, written.head_dim, seed=2)
    retrieval.fetched(0, q_BNH.unsqueeze(2), n, [0], room=1)
    torch.testing.assert_close(asked[0][0], written.rotated(q_BNH[0, :, None], torch.tensor([WINDOW]))[:, 0])
    k_BKnH = ours.cache.layers[0].slab().read(0, n)[0]
    written.seen = n + 1
    places_n = written.places(n + 1)
    q_NH, k_KnH, new_KH = (
        x[0] for x in retrieval.clamped.rotated(ours.cache.layers[0], q_BNH, k_BKnH, k_BKH.unsqueeze(2))
    )
    torch.testing.assert_close(q_NH, written.rotated(q_BNH[0, :, None], places_n[-1:])[:, 0])
    torch.testing.assert_close(k_KnH, written.rotated(k_BKnH[0], places_n[:-1]))
    torch.testing.assert_close(new_KH, written.rotated(k_BKH[0, :, None], places_n[-1:]))


def test_an_engine_takes_a_prompt_of_any_length(model: Model) -> None:
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    policies = RankPolicies.everywhere([InfLLM(**BLOCKS, fetch=40)])
    engine = Engine(model, ranks, prefill=PrefillOptions(name=PrefillName.single), policies=policies)
    with throughout(torch.float64):
        batch = engine.generate([prompt(LENGTH)], GenerationOptions(max_new_tokens=4, ignore_eos=True))
    report = batch.ranks[0]
    assert report.kept_tokens == [LENGTH] * model.num_layers
    assert report.retrieval is not None and max(filter(None, report.retrieval.fetched_share)) < 0.5


@pytest.mark.parametrize(("clamped", "differs"), [(True, True), (False, False)])
def test_within_the_context_chunks_retrieve_if_turns_of_their_length_do(clamped: bool, differs: bool) -> None:
    """They have an index at clamped distances alone, so elsewhere `turn_tokens` is told to have no effect."""
    ranks, top5 = Ranks.start(RanksOptions(device=Device.cpu, threads=1)), []
    for turn_tokens in (0, CHUNK):
        policy = InfLLM(**BLOCKS, fetch=40, clamped=clamped, turn_tokens=turn_tokens)
        engine = Engine(
            tiny_model("llama"),
            ranks,
            prefill=PrefillOptions(chunk_tokens=CHUNK),
            policies=RankPolicies.everywhere([policy]),
        )
        with throughout(torch.float64):
            batch = engine.generate([prompt(100)], GenerationOptions(max_new_tokens=1, ignore_eos=True))
        top5.append(batch.generations[0].first_token_logits_top5)
    assert (top5[0] != top5[1]) == differs


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([LENGTH], {}, None),
        ([LENGTH, 20], {}, "use prompt.batch=1"),
        ([LENGTH], {"num_ranks": 2}, r"one rank \(prefill=single\)"),
        ([LENGTH], {"prefill": PrefillOptions(chunk_tokens=25)}, "prefill.chunk_tokens=24 or less"),
        ([LIMIT - 2, 20], {"num_ranks": 2}, None),
    ],
)
def test_a_prompt_is_checked_before(
    model: Model, lengths: list[int], more: dict[str, Any], message: str | None
) -> None:
    prompts, given = [prompt(length) for length in lengths], limits(model, InfLLM(**BLOCKS), **more)
    if message is None:
        check_prompts(prompts, given, num_new=LENGTH)
        return
    with pytest.raises(ValueError, match=message):
        check_prompts(prompts, given, num_new=4)


def test_a_turn_longer_than_the_window_is_given_in_parts(model: Model) -> None:
    ours = Conversation(model, RankPolicies.everywhere([InfLLM(**BLOCKS, fetch=40)]))
    with throughout(torch.float64):
        ours.feed(torch.tensor([prompt(LIMIT)]))
        with pytest.raises(ValueError, match="exceeds the 64 positions"):
            ours.feed(torch.tensor([prompt(WINDOW + 1)]))
        assert ours.feed(torch.tensor([prompt(WINDOW)])).isfinite().all()


def test_the_command_line_knows_which_policies_clamp() -> None:
    retrieving = {name: kind for name, kind in POLICIES.items() if issubclass(kind, Retriever)}
    for name, kind in retrieving.items():
        assert clamps({"name": name}) is kind().clamps
    assert clamps({"name": "per_rank", "ranks": {"last": "infllm"}})
    for options, is_clamped in (({}, True), ({"clamped": False}, False)):
        assert clamps({"name": "infllm"} | options) is is_clamped
        assert (RankPolicies.everywhere([InfLLM(**options)]).clamped_to is not None) is is_clamped


def test_what_it_does_not_go_with_is_refused() -> None:
    gpt2, llama = tiny_model("gpt2"), tiny_model("llama")
    for policies, model, message in (
        ([InfLLM()], gpt2, "policy.clamped=false"),
        ([InfLLM(recent=512)], llama, "policy.recent=512 is the distance"),
    ):
        with pytest.raises(ValueError, match=message):
            RankPolicies.everywhere(policies).check(model)
    with pytest.raises(ValueError, match="decode=last"):
        check(Setup(decode=DecodeOptions(name=DecodeName.sharded), policies=RankPolicies(last=[InfLLM()])))
    with pytest.raises(ValueError, match="policy.late=0.8"):
        InfLLM(late=0.8)
