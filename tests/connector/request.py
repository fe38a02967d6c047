"""A request as vLLM's scheduler has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def request(name: str, ids: list[int], **more: Any) -> Any:
    about: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": ids,
        "num_prompt_tokens": len(ids),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**about | more)
