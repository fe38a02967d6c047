"""The requests /tokenize and /detokenize, as vLLM has them: what a prompt's tokens are, and what text tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.server.errors import missing, wrong
from launch.server.request.chats import Chats
from launch.server.request.fields import ChatRequest, CompletionRequest, read_chat, read_completion
from launch.server.request.prompts import ids_of_text
from launch.server.request.reader import Fields, is_token
from runahead.config import GenerationOptions

MAX_IDS = 2**20
NO_TOKENIZER = "needs a tokenizer, and this model has none"


def tokenized(
    body: Mapping[str, Any], chats: Chats, tokenizer: Any | None, *, longest: int | None = None
) -> tuple[list[int], list[str] | None, Any]:
    """Tokens of a prompt or of a chat, their texts if those are asked for, and the request. Raises: APIError.

    A chat is read as /v1/chat/completions reads it, so its tokens are those that its prompt would have there. A text
    that is far longer than `longest` tokens is refused as it is there.
    """
    fields = Fields(body)
    is_chat = body.get("messages") is not None
    adds = fields.take("add_special_tokens", lambda value: isinstance(value, bool), "must be true or false")
    shows = fields.flag("return_token_strs")
    rest = {name: value for name, value in body.items() if name not in ("add_special_tokens", "return_token_strs")}
    if tokenizer is None:
        raise wrong("messages" if is_chat else "prompt", NO_TOKENIZER)
    if body.get("prompt_cache") is not None:
        raise wrong("prompt_cache", "is not for /tokenize; leave it out", code="unsupported_parameter")
    read: ChatRequest | CompletionRequest
    if is_chat:
        read = read_chat(rest, GenerationOptions())
        text, adds = chats.prompt(read)[0], adds is True
    else:
        read = read_completion(rest, GenerationOptions())
        if len(read.prompts) != 1 or not isinstance(read.prompts[0], str):
            raise wrong("prompt", "must be a text")
        text, adds = read.prompts[0], adds is not False
    ids = ids_of_text(text, tokenizer, "messages" if is_chat else "prompt", longest, add_special_tokens=adds)
    return ids, tokenizer.convert_ids_to_tokens(ids) if shows else None, read


def detokenized(body: Mapping[str, Any], tokenizer: Any | None, vocab_size: int) -> tuple[str, Fields]:
    """Text of tokens, special ones too, and the fields that nobody has taken. Raises: APIError."""
    fields = Fields(body)
    if tokenizer is None:
        raise wrong("tokens", NO_TOKENIZER)
    rule = f"must be a list of at most {MAX_IDS:,} token ids"
    ids = fields.take("tokens", lambda value: isinstance(value, list) and len(value) <= MAX_IDS, rule)
    if ids is None:
        raise missing("tokens")
    if not all(is_token(token) and token < vocab_size for token in ids):
        raise wrong("tokens", f"must be token ids from 0 to {vocab_size - 1}")
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)), fields
