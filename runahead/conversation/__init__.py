"""Conversations: several turns over one KV cache, in one process or over several ranks."""

from __future__ import annotations

from runahead.conversation.conversation import Conversation
from runahead.conversation.sharded import ShardedConversation

__all__ = ["Conversation", "ShardedConversation"]
