"""Span of a timeline: something that a rank did, with its begin and end."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(kw_only=True)
class Span:
    """Something that a rank did. The spans of all ranks are on one clock.

    Attributes:
        kind: "compute", "wait" or "send".
        layer: None for what belongs to no layer, such as the embedding.
        start_s, end_s: seconds since the prompt's start.
        detail: more in a few words, such as the tokens that were sent.
    """

    kind: str
    layer: int | None
    start_s: float
    end_s: float
    detail: str = ""

    def shifted(self, seconds: float) -> Span:
        """The same span on a clock that is `seconds` ahead."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)
