"""Prompts of requests as token ids, by the model's tokenizer and chat template."""

from __future__ import annotations

from typing import Any

from launch.server.errors import APIError, shown, wrong
from launch.server.fields import ChatRequest, CompletionRequest
from policies.prompt_cache.model_text import render


def prompts_of(request: ChatRequest | CompletionRequest, tokenizer: Any | None) -> list[list[int]]:
    """Token ids of each prompt of a request.

    Raises:
        APIError: the model has no tokenizer or no chat template for it, or the template fails or leaves the tools out.
    """
    if isinstance(request, ChatRequest):
        return [_of_chat(request, tokenizer)]
    return [_of_text(prompt, tokenizer) if isinstance(prompt, str) else prompt for prompt in request.prompts]


def _of_chat(request: ChatRequest, tokenizer: Any | None) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise APIError(400, "this model has no chat template; use /v1/completions", param="messages")
    # A template has the assistant answer next, or go on with what it has begun to say.
    goes_on = request.messages[-1]["role"] == "assistant"
    how: dict[str, Any] = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    text = _rendered(request, tokenizer, how)
    if request.tools:
        told = _rendered(request, tokenizer, how | {"tools": request.tools})
        if told == text:
            raise wrong("tools", "are not in this model's chat template, so it would not know of them; leave them out")
        text = told
    return _ids(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], "messages")


def _rendered(request: ChatRequest, tokenizer: Any, how: dict[str, Any]) -> str:
    try:
        return render(tokenizer, request.messages, **how)
    except ValueError as error:
        raise wrong("messages", f"do not fit the model's chat template: {shown(str(error), 200)}") from error


def _of_text(text: str, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise wrong("prompt", "must be a list of token ids, as this model has no tokenizer")
    # verbose=False: what is too long is refused with a message of ours.
    return _ids(tokenizer(text, verbose=False)["input_ids"], "prompt")


def _ids(ids: Any, name: str) -> list[int]:
    if not ids:
        raise wrong(name, "has no tokens")
    return [int(token) for token in ids]
