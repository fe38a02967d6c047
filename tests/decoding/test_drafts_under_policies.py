"""Speculation under cache policies changes no token: rejected drafts leave no trace in what policies keep and count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.adakv import AdaKV
from policies.base import Policy
from policies.expected_attention import ExpectedAttention
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.k_centers import KCenters
from policies.keyformer import Keyformer
from policies.kvzip import KVzip
from policies.pyramidinfer import PyramidInfer
from policies.quest import Quest
from policies.r_kv import RKV
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from runahead.cache.kept import KeptLayer
from runahead.config import CacheOptions, Positions, Speculate
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies
from tests.decoding.test_speculation import DRAFTED, PLAIN, PROMPTS, SAMPLED, compare, engine_of, knowing
from tests.families import prompt
from tests.policies.test_streaming_heads import duo
from tests.ranks.tasks import tiny_model

KEEPING: dict[str, list[Policy]] = {
    "snapkv": [SnapKV(budget=12, window=4)],
    "adakv": [AdaKV(scorer=SnapKV(budget=12, window=4))],
    "kvzip": [KVzip(budget=0.5)],
    "snapkv, adakv": [SnapKV(budget=20, window=4), AdaKV(scorer=SnapKV(budget=12, window=4))],
}
"""Policies that keep all generated tokens, in equal and unequal heads."""

DECIDING: dict[str, list[Policy]] = {
    "streaming_llm": [StreamingLLM(budget=10, sinks=2, evict_every=3)],
    "tova": [TOVA(budget=10)],
    "h2o": [H2O(budget=10, recent=3, evict_every=4)],
    "keyformer": [Keyformer(budget=10, recent=3, evict_every=2)],
    "scissorhands": [Scissorhands(budget=10, recent=3)],
    "k_centers": [KCenters(budget=10, recent=3, evict_every=5)],
    "r_kv": [RKV(budget=10, window=3, evict_every=4)],
    "expected_attention": [ExpectedAttention(budget=10, evict_every=4)],
    "pyramidinfer": [PyramidInfer(mean_keep=0.6, min_tokens=6, evict_every=3)],
    "adakv of h2o": [AdaKV(scorer=H2O(budget=10, recent=3)), H2O(budget=12, recent=3, evict_every=3)],
    "snapkv, tova": [SnapKV(budget=12, window=4), TOVA(budget=10)],
}
"""Policies that drop tokens while they decode, alone and in a sequence."""

BOTH = KEEPING | DECIDING


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", BOTH)
def test_tokens_are_those_without_drafts(name: str, rows: int) -> None:
    """Rows accept and end differently; policies decide inside drafts, of which some tokens are wrong.

    It fails where wrong tokens stay in a layer, in what a policy counts, or in the number of tokens since the prompt;
    where a token is dropped that a rejected one pushed out; and where drafted tokens see what earlier ones of them
    would have pushed out.
    """
    engine = engine_of(tiny_model("llama"), policies=RankPolicies.everywhere(BOTH[name]))
    options = [replace(PLAIN, max_new_tokens=num) for num in (20, 13, 17)]
    report = compare(engine, PROMPTS[:rows], options[:rows])
    assert 5 < report.accepted < report.drafted and len(report.accepted_lengths) > 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "h2o", "tova"])
def test_few_bits(name: str, rows: int) -> None:
    """Tokens leave the window inside drafts, rejected ones among them.

    It fails where a rejected token is encoded, or pushes another one out of the window, and where drafted tokens see
    others exact that earlier ones of them would have encoded.
    """
    storage = CacheOptions(bits=4, residual=8)
    policies = RankPolicies.everywhere(BOTH.get(name, []), storage=storage)
    options = [replace(PLAIN, max_new_tokens=num) for num in (60, 45, 50)]
    report = compare(engine_of(tiny_model("llama"), policies=policies), PROMPTS[:rows], options[:rows])
    assert report.accepted > 10


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "r_kv"])
def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(name: str) -> None:
    engine = engine_of(tiny_model("llama"), policies=RankPolicies.everywhere(BOTH[name]))
    compare(engine, PROMPTS, [replace(PLAIN, do_sample=True, seed=seed, **each) for seed, each in enumerate(SAMPLED)])


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o"])
@pytest.mark.sampled(6)
def test_families_under_policies(family: str, name: str) -> None:
    """Windows, soft caps, sinks, learned positions and latent attention; layers with windows keep all tokens."""
    model = tiny_model(family)
    prompts = PROMPTS[:2] if model.uneven_limit is None else [prompt(29, seed=seed) for seed in range(2)]
    engine = engine_of(model, policies=RankPolicies.everywhere(BOTH[name]))
    report = compare(engine, prompts, [replace(PLAIN, max_new_tokens=num) for num in (14, 9)])
    assert report.accepted > 3


@pytest.mark.parametrize("name", ["snapkv", "streaming_llm", "h2o"])
def test_positions_that_are_encoded_anew(name: str) -> None:
    policies = RankPolicies.everywhere(BOTH[name], positions=Positions.reencoded)
    compare(engine_of(tiny_model("llama"), policies=policies), PROMPTS[:2], [PLAIN, PLAIN])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_heads_that_stream_beside_others(share: float, tmp_path: Path) -> None:
    """Such a layer has nothing to do after most tokens, and is cut back after some."""
    model = tiny_model("llama")
    engine = engine_of(model, policies=RankPolicies.everywhere([duo(tmp_path, model, share)]))
    compare(engine, PROMPTS[:2], [replace(PLAIN, max_new_tokens=20)] * 2)


@pytest.mark.parametrize("name", ["tova", "h2o", "adakv of h2o"])
def test_what_is_kept_after_drafts_is_what_is_kept_without(name: str) -> None:
    """Also what policies count of each token, and the bytes of its memory once the room of a draft is given back."""
    model, found = tiny_model("llama"), list[list[KeptLayer]]()
    known = list[list[int]]()
    for speculates in (False, True):
        talking = Conversation(model, RankPolicies.everywhere(DECIDING[name]))
        talking.feed(torch.tensor([PROMPTS[0]]))
        with knowing(known, right=0.7):
            talking.generate(replace(DRAFTED if speculates else PLAIN, max_new_tokens=20))
        known.append(talking.rows[0])
        assert talking.cache is not None
        talking.cache.free(room=0)
        found.append(talking.cache.layers)
    assert known[0] == known[1]
    for plain, drafted in zip(*found, strict=True):
        assert torch.equal(plain.positions_BKn(), drafted.positions_BKn()) and plain.num_bytes == drafted.num_bytes
        assert torch.allclose(plain.kv_BKnX(), drafted.kv_BKnX(), atol=1e-9)
        assert plain.carried.keys() == drafted.carried.keys()
        for policy in plain.carried:
            assert torch.allclose(plain.carried_BKn(policy), drafted.carried_BKn(policy), atol=1e-9)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "pyramidinfer"])
def test_a_conversation_speculates_in_every_turn(name: str) -> None:
    """A fork that was made before an answer is not changed by its drafts."""
    model, known = tiny_model("llama"), list[list[int]]()
    turns = [torch.tensor([ids]) for ids in (PROMPTS[0], prompt(9, seed=5), prompt(4, seed=6))]
    logits = list[torch.Tensor]()
    for speculates in (False, True):
        talking = Conversation(model, RankPolicies.everywhere(BOTH[name]))
        with knowing(known):
            for ids_1C in turns:
                logits.append(talking.feed(ids_1C))
                fork = talking.fork()
                answer = talking.generate(DRAFTED if speculates else PLAIN)
                assert fork.generate(PLAIN).rows[0].new_ids == answer.rows[0].new_ids
        known.append(talking.rows[0])
        assert speculates == (talking.speculation is not None)
    assert known[0] == known[1]
    for plain_BV, drafted_BV in zip(logits[:3], logits[3:], strict=True):
        assert torch.allclose(plain_BV, drafted_BV, atol=1e-9)


def test_a_smaller_model_drafts_under_a_policy() -> None:
    model = tiny_model("llama")
    engine = engine_of(model, policies=RankPolicies.everywhere(DECIDING["h2o"]), draft=model)
    options = replace(PLAIN, speculate=Speculate.model, speculate_tokens=3, speculate_always=True)
    plain, drafted = (engine.generate(PROMPTS[:2], each) for each in (PLAIN, options))
    assert [each.new_token_ids for each in plain.generations] == [each.new_token_ids for each in drafted.generations]
    report = drafted.ranks[0].speculation
    assert report is not None and 0 < report.accepted < report.drafted


@pytest.mark.parametrize(
    ("policy", "kind", "family", "message"),
    [
        (Quest(), Speculate.lookup, "llama", "takes each token into its index before the next one asks"),
        (MiniCache(), Speculate.lookup, "llama", "merges tokens of two layers"),
        (SnapKV(), Speculate.policy, "llama", "drafts from what a policy keeps of all tokens"),
        (H2O(), Speculate.lookup, "gemma3n_text", "but 3 layers of .* read the keys and values of a whole draft"),
    ],
)
def test_what_policies_refuse(policy: Policy, kind: Speculate, family: str, message: str) -> None:
    engine = engine_of(tiny_model(family), policies=RankPolicies.everywhere([policy]))
    with pytest.raises(ValueError, match=message):
        engine.generate([[5, 6, 7]], replace(PLAIN, speculate=kind))
