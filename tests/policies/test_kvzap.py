"""KVzap: tokens are scored by what attention is given when they are computed, and dropped below a threshold."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from policies.adakv import AdaKV
from policies.base import Policy
from policies.kvzap import KVzap
from policies.layer_view import LayerView
from policies.score_maps import FILES, ScoreMaps
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, Engine, GenerationOptions, Model, PrefillOptions, Ranks, RanksOptions
from runahead.attention.base import Recording
from runahead.cache.attention import CausalAttention
from runahead.cache.kept import KeptLayer
from runahead.config import DecodeName, DecodeOptions, Device
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.thinning.ragged import RaggedLayer
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, prompt, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap, made_up_scores
from tests.policies.running import Run, prompts
from tests.policies.test_adakv import kept_by
from tests.policies.test_kvzip import Noting, attention_inputs
from tests.ranks.tasks import tiny_model

SINKS, RECENT, EVERY, THRESHOLD = 2, 5, 4, 0.5
LENGTHS = (40, 31, 6)
GENERATED = [5, 7, 11, 13]
ZAP = MadeUpKVzap(threshold=THRESHOLD, sinks=SINKS, recent=RECENT, evict_every=EVERY)


def scores_by_hand(model: Model, ids: list[int]) -> list[Tensor]:
    """Scores (K, n) of each layer, from what the family's attention modules are given."""
    with throughout(torch.float64):
        ids_1S = torch.tensor([ids])
        attention = Noting(model.empty_cache(len(ids)), start=0, pads=[0])  # which computes the last layer whole
        inputs = attention_inputs(model, attention, ids_1S)
    heads = [shape.num_kv_heads for shape in model.kv_shapes]
    return [made_up_scores(layer, heads[layer], x_SD[None])[0] for layer, x_SD in enumerate(inputs)]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.{}.self_attn"),
        ("gpt2", "transformer.h.{}.attn"),
        ("gpt_bigcode", "transformer.h.{}.attn"),
        ("deepseek_v3", "model.layers.{}.self_attn"),
        ("gemma2", "model.layers.{}.self_attn"),
        ("phi", "model.layers.{}.self_attn"),
        ("falcon", "transformer.h.{}.self_attention"),
        ("gptj", "transformer.h.{}.attn"),
        ("bloom", "transformer.h.{}.self_attention"),
    ],
)
def test_forwards_show_what_attention_is_given(family: str, name: str) -> None:
    class Shown(Recording):
        def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
            seen.append((layer, x_BCD))

    model, seen, given = tiny_model(family), list[tuple[int, Tensor]](), list[Tensor]()

    def give(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given.append(args[0] if args else keywords["hidden_states"])

    modules = [model.module.get_submodule(name.format(layer)) for layer in range(3)]
    with throughout(torch.float64):
        assert model.attention_input_dims == [32] * 3
        hooks = [module.register_forward_pre_hook(give, with_kwargs=True) for module in modules]
        model.forward(torch.tensor([prompt(9)]), Shown(start=0, pads=[0]), start=0, pads=[0])
    for hook in hooks:
        hook.remove()
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert all(torch.equal(ours, theirs) for (_, ours), theirs in zip(seen, given, strict=True))


@pytest.mark.parametrize("chunks", [None, [17, 1, 12, 10]], ids=["whole", "in chunks"])
@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_each_head_keeps_the_tokens_above_the_threshold(family: str, chunks: list[int] | None) -> None:
    """And sinks and recent ones, in each row of a padded batch, and no memory for others."""
    model = tiny_model(family)
    run, counts = Run(model, [ZAP], prompts(LENGTHS)), set[int]()
    whole = Run(model, [], prompts(LENGTHS))
    torch.testing.assert_close(run.prefill(chunks), whole.prefill(), atol=1e-9, rtol=0)
    for row, ids in enumerate(prompts(LENGTHS)):
        for layer, scores_Kn in enumerate(scores_by_hand(model, ids)):
            for head, kept in enumerate(kept_by(run, layer, row)):
                above = (scores_Kn[head] >= THRESHOLD).nonzero()[:, 0].tolist()
                always = {*range(min(SINKS, len(ids))), *range(max(0, len(ids) - RECENT), len(ids))}
                assert kept == sorted({*above, *always})
                counts.add(len(kept))
    assert len(counts) > 5
    tokens = sum(len(head) for layer in range(3) for row in range(3) for head in kept_by(run, layer, row))
    assert sum(layer.slab_TBKX.nbytes for layer in run.kept.layers) == tokens * 2 * 8 * 8
    assert all(isinstance(layer, RaggedLayer) for layer in run.kept.layers)


def test_generated_tokens_have_scores_in_a_later_turn_under_adakv() -> None:
    """Whose answers are all kept until then. Seen to fail: those of an answer were 0, which beats most logarithms."""

    class Lower(MadeUpKVzap):
        def predicted(self, view: LayerView) -> Tensor:
            return super().predicted(view) - 20

    found = []
    scorer = Lower(budget=30, sinks=2, recent=3)
    for policy in (AdaKV(scorer=scorer, alpha=1.0), replace(scorer, evict_every=1000)):
        talk = Conversation(tiny_model("llama"), RankPolicies.everywhere([policy]))
        with throughout(torch.float64):
            talk.feed(torch.tensor([prompt(60)]))
            talk.follow(torch.tensor([range(3, 27)]))
            talk.feed(torch.tensor([[9, 8, 7]]))
        assert talk.cache is not None
        found.append([layer.positions_BKn().expand(-1, 2, -1) for layer in talk.cache.layers])
    assert all(map(torch.equal, *found))
    answer = [int(((positions >= 60) & (positions < 84)).sum()) for positions in found[0]]
    assert 0 < sum(answer) < 3 * 2 * 24 / 2


def test_scores_stay_with_their_tokens_while_decoding_and_the_buffer_is_emptied() -> None:
    """Every few tokens those below the threshold that have left the recent ones are dropped, in each head."""
    model = tiny_model("llama")
    run, ids, dropped = Run(model, [ZAP], prompts(LENGTHS)[:1]), prompts(LENGTHS)[0], list[int]()
    run.prefill()
    for step in range(1, 14):
        before = [scores_of(run, layer, head) for layer in range(3) for head in range(2)]
        run.decode(GENERATED[step % 4])
        after = [scores_of(run, layer, head) for layer in range(3) for head in range(2)]
        first_recent, newest, count = 40 + step - RECENT, 39 + step, 0
        for old, new in zip(before, after, strict=True):
            below = {at for at, score in old.items() if SINKS <= at < first_recent and score < THRESHOLD}
            gone = below if step % EVERY == 0 else set()
            assert {at: score for at, score in new.items() if at != newest} == {at: old[at] for at in old.keys() - gone}
            assert newest in new
            count += len(gone)
        dropped.append(count)
    assert [count > 0 for count in dropped] == [step % EVERY == 0 for step in range(1, 14)]
    scores_Kn = scores_by_hand(model, ids)[0]  # of layer 0, whose inputs do not depend on what is dropped
    for head in range(2):
        for at, score in scores_of(run, 0, head).items():
            assert at >= 40 or score == pytest.approx(float(scores_Kn[head, at]), abs=1e-9)


def scores_of(run: Run, layer: int, head: int) -> dict[int, float]:
    """Scores that are stored with the tokens of a head of the first row, by their positions."""
    return stored_scores(run.kept.layers[layer], head, run.steps[0].state_key)


def stored_scores(layer: KeptLayer, head: int, policy: Hashable) -> dict[int, float]:
    carried_BKn, positions_BKn = layer.carried_BKn(policy), layer.positions_BKn().expand(-1, 2, -1)
    assert carried_BKn is not None
    pairs = zip(positions_BKn[0, head].tolist(), carried_BKn[0, head].tolist(), strict=True)
    return {at: score for at, score in pairs if at >= 0}


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_thresholds_below_and_above_all_scores_are_the_full_cache_and_a_window(family: str) -> None:
    model, window = tiny_model(family), StreamingLLM(budget=SINKS + RECENT, sinks=SINKS, evict_every=EVERY)
    for threshold, other in ((-1e9, None), (1e9, window)):
        policy = MadeUpKVzap(threshold=threshold, sinks=SINKS, recent=RECENT, evict_every=EVERY)
        ours, theirs = (Run(model, [each] if each is not None else [], prompts(LENGTHS)) for each in (policy, other))
        assert torch.equal(ours.prefill(), theirs.prefill())
        for a, b in zip(ours.kept.layers, theirs.kept.layers, strict=True):
            assert torch.equal(a.positions_BKn().expand(-1, 2, -1), b.positions_BKn().expand(-1, 2, -1))
        for token in GENERATED[: EVERY - 1]:  # until either is cut back again
            torch.testing.assert_close(ours.decode(token), theirs.decode(token), atol=1e-9, rtol=0)


def test_under_a_budget_adakv_shares_it_out() -> None:
    """All of it alike is the policy itself."""
    budget, model = MadeUpKVzap(budget=16, sinks=SINKS, recent=RECENT), tiny_model("llama")
    plain, alike, shared = (
        Run(model, [each], prompts(LENGTHS)) for each in (budget, AdaKV(scorer=budget, alpha=1.0), AdaKV(scorer=budget))
    )
    assert torch.equal(plain.prefill(), alike.prefill()) and shared.prefill().isfinite().all()
    for layer in range(3):
        assert [kept_by(alike, layer, row) for row in range(3)] == [kept_by(plain, layer, row) for row in range(3)]
        assert sum(map(len, kept_by(shared, layer, 0))) == 2 * 16
    assert any(len(kept_by(shared, layer, 0)[0]) != 16 for layer in range(3))
    with pytest.raises(ValueError, match="shares out its budget over heads by itself"):
        AdaKV(scorer=ZAP)


def maps_of(heads: int = 2, dim: int = 32, layers: int = 3) -> ScoreMaps:
    draw = torch.Generator().manual_seed(0)
    return ScoreMaps(
        weights={layer: torch.randn(heads, dim, generator=draw) for layer in range(layers)},
        biases={layer: torch.randn(heads, generator=draw) for layer in range(layers)},
    )


def file_with(maps: ScoreMaps, folder: Path, fingerprint: str) -> str:
    path = folder / "zap, of a model.safetensors"
    path.write_bytes(maps.packed(fingerprint))
    return str(path)


def test_the_engine_and_conversations_take_the_file_of_their_model_alone(tmp_path: Path) -> None:
    model, maps, ranks = tiny_model("llama"), maps_of(), Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    path = file_with(maps, tmp_path, model.fingerprint)
    with throughout(torch.float64):
        policies = RankPolicies.everywhere([KVzap(predictor=path, threshold=0.0, sinks=2, recent=4, evict_every=4)])
        engine = Engine(model, ranks, prefill=PrefillOptions(chunk_tokens=16), policies=policies)
        batch = engine.generate(prompts(LENGTHS), GenerationOptions(max_new_tokens=9, ignore_eos=True))
        talk = Conversation(model, policies)
        talk.feed(torch.tensor([prompts(LENGTHS)[0]]))
        assert talk.cache is not None and talk.logits_BV is not None
        assert int(talk.logits_BV.argmax()) == batch.generations[0].new_token_ids[0]
    attention = CausalAttention(model.empty_cache(40), start=0, pads=[0])
    with throughout(torch.float64):
        x_1SD = attention_inputs(model, attention, torch.tensor([prompts(LENGTHS)[0]]))[0][None]
    expected_KS = (x_1SD[0] @ maps.weights[0].double().T + maps.biases[0].double()).T
    for head in range(2):
        found = stored_scores(talk.cache.layers[0], head, (KVzap, 0))
        above = {at for at in range(40) if expected_KS[head, at] >= 0} | {0, 1, 36, 37, 38, 39}
        assert set(found) == above
        assert all(score == pytest.approx(float(expected_KS[head, at]), abs=1e-9) for at, score in found.items())
    for found_maps, fingerprint, says in (
        (maps, "0" * 32, "was made for another model; make one for this model with python -m policies.fit_kvzap"),
        (maps_of(heads=4), model.fingerprint, "is for other heads or hidden states than those of model"),
        (maps_of(dim=31), model.fingerprint, "is for other heads or hidden states than those of model"),
        (maps_of(layers=4), model.fingerprint, "is for other heads or hidden states than those of model"),
    ):
        policy = KVzap(predictor=file_with(found_maps, tmp_path, fingerprint))
        with throughout(torch.float64), pytest.raises(ValueError, match=says) as raised:
            RankPolicies.everywhere([policy]).check(model)
        assert "\n" not in str(raised.value)


def chain_of(policy: Policy, num_stages: int) -> Setup:
    policies = RankPolicies.everywhere([policy])
    return Setup(prefill=PrefillOptions(), decode=DecodeOptions(), policies=policies, num_stages=num_stages)


def test_stages_that_do_not_send_hidden_states_are_refused() -> None:
    for policy in (ZAP, MadeUpKVzap()):
        with pytest.raises(ValueError, match="use prefill=single or decode=sharded$"):
            check(chain_of(policy, 2))
        check(chain_of(policy, 1))
        check(replace(chain_of(policy, 2), decode=DecodeOptions(name=DecodeName.sharded)))


@pytest.mark.parametrize("policy", [MadeUpKVzap(), AdaKV(scorer=MadeUpKVzap())], ids=lambda each: type(each).__name__)
def test_a_model_that_hides_what_attention_is_given_is_refused(policy: Policy) -> None:
    with throughout(torch.float64):
        model = Model(build("llama"))
        model.config.hidden_size = 31  # as if no module were given hidden states
        with pytest.raises(
            ValueError, match="given hidden states, but policy .* scores tokens by these; use"
        ) as raised:
            RankPolicies.everywhere([policy]).check(model)
    assert "\n" not in str(raised.value)


GOOD = {
    "layer.0.weight": torch.ones(2, 8),
    "layer.0.bias": torch.ones(2),
    "layer.2.weight": torch.ones(1, 4),
    "layer.2.bias": torch.ones(1),
}


@pytest.mark.parametrize(
    "change",
    [
        {"layer.0.bias": None},
        {"layer.0.bias": torch.ones(3)},
        {"layer.0.weight": torch.ones(2, 8, 1)},
        {"layer.0.weight": torch.ones(2, 8).double()},
        {"layer.2.bias": torch.full((1,), torch.nan)},
        {"layer.x.bias": torch.ones(1)},
        {"more": torch.ones(1)},
        {name: None for name in GOOD},
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, change: dict[str, Tensor | None]) -> None:
    tensors: dict[str, Any] = {name: x for name, x in (GOOD | change).items() if x is not None}
    path = tmp_path / "x"
    path.write_bytes(safetensors.torch.save(tensors, metadata={"kind": FILES.kind, "fingerprint": "abc"}))
    with pytest.raises(ValueError, match="wrong names, shapes or values; make it again with") as raised:
        KVzap(predictor=str(path))
    assert f"policy.predictor={path}" in str(raised.value) and "\n" not in str(raised.value)


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(safetensors.torch.save(GOOD, metadata={"kind": FILES.kind, "fingerprint": "abc"}))
    maps = ScoreMaps.load(tmp_path / "x", "abc")
    assert {layer: tuple(x.shape) for layer, x in maps.weights.items()} == {0: (2, 8), 2: (1, 4)}
    with pytest.raises(ValueError, match="is not a file of python -m policies.fit_kvzap"):
        (tmp_path / "x").write_bytes(safetensors.torch.save(GOOD))
        ScoreMaps.load(tmp_path / "x")


def test_ranks_that_share_a_model_take_their_heads() -> None:
    maps, x_1CD = maps_of(heads=6), torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    shares = [maps.of_share(share, 3) for share in range(3)]
    for layer in range(3):
        parts = [share.scores(layer, x_1CD) for share in shares]
        assert [part.shape[1] for part in parts] == [2, 2, 2]
        torch.testing.assert_close(torch.cat(parts, dim=1), maps.scores(layer, x_1CD))


def test_options() -> None:
    for options, says in (
        ({"predictor": None}, "needs policy.predictor"),
        ({"threshold": torch.inf}, "policy.threshold=inf must be a number"),
        ({"recent": -1}, "policy.recent=-1"),
        ({"budget": 100}, "has no room for policy.sinks=4 and policy.recent=128"),
    ):
        kind = KVzap if "predictor" in options or "threshold" in options else MadeUpKVzap
        with pytest.raises(ValueError, match=says):
            kind(**{"predictor": "x"} | options)  # type: ignore[arg-type]
    assert not MadeUpKVzap().keeps_ragged and ZAP.keeps_ragged
    assert MadeUpKVzap(recent=128).recent_of(40) == 20
