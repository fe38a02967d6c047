"""EM-LLM: blocks that end where the text surprises the model, refined by their keys, and neighbours of those found."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.block_index import BlockIndex, BlockRetriever
from policies.em_llm import EMLLM, NeighbouringEvents
from policies.events import By, Events, Refine, modularity, surprising
from policies.infllm import Blocks, InfLLM
from policies.quest import Digest, EventPages, Quest
from policies.retriever import Group, need_of_group
from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions, Ranks, RanksOptions
from runahead.config import Device
from runahead.retrieval.retrieval import Retrieval
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.test_indices import BARE, drawn, slots_of, view
from tests.policies.test_retrieval import GENERATED, PADDED, Turns
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9  # float64
LENGTH = 90
EVENTS: dict[str, Any] = {"by": "surprise", "gamma": 1.0, "window": 20, "least": 2, "most": 9}
OPTIONS: dict[str, Any] = {"min_tokens": 0, "sinks": 2, "recent": 10, "observed": 8, "representatives": 2, "fetch": 40}


def marked(surprises: list[float], window: int, gamma: float, ahead: int = 0) -> list[bool]:
    """The paper's rule, token by token. With `ahead` the window ends after as many more tokens: the wrong one."""
    found = []
    for place, value in enumerate(surprises):
        before = [each for each in surprises[max(0, place - window) : place + ahead] if not math.isnan(each)]
        if len(before) < 2 or math.isnan(value):
            found.append(False)
            continue
        mean = sum(before) / len(before)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in before) / (len(before) - 1))
        found.append(value > mean + gamma * deviation)
    return found


@pytest.mark.parametrize("window", [2, 7, 500])
def test_a_token_surprises_by_those_before_it_alone(window: int) -> None:
    """A window that ends after the token, or after the next one, marks others."""
    surprises = drawn(200, seed=window).abs() * 3 + 40
    surprises[[0, 17, 18, 90]] = math.nan
    ours = surprising(surprises.numpy(), gamma=1.0, window=window).tolist()
    assert ours == marked(surprises.tolist(), window, 1.0) and 5 < sum(ours) < 100
    assert all(ours != marked(surprises.tolist(), window, 1.0, ahead) for ahead in (1, 2))
    cut = surprising(surprises[:60].numpy(), gamma=1.0, window=window).tolist()
    assert cut == ours[:60]  # whatever comes later


def of_graph(k_TX: Tensor, part: int, *, expects: bool = True) -> float:
    """Modularity of [0, part) and [part, T) by its definition, pair by pair."""
    a_TT, is_first_T = k_TX @ k_TX.T, torch.arange(len(k_TX)) < part
    degrees_T, twice_m = a_TT.sum(dim=0), a_TT.sum()
    is_same_TT = is_first_T[:, None] == is_first_T
    found_TT = a_TT - expects * degrees_T[:, None] * degrees_T / twice_m
    return float(found_TT[is_same_TT].sum() / (2 * twice_m))


def test_modularity_is_that_of_the_graph_of_all_pairs() -> None:
    """Without the edges that are expected it is another."""
    k_TX = drawn(13, 6, seed=3)
    ours = modularity(k_TX)
    expected = [of_graph(k_TX, part) for part in range(14)]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))
    assert abs(of_graph(k_TX, 5, expects=False) - float(ours[5])) > 1e-3


def ends_by_hand(
    marks: list[int], start: int, how: Events, known: range, k_nX: Tensor | None, *, moves: bool = True
) -> list[int]:
    """Ends of blocks, one after another. With keys by Algorithm 1, pair by pair, in the window of published code.

    Without `moves` the ends before stay where they were: wrong.
    """
    found, before, seen_from = list[int](), start, start
    for mark in marks:
        end = mark
        if mark - seen_from < how.least:
            continue
        if k_nX is not None:
            half = (mark - seen_from) // 2
            first, last = max(known.start, seen_from - half), min(known.stop, mark + half)
            places = range(seen_from + how.least, mark + 1)
            end = max(places, key=lambda at: of_graph(k_nX[first:last], at - first))
        while end - before > how.most:
            before += how.most
            found.append(before)
        if end - before >= how.least:
            found.append(end)
            before = end
        seen_from = before if moves else mark
    return found


def ends_at(marks: list[int], start: int, how: Events, known: range, k_nX: Tensor | None = None) -> list[int]:
    """Ends where these tokens surprise the model."""
    surprises = [float(slot in marks) for slot in range(known.stop)]
    with mock.patch("policies.events.surprising", lambda surprise_S, **how: surprise_S > 0):
        return how.ends(
            surprises,
            num_told=0,
            begin=known.start,
            before=start,
            k_LKSH=[] if k_nX is None else [k_nX[None]],
        )


def test_ends_move_to_where_their_keys_part() -> None:
    k_nX = drawn(55, 5, seed=2) + drawn(55, 5, seed=4).cumsum(dim=0)
    marks, known, how = [12, 14, 19, 26, 40, 41, 49], range(1, 55), Events(by=By.surprise, least=3, most=20)
    ours = ends_at(marks, 4, how, known, k_nX)
    assert ours == ends_by_hand(marks, 4, how, known, k_nX) != ends_at(marks, 4, how, known)
    assert ours != ends_by_hand(marks, 4, how, known, k_nX, moves=False)


def test_an_end_stays_where_keys_have_no_products() -> None:
    """Keys that are 0, and keys that sum to 0, whose modularity is not defined."""
    how, known, marks = Events(by=By.surprise, least=3, most=20), range(4, 28), [16]
    for k_nX in (torch.zeros(40, 2), torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).repeat(20, 1)):
        assert modularity(k_nX[4:28]).isnan().all()
        assert ends_at(marks, 4, how, known, k_nX) == marks


def test_blocks_are_no_shorter_than_the_least_and_no_longer_than_the_most() -> None:
    """A rest that is too short is a part of the next block."""
    how, known = Events(by=By.surprise, least=3, most=8), range(30)
    assert ends_at([5, 6, 20, 22, 27], 0, how, known) == [5, 13, 20, 27]
    assert ends_at([17], 0, how, known) == [8, 16] and ends_at([], 3, how, known) == []


def expected_ends(
    model: Model, ids: list[int], policy: InfLLM | Quest, known: int | None = None, ahead: int = 0
) -> list[int]:
    """Ends of a row's blocks, from transformers' logits and the keys of the model's own cache, layer by layer."""
    ids, how = ids[:known], policy.events
    with torch.no_grad(), throughout(torch.float64):
        plain = model.module
        out = reference(plain, ids)
    logprobs = out.logits[0].double().log_softmax(dim=-1)
    surprises = [math.nan] + [-float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    marks = [slot for slot, mark in enumerate(marked(surprises, how.window, how.gamma, ahead)) if mark]
    k_nX = None
    if how.refine is Refine.modularity:
        layers = out.past_key_values.layers
        first = policy.first_layer
        retrieving = layers[first:]
        last = retrieving[-max(1, round(how.layers * len(retrieving))) :]
        k_nX = torch.cat([unrotated(model, layer.keys[0], policy) for layer in last], dim=-1)
    return ends_by_hand(marks, policy.sinks, how, range(len(ids)), k_nX)


def reference(module: Any, ids: list[int]) -> Any:
    from runahead.model.checks.logits_check import transformers_attention

    with transformers_attention(module):
        return module(input_ids=torch.tensor([ids]), use_cache=True)


def unrotated(model: Model, k_KnH: Tensor, policy: InfLLM | Quest) -> Tensor:
    """Keys (n, K x H) as they are stored: before RoPE where distances are clamped."""
    if policy.clamps:
        from tests.policies.written_out import WrittenOut

        k_KnH = WrittenOut(model.module).rotated(k_KnH, -torch.arange(k_KnH.shape[1]))
    return k_KnH.transpose(0, 1).flatten(1)


POLICIES: dict[str, InfLLM | Quest] = {
    "infllm": InfLLM(**OPTIONS, events=EVENTS, clamped=False),
    "em_llm": EMLLM(**OPTIONS, events=EVENTS | {"refine": "modularity", "layers": 0.7}, clamped=False),
    "em_llm, clamped": EMLLM(**OPTIONS, events=EVENTS | {"refine": "modularity", "layers": 0.4}),
    "quest": Quest(min_tokens=0, sinks=1, fetch=30, first_layer=1, events=EVENTS | {"refine": "modularity"}),
}


def blocks_of(turns: Turns | Any) -> list[BlockIndex]:
    return [each.index for each in turns.retrieval.layers if each is not None]


@pytest.mark.parametrize("lengths", [(LENGTH,), (LENGTH, 61, 40)], ids=["alone", "padded"])
@pytest.mark.parametrize("name", POLICIES)
def test_blocks_end_where_transformers_logits_and_keys_say(name: str, lengths: tuple[int, ...]) -> None:
    """In all layers alike, also of rows that are padded.

    A window that ends after the token, or after later ones, and the surprises of another row give others.
    """
    policy, model = POLICIES[name], tiny_model("llama")
    turns = Turns(model, [policy], lengths)
    turns.prefill()
    for row, length in enumerate(lengths):
        pad = max(lengths) - length
        expected = expected_ends(model, prompt(length, row), policy)
        for index in blocks_of(turns):
            assert [end - pad for end in index.parts[row].edges[1:]] == expected
        wrong = [expected_ends(model, prompt(length, row), policy, ahead=ahead) for ahead in (1, 20)]
        wrong.append(expected_ends(model, prompt(length, row + 1), policy))
        assert expected not in wrong and len(expected) >= 5


@pytest.mark.parametrize("name", ["infllm", "em_llm"])
def test_pieces_of_a_prompt_have_the_surprises_of_the_whole(name: str) -> None:
    """The last token of a piece tells that of the next one's first. Ends are known once the index is made."""
    policy = POLICIES[name]
    whole, pieces = (Turns(tiny_model("llama"), [policy], (LENGTH,)) for _ in range(2))
    whole.prefill()
    pieces.prefill([40, 1, 30, 19])
    for ours, theirs in zip(blocks_of(pieces), blocks_of(whole), strict=True):
        assert ours.parts[0].edges[1:] == theirs.parts[0].edges[1:]
    torch.testing.assert_close(pieces.decode(GENERATED), whole.decode(GENERATED), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("turn_tokens", [0, 20], ids=["pieces attend to all", "pieces retrieve"])
@pytest.mark.parametrize("refine", list(Refine))
def test_pieces_of_a_later_turn_end_blocks_as_transformers_logits_say(refine: Refine, turn_tokens: int) -> None:
    """Also where a piece is chosen from before the turn is over: all that is stored is retrieved."""
    events = EVENTS | {"refine": refine.value}
    policy = InfLLM(**OPTIONS | {"fetch": 1.0}, turn_tokens=turn_tokens, events=events, clamped=False)
    model, turn = tiny_model("llama"), prompt(50, seed=7)
    turns = Turns(model, [policy], (LENGTH,))
    turns.prefill()
    for number, piece in enumerate(torch.tensor([turn]).split([18, 18, 14], dim=1), start=1):
        with throughout(torch.float64):
            turns.conversation.feed(piece, cut_back=number == 3)
    told = len(expected_ends(model, prompt(LENGTH), policy))
    for index in blocks_of(turns):
        ends = index.parts[0].edges[1:]
        assert len(ends) > told + 4
        if refine is Refine.none:  # else ends move by what is known of the text then
            assert ends == expected_ends(model, prompt(LENGTH) + turn, policy)
    assert turns.retrieval._num_told == LENGTH + 50
    if not turn_tokens:
        whole = Turns(model, [policy], (LENGTH,))
        whole.prefill()
        with throughout(torch.float64):
            whole.conversation.feed(torch.tensor([turn]))
        for ours, theirs in zip(blocks_of(turns), blocks_of(whole), strict=True):
            assert ours.parts[0].edges[1:] == theirs.parts[0].edges[1:]
        torch.testing.assert_close(turns.decode(GENERATED), whole.decode(GENERATED), atol=TOLERANCE, rtol=0)


def test_a_prompt_in_pieces_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece hands over its own surprises, and ends are looked for among these and a window before them."""
    handed, looked = list[int](), list[int]()
    see = Retrieval.see_surprise

    def noted(retrieval: Retrieval, surprise_BC: Tensor, start: int) -> None:
        handed.append(surprise_BC.shape[1])
        see(retrieval, surprise_BC, start)

    def noted_lengths(surprise_n: Any, **how: Any) -> Any:
        looked.append(len(surprise_n))
        return surprising(surprise_n, **how)

    monkeypatch.setattr(Retrieval, "see_surprise", noted)
    monkeypatch.setattr("policies.events.surprising", noted_lengths)
    policy = InfLLM(**OPTIONS | {"recent": 24, "fetch": 200}, events=EVENTS)
    with throughout(torch.float64):
        model = Model(build("llama", max_position_embeddings=64))
        ranks, policies = Ranks.start(RanksOptions(device=Device.cpu, threads=1)), RankPolicies.everywhere([policy])
        engine = Engine(model, ranks, prefill=PrefillOptions(chunk_tokens=10), policies=policies)
        engine.generate([prompt(200)], GenerationOptions(max_new_tokens=2, ignore_eos=True))
    *pieces, whole = handed  # the whole prompt's are told once more, as those of several ranks are
    assert whole == 200 and pieces == [10] * 20
    assert max(looked[:20]) <= EVENTS["window"] + 11 and len(looked) == 21


def test_a_step_makes_no_list_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of blocks go from the host to the device when there are new ones."""

    def fails(*args: Any) -> None:
        raise AssertionError("sent to the device")

    for policy in (POLICIES["em_llm"], POLICIES["quest"]):
        seen, slots = view(60, [0, 9]), slots_of(60, [0, 9])
        index = policy.index(seen)
        assert isinstance(index, BlockIndex)
        for row, pad in enumerate([0, 9]):
            index.parts[row].edges.extend(range(pad + 7, 58, 5))
        first = index.choose(drawn(2, 4, 8, seed=1), slots)
        with monkeypatch.context() as during:
            during.setattr("policies.block_index.sent", fails)  # the modules of the policies send by it alone
            second = index.choose(drawn(2, 4, 8, seed=1), slots)
        assert first is not None and second is not None and first.slots_BKm.shape == second.slots_BKm.shape


@pytest.mark.parametrize("fetch", [40, 400], ids=["some retrieved", "all retrieved"])
@pytest.mark.parametrize("kind", [InfLLM, EMLLM, Quest])
def test_generated_tokens_and_a_turn_end_in_blocks_too(kind: type[BlockRetriever], fetch: int) -> None:
    """An answer has blocks of `most`, a later turn those of its surprises, also while the whole text is retrieved."""
    events = EVENTS | {"refine": "modularity" if kind is EMLLM else "none"}
    policy = kind(min_tokens=0, first_layer=0, sinks=2, recent=2, fetch=fetch, events=events)
    turns = Turns(tiny_model("llama"), [policy], (50,))
    turns.prefill()
    [index, *_] = blocks_of(turns)
    told = index.parts[0].edges[1:]
    turns.decode(GENERATED * 5)
    ends = index.parts[0].edges[1:][len(told) :]
    assert ends == list(range(told[-1] + 9, 70 + 1, 9))
    assert index.parts[0].num_blocks == sum(end <= 70 - 2 for end in index.parts[0].edges[1:])
    before = index.parts[0].edges[1:]
    with throughout(torch.float64):
        turns.conversation.feed(torch.tensor([prompt(30, seed=5)]))
    ends = index.parts[0].edges[1:]
    sizes = [end - start for start, end in zip([2, *ends], ends, strict=False)]
    assert ends[: len(before)] == before and len(ends) > len(before) and set(sizes) <= set(range(2, 10))
    assert len(set(sizes[len(before) :])) > 1


@pytest.mark.parametrize("digest", Digest)
@pytest.mark.parametrize("group", [Group.union, Group.mean])
def test_pages_of_many_sizes_are_scored_by_their_own_keys(digest: Digest, group: Group) -> None:
    """By a loop over pages. Tokens in no page yet come first; of the last page that fits in part the latest.

    Of pages that are the best of one head each the latest comes first.
    """
    pads, num_slots, fetch = [0, 6], 40, 17
    policy = Quest(**BARE, fetch=fetch, digest=digest, group=group, events=EVENTS)
    seen, slots = view(num_slots, pads), slots_of(num_slots, pads)
    index = policy.index(seen)
    assert isinstance(index, EventPages)
    ends = [[3, 9, 13, 22, 30, 36], [9, 14, 23, 33]]
    for row, each in enumerate(ends):
        index.parts[row].edges.extend(each)
    index.catch_up()
    q_BNH = drawn(2, 4, 8, seed=8)
    choice = index.choose(q_BNH, slots)
    assert choice is not None
    for row, each in enumerate(ends):
        starts, q_KGH = [pads[row], *each], q_BNH[row].unflatten(0, (2, 2))
        pages = [seen.k_BKnH[row, :, start:end] for start, end in zip(starts, each, strict=False)]
        scores = torch.stack([page_scores(k_KSH, q_KGH, digest) for k_KSH in pages], dim=-1)
        need_KP = need_of_group(scores[None] * seen.scaling, group)[0]
        for head, need_P in enumerate(need_KP):
            order = sorted(range(len(each)), key=lambda page: (float(need_P[page]), page), reverse=True)
            wanted = [slot for page in order for slot in reversed(range(starts[page], each[page]))]
            always = list(range(each[-1], num_slots))
            assert set(choice.slots_BKm[row, head].tolist()) == {*always, *wanted[: fetch - len(always)]}


def page_scores(k_KSH: Tensor, q_KGH: Tensor, digest: Digest) -> Tensor:
    """Scores (K, G) of a page."""
    least, most = k_KSH.amin(dim=1), k_KSH.amax(dim=1)
    if digest is Digest.mean:
        least = most = k_KSH.mean(dim=1)
    elif digest is Digest.shrunk:
        centre = (least + most) / 2
        distance = (k_KSH - centre[:, None]).abs().mean(dim=1)
        least, most = centre - distance, centre + distance
    return torch.maximum(q_KGH * least[:, None], q_KGH * most[:, None]).sum(dim=-1)


class Queue:
    """Events by similarity and their neighbours, one step after another, in lists."""

    def __init__(self, sizes: list[int], share: float, *, keeps: bool = True) -> None:
        self.sizes, self.share, self.keeps, self.queue = sizes, share, keeps, list[int]()

    def order(self, scores: list[float], room: int) -> list[int]:
        """All events, from the one that is retrieved first on."""
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        similar, used = [best[0]], self.sizes[best[0]]
        for event in best[1:]:
            used += self.sizes[event]
            if used > (1 - self.share) * room:
                break
            similar.append(event)
        near = {each for event in similar for each in (event - 1, event + 1) if 0 <= each < len(scores)} - {*similar}
        old = self.queue if self.keeps else []
        self.queue = [each for each in old if each not in near] + sorted(near, key=scores.__getitem__)
        kept, used = list[int](), 0
        for event in reversed([each for each in self.queue if each not in similar]):
            used += self.sizes[event]
            if used > self.share * room:
                break
            kept.append(event)
        self.queue = [each for each in self.queue if each in kept or each in similar]
        return similar + kept + [each for each in best if each not in similar and each not in kept]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_neighbours_of_what_was_retrieved_are_in_a_queue(share: float) -> None:
    """Over ten queries, of which the first two retrieve the whole text.

    Without a queue, or, if it has room, one that forgets earlier queries, others are found.
    """
    num_slots, fetch = 120, 60
    policy = EMLLM(**OPTIONS | {"fetch": fetch, "representatives": 100}, contiguity=share, events=EVENTS)
    seen, slots = view(num_slots, [0]), slots_of(num_slots, [0])
    index = policy.index(seen)
    assert isinstance(index, NeighbouringEvents)
    ends = [7, 12, 15, 23, 30, 34, 43, 50, 55, 58, 64, 71, 77, 84, 90, 97, 101, 108]
    index.parts[0].edges.extend(ends)
    index.catch_up()
    inside = [end for end in ends if end <= num_slots - 10]
    starts = [2, *inside]
    sizes = [b - a for a, b in zip(starts, inside, strict=False)]
    always = {*range(2), *range(inside[-1], num_slots)}
    queues = [Queue(sizes, share), Queue(sizes, 0.0), Queue(sizes, share, keeps=False)]
    differs, forked = [False, False], None
    for seed in range(10):
        fetched = num_slots if seed < 2 else fetch
        index.how, room = replace(policy, fetch=fetched), fetched - len(always)
        q_BNH = drawn(1, 4, 8, seed=20 + seed)
        q_KH = q_BNH[0].unflatten(0, (2, 2)).sum(dim=1)
        scores = [
            float((q_KH * seen.k_BKnH[0, :, a:b].mean(dim=1)).sum()) for a, b in zip(starts, inside, strict=False)
        ]
        wanted, *wrong = (
            {*[slot for event in each.order(scores, room) for slot in range(starts[event], inside[event])[::-1]][:room]}
            for each in queues
        )
        choice = index.choose(q_BNH, slots)
        if fetched == num_slots:
            assert choice is None
            continue
        assert choice is not None
        assert set(choice.slots_BKm[0, 0].tolist()) == always | wanted
        differs = [before or wanted != each for before, each in zip(differs, wrong, strict=True)]
        if forked is not None:
            again = forked.choose(q_BNH, slots)
            assert again is not None and torch.equal(again.slots_BKm, choice.slots_BKm)
        if seed == 4:
            forked = index.fork(seen.stored)
    assert differs == [share > 0, share > 0.3]


def test_blocks_of_one_size_with_events_of_that_size_are_those_of_infllm() -> None:
    """The same representatives, places and slots, whichever way the ends are said."""
    plain, seen, slots = InfLLM(**OPTIONS | {"recent": 5}, block=4), view(60, [0, 9]), slots_of(60, [0, 9])
    by_event = InfLLM(**OPTIONS | {"recent": 5}, events=EVENTS)
    one, other = Blocks(seen, plain), Blocks(seen, by_event)
    for row, pad in enumerate([0, 9]):
        other.parts[row].edges.extend(range(pad + 6, 58, 4))
    other.catch_up()
    q_BNH = drawn(2, 4, 8, seed=1)
    choices = [index.choose(q_BNH, slots) for index in (one, other)]
    assert choices[0] is not None and choices[1] is not None
    assert torch.equal(choices[0].slots_BKm, choices[1].slots_BKm)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (InfLLM, {"events": {"gamma": 2.0}}, "policy.events.gamma=2.0 has no effect on blocks of one size"),
        (InfLLM, {"events": {"by": "text"}}, "policy.events.by=text is not one of size, surprise"),
        (Quest, {"events": {"blocks": 3}}, "must have by, gamma"),
        (Quest, {"events": {"by": "surprise", "least": 9, "most": 8}}, "at least policy.events.least=9"),
        (EMLLM, {"events": {"gamma": float("nan")}}, "policy.events.gamma=nan must be a finite number"),
        (EMLLM, {"events": {"refine": "none", "layers": 0.9}}, "policy.events.layers=0.9 has no effect without"),
        (EMLLM, {"contiguity": 1.0}, "policy.contiguity=1.0 must be at least 0 and below 1"),
    ],
)
def test_options_out_of_range_are_refused(kind: type[Policy], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind(**options)


def test_given_options_of_events_are_in_place_of_those_of_the_policy() -> None:
    events = EMLLM(events={"gamma": 2.0}).events
    assert events == Events(by=By.surprise, refine=Refine.modularity, gamma=2.0)
    assert EMLLM(events={"by": "size", "refine": "none"}).events == Quest().events == Events()


def test_a_text_longer_than_the_context_is_read_by_events() -> None:
    """Piece by piece at clamped distances; what is told of a piece is known when the next one retrieves."""
    with throughout(torch.float64):
        model = Model(build("llama", max_position_embeddings=64))
    policy = InfLLM(**OPTIONS | {"recent": 24, "fetch": 200}, events=EVENTS)
    ours, plain = (
        Conversation(model, RankPolicies.everywhere([each]))
        for each in (policy, replace(policy, events=Events(by=By.size)))
    )
    ids = prompt(150)
    with throughout(torch.float64):
        for start in range(0, 150, 16):
            logits = [each.feed(torch.tensor([ids[start : start + 16]])) for each in (ours, plain)]
            torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=0)  # all is retrieved
    assert ours.cache is not None
    assert len(ours.cache.retrieval.layers[0].index.parts[0].edges[1:]) > 10


def test_a_text_without_surprises_is_read_from_its_end() -> None:
    """There is no block yet."""
    few: dict[str, Any] = {"min_tokens": 0, "sinks": 1, "recent": 2, "fetch": 12}
    policies = [each(**few, events=EVENTS | {"gamma": 1e6, "most": 99}) for each in (InfLLM, Quest)]
    for policy in policies:
        turns = Turns(tiny_model("llama"), [policy], (40,))
        turns.prefill()
        turns.decode(GENERATED)
        assert all(not index.parts[0].edges[1:] for index in blocks_of(turns))


def test_what_was_told_twice_adds_no_block() -> None:
    """Ends that have moved back would leave the marks that they came from."""
    turns = Turns(tiny_model("llama"), [POLICIES["em_llm"]], (LENGTH,))
    turns.prefill()
    before = [index.parts[0].edges[1:] for index in blocks_of(turns)]
    assert turns.conversation.cache is not None
    with torch.inference_mode():
        turns.conversation.cache.see_surprise(torch.full((1, LENGTH), torch.nan, dtype=torch.float64), 0)
    assert [index.parts[0].edges[1:] for index in blocks_of(turns)] == before


def test_padded_rows_are_what_they_are_alone() -> None:
    policy = EMLLM(**OPTIONS | {"fetch": 18, "recent": 4}, events=EVENTS, clamped=False)
    together = Turns(tiny_model("llama"), [policy], PADDED[:2])
    together.prefill()
    logits = together.decode(GENERATED)
    for row, length in enumerate(PADDED[:2]):
        alone = Conversation(tiny_model("llama"), RankPolicies.everywhere([policy]))
        with throughout(torch.float64):
            alone.feed(torch.tensor([prompt(length, row)]))
            torch.testing.assert_close(logits[row], alone.follow(torch.tensor([GENERATED]))[0], atol=TOLERANCE, rtol=0)
