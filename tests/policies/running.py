"""One process, one model, a policy: prompts in chunks, then tokens that are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.adakv import AdaKV
from policies.base import ModelFacts, Policy
from policies.duo_attention import DuoAttention
from policies.experiments.dms import DMS
from policies.layer_view import Phase
from policies.razor_attention import RazorAttention
from policies.scorer import Scorer
from policies.streaming_heads import StreamingHeads
from runahead import Conversation, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks, RanksOptions
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.config import DecodeName, Device, Positions, PrefillName
from runahead.model.model import Model
from runahead.report import GenerationBatch
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.policy_hook import attention_under
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.replay import decide_on_prompt
from runahead.thinning.steps import PolicySteps
from tests.conftest import RankPools
from tests.families import build, largest_difference, prompt, throughout
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

ByHand = Callable[[str, tuple[int, ...]], tuple[Tensor, Any]]
"""(family, ids) -> logits (S, V) of a text, by a test's own computation in float64, and whatever else it finds."""

MARKED_TOKENS, GENERATED = 40, [5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
ROUNDING = 1e-9


def model_with(kv_heads: int) -> Model:
    """A tiny Llama with so many KV heads, in float64."""
    module = build("llama", num_key_value_heads=kv_heads)
    with throughout(torch.float64):
        return Model(module)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """A prompt of each length."""
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


class Run:
    """Left-padded prompts through a model whose cache the steps cut back. Logits (B, V) in the model's dtype."""

    def __init__(self, model: Model, steps: list[Policy], prompts: list[list[int]], *, reencoded: bool = False) -> None:
        longest = max(map(len, prompts))
        self.model = model
        self.pads = [longest - len(prompt) for prompt in prompts]
        self.ids_BS = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        self.prompt_tokens = longest
        positions = Positions.reencoded if reencoded else Positions.original
        policies = RankPolicies(last=steps, positions=positions)
        self.steps = policies.last
        if policies.merging is not None:
            self.kept = policies.cache(model, batch=len(prompts))
        else:
            rotaries = model.rotaries if reencoded else None
            self.kept = KeptCache.empty(model.kv_shapes, batch=len(prompts), device=model.device, rotaries=rotaries)
            self.kept.states = model.empty_states()
        self.seen = 0

    def prefill(self, chunks: Sequence[int] | None = None) -> Tensor:
        """Logits behind the prompt, which goes in chunks of these lengths; policies cut back behind the last one."""
        for chunk in chunks or [self.ids_BS.shape[1]]:
            logits_BV = self.chunk(chunk, evicts=self.seen + chunk == self.prompt_tokens)
        with throughout(self.model.dtype):
            decide_on_prompt(self.model, RankPolicies(last=self.steps), self.kept, self.ids_BS, self.pads)
        self.kept.end_turn(room=0)
        return logits_BV

    def chunk(self, num_tokens: int, *, evicts: bool = True) -> Tensor:
        """Logits behind the next tokens of the prompt."""
        ids_BC = self.ids_BS[:, self.seen : self.seen + num_tokens]
        return self._forward(ids_BC, Phase.prefill, evicts=evicts)

    def decode(self, token: int) -> Tensor:
        """Logits behind one more token, the same in every row."""
        return self.decode_each([token] * len(self.pads))

    def decode_each(self, tokens: list[int]) -> Tensor:
        """Logits behind one more token in each row."""
        return self._forward(torch.tensor(tokens)[:, None], Phase.decode)

    def next_prompt(self, ids: list[int]) -> Tensor:
        """Logits behind another turn's prompt, the same in every row."""
        self.prompt_tokens = self.seen + len(ids)
        logits_BV = self._forward(torch.tensor([ids] * len(self.pads)), Phase.prefill)
        self.kept.end_turn(room=0)
        return logits_BV

    def _forward(self, ids_BC: Tensor, phase: Phase, evicts: bool = True) -> Tensor:
        tokens = NewTokens(self.seen, self.pads, phase)
        steps = PolicySteps(
            self.model,
            self.steps,
            tokens,
            prompt_tokens=self.prompt_tokens,
            evicts=evicts,
            cache=self.kept,
        )
        with throughout(self.model.dtype):
            logits_BV = self.model.forward(
                ids_BC,
                attention_under(steps, self.kept),
                start=self.seen,
                pads=self.pads,
                length=max(self.prompt_tokens, self.seen + 1),
                tokens=tokens,
            )
        self.seen += ids_BC.shape[1]
        return logits_BV


def require_answers(
    ranks: Ranks,
    model: Model,
    policy: Policy,
    lengths: Sequence[int],
    num_new: int,
    prefill: PrefillOptions | None = None,
) -> GenerationBatch:
    """Compare an engine's greedy answers to prompts of these lengths with a `Run` that is given the same tokens."""
    run = Run(model, [policy], prompts(lengths))
    with throughout(model.dtype):
        engine = Engine(model, ranks, prefill=prefill, policies=RankPolicies.everywhere([policy]))
        batch = engine.generate(prompts(lengths), GenerationOptions(max_new_tokens=num_new, ignore_eos=True))
    logits_BV = run.prefill()
    for step in range(num_new):
        tokens = [generation.new_token_ids[step] for generation in batch.generations]
        assert logits_BV.argmax(dim=-1).tolist() == tokens
        logits_BV = run.decode_each(tokens)
    return batch


def require_decides_once(
    ranks: Ranks, model: Model, policy: Policy, lengths: Sequence[int], chunk: int, total: int
) -> None:
    """Compare an engine's answers under a policy that decides on a whole prompt, in one piece and in chunks, with a
    `Run`. A conversation keeps `total` tokens of its first turn in all layers together, and all of later turns."""
    for chunk_tokens in (None, chunk):
        require_answers(ranks, model, policy, lengths, 3, PrefillOptions(chunk_tokens=chunk_tokens))
    with throughout(torch.float64):
        talk = Conversation(model, RankPolicies.everywhere([policy]))
        talk.feed(torch.tensor([prompt(40)]))
        first = talk.kept_tokens
        assert max(first) < 40 and abs(sum(first) - total) < len(first)  # each layer's number is rounded
        talk.feed(torch.tensor([prompt(8, seed=2)]))
    assert talk.kept_tokens == [tokens + 8 for tokens in first]
    assert talk.cache is not None and all(layer.carried == {} for layer in talk.cache.layers)


def require_no_other_decides(policy: Scorer) -> None:
    """A policy that decides on a whole prompt, with budgets of its own, is the only one that does, on one rank."""
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    sharded = {"policies": RankPolicies.everywhere([policy]), "decode": DecodeOptions(name=DecodeName.sharded)}
    with pytest.raises(ValueError, match="use decode=last"):
        Engine(tiny_model("llama"), ranks, **sharded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use it alone"):
        AdaKV(scorer=policy)


def require_engines_refuse(model: Model) -> None:
    """Engines of a model that marks tokens refuse what does not know of marks."""
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    with pytest.raises(ValueError, match="which prefill=tsp does not support; use prefill=kv_runahead"):
        Engine(model, ranks, prefill=PrefillOptions(name=PrefillName.tsp))
    with pytest.raises(ValueError, match="which decode=sharded does not support; use decode=last"):
        Engine(model, ranks, decode=DecodeOptions(name=DecodeName.sharded))
    with pytest.raises(ValueError, match="which reuse of prefixes does not support"):
        Engine(model, ranks, tree=PrefixTree(1 << 20))


class EveryThird(StreamingHeads):
    """Every third head retrieves, counted with its layer: in a model with one head all of a layer do, or none."""

    def retrieving(self, layer: int, num_kv_heads: int) -> list[bool]:
        return [(layer + head) % 3 == 0 for head in range(num_kv_heads)]

    def require(self, model: ModelFacts) -> None:
        """It needs no file."""


class Razor(EveryThird, RazorAttention):
    pass


class Duo(EveryThird, DuoAttention):
    pass


STREAMING = {"razor_attention": Razor, "duo_attention": Duo}
"""Policies whose heads a file tells of a model, without one."""


def require_logits(family: str, by_hand: ByHand) -> Iterator[tuple[KeptCache, Any]]:
    """Compare the logits of a model that marks tokens with a computation, with and without evicting.

    Yields:
        after the prompt and each given token, what is kept where tokens are evicted, and what the computation found.
    """
    text, model = prompt(MARKED_TOKENS), tiny_model(family)
    kept, full = Run(model, [DMS(evict_every=1)], [text]), Run(model, [], [text])
    for token in [None, *GENERATED]:
        if token is None:
            logits = [run.prefill() for run in (kept, full)]
        else:
            text = [*text, token]
            logits = [run.decode(token) for run in (kept, full)]
        expected, found = by_hand(family, tuple(text))
        for ours in logits:
            assert largest_difference(ours[0], expected[-1]) < ROUNDING
        yield kept.kept, found


def require_rows_chunks_and_turns(family: str, by_hand: ByHand) -> None:
    """Compare padded rows, chunks, turns and a conversation of a model that marks tokens with a computation."""
    model, prompts = tiny_model(family), [prompt(MARKED_TOKENS), prompt(23, seed=1), prompt(7, seed=2)]
    run, chunked = Run(model, [DMS()], prompts), Run(model, [DMS()], prompts)
    first, again = run.prefill(), chunked.prefill([17, 1, 12, 10])
    more = prompt(9, seed=5)
    decoded = [run.decode(token) for token in GENERATED]
    turn = run.next_prompt(more)
    for row, ids in enumerate(prompts):
        expected, _ = by_hand(family, (*ids, *GENERATED, *more))
        assert largest_difference(first[row], expected[len(ids) - 1]) < ROUNDING
        assert largest_difference(again[row], expected[len(ids) - 1]) < ROUNDING
        for step, logits in enumerate(decoded):
            assert largest_difference(logits[row], expected[len(ids) + step]) < ROUNDING
        assert largest_difference(turn[row], expected[-1]) < ROUNDING
    with throughout(torch.float64):
        talk = Conversation(model, RankPolicies(last=[DMS()]))
        talk.feed(torch.tensor([prompts[0]]))
        peeked = talk.peek(torch.tensor([more]))
        logits = talk.feed(torch.tensor([more]), all_logits=True)
    expected, _ = by_hand(family, (*prompts[0], *more))
    assert largest_difference(logits[0], expected[MARKED_TOKENS:]) < ROUNDING
    assert largest_difference(peeked[0], expected[MARKED_TOKENS:]) < ROUNDING


def require_chains(rank_pools: RankPools, family: str, chosen: RankPolicies, by_hand: ByHand) -> None:
    """Compare the tokens and first logits of chains of 1 to 3 ranks with a computation."""
    given = [prompt(MARKED_TOKENS), prompt(23, seed=1)]
    for bounds in ((0, 40), (0, 21, 40), (0, 1, 20, 40)):
        batch = rank_pools.run(len(bounds) - 1, policy_tasks.generate, family, given, bounds, chosen, 6)[-1]
        for ids, generation in zip(given, batch.generations, strict=True):
            expected, _ = by_hand(family, (*ids, *generation.new_token_ids))
            assert generation.new_token_ids == expected[len(ids) - 1 : -1].argmax(dim=-1).tolist()
            for token, logit in generation.first_token_logits_top5:
                assert abs(float(expected[len(ids) - 1, token]) - logit) < ROUNDING
