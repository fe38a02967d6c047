"""Compute cost and bytes of a prefill with prefill.attention=streaming_heads, from those of attention to all keys."""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from partitioner.cost.compute import OtherAttention

if TYPE_CHECKING:
    from runahead.model.model import Model
    from runahead.thinning.rank_policies import RankPolicies

USUAL_TOKENS = 8192
"""Length of the prompt for which tokens are counted that are a share of it; they are few."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """KV heads that see a text's first tokens and the last ones alone.

    Attributes:
        share: of all KV heads of the layers.
        tokens: first tokens and last ones before its own that a query of such a head sees.
    """

    share: float
    tokens: int

    @classmethod
    def of(cls, policies: RankPolicies, model: Model, num_tokens: int = USUAL_TOKENS) -> Self:
        """The streams that a policy names for a model that is loaded, among the heads of all shares.

        Args:
            num_tokens: length of the prompt.
        """
        from runahead.attention.sparse.streaming import Streaming  # here, so that programs that only simulate do not
        from runahead.prefill.base import never_streaming  # load torch
        from runahead.thinning.rank_policies import facts_of

        [policy] = map(copy, policies.last)
        policy.require(facts_of(model).of_all)
        heads = policy.streamed_heads(num_tokens)
        assert heads is not None, policy
        streaming = Streaming.of(heads, exact=never_streaming(model), pads=[0])
        each = [len(exact) + len(streamed) for exact, streamed in zip(streaming.exact, streaming.streamed, strict=True)]
        return cls(share=sum(map(len, streaming.streamed)) / sum(each), tokens=streaming.sinks + streaming.window - 1)

    @classmethod
    def expected(
        cls,
        policies: RankPolicies,
        num_tokens: int = USUAL_TOKENS,
        *,
        model: Model | None = None,
        num_attending: int | None = None,
    ) -> Self:
        """As many streams as a policy says of a model of which it knows no heads.

        Where no head of some layers streams, those of the others are taken to be as many as elsewhere, and where heads
        are of two kinds, none is of both: a policy that names its heads may have a few more or less.

        Args:
            num_tokens: length of the prompt.
            model: in some layers of which no head streams; None: in all of them heads may.
            num_attending: places with keys and values of the model to plan for, if `model` was loaded with fewer.

        Raises:
            ValueError: the policy does not say it.
        """
        [policy], part, num_heads = policies.last, 1.0, None
        if model is not None:
            from runahead.thinning.rank_policies import facts_of

            of_layers = facts_of(model).heads_of_all
            num_heads = sum(of_layers)
            if num_attending is not None:
                num_heads = round(num_heads * num_attending / len(of_layers))
        found = policy.streamed_share(num_tokens, num_heads)
        if found is None:
            raise ValueError(f"policy {policy.label} does not say how many KV heads stream; use policy=duo_attention")
        if model is not None:
            from runahead.prefill.base import never_streaming

            heads = [shape.num_kv_heads for shape in model.kv_shapes]
            part = 1 - sum(heads[n] for n in never_streaming(model)) / sum(heads)
        return cls(share=part * found.share, tokens=found.sinks + found.recent)

    def kept_tokens(self, num_tokens: int) -> float:
        """Tokens of all heads whose keys and values have as many bytes as what is kept of so many."""
        return self.sent_tokens(num_tokens, num_tokens)

    def __str__(self) -> str:
        return f"{self.share:.0%} of KV heads see {self.tokens} tokens"

    def sent_tokens(self, num_tokens: int, prefix_tokens: int) -> float:
        """Tokens of all heads whose keys and values have as many bytes as what a rank sends to the next one of its own.

        Args:
            num_tokens: of the own chunk.
            prefix_tokens: before the next rank's chunk.
        """
        return (1 - self.share) * num_tokens + self.share * min(prefix_tokens, self.tokens)


@dataclass(frozen=True, kw_only=True)
class StreamingCost(OtherAttention):
    """A cost where some KV heads stream, as a `ComputeCost`."""

    streams: Streams

    def own(self, c: float) -> float:
        """Attention to the chunk; of heads that stream, to the tokens that a query of theirs sees, in it or before."""
        share, own = self.streams.share, self.dense.own(c)
        return (1 - share) * own + share * min(own, self.dense.prefix(c, self.streams.tokens))

    def prefix(self, c: float, P: float) -> float:
        return (1 - self.streams.share) * self.dense.prefix(c, P)
