"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): the first few tokens and the last ones.

Models give much attention to the first tokens whatever they are ("attention sinks"); a window without them fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.window import Window


@dataclass(kw_only=True)
class StreamingLLM(Window):
    """A window with sinks."""

    sinks: int = 4
