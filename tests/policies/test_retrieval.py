"""Policies that keep all K,V and choose what attention sees: right whatever they choose, exact where that is all."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from policies import POLICIES
from policies.base import Policy
from policies.full import Full
from policies.infinigen import InfiniGen
from policies.pyramidinfer import PyramidInfer
from policies.retriever import Retriever
from policies.snapkv import SnapKV
from runahead.attention.base import LayerAttention
from runahead.config import GenerationOptions, Positions
from runahead.conversation import Conversation
from runahead.model.model import Model
from runahead.retrieval import indices
from runahead.retrieval.retrieval import Retrieval
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.short import short_options
from tests.ranks.tasks import tiny_model

FAMILIES = ["llama", "gpt2", "gpt_bigcode", "qwen3", "opt", "deepseek_v3", "gpt_oss", "gemma2"]
"""KV heads for two queries, for one and for all; norms of queries; no rotations; values of other width; windows."""
NAMES = [name for name, kind in POLICIES.items() if issubclass(kind, Retriever)]
ALL: dict[str, dict[str, Any]] = {name: {"fetch": 1.0, "first_layer": 0} for name in NAMES} | {
    "infinigen": {"alpha": math.inf, "max_fetch": 1.0, "first_layer": 1},
    "infllm": {"fetch": 1.0, "clamped": False},
    "em_llm": {"fetch": 1.0, "clamped": False, "events": {"by": "surprise", "least": 2, "most": 4}},
    "magicpig": {"fetch": 1.0, "dense_every": 0},
    "offload": {},
}
SOME: dict[str, dict[str, Any]] = {name: short_options(name) | {"fetch": 10} for name in NAMES} | {
    "infinigen": {"fetch": 10, "first_layer": 1},
    "shadowkv": {"fetch": 10, "page": 4, "outliers": 1, "rank": 1000},
    "sparq": {"fetch": 10, "dims": 3},
    "clusterkv": {"fetch": 10, "cluster": 4, "block": 2, "first_layer": 0},
    "squeezed_attention": {"fetch": 10, "cluster": 4, "block": 2, "first_layer": 0},
    "retroinfer": {"fetch": 10, "cluster": 4, "block": 2, "first_layer": 0},
    "retrieval_attention": {"fetch": 10, "observed": 8, "nearest": 4, "degree": 3, "width": 4, "hops": 2},
    "magicpig": {"fetch": 10, "bits": 2, "tables": 4, "dense_every": 0},
    "em_llm": {
        "fetch": 10,
        "representatives": 1,
        "observed": 8,
        "clamped": False,
        "events": {"by": "surprise", "gamma": 0.2, "least": 1, "most": 3, "refine": "modularity"},
    },
    "infllm": {"fetch": 10, "block": 2, "representatives": 1, "observed": 8, "clamped": False},
    "offload": {},
}
INDEXED = [name for name in NAMES if name != "offload"]
NUM_TOKENS = 40
PADDED = (NUM_TOKENS, 23, 7)
GENERATED = [5, 7, 11, 13]


def policy(name: str, options: dict[str, Any]) -> Policy:
    if name == "infinigen":
        options = ({} if options.get("ahead") is False else {"ahead": True, "first_ahead": 1}) | options
    always = {} if name == "offload" else {"sinks": 2, "recent": 3}
    return POLICIES[name](**(always | {"min_tokens": 0} | options))


class Turns:
    """A conversation in the model's dtype throughout."""

    def __init__(self, model: Model, policies: list[Policy], lengths: tuple[int, ...] = (NUM_TOKENS,)) -> None:
        self.model, self.lengths = model, lengths
        self.conversation = Conversation(model, RankPolicies.everywhere(policies))

    def prefill(self, chunks: list[int] | None = None) -> Tensor:
        longest = max(self.lengths)
        pads = [longest - length for length in self.lengths]
        rows = [
            [0] * pad + prompt(length, seed) for seed, (length, pad) in enumerate(zip(self.lengths, pads, strict=True))
        ]
        parts = torch.tensor(rows).split(chunks or [longest], dim=1)
        with throughout(self.model.dtype):
            for number, part in enumerate(parts, start=1):
                logits = self.conversation.feed(part, pads=pads if number == 1 else None, cut_back=number == len(parts))
        return logits

    def decode(self, tokens: list[int]) -> Tensor:
        """Logits (B, C, V) behind each of them, in every row."""
        with throughout(self.model.dtype):
            return self.conversation.follow(torch.tensor([tokens]))

    @property
    def retrieval(self) -> Retrieval:
        assert self.conversation.cache is not None and self.conversation.cache.retrieval is not None
        return self.conversation.cache.retrieval


def with_forwards_of(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model's forwards be as under this policy: of all tokens in all layers, if it asks for their logits."""
    forward = model.forward

    def of_all(*args: Any, **options: Any) -> Tensor:
        return forward(*args, **options | {"all_hidden": not options.get("all_logits")})

    if name == "em_llm":
        monkeypatch.setattr(model, "forward", of_all)


SELDOM = (
    "sparq",
    "clusterkv",
    "squeezed_attention",
    "retroinfer",
    "infllm",
    "em_llm",
    "retrieval_attention",
    "shadowkv",
)
"""Names that go with a family of each kind, and with all of them in the slow set."""
OFTEN = ("gpt_bigcode", "deepseek_v3", "gemma2")

every_name = pytest.mark.parametrize("name", NAMES)
every_case = pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[pytest.mark.slow] if name in SELDOM and family not in OFTEN else [])
        for name in NAMES
        for family in FAMILIES
    ],
)


def fit(family: str, lengths: tuple[int, ...]) -> Model:
    model = tiny_model(family)
    if len(lengths) > 1 and model.uneven_limit is not None:
        pytest.skip("its rows cannot be of different lengths")
    return model


@every_case
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
@pytest.mark.sampled(8)
def test_where_all_is_chosen_it_is_the_full_cache_bit_by_bit(
    name: str, family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fit(family, lengths)
    with_forwards_of(name, model, monkeypatch)
    ours, full = Turns(model, [policy(name, ALL[name])], lengths), Turns(model, [Full()], lengths)
    assert torch.equal(ours.prefill(), full.prefill())
    assert torch.equal(ours.decode(GENERATED), full.decode(GENERATED))
    shares = ours.retrieval.report().fetched_share
    assert set(shares) <= {1.0, None} and 1.0 in shares


@every_case
@pytest.mark.sampled(4)
def test_rows_of_a_padded_batch_are_what_they_are_alone(name: str, family: str) -> None:
    model = fit(family, PADDED)
    # Fewer than a short row has, and free for more than one: the best slots of a group's queries are needed alike.
    options: dict[str, Any] = SOME[name] | ({} if name == "offload" else {"fetch": 6, "sinks": 1, "recent": 1})
    if name == "infinigen":
        options |= {"ratio": 0.25}  # fewer columns than a short row has queries, which leave the others open
    if name in ("quest", "shadowkv"):
        options |= {"page": 1}  # pages of several tokens begin elsewhere in a padded row
    if name == "shadowkv":
        options |= {"outliers": 0}  # a page of one token is its own mean, so all are outliers alike
    together = Turns(model, [policy(name, options)], PADDED)
    logits = torch.cat([together.prefill()[:, None], together.decode(GENERATED)], dim=1)
    for row, ids in enumerate(prompt(length, seed) for seed, length in enumerate(PADDED)):
        alone = Conversation(model, RankPolicies.everywhere([policy(name, options)]))
        with throughout(model.dtype):
            first = alone.feed(torch.tensor([ids]))
            theirs = torch.cat([first[:, None], alone.follow(torch.tensor([GENERATED]))], dim=1)
        torch.testing.assert_close(logits[row], theirs[0], atol=1e-9, rtol=0)  # float64


def test_rows_that_are_retrieved_for_are_never_parted() -> None:
    """A row alone would attend to all of its tokens: what retrieves for it is of the batch."""
    both = Turns(tiny_model("llama"), [policy("quest", SOME["quest"])], (NUM_TOKENS, 7))
    both.prefill()
    cache = both.conversation.cache
    assert cache is not None
    with pytest.raises(AssertionError, match="RetrievedCache holds 2 rows, which stay together"):
        cache.split(both.conversation.pads)


@every_case
@pytest.mark.sampled(4)
def test_a_short_row_is_whole_beside_a_long_one(name: str, family: str) -> None:
    """More slots are chosen than it has tokens: it sees all of them, and no padding."""
    model, lengths = fit(family, (NUM_TOKENS, 7)), (NUM_TOKENS, 7)
    ours, full = (
        Turns(model, [policy(name, SOME[name] | ({} if name == "offload" else {"fetch": 16}))], lengths),
        Turns(model, [Full()], lengths),
    )
    ours.prefill(), full.prefill()
    torch.testing.assert_close(ours.decode(GENERATED)[1], full.decode(GENERATED)[1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", INDEXED)
def test_of_few_tokens_all_are_seen_and_later_all_are_known(name: str) -> None:
    """The index takes in what came before it was needed: from then on it is as if it had been there from the start."""
    late, full = (
        Turns(tiny_model("llama"), [each]) for each in (policy(name, SOME[name] | {"min_tokens": 43}), Full())
    )
    late.prefill(), full.prefill()
    assert torch.equal(late.decode(GENERATED[:3]), full.decode(GENERATED[:3]))
    found = late.retrieval.layers[-1]
    assert found is not None and found.steps == 0
    assert (late.decode([11, 13]) - full.decode([11, 13])).abs().max() > 1e-3
    assert found.index.num_slots == NUM_TOKENS + 5 and found.steps == 2


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.sampled(3)
def test_what_is_left_out_shows(name: str) -> None:
    ours, full = Turns(tiny_model("llama"), [policy(name, SOME[name])]), Turns(tiny_model("llama"), [Full()])
    ours.prefill(), full.prefill()
    assert (ours.decode(GENERATED) - full.decode(GENERATED)).abs().max() > 0.01


@every_name
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode"])
@pytest.mark.sampled(4)
def test_chunks_of_a_prompt_do_not_matter(name: str, family: str) -> None:
    options = SOME[name] | ({"observed": 8} if name in ("infinigen", "squeezed_attention", "infllm") else {})
    pieces_do_not_matter(tiny_model(family), policy(name, options))


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("name", ["exact_topk", "infinigen"])
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), (NUM_TOKENS, 38)], ids=["alone", "padded"])
def test_chunks_of_a_prompt_do_not_matter_to_a_full_pool(name: str, victim: str, lengths: tuple[int, ...]) -> None:
    """Seen to fail: the last tokens, whose queries decide who stays, were those of the last piece alone."""
    model = tiny_model("llama")
    pool = {"bytes": 20 * 3 * model.kv_shapes[0].bytes_per_token(len(lengths)), "victim": victim}
    more = {"observed": 8} if name == "infinigen" else {}
    pieces_do_not_matter(model, policy(name, SOME[name] | {"pool": pool} | more), lengths)


def pieces_do_not_matter(model: Model, one: Policy, lengths: tuple[int, ...] = (NUM_TOKENS,)) -> None:
    """Also where the last piece has few of the tokens whose queries count."""
    whole = Turns(model, [one], lengths)
    first, answer = whole.prefill(), whole.decode(GENERATED)
    for chunks in ([17, 1, 12, 10], [32, 5, 2, 1]):
        pieces = Turns(model, [one], lengths)
        torch.testing.assert_close(first, pieces.prefill(chunks), atol=1e-9, rtol=0)
        torch.testing.assert_close(answer, pieces.decode(GENERATED), atol=1e-9, rtol=0)


@every_name
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), PADDED], ids=["alone", "padded"])
@pytest.mark.sampled(3)
def test_another_turn_sees_everything(name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt attends to all K,V; only single tokens are retrieved for."""
    with_forwards_of(name, tiny_model("llama"), monkeypatch)
    ours, full = (Turns(tiny_model("llama"), [each], lengths) for each in (policy(name, SOME[name]), Full()))
    more = torch.tensor([prompt(9, seed=5)])
    for turns in (ours, full):
        turns.prefill()
    with throughout(torch.float64):
        assert torch.equal(ours.conversation.feed(more), full.conversation.feed(more))
    ours.decode(GENERATED)
    found = ours.retrieval.layers[-1]
    assert found is not None and found.index.num_slots == NUM_TOKENS + 9 + len(GENERATED)


def test_exact_top_k_is_attention_to_the_keys_with_the_highest_scores() -> None:
    """Against weights written out: of each KV head the slots that one of its queries needs most."""
    model = tiny_model("llama")
    turns = Turns(model, [policy("exact_topk", {"fetch": 12})])
    turns.prefill()
    cache, retrieval, layer = turns.conversation.cache, turns.retrieval, 1
    assert cache is not None
    q_BNH = torch.randn(1, 4, model.kv_shapes[layer].key_dim, dtype=torch.float64, generator=torch.manual_seed(3))
    fetched = retrieval.fetched(layer, q_BNH.unsqueeze(2), NUM_TOKENS, [0], room=1)
    assert fetched is not None and fetched.slots_BKm is not None
    k_BKnH, _ = cache.layers[layer].slab().read(0, NUM_TOKENS)
    scores = torch.einsum("kgh,knh->kgn", q_BNH[0].unflatten(0, (2, 2)), k_BKnH[0]) * q_BNH.shape[-1] ** -0.5
    need = (scores - scores.amax(-1, keepdim=True)).amax(1)
    for head, slots in enumerate(fetched.slots_BKm[0].tolist()):
        always = {0, 1, 37, 38, 39}
        best = [slot for slot in need[head].argsort(descending=True).tolist() if slot not in always][:7]
        assert set(slots) == always | set(best)
    slab = fetched.slab(model.kv_shapes[layer].key_dim)
    for head, slots in enumerate(fetched.slots_BKm[0].tolist()):
        for place, slot in enumerate(slots):
            assert torch.equal(slab.slab_TBKX[place, 0, head], cache.layers[layer].slab_TBKX[slot, 0, head])


def test_a_smaller_alpha_fetches_less() -> None:
    shares: list[float] = []
    for alpha in (0.0, 0.5, 2.0, 8.0, math.inf):
        turns = Turns(
            tiny_model("llama"),
            [
                InfiniGen(
                    min_tokens=0,
                    ahead=True,
                    first_ahead=1,
                    alpha=alpha,
                    max_fetch=1.0,
                    first_layer=1,
                    sinks=1,
                    recent=1,
                )
            ],
        )
        turns.prefill()
        turns.decode(GENERATED)
        shares.append(turns.retrieval.report().mean_fetched_share or 0.0)
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] == 1.0


@pytest.mark.parametrize("max_fetch", [0.25, 0.5])
def test_no_more_than_the_cap_is_fetched(max_fetch: float) -> None:
    turns = Turns(
        tiny_model("llama"),
        [
            InfiniGen(
                min_tokens=0,
                ahead=True,
                first_ahead=1,
                alpha=math.inf,
                max_fetch=max_fetch,
                first_layer=1,
                sinks=1,
                recent=1,
            )
        ],
    )
    turns.prefill()
    turns.decode(GENERATED)
    shares = [share for share in turns.retrieval.report().fetched_share if share is not None]
    assert max(shares) <= max_fetch and min(shares) > max_fetch - 1 / NUM_TOKENS


@pytest.mark.parametrize("skew", ["auto", "none"])
def test_all_columns_find_what_the_exact_scores_find(skew: str) -> None:
    """Skewing turns queries and keys alike: with all columns, and the layer's own queries, nothing is lost."""
    ours, exact = (
        Turns(tiny_model("llama"), [each])
        for each in (
            InfiniGen(
                min_tokens=0,
                skew=skew,
                ratio=1.0,
                fetch=12,
                first_layer=0,
                ahead=False,
                sinks=2,
                recent=3,
            ),
            policy("exact_topk", {"fetch": 12}),
        )
    )
    ours.prefill(), exact.prefill()
    torch.testing.assert_close(ours.decode(GENERATED), exact.decode(GENERATED), atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_predicted_from_a_layers_own_input_are_its_queries(family: str) -> None:
    model = tiny_model(family)
    prediction, seen = model.query_prediction, []

    class Compared(LayerAttention):
        def see_input(self, layer: int, given: Any) -> None:
            self.expected = prediction.queries(layer, given)

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: Any) -> Tensor:
            torch.testing.assert_close(self.expected, q, atol=1e-9, rtol=0)
            seen.append(layer)
            return q.new_zeros(*q.shape[:3], v.shape[-1])

    with throughout(model.dtype):
        model.forward(torch.tensor([[4]]), Compared(start=9, pads=[0]), start=9, pads=[0])
    assert seen == list(range(model.num_layers))


def test_an_index_is_made_anew_where_decoding_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations take queries elsewhere. With all columns any basis finds the same, made anew or not."""
    monkeypatch.setattr(indices, "DECODED_SOON", 4)
    ours, exact = (
        Turns(tiny_model("llama"), [each])
        for each in (
            InfiniGen(min_tokens=0, ratio=1.0, fetch=12, first_layer=0, ahead=False, sinks=2, recent=3),
            policy("exact_topk", {"fetch": 12}),
        )
    )
    ours.prefill(), exact.prefill()
    before = [layer.index for layer in ours.retrieval.layers if layer is not None]
    torch.testing.assert_close(ours.decode(GENERATED), exact.decode(GENERATED), atol=1e-9, rtol=0)
    assert [layer.age for layer in ours.retrieval.layers if layer is not None] == [4, 4, 4]
    torch.testing.assert_close(ours.decode(GENERATED), exact.decode(GENERATED), atol=1e-9, rtol=0)
    layers = [layer for layer in ours.retrieval.layers if layer is not None]
    assert [layer.age for layer in layers] == [4, 3, 2]  # made anew behind 4, 5 and 6 tokens
    assert all(layer.index is not old for layer, old in zip(layers, before, strict=True))
    assert all(layer.index.num_slots == NUM_TOKENS + 8 for layer in layers)


def test_queries_that_made_an_index_are_turned_as_far_as_decoding_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "DECODED_SOON", 4)
    turns = Turns(
        tiny_model("llama"),
        [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=12, sinks=2, recent=3, observed=8)],
    )
    turns.prefill()
    found, rotary = turns.retrieval.layers[0], turns.model.rotaries[0]
    assert found is not None and found.observed_BNoH is not None
    before_BNoH = found.observed_BNoH
    assert before_BNoH.shape[2] == 2
    turns.decode([*GENERATED, 17])
    by_Bo = torch.full((1, 2), 4)
    torch.testing.assert_close(found.observed_BNoH, rotary.turned(before_BNoH, by_Bo), atol=1e-9, rtol=0)


def test_without_rotations_the_basis_is_in_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a fraction of the query weights predicts, and the same slots are found."""
    model = tiny_model("opt")
    folded = Turns(model, [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=10, ratio=0.5, sinks=2, recent=3)])
    folded.prefill()
    weights = [layer.folded for layer in folded.retrieval.layers if layer is not None]
    heads, dim = model.kv_shapes[0].num_kv_heads, model.kv_shapes[0].key_dim
    for each in weights:
        assert each is not None and each.num_bytes == heads * dim // 2 * (model.config.hidden_size + 1) * 8
    logits = folded.decode(GENERATED)
    monkeypatch.setattr(type(model.query_prediction), "folded", lambda *_: None)
    plain = Turns(model, [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=10, ratio=0.5, sinks=2, recent=3)])
    plain.prefill()
    torch.testing.assert_close(logits, plain.decode(GENERATED), atol=1e-9, rtol=0)
    turns = Turns(
        tiny_model("llama"),
        [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=10, ratio=0.5, sinks=2, recent=3)],
    )
    turns.prefill()
    assert all(layer.folded is None for layer in turns.retrieval.layers if layer is not None)


def test_projections_that_are_linear_are_computed_alone() -> None:
    """Else the model's whole projection runs, which gives the same and costs more."""
    for family, alone in (("llama", True), ("qwen3", True), ("opt", True), ("gpt2", False)):
        projections = tiny_model(family).query_prediction._projections
        assert all((projection is not None) is alone for projection in projections), family


@pytest.mark.parametrize("name", ["variance_epsilon", "eps"])
def test_rms_norms_are_known_by_what_they_compute(name: str) -> None:
    """Whatever their eps is called; one whose eps is another number than it says runs as the model's own code."""
    with throughout(torch.float32):
        for told in (None, 0.5):
            module = build("llama", dtype=torch.float32)
            for norm in module.modules():
                if hasattr(norm, "variance_epsilon"):
                    eps = vars(norm).pop("variance_epsilon")
                    norm.forward = partial(_normed, norm, eps)  # type: ignore[method-assign]
                    setattr(norm, name, told or eps)
            found = {each.eps for each in Model(module).query_prediction._projections if each is not None}
            assert found == {1e-6 if told is None else None}


def _normed(norm: Any, eps: float, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def test_the_device_holds_partial_keys_and_what_was_fetched() -> None:
    model = tiny_model("llama")
    turns = Turns(
        model,
        [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, ratio=0.25, fetch=10, first_layer=1, sinks=2, recent=3)],
    )
    turns.prefill()
    turns.decode(GENERATED)
    cache, shape = turns.conversation.cache, model.kv_shapes[0]
    assert cache is not None
    columns, slots = round(0.25 * shape.key_dim), cache.layers[0].num_slots
    room = 45 + 45 // 8  # it grew once, by an eighth
    index_bytes = 2 * 8 * shape.num_kv_heads * columns * (min(room, 46) + 2 * shape.key_dim)
    kept = turns.retrieval
    assert sum(layer.index.num_bytes for layer in kept.layers if layer) == pytest.approx(index_bytes, rel=0.15)
    assert kept.peak_fetched_bytes == 11 * shape.bytes_per_token()  # of one layer: on a CPU nothing is under way
    in_pool = sum(layer.slab_TBKX.nbytes for layer in cache.layers[1:])
    assert cache.retrieval.host_bytes == in_pool >= 2 * slots * shape.bytes_per_token()
    positions = sum(layer.positions_TBK.nbytes for layer in cache.layers)
    assert cache.num_bytes == cache.layers[0].slab_TBKX.nbytes + positions + kept.num_bytes


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
@pytest.mark.parametrize("lengths", [(NUM_TOKENS,), (NUM_TOKENS, 33)], ids=["alone", "padded"])
def test_a_full_pool_gives_up_as_many_tokens_as_come_and_no_sink(victim: str, lengths: tuple[int, ...]) -> None:
    model, limit = tiny_model("llama"), 20
    per_slot = 2 * model.kv_shapes[0].bytes_per_token(len(lengths))
    pool = {"bytes": limit * per_slot, "victim": victim}
    turns = Turns(
        model,
        [InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=8, first_layer=1, sinks=2, recent=3, pool=pool)],
        lengths,
    )
    turns.prefill()
    turns.decode(GENERATED * 3)
    cache, seen = turns.conversation.cache, NUM_TOKENS + 12
    assert cache is not None
    assert turns.retrieval.report().evicted == [0, seen - limit, seen - limit]
    assert cache.layers[0].num_slots == seen
    for layer in cache.layers[1:]:
        assert layer.slab_TBKX.shape[0] == limit
        for row, length in enumerate(lengths):
            for positions in layer.positions_BKn()[row].tolist():
                assert len(set(positions)) == limit
                assert {0, 1, *range(length + 12 - 3, length + 12)} <= set(positions)
                if victim == "fifo":
                    assert sorted(positions)[2:] == list(range(length + 12 - limit + 2, length + 12))
    for found in turns.retrieval.layers[1:]:
        assert found is not None and found.index.num_slots == limit


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
def test_a_turn_retrieves_from_a_full_pool_which_is_cut_back_after_it(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all is fetched, as a turn that attends to everything; a turn of one token as a generated one."""
    model = tiny_model("llama")
    monkeypatch.setattr(model, "last_layer", None)  # as turns that retrieve have it
    pool = {"bytes": 20 * 3 * model.kv_shapes[0].bytes_per_token(len(PADDED)), "victim": victim}

    def answered(**options: Any) -> Turns:
        turns = Turns(model, [policy("exact_topk", {"pool": pool, **options})], PADDED)
        turns.prefill()
        turns.decode(GENERATED)
        return turns

    def fed(turns: Turns, *tokens: int) -> Tensor:
        with throughout(torch.float64):
            return turns.conversation.feed(torch.tensor([tokens]))

    ours, all_seen = (answered(fetch=1.0, turn_tokens=turn_tokens) for turn_tokens in (9, 0))
    assert torch.equal(fed(ours, 5, 7, 11), fed(all_seen, 5, 7, 11))
    steps = [[found.steps for found in each.retrieval.layers if found] for each in (ours, all_seen)]
    assert steps == [[5] * 3, [4] * 3]
    for kept, expected in zip(ours.conversation.cache.layers, all_seen.conversation.cache.layers, strict=True):
        assert kept.num_slots == 20 and torch.equal(kept.positions_BKn(), expected.positions_BKn())
    assert torch.equal(ours.decode(GENERATED), all_seen.decode(GENERATED))
    turn, generated = answered(fetch=8, turn_tokens=1), answered(fetch=8)
    torch.testing.assert_close(fed(turn, 5), generated.decode([5])[:, -1], atol=1e-9, rtol=0)


def test_the_index_of_a_full_pool_is_of_the_keys_that_are_in_it() -> None:
    model = tiny_model("llama")
    pool = {"bytes": 20 * 2 * model.kv_shapes[0].bytes_per_token(1)}
    policy = InfiniGen(
        min_tokens=0,
        ahead=True,
        first_ahead=1,
        fetch=8,
        ratio=1.0,
        skew="none",
        first_layer=1,
        sinks=2,
        recent=3,
        pool=pool,
    )
    turns = Turns(model, [policy])
    turns.prefill()
    turns.decode(GENERATED * 3)
    cache = turns.conversation.cache
    assert cache is not None
    for layer, found in enumerate(turns.retrieval.layers):
        if found is not None:
            k_BKnH, _ = cache.layers[layer].slab().read(0, 20)
            q_BNH = torch.randn(1, 4, k_BKnH.shape[3], dtype=torch.float64, generator=torch.manual_seed(1))
            expected = q_BNH.unflatten(1, (2, 2)) @ k_BKnH.mT * k_BKnH.shape[3] ** -0.5
            torch.testing.assert_close(found.index.scores(q_BNH), expected, atol=1e-6, rtol=0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", ["fifo", "lru", "counter"])
def test_a_pool_with_room_for_all_gives_up_nothing(victim: str) -> None:
    model, pool = tiny_model("llama"), {"bytes": "1MiB", "victim": victim}
    options = SOME["infinigen"]
    ours, free = (Turns(model, [policy("infinigen", each)]) for each in (options | {"pool": pool}, options))
    ours.prefill(), free.prefill()
    assert torch.equal(ours.decode(GENERATED), free.decode(GENERATED))
    assert ours.retrieval.report().evicted == [0, 0, 0]


def test_behind_a_policy_that_narrows_all_that_is_left_is_retrieved_from() -> None:
    model = tiny_model("llama")
    narrowed = PyramidInfer(mean_keep=0.6, min_tokens=8)
    ours, alone = Turns(model, [narrowed, policy("infinigen", ALL["infinigen"])]), Turns(model, [narrowed])
    torch.testing.assert_close(ours.prefill(), alone.prefill(), atol=1e-9, rtol=0)
    assert ours.conversation.kept_tokens == alone.conversation.kept_tokens
    assert min(ours.conversation.kept_tokens) < NUM_TOKENS
    torch.testing.assert_close(ours.decode([5]), alone.decode([5]), atol=1e-9, rtol=0)


def test_sampled_steps_tell_how_much_attention_was_seen() -> None:
    masses = {}
    for name in ("infinigen", "exact_topk"):
        turns = Turns(tiny_model("llama"), [policy(name, SOME[name] | {"sample_every": 2, "first_layer": 1})])
        turns.prefill()
        turns.decode(GENERATED)
        report = turns.retrieval.report()
        assert report.hit_mass[0] is None
        masses[name] = [mass for mass in report.hit_mass if mass is not None]
        assert all(len(layer.hit_mass) == 2 for layer in turns.retrieval.layers if layer is not None)
    assert all(0 < mass <= 1 for each in masses.values() for mass in each)
    assert sum(masses["exact_topk"]) > sum(masses["infinigen"])


def test_generating_goes_through_retrieval() -> None:
    turns = Turns(tiny_model("llama"), [policy("infinigen", SOME["infinigen"])])
    turns.prefill()
    with throughout(torch.float64):
        turns.conversation.generate(GenerationOptions(max_new_tokens=5, ignore_eos=True))
    assert [layer.steps for layer in turns.retrieval.layers if layer is not None] == [4, 4]


@pytest.mark.parametrize(
    ("device", "ahead", "predicts"),
    [("cpu", None, False), ("cuda", None, True), ("cpu", True, True), ("cuda", False, False)],
)
def test_queries_are_predicted_where_kv_have_to_travel_or_it_is_asked_for(
    device: str, ahead: bool | None, predicts: bool
) -> None:
    assert InfiniGen(ahead=ahead).looks_ahead_on(torch.device(device)) is predicts


def test_in_the_hosts_own_memory_layers_choose_by_their_own_queries() -> None:
    turns = {
        ahead: Turns(tiny_model("llama"), [policy("infinigen", SOME["infinigen"] | {"ahead": ahead})])
        for ahead in (None, False, True)
    }
    for each in turns.values():
        each.prefill()
    default, own, predicted = (turns[ahead].decode(GENERATED) for ahead in (None, False, True))
    assert torch.equal(default, own)
    assert not torch.equal(default, predicted)


@pytest.mark.parametrize(
    ("policies", "positions", "message"),
    [
        ([InfiniGen(), SnapKV(budget=64)], Positions.original, "last step of a sequence"),
        ([InfiniGen(), InfiniGen()], Positions.original, "only one"),
        ([InfiniGen()], Positions.reencoded, "positions=original"),
    ],
)
def test_what_cannot_be_combined_is_refused(policies: list[Policy], positions: Positions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankPolicies.everywhere(policies, positions).check(tiny_model("llama"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "policy.ratio=0.0 must be above 0"),
        ({"max_fetch": 1.5}, "policy.max_fetch=1.5"),
        ({"alpha": -1.0}, "policy.alpha=-1.0"),
        ({"alpha": math.nan}, "policy.alpha=nan"),
        ({"fetch": 0}, "policy.fetch=0"),
        ({"first_ahead": 0}, "policy.first_ahead=0"),
        ({"sinks": -1}, "policy.sinks=-1"),
        ({"observed": 0}, "policy.observed=0"),
        ({"pool": {"bytes": "3 apples"}}, "policy.pool.bytes=3 apples is no size"),
        ({"pool": {"bytes": 0}}, "policy.pool.bytes=0 is no size"),
        ({"pool": {"victim": "random"}}, "policy.pool.victim=random is not one of fifo, lru, counter"),
        ({"pool": {"victim": "lru"}}, "policy.pool.victim=lru is the token .* set policy.pool.bytes"),
        ({"pool": "max"}, r"policy.pool=max must have bytes, victim only, as in policy\.pool\.bytes=2GiB$"),
        ({"skew": "not_there.safetensors"}, "there is no such file"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfiniGen(**options)


def test_a_pool_too_small_for_what_always_stays_is_refused() -> None:
    turns = Turns(tiny_model("llama"), [InfiniGen(pool={"bytes": 1000})])
    with pytest.raises(ValueError, match=r"policy.pool.bytes=1000 holds \d+ tokens"):
        turns.prefill()


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_free_with_the_conversation(name: str) -> None:
    """Keys, values and indices do not wait until garbage is collected; of a fork neither."""
    turns = Turns(tiny_model("llama"), [policy(name, SOME[name])])
    turns.prefill()
    turns.decode(GENERATED[:2])
    fork = turns.conversation.fork()
    stores = [turns.conversation.cache, fork.cache]
    held = [weakref.ref(each) for store in stores for each in store.layers]
    held += [weakref.ref(each.index) for store in stores for each in store.retrieval.layers if each is not None]
    gc.collect()
    gc.disable()
    try:
        del turns, fork, stores
        assert len(held) >= 2 * 2 * 2 and not any(each() for each in held)
    finally:
        gc.enable()


class SettleCounts:
    """A gathering of one rank that counts the waits."""

    num_waits = 0

    def __call__(self, own: Tensor) -> Tensor:
        return own.unsqueeze(0)

    def await_device(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize(
    "name, options, waits",
    [
        ("exact_topk", {}, False),
        ("exact_topk", {"late": 0.5}, True),
        ("exact_topk", {"sample_every": 1}, True),
        ("squeezed_attention", {"observed": 8, "coarse": 2, "fetch": None}, True),
    ],
    ids=["plain", "late", "sampled", "coarse clusters"],
)
def test_exchanges_are_awaited_before_the_host_asks_the_device(name: str, options: dict[str, Any], waits: bool) -> None:
    """A host that waits for a GPU behind messages of other ranks would not see that one of them is gone."""
    turns, gather = (
        Turns(tiny_model("llama"), [policy(name, SOME[name] | {"sample_every": 0} | options)]),
        SettleCounts(),
    )
    turns.prefill()
    assert turns.conversation.cache is not None
    turns.conversation.cache.await_device_by(gather.await_device)
    turns.decode(GENERATED)
    assert (gather.num_waits > 0) == waits
