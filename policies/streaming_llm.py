"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): keep the first few tokens and the last ones.

Models attend strongly to the first tokens, whatever these are ("attention sinks"); a window without them fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.window import Window


@dataclass(kw_only=True)
class StreamingLLM(Window, name="streaming_llm"):
    """A window with sink tokens."""

    sinks: int = 4
