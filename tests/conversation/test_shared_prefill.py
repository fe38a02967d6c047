"""One prefill for several conversations: bit for bit what each of them computes alone, under every policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies import POLICIES
from policies.adakv import AdaKV
from policies.em_llm import EMLLM
from policies.h2o import H2O
from policies.keyformer import Keyformer
from policies.kvzip import KVzip
from policies.snapkv import SnapKV
from runahead.attention.probabilities import QuerySignals
from runahead.config import CacheOptions, Positions
from runahead.conversation import Conversation
from runahead.conversation.shared_prefill import feed_all, may_share_prefill
from runahead.model.model import Model
from runahead.retrieval.cache import RetrievedCache
from runahead.thinning import replay
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, build, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.running import STREAMING
from tests.ranks.tasks import tiny_model

OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4, "budget": 0.4},
    "pyramidkv": {"window": 4, "budget": 0.4},
    "infinigen": {"min_tokens": 0, "observed": 16, "max_fetch": 0.3},
    "quest": {"min_tokens": 0, "page": 4, "fetch": 0.3},
    "infllm": {"recent": 16},
    "exact_topk": {"min_tokens": 0, "fetch": 0.3},
    "razor_attention": {"recent": 12, "evict_every": 4},
    "duo_attention": {"sinks": 4, "recent": 12, "evict_every": 4},
}
"""Options where the defaults would keep all of a short prompt."""
CONTEXT = 60


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(build("llama", dtype=torch.float32, eos_token_id=None))


def policies_of(name: str) -> RankPolicies:
    """Policies of the name "snapkv" or "snapkv in 4 bits"."""
    name, _, bits = name.partition(" in ")
    storage = CacheOptions(bits=int(bits[0]), residual=8) if bits else CacheOptions()
    if name == "full":
        return RankPolicies(storage=storage)
    if name == "adakv":  # heads of different lengths
        return RankPolicies.everywhere([AdaKV(scorer=SnapKV(budget=0.4, window=4))])
    if name == "kvzap":
        return RankPolicies.everywhere([MadeUpKVzap(budget=0.4, recent=4)])
    kind: type[Any] = STREAMING.get(name) or POLICIES[name]
    budget = {"budget": 0.4} if "budget" in kind.__dataclass_fields__ and name not in ("pyramidinfer",) else {}
    return RankPolicies.everywhere([kind(**budget | OPTIONS.get(name, {}))], storage=storage)


def ids(count: int, model: Model) -> torch.Tensor:
    return torch.randint(model.vocab_size, (1, count), generator=torch.Generator().manual_seed(3))


def test_every_policy_but_those_that_narrow_shares_a_prefill_bit_for_bit(model: Model) -> None:
    names = [name for name in POLICIES if name != "dms" and may_share_prefill(policies_of(name))]
    assert set(POLICIES) - set(names) == {"pyramidinfer", "infllm", "em_llm", "dms"}  # this model marks no tokens
    names += ["full in 4 bits", "h2o in 2 bits"]
    together = [Conversation(model, policies_of(name)) for name in names]
    seconds = feed_all(together, ids(CONTEXT, model))
    assert len(seconds) == len(names) and all(each > 0 for each in seconds)
    turn, answer = ids(5, model), ids(7, model)
    kept = {}
    for name, shared in zip(names, together, strict=True):
        alone = Conversation(model, policies_of(name))
        alone.feed(ids(CONTEXT, model))
        assert alone.logits_BV is not None and shared.logits_BV is not None
        assert torch.equal(alone.logits_BV, shared.logits_BV), name
        assert (alone.rows, alone.pads, alone.num_tokens) == (shared.rows, shared.pads, shared.num_tokens)
        assert (alone.kept_tokens, alone.kv_bytes) == (shared.kept_tokens, shared.kv_bytes), name
        assert alone.cache is not None and shared.cache is not None
        for one, other in zip(alone.cache.layers, shared.cache.layers, strict=True):
            assert torch.equal(one.kv_BKnX(), other.kv_BKnX()), name
            assert torch.equal(one.positions_BKn(), other.positions_BKn()), name
        for conversation in (alone, shared):  # what the policy remembers shows in what it does next
            conversation.feed(turn, cut_back=False)
        assert torch.equal(alone.follow(answer), shared.follow(answer)), name
        assert alone.kept_tokens == shared.kept_tokens, name
        kept[name] = shared
    seen = kept["quest"].cache
    assert isinstance(seen, RetrievedCache) and (seen.retrieval.report().mean_fetched_share or 1.0) < 0.6
    assert kept["snapkv"].kept_tokens != kept["full"].kept_tokens
    for name in names[-2:]:
        cache = kept[name].cache
        assert cache is not None
        assert all(layer.codes is not None for layer in cache.layers)
    assert kept["adakv"].cache is not None
    assert any(isinstance(layer, RaggedLayer) for layer in kept["adakv"].cache.layers)


def test_conversations_of_a_hybrid_have_states_of_their_own() -> None:
    """Seen to fail: a later turn from no state, and from one that another conversation has changed."""
    model = tiny_model("qwen3_next")
    names = ["full", "snapkv", "quest"]
    with throughout(model.dtype):
        together = [Conversation(model, policies_of(name)) for name in names]
        feed_all(together, ids(CONTEXT, model))
        for name, shared in zip(names, together, strict=True):
            alone = Conversation(model, policies_of(name))
            alone.feed(ids(CONTEXT, model))
            for conversation in (alone, shared):
                conversation.feed(ids(5, model))
            assert alone.logits_BV is not None and shared.logits_BV is not None
            assert torch.equal(alone.logits_BV, shared.logits_BV), name


def test_a_long_text_under_longrope_goes_on_from_what_was_shared() -> None:
    """It is computed anew where it crosses the threshold, and not where it has crossed before."""
    model = tiny_model("phi3_longrope")
    for num, long_rows in ((ROPE_THRESHOLD - 3, set()), (ROPE_THRESHOLD + 8, {0})):
        shared, alone = (Conversation(model, policies_of("snapkv")) for _ in range(2))
        with throughout(model.dtype):
            feed_all([shared], ids(num, model))
            alone.feed(ids(num, model))
            assert shared.long_rows == alone.long_rows == long_rows
            assert torch.equal(alone.follow(ids(7, model)), shared.follow(ids(7, model)))
        assert alone.kept_tokens == shared.kept_tokens


def test_conversations_do_not_write_into_each_others_memory(model: Model) -> None:
    first, second = (Conversation(model, policies_of("h2o")) for _ in range(2))
    feed_all([first, second], ids(CONTEXT, model))
    before = second.fork().follow(ids(6, model))
    first.feed(ids(20, model))
    first.follow(ids(20, model))
    assert torch.equal(second.follow(ids(6, model)), before)


def test_what_several_policies_ask_is_computed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question has one key: without noise in it `keyformer` has `h2o`'s sums, without weights KVzip+'s."""
    each = [policy for share in (0.3, 0.6) for policy in (H2O(budget=share), Keyformer(budget=share))]
    each += [KVzip(budget=0.3), KVzip(budget=0.6), KVzip(budget=0.3, plus=True)]
    together = [Conversation(model, RankPolicies.everywhere([policy])) for policy in each]
    counted: list[str] = []

    def count(owner: object, name: str) -> None:
        whole = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            counted.append(name)
            return whole(*given, **more)

        monkeypatch.setattr(owner, name, call)

    count(QuerySignals, "_sum_over")
    count(replay, "score_prompt")
    feed_all(together, ids(CONTEXT, model))
    assert (counted.count("_sum_over"), counted.count("score_prompt")) == (2 * model.num_layers, 2)
    kept = []
    for policy, shared in zip(each, together, strict=True):
        alone = Conversation(model, RankPolicies.everywhere([policy]))
        alone.feed(ids(CONTEXT, model))
        assert alone.cache is not None and shared.cache is not None
        of_layers = list(zip(alone.cache.layers, shared.cache.layers, strict=True))
        assert all(torch.equal(one.positions_BKn(), other.positions_BKn()) for one, other in of_layers), policy
        kept.append([layer.positions_BKn().tolist() for layer in shared.cache.layers])
    assert kept[0] != kept[1] and kept[4] != kept[6]


def test_reencoded_positions_and_narrowing_need_a_prefill_of_their_own(model: Model) -> None:
    policies = policies_of("window")
    assert may_share_prefill(policies) and not may_share_prefill(policies_of("pyramidinfer"))
    by_events = RankPolicies.everywhere([EMLLM(clamped=False)])  # all logits of the prompt, for its own seconds
    assert by_events.clamped_to is None and not may_share_prefill(by_events)
    reencoded = RankPolicies.everywhere(policies.last, Positions.reencoded)
    assert not may_share_prefill(reencoded)
    with pytest.raises(AssertionError):
        feed_all([Conversation(model, reencoded)], ids(8, model))


def test_mistakes_are_told_as_by_feed(model: Model) -> None:
    with pytest.raises(ValueError, match="token ids must be in"):
        feed_all([Conversation(model)], torch.tensor([[model.vocab_size]]))
