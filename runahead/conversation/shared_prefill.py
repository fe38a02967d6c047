"""One prefill of a prompt for several conversations under different policies.

A policy that only drops or retrieves stored tokens has no effect on what the layers compute of a prompt. So one forward
serves all of them: after each layer's attention every policy gets that layer as if it were alone.
"""

# Legend: B batch, C new tokens.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from runahead.attention.answers import Answers
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.config import Positions
from runahead.conversation.conversation import Conversation
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.steps import PolicySteps


def may_share_prefill(policies: RankPolicies) -> bool:
    """Whether the layers compute of a prompt under these policies what they compute without any.

    They do not if hidden states are dropped between layers, or if keys are stored unrotated. Policies that ask how the
    prompt surprises the model compute more: all its logits.
    """
    is_rotated = policies.positions is Positions.original and policies.clamped_to is None
    return is_rotated and not policies.needs_surprise and not any(policy.narrows for policy in policies.last)


def feed_all(
    conversations: Sequence[Conversation], ids_BC: Tensor, *, clock_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Feed a prompt without padding to empty conversations, with one forward for all of them.

    Each conversation is then as if it alone had been fed. Their caches share memory until new tokens are appended.

    Args:
        conversations: of one model and of one length, under policies that may share a prefill (`may_share_prefill`).
        clock_s: returns seconds, after the device has done what was queued.

    Returns:
        seconds that each would have taken alone: those of the forward and of its own policies.

    Raises:
        ValueError: as `Conversation.feed`.
    """
    for conversation in conversations:
        assert conversation.cache is None and may_share_prefill(conversation.rank_policies), conversation.rank_policies
    answers = Answers(clock_s)
    prefill = _Prefill(conversations, clock_s)
    began_s = clock_s()
    logits_BV = prefill.feed(ids_BC)
    forward_s = clock_s() - began_s - sum(prefill.policy_s)
    for number, conversation in enumerate(conversations):
        assert conversation.cache is not None and prefill.cache is not None
        if prefill.cache.states is not None:
            conversation.cache.states = prefill.cache.states.fork()
        conversation.pads, conversation.num_tokens = list(prefill.pads), prefill.num_tokens
        conversation.rows = [list(row) for row in prefill.rows]
        conversation.long_rows, conversation.logits_BV = prefill.long_rows, logits_BV
        began_s, saved_s = clock_s(), answers.saved_s
        conversation.decide(answers)
        prefill.policy_s[number] += clock_s() - began_s
        prefill.saved_s[number] += answers.saved_s - saved_s
        conversation.cache.end_turn(room=0)
    return [forward_s + sum(own) for own in zip(prefill.policy_s, prefill.saved_s, strict=True)]


class _Prefill(Conversation):
    """The prompt under no policy; each of its layers also goes through the policies of the other conversations.

    Attributes:
        policy_s: seconds that the policies of each conversation took.
        saved_s: seconds that they would have taken besides if no other policy had asked the same.
    """

    def __init__(self, others: Sequence[Conversation], clock_s: Callable[[], float]) -> None:
        super().__init__(others[0].model, length=others[0].length)
        self._others, self._clock_s = others, clock_s
        self.policy_s, self.saved_s = [0.0] * len(others), [0.0] * len(others)

    def _steps(self, tokens: NewTokens, end: int, *, cut_back: bool) -> PolicySteps:
        each = []
        for other in self._others:
            other.cache = other.rank_policies.cache(self.model, batch=len(self.pads), has_turns=True)
            each.append(PolicySteps(self.model, other.policies, tokens, prompt_tokens=end, cache=other.cache))
        return _EachAlone(
            self.model, each, tokens, end, clock_s=self._clock_s, policy_s=self.policy_s, saved_s=self.saved_s
        )


class _EachAlone(PolicySteps):
    """The policies of several conversations, each of which gets its own copy of a layer.

    Args:
        each: steps of every conversation, with its cache.
        policy_s, saved_s: as in `_Prefill`; a layer's are added.
    """

    def __init__(
        self,
        model: Model,
        each: Sequence[PolicySteps],
        tokens: NewTokens,
        end: int,
        *,
        clock_s: Callable[[], float],
        policy_s: list[float],
        saved_s: list[float],
    ) -> None:
        super().__init__(model, [], tokens, prompt_tokens=end)
        self._each, self._clock_s, self._policy_s, self._saved_s = each, clock_s, policy_s, saved_s

    def run(self, layer: int, kept: KeptLayer, seen: SeenKV, terms: AttentionTerms) -> KeptLayer:
        answers = Answers(self._clock_s)
        for number, steps in enumerate(self._each):
            cache, began_s, saved_s = steps.cache, self._clock_s(), answers.saved_s
            assert cache is not None
            own = kept.fork(copy=not cache.shares_memory)
            cache.layers[layer], steps.input_BCD = own, self.input_BCD
            steps.answers = answers
            stored = steps.run(layer, own, seen, terms)
            if stored is not own:
                cache.put(layer, stored)
            cache.close(layer, room=steps.room)
            self._policy_s[number] += self._clock_s() - began_s
            self._saved_s[number] += answers.saved_s - saved_s
        return kept
