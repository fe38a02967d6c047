"""A prefill with streaming heads: transformers' logits with a mask per head, for every number of ranks and split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import sliding_window_causal_mask_function

from benchmarks.ttft.traffic import formula_bytes
from benchmarks.ttft.variants import Traffic
from policies.base import StreamedHeads
from policies.razor_attention import RazorAttention
from runahead import ContextPartition, PrefillOptions
from runahead.attention.masks import MaskRule
from runahead.attention.op import spans_of
from runahead.attention.sparse.heads import Heads
from runahead.attention.sparse.streaming import Streaming, _bias_of
from runahead.config import Attention, Carrier, DecodeName, Transfer
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import build, largest_difference, oracle_logits, prompt, throughout
from tests.ranks import policy_tasks, streaming_tasks
from tests.ranks.streaming_tasks import TABLE, GivenHeads, of_all
from tests.ranks.tasks import tiny_model
from tests.ranks.test_exactness import TOLERANCE
from tests.ranks.test_wire_bits import rounded_logits

PROMPT_TOKENS = 70
NEW = (5, 7, 11, 13)
SPLITS = [(0, 70), (0, 33, 70), (0, 2, 70), (0, 8, 70), (0, 30, 36, 70), (0, 1, 14, 70), (0, 0, 40, 70)]
WAYS = list(product(Transfer, (Carrier.backend, Carrier.copy)))


def options(**others: Any) -> PrefillOptions:
    return PrefillOptions(attention=Attention.streaming_heads, **others)


@cache
def masked_logits(family: str, ids: tuple[int, ...], policy_of: tuple[Any, ...] = (TABLE, 3, 9)) -> Tensor:
    """Transformers' logits (tokens, V), with attention by a mask for each head."""
    table, num_sinks, recent = policy_of

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        num_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
        streams_N11 = torch.tensor(table[module.layer_idx]).repeat_interleave(group)[:, None, None]
        at = torch.arange(num_tokens)
        distances = at[:, None] - at
        few = (at < num_sinks) | (distances <= recent)
        sees = (few | ~streams_N11) & (distances >= 0)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q @ k.mT * scaling).masked_fill(~sees, -math.inf)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("streaming_by_mask", attention)
    with throughout(torch.float64), torch.no_grad():
        module = build(family).double()
        module.config._attn_implementation = "streaming_by_mask"
        logits: Tensor = module(torch.tensor([ids])).logits[0]
    return logits


def streaming_rule(window: int) -> MaskRule:
    return Streaming.of(StreamedHeads(by_layer=TABLE, sinks=1, recent=window - 1), exact=(), pads=[0]).rule


def run(
    rank_pools: RankPools,
    family: str,
    prompts: Sequence[list[int]],
    bounds: tuple[int, ...],
    given: PrefillOptions,
    policy: GivenHeads | None = None,
    wrong: str = "",
) -> tuple[Tensor, list[Any]]:
    """Logits (steps, B, V) after the prompt and new tokens, and all ranks' outcomes."""
    policy = policy or GivenHeads(table=TABLE)
    found = rank_pools.run(
        len(bounds) - 1, streaming_tasks.prefill_and_steps, family, list(prompts), bounds, given, policy, NEW, wrong
    )
    [(outcome, steps)] = [each for each in found if each[0].logits is not None]
    return torch.tensor([outcome.logits, *steps], dtype=torch.float64), [each for each, _ in found]


@pytest.mark.parametrize("bounds", SPLITS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_a_mask_per_head(rank_pools: RankPools, family: str, bounds: tuple[int, ...]) -> None:
    """And those of the tokens after it, of which a policy that cuts after each one sees the same."""
    ids = prompt(PROMPT_TOKENS)
    expected = masked_logits(family, (*ids, *NEW))[PROMPT_TOKENS - 1 :]
    assert largest_difference(oracle_logits(family, tuple(ids)), expected[0]) > 1e-4
    for transfer, carrier in WAYS:
        given = options(transfer=transfer, carrier=carrier, layers_in_flight=2)
        ours, _ = run(rank_pools, family, [ids], bounds, given)
        assert largest_difference(ours[:, 0], expected) < TOLERANCE, (transfer, carrier)


@pytest.mark.parametrize("bounds", [(0, 70), (0, 40, 70), (0, 21, 45, 70)])
def test_padded_rows_see_their_own_first_tokens(rank_pools: RankPools, bounds: tuple[int, ...]) -> None:
    texts = [prompt(70), prompt(51, seed=1), prompt(7, seed=2)]
    for transfer, carrier in WAYS:
        ours, _ = run(rank_pools, "llama", texts, bounds, options(transfer=transfer, carrier=carrier))
        for row, ids in enumerate(texts):
            expected = masked_logits("llama", (*ids, *NEW))[len(ids) - 1 :]
            assert largest_difference(ours[:, row], expected) < TOLERANCE, (row, transfer, carrier)


@pytest.mark.parametrize(
    "policy",
    [
        GivenHeads(table=TABLE, sinks=0, recent=1),
        GivenHeads(table=TABLE, sinks=5, recent=40),
        GivenHeads(table=((True, True), (True, True), (True, True)), sinks=1, recent=2),
    ],
)
def test_any_numbers_of_tokens_and_heads(rank_pools: RankPools, policy: GivenHeads) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = masked_logits("llama", (*ids, *NEW), (policy.table, policy.sinks, policy.recent))[PROMPT_TOKENS - 1 :]
    for bounds, (transfer, carrier) in product([(0, 70), (0, 38, 70), (0, 20, 24, 70)], WAYS):
        ours, _ = run(rank_pools, "llama", [ids], bounds, options(transfer=transfer, carrier=carrier), policy)
        assert largest_difference(ours[:, 0], expected) < TOLERANCE, (bounds, transfer, carrier)


def test_no_streaming_heads_are_the_exact_prefill_bit_by_bit(rank_pools: RankPools) -> None:
    policy, ids = GivenHeads(table=((False, False),) * 3), prompt(PROMPT_TOKENS)
    for bounds in ((0, 70), (0, 33, 70)):
        ours, exact = (
            run(rank_pools, "llama", [ids], bounds, given, policy)[0] for given in (options(), PrefillOptions())
        )
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "bloom", "qwen3_next"])
def test_families(rank_pools: RankPools, family: str) -> None:
    """Soft caps, sinks of the model, biases by distance and states. Layers with windows are exact."""
    ids, numbers = prompt(PROMPT_TOKENS), [shape.num_kv_heads for shape in tiny_model(family).kv_shapes]
    few = GivenHeads(table=[[head % 2 == layer % 2 for head in range(num)] for layer, num in enumerate(numbers)])
    alone, _ = run(rank_pools, family, [ids], (0, 70), options(row_tokens=16), few)
    exact = oracle_logits(family, tuple(ids))
    has_windows_alone = all(rule is not None for rule in tiny_model(family).rules)
    assert (largest_difference(alone[0, 0], exact) < TOLERANCE) is has_windows_alone
    for bounds in ((0, 33, 70), (0, 20, 45, 70)):
        ours, _ = run(rank_pools, family, [ids], bounds, options(row_tokens=16), few)
        assert largest_difference(ours, alone) < TOLERANCE, bounds


@pytest.mark.parametrize(("way", "bounds"), list(product(WAYS, [(0, 33, 70), (0, 2, 70), (0, 30, 36, 70)])))
@pytest.mark.parametrize("bits", [None, 8])
def test_bytes_are_as_predicted(
    rank_pools: RankPools, way: tuple[Transfer, Carrier], bounds: tuple[int, ...], bits: int | None
) -> None:
    policy, model = GivenHeads(table=TABLE), tiny_model("llama")
    _, outcomes = run(
        rank_pools, "llama", [prompt(70)], bounds, options(transfer=way[0], carrier=way[1], wire_bits=bits), policy
    )
    partition = ContextPartition(boundaries=bounds)
    predicted = formula_bytes(Traffic.streamed, partition, model, [policy], wire_bits=bits)
    assert sum(each.kv_sent_bytes for each in outcomes) == predicted
    assert predicted < formula_bytes(Traffic.chain, partition, model, wire_bits=bits) or max(bounds[1:-1]) <= 12


def test_states_are_among_the_bytes(rank_pools: RankPools) -> None:
    model, bounds = tiny_model("qwen3_next"), (0, 30, 45, 70)
    policy = GivenHeads(table=[[True] + [False] * (shape.num_kv_heads - 1) for shape in model.kv_shapes])
    _, outcomes = run(rank_pools, "qwen3_next", [prompt(70)], bounds, options(), policy)
    predicted = formula_bytes(Traffic.streamed, ContextPartition(boundaries=bounds), model, [policy])
    assert model.state_shapes and sum(each.kv_sent_bytes for each in outcomes) == predicted


@pytest.mark.parametrize("wrong", ["a sink left out", "streaming heads read all", "windows by chunk"])
def test_mistakes_are_seen(rank_pools: RankPools, wrong: str) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = masked_logits("llama", (*ids, *NEW))[PROMPT_TOKENS - 1 :]
    ours, _ = run(rank_pools, "llama", [ids], (0, 33, 70), options(), wrong=wrong)
    assert largest_difference(ours[0, 0], expected[0]) > 1e4 * TOLERANCE


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_on_the_wire(rank_pools: RankPools, bits: int) -> None:
    """The logits of one rank that rounds earlier chunks."""
    ids, bounds = prompt(PROMPT_TOKENS), (0, 30, 45, 70)
    streaming = Streaming.of(StreamedHeads(by_layer=TABLE, sinks=3, recent=9), exact=(), pads=[0])
    expected = rounded_logits("llama", [ids], bounds, bits, streaming.of_layer)
    assert largest_difference(expected[0], masked_logits("llama", tuple(ids))[-1]) > 1e4 * TOLERANCE
    for transfer, carrier in WAYS:
        given = options(transfer=transfer, carrier=carrier, wire_bits=bits)
        ours, _ = run(rank_pools, "llama", [ids], bounds, given)
        assert largest_difference(ours[0], expected) < TOLERANCE, (transfer, carrier)


def test_engines_report_density_and_answer_alike(rank_pools: RankPools) -> None:
    """With what a policy keeps in few bits, and on several ranks, where each keeps its part, as with exact prefills."""
    ids, policy = prompt(PROMPT_TOKENS), GivenHeads(table=TABLE)
    top5 = masked_logits("llama", tuple(ids))[-1].topk(5)
    for bounds, decode, bits in (
        ((0, 70), DecodeName.last, None),
        ((0, 33, 70), DecodeName.last, 8),
        ((0, 33, 70), DecodeName.sharded, None),
        ((0, 30, 36, 70), DecodeName.last, None),
    ):
        given = "llama", [ids], bounds, of_all(policy, bits), 4, options(), None, decode
        batches = rank_pools.run(len(bounds) - 1, policy_tasks.generate, *given)
        reported = batches[-1].generations[0].first_token_logits_top5
        assert [token for token, _ in reported] == top5.indices.tolist()
        assert largest_difference([logit for _, logit in reported], top5.values) < TOLERANCE
        for rank, (start, end) in enumerate(pairwise(bounds)):
            report = batches[0].ranks[rank].attention
            assert report is not None
            seen = [sum(min(p + 1, limit) for p in range(start, end)) for limit in (71, 13)]
            shares = [(seen[0] * (2 - sum(each)) + seen[1] * sum(each)) / (2 * seen[0]) for each in TABLE]
            counted = shares[: len(report.density)]
            assert report.density == pytest.approx(counted) and len(counted) >= 2


@pytest.mark.parametrize(("start", "end"), [(0, 5), (2, 9), (3, 4), (8, 30)])
def test_the_window_is_that_of_a_mask(start: int, end: int) -> None:
    ours, mask = streaming_rule(4), MaskRule(sliding_window_causal_mask_function(4))
    found, expected = ours.first_keys(start, end), mask.first_keys(start, end)
    assert found is not None and expected is not None and torch.equal(found, expected)
    assert [ours.first_key(query) for query in range(end)] == [mask.first_key(query) for query in range(end)]
    assert [ours.is_causal(start, end, first) for first in range(start + 1)] == [
        mask.is_causal(start, end, first) for first in range(start + 1)
    ]
    assert ours.window(start, end) in (None, mask.window(start, end))
    assert ours.window(8, 30) == 4


@pytest.mark.parametrize(("start", "end"), [(0, 5), (2, 12), (0, 13), (11, 12), (12, 13), (5, 40), (20, 41)])
def test_keys_are_counted_without_a_look_at_each_token(start: int, end: int) -> None:
    streaming = Streaming.of(StreamedHeads(by_layer=TABLE, sinks=3, recent=8), exact=(), pads=[0, 0])
    [span] = spans_of(range(end), start=start, num_new=end - start, pads=[0])
    spans = [replace(span, positions=Ends(start, end))]
    steps: list[Any] = [SimpleNamespace(runs=[SimpleNamespace(spans=spans)])]
    streaming._count(0, steps)
    of_exact, of_streamed = (sum(min(at + 1, most) for at in range(start, end)) for most in (end, 12))
    assert streaming.counts == {0: (2 * (of_exact + of_streamed), 4 * of_exact)}


class Ends(Sequence[int]):
    """Numbers of which only the first one is known, and how many there are."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, place: Any) -> Any:
        assert place == 0, "looked at"
        return self._start


@pytest.mark.parametrize("numbers", [(0, 2), (1,), (0, 1, 3), (0, 1, 2, 3), ()])
@pytest.mark.parametrize("shape", [(8, 5), (2, 8, 5)])
def test_the_bias_of_some_heads_is_selected_without_an_index(numbers: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """An index would be a copy to the device. Each of four KV heads has two query heads."""
    bias, called = torch.rand(shape), list[str]()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Noting():
        found = _bias_of(lambda _: bias, Heads(numbers=numbers, of=4), torch.arange(5))
    query_heads = [2 * head + of_two for head in numbers for of_two in (0, 1)]
    assert torch.equal(found, bias[..., query_heads, :])
    assert called and "index" not in called


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="takes the heads that stream from a cache policy"):
        check(Setup(prefill=options(), policies=RankPolicies()))
    with pytest.raises(ValueError, match="takes the heads that stream from a cache policy"):
        check(Setup(prefill=options(), policies=of_all(RazorAttention())))
    check(Setup(prefill=options(), policies=of_all(GivenHeads(table=TABLE))))


@pytest.mark.parametrize("transfer", list(Transfer))
def test_the_timeline_is_of_the_models_layers(rank_pools: RankPools, transfer: Transfer) -> None:
    """Though a layer is up to three places of a transfer, whose messages are sent one by one: exact heads', others'."""
    ids, layers = prompt(PROMPT_TOKENS), range(len(TABLE))
    for table in (TABLE, ((False, False),) * 3):
        given = "llama", [ids], (0, 20, 40, 70), of_all(GivenHeads(table=table)), 2, options(transfer=transfer)
        batch = rank_pools.run(3, policy_tasks.generate, *given, None, DecodeName.last, True)[0]
        for rank, spans in enumerate(batch.spans):
            of_kind = {kind: [span for span in spans if span.kind == kind] for kind in ("compute", "wait", "send")}
            assert {span.layer for span in of_kind["send"]} == (set(layers) if rank < 2 else set())
            computed = [span.layer for span in of_kind["compute"] if span.layer is not None]
            assert computed == sorted(computed) and set(computed) == set(layers)
            assert {span.layer for span in of_kind["wait"]} <= set(layers)
            lane = sorted((span.start_s, span.end_s) for kind in ("compute", "wait") for span in of_kind[kind])
            assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(lane)), "one thing at a time"
        per_layer = [sum(span.kind == "send" and span.layer == layer for span in batch.spans[0]) for layer in layers]
        least = 1 if transfer is Transfer.relay else 2  # to the next rank, or to each
        assert all((number > least) is any(streams) for number, streams in zip(per_layer, table, strict=True)), (
            per_layer
        )
