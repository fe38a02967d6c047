"""Attention of one rank's chunk of the new tokens, which lie between and behind K,V that are reused."""

from __future__ import annotations

from runahead.prefill.chain_attention import ChainAttention
from runahead.reuse.attention import ReusedAttention


class ReusedChainAttention(ReusedAttention, ChainAttention):
    """The chain's loop body, with attention to what is reused beside that to the new tokens."""
