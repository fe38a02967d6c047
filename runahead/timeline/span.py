"""One thing that a rank did, from when to when."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(kw_only=True)
class Span:
    """One thing that a rank did: `kind` is compute, wait or send; times are seconds since the prompt's start.

    All ranks' spans are on one clock. `layer` is None for what belongs to no layer, such as the embedding.
    """

    kind: str
    layer: int | None
    start_s: float
    end_s: float
    detail: str = ""

    def shifted(self, seconds: float) -> Span:
        """The same span on a clock that is `seconds` ahead."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)
