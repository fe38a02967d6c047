"""kvpress's methods by name, with a budget in tokens; imported in kvpress's environment only.

A press drops tokens by a share, and rounds what is left down. Presses that keep other numbers of tokens in different
heads drop none: they replace the keys of dropped tokens in each forward after the prompt.
"""

from __future__ import annotations

import logging
from typing import Any

from kvpress import (  # type: ignore[import-not-found,unused-ignore]
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVzipPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import AutoTokenizer

PRESSES = {
    "expected_attention": ExpectedAttentionPress,
    "keydiff": KeyDiffPress,
    "snapkv": SnapKVPress,
    "streaming_llm": StreamingLLMPress,
}
logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip warns of its time whenever it is made


def press_of(model: Any, asked: dict[str, Any], num_tokens: int) -> Any:
    """The press that keeps so many tokens per KV head.

    Args:
        asked: {"press", "options", "budget"}; `methods.Method.asked` makes it.
        num_tokens: length of the prompt.
    """
    options, budget = asked["options"], asked["budget"]
    if asked["press"] == "adakv":
        scorer = press_of(model, options["scorer"] | {"budget": budget}, num_tokens)
        return AdaKVPress(press=scorer, alpha_safeguard=options["alpha_safeguard"])
    if asked["press"] == "kvzip":
        # One number of tokens to drop for all layers and heads together: half a token more, to be rounded down.
        num_heads = model.config.num_hidden_layers * model.config.num_key_value_heads
        dropped = num_heads * (num_tokens - budget) + 0.5
        return KVzipPress(compression_ratio=dropped / (num_heads * num_tokens), **options)
    return PRESSES[asked["press"]](compression_ratio=1 - (budget + 0.5) / num_tokens, **options)


def masked(model: Any) -> list[list[set[int]]]:
    """Slots of the first row that a press has marked as dropped, by layer and KV head."""
    num_heads = model.config.num_key_value_heads
    found: list[list[set[int]]] = []
    for layer in model.model.layers:
        slots: list[set[int]] = [set() for _ in range(num_heads)]
        marked = getattr(layer.self_attn, "masked_key_indices", None)
        if marked is not None:
            _, heads, at = marked
            for head, slot in zip(heads.tolist(), at.tolist(), strict=True):
                slots[head].add(slot)
        found.append(slots)
    return found


def without_chat_template(model: Any, scratch: str) -> None:
    """Give KVzip, which loads the model's tokenizer, one without a chat template.

    Prompts here are plain text. With a template KVzip takes their first tokens for the template's, does not score them,
    and drops them all but the sinks.
    """
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(scratch)
    model.config.name_or_path = scratch
