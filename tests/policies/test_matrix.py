"""Every policy of the table, on models of every kind, does what a policy must do whatever it keeps."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policies import POLICIES
from policies.base import Policy
from policies.pyramidinfer import PyramidInfer
from policies.retriever import Retriever
from policies.wrapper import Wrapper
from runahead import Conversation
from runahead.cache.attention import CausalAttention
from runahead.config import CacheOptions
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.policy_odd_tokens import OddTokens
from tests.policies.running import STREAMING, Run, prompts
from tests.policies.short import short_options
from tests.ranks.tasks import tiny_model

FAMILIES = [
    "llama",  # two query heads per KV head
    "gpt2",  # a KV head for each
    "gpt_bigcode",  # one for all
    "qwen3",
    "deepseek_v3",  # keys and values of different width
    "gpt_oss",  # sinks in the softmax, windows in every second layer
    "gemma2",  # soft caps and windows
    "bloom",  # ALiBi
]
OPTIONS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sinks": 2},
    "pyramidkv": {"window": 4, "kernel": 3, "beta": 2.0},
    "tova": {"evict_every": 8},
    "expected_attention": {"sinks": 2, "evict_every": 8, "future_tokens": 16},
    "lagkv": {"sinks": 2, "evict_every": 8, "lag": 4},
    "chunkkv": {"window": 4, "chunk": 5},
    "r_kv": {"window": 4, "kernel": 3, "evict_every": 8},
    "kvzip": {"sinks": 2, "chunk_tokens": 15},
    "kvzap": {"sinks": 2, "recent": 3, "evict_every": 8},
    "scissorhands": {"recent": 3, "evict_every": 8, "window": 6},
    "keyformer": {"tau_tokens": 3},
    "k_centers": {"sinks": 2, "evict_every": 8},
    "fastgen": {"window": 4, "sinks": 2, "frequent": 6, "local": 6},
    "razor_attention": {"sinks": 2},
    "duo_attention": {"sinks": 3},
    "minicache": {"start_share": 0.0},
    "pyramidinfer": {"min_tokens": 8},
}
"""Options of policies that `short_options` does not suit."""
KEEPING = [name for name, kind in POLICIES.items() if not (issubclass(kind, Retriever) or kind.follows_marks)]
"""Those that drop tokens or merge them. Those that retrieve have a matrix of their own, test_retrieval.py; what needs a
model that marks tokens is in test_dms.py."""
NUM_TOKENS, BUDGET = 40, 16
PADDED = (NUM_TOKENS, 23, 7)
GENERATED = [5, 7, 11, 13]


def options_of(name: str) -> dict[str, Any]:
    return OPTIONS.get(name) or short_options(name)


def policy(name: str, budget: int | float = BUDGET) -> Policy:
    if name == "odd_tokens":
        return OddTokens(budget=budget)
    kind: type[Any] = POLICIES[name]
    if issubclass(kind, Wrapper):
        return kind(scorer=policy("snapkv", budget))
    if name == "fastgen":  # what it keeps depends on what it has to recover
        return kind(**OPTIONS[name], recovered=0.3 if budget == BUDGET else 1.0)
    if name in STREAMING:  # some heads keep all
        recent = budget if isinstance(budget, float) else budget - OPTIONS[name]["sinks"]
        recent = 1000 if name == "duo_attention" and isinstance(recent, float) else recent
        return STREAMING[name](**OPTIONS[name], recent=recent)
    if name == "pyramidinfer":  # its budget is the mean over layers
        return kind(**OPTIONS[name], mean_keep=0.6 if budget == BUDGET else 1.0)
    if name == "minicache":  # all tokens stay; with room for all they are exact
        return kind(**OPTIONS[name], retain_share=0.3 if budget == BUDGET else 1.0)
    if name == "kvzap":
        return MadeUpKVzap(**OPTIONS[name], budget=budget)
    return kind(**options_of(name), **({"budget": budget} if has_budget(name) else {}))


def has_budget(name: str) -> bool:
    return "budget" in POLICIES[name].__dataclass_fields__


def decides_on_all(name: str) -> bool:
    return POLICIES[name].decides_on_all or policy(name).replay is not None


def keeps_new(name: str) -> bool:
    """Whether a policy keeps all generated tokens."""
    chosen = policy(name)
    return name == "full" or not getattr(chosen, "scorer", chosen).while_decoding


WRAPPERS = [name for name, kind in POLICIES.items() if issubclass(kind, Wrapper)]
KEEP_NEW = [name for name in KEEPING if keeps_new(name)]
BY_HEAD = [
    name for name in KEEPING if name not in ("full", *WRAPPERS) and (not has_budget(name) or decides_on_all(name))
]
"""Policies that give a layer what its heads need, or keep all tokens in less memory."""
OF_EACH_LAYER = [*(name for name in KEEPING if name not in BY_HEAD), "odd_tokens"]
"""Policies whose budget is that of each layer."""
every_policy = pytest.mark.parametrize("name", [*KEEPING, "odd_tokens"])


@dataclass(kw_only=True)
class PyramidOfBatch(PyramidInfer):
    """PyramidInfer for a row alone, with the lengths of the padded batch that it was in: shares of the longest row."""

    def lengths(self, num_tokens: int, num_layers: int) -> list[int]:
        return [min(num_tokens, tokens) for tokens in super().lengths(NUM_TOKENS, num_layers)]

    def recent(self, num_tokens: int) -> int:
        return min(num_tokens, super().recent(NUM_TOKENS))


def following(given: list[list[int]], num_tokens: int = 20) -> list[int]:
    """Tokens of an answer, more than the 16 after which most policies cut back.

    None is in the prompts: in the first layer equal tokens may have equal scores, between which rounding would decide.
    """
    return [token for token in range(5, 97) if not any(token in ids for ids in given)][:num_tokens]


def test_a_policy_of_ones_own_is_one_short_file() -> None:
    source = Path(__file__).with_name("policy_odd_tokens.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40


OFTEN = ("llama", "gpt_bigcode", "deepseek_v3", "gpt_oss")
"""Families that go with every policy; the others do in the slow set."""
every_family = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in OFTEN else [pytest.mark.slow]) for each in FAMILIES]
)
every_batch = pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])


@pytest.fixture(autouse=True)
def _without_windows(request: pytest.FixtureRequest) -> None:
    """Some policies are for some models: without windows, or with rotations that are known."""
    options = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if options.get("name") in ("pyramidinfer", "minicache") and options.get("family") in ("gpt_oss", "gemma2"):
        pytest.skip("a model with windows")
    if options.get("name") == "expected_attention" and options.get("family") in ("gpt2", "gpt_bigcode"):
        pytest.skip("a model that does not rotate")
    unfit = ("pyramidinfer", "expected_attention", "razor_attention")
    if options.get("name") in unfit and options.get("family") == "bloom":
        pytest.skip("a model with a bias by position")
    if len(options.get("lengths", ())) > 1 and tiny_model(options.get("family", "llama")).uneven_limit is not None:
        pytest.skip("its rows cannot be of different lengths")


@pytest.mark.parametrize(
    ("family", "budget"), [*((family, 1000) for family in FAMILIES), ("llama", 1.0), ("gpt_bigcode", 1.0)]
)
@every_policy
@every_batch
@pytest.mark.sampled(5)
def test_with_room_for_all_it_is_the_full_cache_bit_by_bit(
    name: str, family: str, lengths: tuple[int, ...], budget: int | float
) -> None:
    model = tiny_model(family)
    run = Run(model, [policy(name, budget)], prompts(lengths))
    ours = [run.prefill(), *(run.decode(token) for token in GENERATED)]
    total = NUM_TOKENS + len(GENERATED)
    cache = model.empty_cache(total, batch=len(lengths))
    start, full = 0, []
    for chunk_BC in [run.ids_BS, *(torch.full((len(lengths), 1), token) for token in GENERATED)]:
        with throughout(model.dtype):
            attention = CausalAttention(cache, start=start, pads=run.pads)
            full.append(model.forward(chunk_BC, attention, start=start, pads=run.pads))
        start += chunk_BC.shape[1]
    for a, b in zip(ours, full, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name in OF_EACH_LAYER if name != "pyramidinfer"])
def test_a_row_that_is_shorter_than_the_budget_keeps_while_decoding_what_it_keeps_alone(name: str) -> None:
    """It is cut back when it has too many tokens itself, whatever its padding. PyramidInfer takes shares."""
    model, given = tiny_model("llama"), prompts(PADDED)
    together = Run(model, [policy(name)], given)
    rows = [Run(model, [policy(name)], [ids]) for ids in given]
    together.prefill()
    for alone in rows:
        alone.prefill()
    for token in following(given, 36):
        logits_BV = together.decode(token)
        for row, alone in enumerate(rows):
            torch.testing.assert_close(logits_BV[row], alone.decode(token)[0], atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize("name", ["h2o", "keyformer", "scissorhands", "snapkv", "r_kv", "tova"])
@every_batch
def test_a_step_that_does_nothing_leaves_a_later_one_what_it_accumulates(name: str, lengths: tuple[int, ...]) -> None:
    """Seen to fail: one place per slot for what all policies of a sequence accumulate."""
    idle = PyramidInfer(**OPTIONS["pyramidinfer"], mean_keep=1.0)  # votes, and keeps all tokens of the prompt
    found = []
    for steps in ([policy(name)], [idle, policy(name)]):
        run = Run(tiny_model("llama"), steps, prompts(lengths))
        logits = [run.prefill([25, 15]), *(run.decode(token) for token in range(5, 25))]
        found.append([*logits, *(layer.positions_BKn().expand(-1, 2, -1) for layer in run.kept.layers)])
    for alone, after in zip(*found, strict=True):
        assert torch.equal(alone, after)


@every_family
@every_policy
@every_batch
@pytest.mark.sampled(16)
def test_tokens_that_follow_in_one_forward_do_what_they_do_one_by_one(
    name: str, family: str, lengths: tuple[int, ...]
) -> None:
    """Seen to fail: all tokens of a layer stored before the first one attends."""
    model = tiny_model(family)
    longest = max(lengths)
    pads = [longest - length for length in lengths]
    given = prompts(lengths)
    ids_BS = torch.tensor([[0] * pad + ids for pad, ids in zip(pads, given, strict=True)])
    found = []
    for at_once in (True, False):
        with throughout(model.dtype):
            conversation = Conversation(model, RankPolicies.everywhere([policy(name)]))
            conversation.feed(ids_BS, pads=pads)
            logits_BCV = conversation.follow(torch.tensor([following(given)] * len(lengths)), at_once=at_once)
            logits_BV = conversation.feed(torch.tensor([[19, 23]] * len(lengths)))
        found.append((logits_BCV, logits_BV, torch.tensor(conversation.kept_tokens), conversation.num_tokens))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)  # float64


@every_family
@every_policy
@pytest.mark.sampled(4)
def test_rows_of_a_padded_batch_are_what_they_are_alone(name: str, family: str) -> None:
    model = tiny_model(family)
    if model.uneven_limit is not None:
        pytest.skip("its rows cannot be of different lengths")
    together = Run(model, [policy(name)], prompts(PADDED))
    logits = [together.prefill(), *(together.decode(token) for token in GENERATED)]
    of_row = PyramidOfBatch(**vars(policy(name))) if name == "pyramidinfer" else policy(name)
    for row, ids in enumerate(prompts(PADDED)):
        alone = Run(model, [of_row], [ids])
        for ours, theirs in zip(logits, [alone.prefill(), *(alone.decode(t) for t in GENERATED)], strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize("name", [name for name in KEEPING if name != "pyramidinfer"])  # it narrows each chunk
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
@every_batch
@pytest.mark.sampled(3)
def test_chunks_of_a_prompt_do_not_matter(name: str, family: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(family)
    whole, pieces = (Run(model, [policy(name)], prompts(lengths)) for _ in range(2))
    torch.testing.assert_close(whole.prefill(), pieces.prefill([17, 1, 12, 10]), atol=1e-9, rtol=0)
    assert whole.kept.slots_by_layer == pieces.kept.slots_by_layer
    for layer, other in zip(whole.kept.layers, pieces.kept.layers, strict=True):
        assert torch.equal(layer.positions_BKn(), other.positions_BKn())
    torch.testing.assert_close(whole.decode(5), pieces.decode(5), atol=1e-9, rtol=0)


@every_family
@pytest.mark.parametrize("name", OF_EACH_LAYER)
@every_batch
@pytest.mark.sampled(2)
def test_what_is_dropped_is_freed_and_nothing_else_is(name: str, family: str, lengths: tuple[int, ...]) -> None:
    model, batch = tiny_model(family), len(lengths)
    run = Run(model, [policy(name)], prompts(lengths))
    run.prefill()
    before = sum(shape.bytes_per_token(batch) * NUM_TOKENS for shape in model.kv_shapes)
    expected = 0
    for layer, (shape, rule) in enumerate(zip(model.kv_shapes, model.rules, strict=True)):
        left_alone = name == "full" or rule is not None
        slots = NUM_TOKENS if left_alone else _slots(name, layer, model.num_layers)
        stored = run.kept.layers[layer]
        assert stored.tokens_per_head == slots, layer
        of_rows = [min(slots, length) for length in lengths] if isinstance(stored, RaggedLayer) else [slots] * batch
        expected += shape.bytes_per_token() * sum(of_rows)
    kv_bytes = sum(layer.slab_TBKX.nbytes for layer in run.kept.layers)
    assert kv_bytes == expected
    assert kv_bytes == before if name == "full" else kv_bytes < before
    queries = [each for layer in run.kept.layers for each in layer.queries.values()]  # since a row was cut back
    of_queries = sum(each.num_bytes for each in queries)
    assert run.kept.num_bytes - of_queries - kv_bytes < 0.3 * kv_bytes  # positions, and what is carried along


@every_family
@pytest.mark.parametrize("name", [name for name in OF_EACH_LAYER if name != "adakv"])
@every_batch
def test_every_head_keeps_as_many_tokens_as_there_is_room_for(name: str, family: str, lengths: tuple[int, ...]) -> None:
    """Different ones of its row, in order; padding only where a row has no more tokens."""
    run = Run(tiny_model(family), [policy(name)], prompts(lengths))
    run.prefill()
    for layer in run.kept.layers:
        for length, positions_Kn in zip(lengths, layer.positions_BKn().tolist(), strict=True):
            for positions in positions_Kn:
                kept = [position for position in positions if position >= 0]
                assert len(kept) == min(length, layer.num_slots)
                assert kept == sorted(set(kept)) and kept[-1] < length


def _slots(name: str, layer: int, num_layers: int) -> int:
    if name == "pyramidinfer":
        return policy(name).lengths(NUM_TOKENS, num_layers)[layer]  # type: ignore[attr-defined]
    if name != "pyramidkv":
        return BUDGET
    first, last = 2 * 12 - 12 / 2, 12 / 2  # 12 tokens beside the window, beta 2
    return min(NUM_TOKENS, 4 + round(first + (last - first) * layer / (num_layers - 1)))


@every_policy
def test_another_turn_goes_on_behind_what_was_kept(name: str) -> None:
    """With room for all it is as if the turns had been one prompt; cut back, it still answers."""
    model, ids, more = tiny_model("llama"), prompt(NUM_TOKENS), prompt(9, seed=5)
    roomy = Run(model, [policy(name, 1000)], [ids])
    roomy.prefill()
    roomy.decode(5)
    joint = Run(model, [policy("full")], [[*ids, 5, *more]])
    torch.testing.assert_close(roomy.next_prompt(more), joint.prefill(), atol=1e-9, rtol=0)
    tight = Run(model, [policy(name)], [ids])
    tight.prefill()
    tight.decode(5)
    assert tight.next_prompt(more).isfinite().all()
    if name not in ("full", "pyramidkv", "pyramidinfer", *BY_HEAD):
        assert set(tight.kept.slots_by_layer) == {BUDGET}


ACCUMULATING = [name for name in KEEPING if type(policy(name)).carry is not Policy.carry]


@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_fork_does_not_depend_on_how_its_original_goes_on(name: str, bits: int | None) -> None:
    """Seen to fail: what policies accumulate in memory of both."""

    def answer(talk: Conversation) -> Tensor:
        talk.feed(torch.tensor([[5, 6, 7]]))
        return talk.follow(torch.tensor([range(9, 25)]))

    model, storage = tiny_model("llama"), CacheOptions(bits=bits, residual=8)
    with throughout(model.dtype):
        talk = Conversation(model, RankPolicies.everywhere([policy(name, 60)], storage=storage))
        talk.feed(torch.tensor([prompt(80)]))
        talk.follow(torch.tensor([[11, 12, 13, 14]]))
        early, late = talk.fork(), talk.fork()
        expected = answer(early)
        talk.feed(torch.tensor([[90, 80]]))
        talk.follow(torch.tensor([[70, 71]]))
        assert torch.equal(answer(late), expected)


@every_family
@every_policy
@every_batch
@pytest.mark.sampled(6)
def test_another_turn_sees_what_was_kept_and_itself(name: str, family: str, lengths: tuple[int, ...]) -> None:
    """All at once under the policy it is what it is token by token over the same cache."""
    run, more = Run(tiny_model(family), [policy(name)], prompts(lengths)), prompt(7, seed=5)
    run.prefill()
    run.decode(5)
    singly = copy(run)
    singly.kept, singly.steps = deepcopy(run.kept), []
    expected = [singly.decode(token) for token in more][-1]
    torch.testing.assert_close(run.next_prompt(more), expected, atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize(
    "name",
    [name for name in [*KEEPING, "odd_tokens"] if name not in (*KEEP_NEW, "pyramidinfer", *STREAMING)],
)
def test_the_store_stays_near_the_budget_while_decoding(name: str) -> None:
    model = tiny_model("llama")
    run = Run(model, [policy(name)], [prompt(NUM_TOKENS), prompt(BUDGET, seed=1)])  # a shorter row is cut back later
    run.prefill()
    sizes = []
    for token in range(3, 40):
        run.decode(token)
        sizes.append(set(run.kept.slots_by_layer))
    assert max(max(size) for size in sizes) < BUDGET + 16
    assert {BUDGET} in sizes


@pytest.mark.parametrize("name", KEEP_NEW)
def test_generated_tokens_are_kept(name: str) -> None:
    run = Run(tiny_model("llama"), [policy(name)], [prompt(NUM_TOKENS)])
    run.prefill()
    before = run.kept.slots_by_layer
    for token in range(3, 30):
        run.decode(token)
    assert run.kept.slots_by_layer == [slots + 27 for slots in before]


@pytest.mark.parametrize("name", [name for name in [*KEEPING, "odd_tokens"] if name != "minicache"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
@pytest.mark.parametrize("lengths", [(3,), (3, 2, 1)], ids=["alone", "padded"])
@pytest.mark.sampled(3)
def test_a_prompt_shorter_than_the_window_is_kept_whole(name: str, family: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(family)
    ours, full = Run(model, [policy(name)], prompts(lengths)), Run(model, [policy("full")], prompts(lengths))
    assert torch.equal(ours.prefill(), full.prefill())
    assert set(ours.kept.slots_by_layer) == {3}
    for token in GENERATED:
        assert torch.equal(ours.decode(token), full.decode(token))
