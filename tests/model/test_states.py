"""Hybrid models on one rank: a text in any pieces, padded or not, and its next turns have transformers' own logits."""

# Legend: B batch, C new tokens, S tokens, V vocabulary.

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions, Ranks, RanksOptions
from runahead.attention.base import LayerAttention, Recording
from runahead.attention.states import StateLayer, StatePart, States, StateShape
from runahead.cache.attention import CausalAttention
from runahead.config import CacheOptions, Device, PrefillName
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, RowId
from runahead.model.checks.logits_check import _Arriving
from runahead.model.held import Held
from runahead.model.layers.pieces import give_in_pieces
from runahead.model.seam import SeamCache
from runahead.prefill.base import PrefillPlan, PromptBatch
from runahead.prefill.kept_states import KeptStates
from runahead.reuse.state_rows import states_of
from runahead.thinning.rank_policies import RankPolicies
from tests.families import HYBRIDS, build, largest_difference, oracle_logits, oracle_tokens, prompt, throughout
from tests.policies import test_matrix
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9
"""The tolerance of tests/ranks/test_exactness.py. A lost state costs above 1e-4."""

WRONG = 1e-5

PIECES = [(70,), (1, 1, 2, 3, 30, 33), (69, 1), (20, 1, 47, 1, 1)]
"""Pieces of one token, of fewer than the kernel of a convolution, and of more than a rule computes at a time."""


def in_pieces(
    model: Model,
    prompts: Sequence[list[int]],
    pieces: Sequence[int],
    between: Callable[[States], None] = lambda states: None,
) -> Tensor:
    """Logits (B, V) behind prompts that are padded and computed in pieces. `between` sees the states after each."""
    batch, start = PromptBatch.from_prompts(list(prompts), torch.device("cpu")), 0
    cache = model.empty_cache(batch.num_tokens, batch=len(prompts))
    with throughout(model.dtype), torch.inference_mode():
        for num_tokens in pieces:
            ids_BC = batch.ids_BS[:, start : start + num_tokens]
            attention = CausalAttention(cache, start=start, pads=batch.pads)
            logits_BV = model.forward(ids_BC, attention, start=start, pads=batch.pads)
            start += num_tokens
            assert cache.states is not None
            between(cache.states)
    return logits_BV


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_text_in_pieces_has_the_logits_of_one_piece(family: str) -> None:
    ids = prompt(70)
    for pieces in PIECES:
        ours = in_pieces(tiny_model(family), [ids], pieces)
        assert largest_difference(ours[0], oracle_logits(family, tuple(ids))) < TOLERANCE, pieces


STOPS = {1: [0], 5: [0, 1], 25: [1, 0], 64: [1], 70: [0, 1]}
"""Also after one token, before a row begins, where a rule's own chunk ends, and at the end."""


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_inside_a_text_are_kept_in_one_forward(family: str) -> None:
    """They are those after the same tokens alone, and the logits are transformers' own."""
    model, prompts = tiny_model(family), [prompt(70), prompt(70, seed=3)]
    batch, cache = PromptBatch.from_prompts(prompts, torch.device("cpu")), model.empty_cache(70, batch=2)
    assert cache.states is not None
    kept = KeptStates(STOPS, cache.states, model.state_shapes, torch.device("cpu"))
    attention = CausalAttention(cache, start=0, pads=[0, 0], hooks=[kept], stops=STOPS)
    with throughout(model.dtype), torch.inference_mode():
        logits_BV = model.forward(batch.ids_BS, attention, start=0, pads=[0, 0])
        assert set(kept.rows) == {(stop, row) for stop, rows in STOPS.items() for row in rows}
        for (stop, row), rows in kept.rows.items():
            alone = model.empty_cache(stop)
            ids_1C = torch.tensor([prompts[row][:stop]])
            model.forward(ids_1C, CausalAttention(alone, start=0, pads=[0]), start=0, pads=[0])
            nothing = model.empty_states()
            assert alone.states is not None and nothing is not None
            ours = states_of([rows], model.state_shapes, nothing, torch.device("cpu"))
            for our, their in zip(ours.layers, alone.states.layers, strict=True):
                for (*_, our_part), (*_, their_part) in zip(our.tensors(), their.tensors(), strict=True):
                    assert largest_difference(our_part, their_part) < TOLERANCE, (stop, row)
    for row, ids in zip(logits_BV, prompts, strict=True):
        assert largest_difference(row, oracle_logits(family, tuple(ids))) < TOLERANCE


@pytest.mark.parametrize("family", HYBRIDS)
def test_padded_rows_begin_without_a_state(family: str) -> None:
    prompts = [prompt(70), prompt(50, seed=3), prompt(3, seed=4)]
    for pieces in PIECES:
        ours = in_pieces(tiny_model(family), prompts, pieces)
        for row, ids in zip(ours, prompts, strict=True):
            assert largest_difference(row, oracle_logits(family, tuple(ids))) < TOLERANCE, (pieces, len(ids))


@pytest.mark.parametrize("family", HYBRIDS)
def test_answers_and_later_turns_are_those_of_one_text(family: str) -> None:
    model, ids, more = tiny_model(family), prompt(70), prompt(5, seed=3)
    with throughout(model.dtype):
        conversation = Conversation(model)
        conversation.feed(torch.tensor([ids]))
        forked = conversation.fork()
        conversation.generate(GenerationOptions(max_new_tokens=6, ignore_eos=True))
        answer = conversation.rows[0][70:]
        ours = conversation.feed(torch.tensor([more]))
        after_fork = forked.feed(torch.tensor([more]))
    assert answer == oracle_tokens(family, tuple(ids), 6)
    assert largest_difference(ours[0], oracle_logits(family, (*ids, *answer, *more))) < TOLERANCE
    assert largest_difference(after_fork[0], oracle_logits(family, (*ids, *more))) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "falcon_h1", "lfm2", "mamba2"])
def test_rows_that_join_and_leave_have_states_of_their_own(family: str) -> None:
    """Rows after one prompt, too. Seen to fail: rows that share a state, and states of rows in another order."""
    model, lanes, live, ended = tiny_model(family), Lanes(tiny_model(family)), dict[RowId, Row](), dict[RowId, Row]()
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True)

    def join(number: int, ids: list[int], copies: int) -> None:
        cache = model.empty_cache(len(ids) + 8)
        [logits_V] = model.forward(
            torch.tensor([ids]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0], length=len(ids)
        )
        rows = {(number, copy): Row(model, ids, options, seed=0) for copy in range(copies)}
        lanes.join(list(rows), list(rows.values()), cache, [len(ids)], [0] * copies)
        for row in rows.values():
            row.add(int(logits_V.argmax()))
        live.update(rows)

    def step() -> None:
        names, logits_BV = lanes.plain({name: row.ids[-1] for name, row in live.items()})
        for name, logits_V in zip(names, logits_BV, strict=True):
            live[name].add(int(logits_V.argmax()))
            if live[name].finish_reason:
                ended[name] = live.pop(name)
                lanes.leave(name, ended[name].ids[-1])

    with throughout(model.dtype), torch.inference_mode():
        join(0, prompt(70), 1)
        step()
        join(1, prompt(3, seed=4), 2)
        step()
        step()
        join(2, prompt(20, seed=5), 1)
        while live:
            step()
    assert len(ended) == 4
    for row in ended.values():
        assert row.new_ids == oracle_tokens(family, tuple(row.prompt), 8)


def test_a_row_left_alone_gives_back_the_memory_of_the_others() -> None:
    """Rows that are computed together have their states in one memory; n answers have a state each, no more."""
    model, lanes, ids = tiny_model("qwen3_next"), Lanes(tiny_model("qwen3_next")), prompt(20)
    of_row = sum(shape.num_bytes for shape in model.state_shapes)
    rows = {
        number: Row(model, ids, GenerationOptions(max_new_tokens=9, ignore_eos=True), seed=0) for number in range(4)
    }

    def alive() -> int:
        gc.collect()
        layers = [each for each in gc.get_objects() if isinstance(each, StateLayer)]
        storages = [state.untyped_storage() for layer in layers for *_, state in layer.tensors()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values()) - before

    before = 0
    before = alive()
    with throughout(model.dtype), torch.inference_mode():
        cache = model.empty_cache(len(ids) + 9)
        model.forward(torch.tensor([ids]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
        lanes.join(list(rows), list(rows.values()), cache, [len(ids)], [0] * 4)
        del cache
        assert alive() == 4 * of_row
        lanes.plain(dict.fromkeys(rows, 5))
        assert alive() == 4 * of_row
        for row in (0, 1, 3):
            lanes.leave(row, 5)
        lanes.plain({2: 5})
        assert alive() == of_row


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
def test_later_turns_of_padded_rows_are_those_of_each_alone(family: str, bits: int | None) -> None:
    """Also in a fork whose original went on before it. In 8 bits all tokens are still among the newest ones, exact."""
    prompts, more = [prompt(30), prompt(2, seed=4), prompt(17, seed=5)], prompt(6, seed=3)
    pads, policies = [30 - len(ids) for ids in prompts], RankPolicies()
    if bits is not None:
        policies = RankPolicies(storage=CacheOptions(bits=bits, residual=64, residual_bits=None))
    model = tiny_model(family)
    with throughout(model.dtype):
        conversation = Conversation(model, policies)
        rows = [[0] * pad + ids for pad, ids in zip(pads, prompts, strict=True)]
        conversation.feed(torch.tensor(rows), pads=pads)
        forked = conversation.fork()
        conversation.feed(torch.tensor([[5, 7, 11]]))
        ours = [forked.feed(torch.tensor([more])), conversation.feed(torch.tensor([more]))]
    for logits_BV, between in zip(ours, ((), (5, 7, 11)), strict=True):
        for row, ids in zip(logits_BV, prompts, strict=True):
            assert largest_difference(row, oracle_logits(family, (*ids, *between, *more))) < TOLERANCE


def without(name: str) -> Callable[[States], None]:
    """Zeros in place of one kind of state."""

    def clear(states: States) -> None:
        for layer in states.layers:
            for kind, _, state in layer.tensors():
                if kind == name:
                    state.zero_()

    return clear


@pytest.mark.parametrize("name", ["conv_states", "recurrent_states"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_lost_state_shows(family: str, name: str) -> None:
    model, ids = tiny_model(family), prompt(70)
    if all(part.name != name for shape in model.state_shapes for part in shape.parts):
        pytest.skip(f"{family} has no {name}")
    ours = in_pieces(model, [ids], (68, 2), without(name))
    assert largest_difference(ours[0], oracle_logits(family, tuple(ids))) > WRONG


def test_a_state_of_padding_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers masks no forward of one token, so the runtime has to."""
    monkeypatch.setattr(StateLayer, "clear", lambda *given: None)
    ids = prompt(3, seed=4)
    ours = in_pieces(tiny_model("qwen3_next"), [prompt(70), ids], (1,) * 67 + (3,))
    assert largest_difference(ours[1], oracle_logits("qwen3_next", tuple(ids))) > WRONG


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o"])
def test_policies_drop_tokens_of_attention_layers_alone(name: str) -> None:
    """With a budget of everything the logits are those of no policy, and with less they are not."""
    model, ids = tiny_model("qwen3_next"), prompt(70)
    policies = RankPolicies.everywhere([test_matrix.policy(name)])
    with throughout(model.dtype):
        conversation = Conversation(model, policies)
        conversation.feed(torch.tensor([ids]))
        assert len(conversation.kept_tokens) == model.num_layers == 2
        assert max(conversation.kept_tokens) < 70
        assert conversation.cache is not None and conversation.cache.states is not None
        states = sum(shape.num_bytes for shape in model.state_shapes)
        of_kv = sum(layer.num_bytes for layer in conversation.cache.layers)
        assert conversation.kv_bytes == of_kv + states
        assert conversation.full_kv_bytes == 70 * sum(shape.bytes_per_token() for shape in model.kv_shapes) + states


def test_a_rule_that_drops_a_given_state_is_given_tokens_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right then, and refused if its rule for single tokens drops the state, too."""
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    rule = code.torch_chunk_gated_delta_rule

    def without_given(*args: Any, **keywords: Any) -> Any:
        return rule(*args, **{**keywords, "initial_state": None})

    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", without_given)
    ids = prompt(70)
    with throughout(torch.float64):
        model = Model(build("qwen3_next"), name="qwen3_next")
    assert model.gives_one_by_one
    ours = in_pieces(model, [ids], (20, 47, 3))
    assert largest_difference(ours[0], oracle_logits("qwen3_next", tuple(ids))) < TOLERANCE
    monkeypatch.setattr(code, "torch_recurrent_gated_delta_rule", without_given)
    with throughout(torch.float64), pytest.raises(ValueError, match="linear_attention layers that do not begin from"):
        Model(build("qwen3_next"), name="qwen3_next")


@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_rows_after_one_prompt_are_given_several_tokens_first(family: str) -> None:
    """They store nothing yet, and have the prompt's state: Jamba's rule began from zero there."""
    model, ids, new = tiny_model(family), prompt(20), {0: [5, 6, 7], 1: [8, 9, 10]}
    lanes = Lanes(model)
    rows = {row: Row(model, ids, GenerationOptions(max_new_tokens=8, ignore_eos=True), seed=0) for row in new}
    with throughout(model.dtype), torch.inference_mode():
        cache = model.empty_cache(len(ids) + 8)
        model.forward(torch.tensor([ids]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
        lanes.join(list(rows), list(rows.values()), cache, [len(ids)], [0, 0])
        assert all(lanes.lane(row).num_tokens == 0 for row in rows)
        for row, logits_CV in lanes.verify(new).items():
            for num, logits_V in enumerate(logits_CV, start=1):
                oracle_V = oracle_logits(family, (*ids, *new[row][:num]))
                assert largest_difference(logits_V, oracle_V) < TOLERANCE


class Summing(nn.Module):
    """A layer with a rule that drops a given state for several tokens, and tells of each of its updates."""

    def forward(self, x_BC: Tensor, cache: SeamCache) -> Tensor:
        given = cache.get_recurrent_state(0) if x_BC.shape[1] == 1 else None
        total_B1 = x_BC.sum(1, keepdim=True) + (0 if given is None else given)
        return x_BC + cache.update_recurrent_state(total_B1, 0)


class Saved(Recording):
    """Notes the numbers of each state that is saved."""

    def __init__(self, states: States) -> None:
        super().__init__(start=3, pads=[0])
        self.states, self.saved = states, list[float]()

    def save_state(self, number: int) -> None:
        assert self.states is not None
        self.saved += [state.item() for *_, state in self.states.layers[number].tensors()]


def test_a_state_is_saved_after_the_last_of_tokens_that_come_one_by_one() -> None:
    """In a chain it is sent then. It was after the first one, and after each."""
    shape = StateShape(parts=(StatePart(name="recurrent_states", index=0, shape=(1,), dtype=torch.float64),))
    held = Held(kinds=["linear_attention"], kv_of={}, state_of={0: 0}, counts=[1], shapes=[shape], order=[("state", 0)])
    module, states = Summing(), held.nothing()
    states.layers[0].hold("recurrent_states", 0, torch.tensor([[100.0]], dtype=torch.float64))
    x_BC = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)

    def run_one_token(attention: LayerAttention) -> None:
        attention.states = held.nothing()
        module(x_BC[:, :1], SeamCache(attention, 0, num_new=1, held=held))

    give_in_pieces(module, run_one_token)
    attention = Saved(states)
    module(x_BC, SeamCache(attention, 3, num_new=3, held=held, one_by_one=True))
    assert attention.saved == [106.0]


def losing(name: str) -> Any:
    """Zeros in place of one kind of state wherever several tokens begin from a given one."""
    load = CausalAttention.load_state

    def without(self: CausalAttention, number: int) -> StateLayer:
        layer = load(self, number)
        for kind, _, state in layer.tensors():
            if kind == name and self.start and self.tokens.ids_BC is not None and self.tokens.ids_BC.shape[1] > 1:
                state.zero_()
        return layer

    return mock.patch.object(CausalAttention, "load_state", without)


READING_AT_ONCE = ["zaya", "mamba", "jamba"]
"""Families that read a state before they update any part of it, or are given tokens one by one."""


def off_where_states_arrive_late(family: str) -> float:
    """How far logits are off if states are no numbers until they are loaded, as those of other ranks."""
    model, ids, off = tiny_model(family), prompt(70), 0.0
    for pieces in ((60, 10), (3, 67), (30, 2, 38)):
        cache, start = model.empty_cache(70), 0
        with throughout(model.dtype), torch.inference_mode():
            for num_tokens in pieces:
                assert cache.states is not None
                attention = CausalAttention(cache, start=start, pads=[0], hooks=[_Arriving(cache.states)])
                ids_1C = torch.tensor([ids[start : start + num_tokens]])
                [logits_V] = model.forward(ids_1C, attention, start=start, pads=[0])
                start += num_tokens
        off = max(off, largest_difference(logits_V.nan_to_num(torch.inf), oracle_logits(family, tuple(ids))))
    return off


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_may_arrive_after_a_layer_has_begun(family: str) -> None:
    """Its memory is there before. Logits are transformers' own."""
    held = tiny_model(family).held
    assert held is not None and held.reads_late == (family not in READING_AT_ONCE)
    assert off_where_states_arrive_late(family) < TOLERANCE


def test_a_state_that_is_read_before_it_has_arrived_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tiny_model("zaya").held
    assert held is not None
    monkeypatch.setattr(tiny_model("zaya"), "held", replace(held, reads_late=True))
    assert not off_where_states_arrive_late("zaya") < WRONG


@pytest.mark.parametrize("name", ["conv_states", "recurrent_states"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_check_at_load_finds_any_state_that_is_lost(family: str, name: str, dtype: torch.dtype) -> None:
    """Also where it shows in the two tokens of a convolution's kernel alone, or in few bits less than rounding does."""
    module = build(family, dtype=dtype)
    with throughout(dtype):
        model = Model(module, name=family)  # is not refused
        if all(part.name != name for shape in model.state_shapes for part in shape.parts):
            pytest.skip(f"{family} has no {name}")
        with losing(name), pytest.raises(ValueError, match="layers that do not begin from a given state"):
            Model(module, name=family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_that_the_weights_multiply_by_zero_is_not_lost(dtype: torch.dtype) -> None:
    """Zaya's first weights do so with its convolution."""
    module = build("zaya", dtype=dtype)
    for name, parameter in module.named_parameters():
        if "conv_qk" in name:
            parameter.zero_()
    Model(module, name="zaya")


def test_the_check_at_load_computes_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all tokens would take gigabytes for large vocabularies."""
    module, rows = build("nemotron_h"), list[int]()
    module.lm_head.register_forward_hook(lambda _, given, out: rows.append(out.shape[1]))
    with throughout(torch.float64):
        Model(module, name="nemotron_h")
    assert 40 <= max(rows) <= 60


def test_places_have_names_also_where_no_layer_holds_a_state() -> None:
    plain, with_states = tiny_model("llama"), tiny_model("qwen3_next")
    assert plain.named_order == [("KV", 0), ("KV", 1), ("KV", 2)]
    assert with_states.named_order == [("state", 0), ("KV", 1), ("state", 2), ("KV", 3)]


def test_states_alone_take_the_bytes_that_are_told() -> None:
    """A model without attention stores no keys and values, and no policy has anything to choose."""
    model, ids = tiny_model("mamba2"), prompt(70)
    assert model.num_layers == 0 and model.uneven_limit is None
    talking = Conversation(model)
    with throughout(model.dtype):
        talking.feed(torch.tensor([ids]))
    states = sum(shape.num_bytes for shape in model.state_shapes)
    assert talking.kv_bytes == talking.full_kv_bytes == states > 0 and talking.kept_tokens == []
    for policies, message in (
        (RankPolicies.everywhere([test_matrix.policy("snapkv")]), "stores no keys and values, of which policy snapkv"),
        (RankPolicies(storage=CacheOptions(bits=4)), "stores no keys and values, which cache.bits=4 would quantise"),
    ):
        with pytest.raises(ValueError, match=message):
            Conversation(model, policies)


def test_layers_that_read_those_of_others_are_refused_beside_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family of transformers has both: here the second layer with attention reads the first one's."""
    monkeypatch.setattr("runahead.model.model_layers.find_sources", lambda calls: {1: 0})
    with pytest.raises(
        ValueError, match="qwen3_next .* read keys and values of others, beside linear_attention layers"
    ):
        Model(build("qwen3_next"), name="qwen3_next")


def test_rows_of_other_lengths_are_refused_where_padding_becomes_a_bias() -> None:
    """It would enter the convolution before a row's first token; LFM has such a bias if its config says so."""
    assert tiny_model("lfm2").uneven_limit is None
    assert Model(build("lfm2", conv_bias=True), name="lfm2").uneven_limit == 0


class Noting:
    """Other work inside a prefill, which notes what it is told of its layers."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def after_layer(self, done: int, of: int) -> None:
        self.told.append((done, of))

    def after_segment_layer(self) -> None:
        pass

    def until(self, arrived: Callable[[float], bool], what: str, peers: object) -> None:
        raise AssertionError("a stage that is alone waits for nobody")


@pytest.mark.parametrize("chunk_tokens", [None, 30])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "llama"])
def test_a_stage_alone_does_other_work_after_each_layer_and_each_state(family: str, chunk_tokens: int | None) -> None:
    """A server decodes there, and tells how far a prompt is; of a prompt in pieces over all of them."""
    model, noting = tiny_model(family), Noting()
    engine = Engine(
        model,
        Ranks.start(RanksOptions(device=Device.cpu, threads=1)),
        prefill=PrefillOptions(name=PrefillName.single, chunk_tokens=chunk_tokens),
    )
    plan = PrefillPlan(prompts=[prompt(70)], partition=engine.split(70), num_new=1)
    with throughout(model.dtype):
        engine.prefill(plan, noting)
    num = len(model.order) * (1 if chunk_tokens is None else 3)
    assert noting.told == [(done, num) for done in range(1, num + 1)]
