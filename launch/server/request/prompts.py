"""Prompts of requests as token ids, by the model's tokenizer, or as prompts that reuse modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launch.server.errors import APIError, shown, too_long, wrong
from launch.server.request.fields import ChatRequest, CompletionRequest, PromptCacheFields
from policies.prompt_cache.prompt import NewText, Prompt
from policies.prompt_cache.prompt_cache import PromptCache
from policies.prompt_cache.schema import ROLES
from policies.prompt_cache.schemas import Schemas
from policies.prompt_cache.xml_reader import PMLError, read_xml
from policies.reuse import GivenPrompt, PromptTooLong

MANY_CHARACTERS = 8
"""Characters per token, more than texts have: with more in all, a text is first counted piece by piece."""
PIECE = 2**13
"""Characters of a longer one that are tokenised at a time."""
MOST_BY_A_CUT = 16
"""Tokens that a cut adds to a text, at most."""


def prompts_of(
    request: ChatRequest | CompletionRequest,
    chat: str | None,
    tokenizer: Any | None,
    schemas: Schemas | None = None,
    client: str = "",
    *,
    longest: int | None = None,
) -> list[GivenPrompt]:
    """Each prompt of a request.

    Args:
        chat: the prompt of a chat as text; None if it has modules before it, and without a chat.
        tokenizer: the model's; None if it has none.
        schemas: for prompts that reuse modules; None if the server takes none.
        client: whose request it is.
        longest: tokens of the longest text that is taken; None is no limit.

    Raises:
        APIError: the model has no tokenizer for it, a prompt does not fit its schema, or a text is so long that not all
            of it was tokenised.
    """
    if request.prompt_cache is not None:
        return list(_after_modules(request, request.prompt_cache, schemas, client))
    if isinstance(request, ChatRequest):
        assert chat is not None
        return [ids_of_text(chat, tokenizer, "messages", longest, add_special_tokens=False)]
    return [_of_text(prompt, tokenizer, longest) if isinstance(prompt, str) else prompt for prompt in request.prompts]


def _after_modules(
    request: ChatRequest | CompletionRequest, asked: PromptCacheFields, schemas: Schemas | None, client: str
) -> Iterator[GivenPrompt]:
    """Prompts that import the same modules, each with a text or the messages after them."""
    if schemas is None:
        message = "'prompt_cache' is taken by servers that are started with policy=prompt_cache; leave it out"
        raise APIError(400, message, param="prompt_cache", code="unsupported_parameter")
    cache = _brought(asked.schema, schemas, client) if asked.schema is not None else _known(asked, schemas, client)
    if isinstance(request, ChatRequest):
        texts = [_messages(request)]
    else:
        texts = [_text(prompt) for prompt in request.prompts]
    for after in texts:
        try:
            prompt = Prompt.from_xml(asked.prompt, cache.schema)
            yield cache.prompt(replace(prompt, items=(*prompt.items, *after)))
        except ValueError as error:
            raise _refused("prompt", error) from error


def _brought(xml: str, schemas: Schemas, client: str) -> PromptCache:
    try:
        return schemas.bring(xml, client)
    except ValueError as error:
        raise _refused("schema", error) from error


def _known(asked: PromptCacheFields, schemas: Schemas, client: str) -> PromptCache:
    try:
        root = read_xml(asked.prompt, source="prompt")
    except PMLError as error:
        raise _refused("prompt", error) from error
    name = root.attributes.get("schema")
    if root.tag != "prompt" or name is None:
        raise wrong("prompt_cache.prompt", 'must begin with <prompt schema="...">')
    if (cache := schemas.find(name, client)) is None:
        rule = f"is of the schema {shown(name)}, which is not known here; send it as 'prompt_cache.schema'"
        raise wrong("prompt_cache.prompt", rule)
    return cache


def _refused(field: str, error: ValueError) -> APIError:
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else "invalid_value"
    return wrong(f"prompt_cache.{field}", f"is refused: {shown(str(error), 300)}", code=code)


def _messages(request: ChatRequest) -> list[NewText]:
    """The messages of a chat, which come after the modules."""
    if request.tools.told:
        raise wrong("tools", "do not go with 'prompt_cache'; leave them out")
    for number, message in enumerate(request.messages):
        if message["role"] not in ROLES or message.keys() - {"role", "content"}:
            rule = f"must have a role of {', '.join(ROLES)}, and only 'content' besides, to go with 'prompt_cache'"
            raise wrong(f"messages[{number}]", rule)
    if request.messages and request.messages[-1]["role"] != "user":
        raise wrong("messages", "must end with a user's message, to go with 'prompt_cache'")
    return [NewText(text=message["content"], role=message["role"], line=1) for message in request.messages]


def _text(prompt: str | list[int]) -> list[NewText]:
    """The prompt of a completion, which comes after the modules."""
    if not isinstance(prompt, str):
        raise wrong("prompt", "must be a text, or a list of texts, to go with 'prompt_cache'")
    return [NewText(text=prompt, line=1)] if prompt else []


def _of_text(text: str, tokenizer: Any | None, longest: int | None) -> list[int]:
    if tokenizer is None:
        raise wrong("prompt", "must be a list of token ids, as this model has no tokenizer")
    return ids_of_text(text, tokenizer, "prompt", longest)


def ids_of_text(text: str, tokenizer: Any, name: str, longest: int | None, **how: bool) -> list[int]:
    """Token ids of a text in the field `name`. One that is far too long is refused before all of it is tokenised."""
    least = 0
    if longest is not None and len(text) > MANY_CHARACTERS * longest:
        for start in range(0, len(text), PIECE):
            piece = tokenizer(text[start : start + PIECE], add_special_tokens=False, verbose=False)["input_ids"]
            least += max(0, len(piece) - MOST_BY_A_CUT)
            if least > longest:
                raise too_long(name, longest, f"'{name}' has more than {least:,} tokens")
    # verbose=False: what is too long is refused with a message of ours.
    ids = tokenizer(text, verbose=False, **how)["input_ids"]
    if not ids:
        raise wrong(name, "has no tokens")
    return [int(token) for token in ids]
