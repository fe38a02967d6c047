"""Compute cost and bytes of a prefill with prefill.attention=streaming_heads, from those of attention to all keys."""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from partitioner.cost.compute import OtherAttention

if TYPE_CHECKING:
    from runahead.model.model import Model
    from runahead.thinning.rank_policies import RankPolicies


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
    def of(cls, policies: RankPolicies, model: Model, num_tokens: int) -> Self:
        """The streams that a policy names for a model that is loaded.

        Args:
            num_tokens: length of the prompt.
        """
        from runahead.prefill.base import streaming_of  # here, so that programs that only simulate do not load torch

        policies.read_files(model)
        streaming = streaming_of(policies, model, num_tokens=num_tokens, pads=[0])
        each = [len(exact) + len(streamed) for exact, streamed in zip(streaming.exact, streaming.streamed, strict=True)]
        return cls(share=sum(map(len, streaming.streamed)) / sum(each), tokens=streaming.sinks + streaming.window - 1)

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
