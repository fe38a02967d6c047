"""The prompt before its answer, with the log-probabilities of its tokens, as `echo` of /v1/completions asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.server.answer.logprobs import Scored, TokenTexts, text_logprobs
from runahead.report import PromptLogprobs, TokenLogprobs


def with_prompt(
    choice: dict[str, Any],
    prompt: str | list[int],
    ids: Sequence[int],
    scores: PromptLogprobs | None,
    texts: TokenTexts,
    *,
    is_answered: bool,
) -> dict[str, Any]:
    """A choice with its prompt before it.

    Args:
        prompt: as the client gave it.
        ids: its tokens.
        scores: of all but the first of them; None: no log-probabilities were asked for.
        is_answered: False leaves out the new tokens.
    """
    parts = texts.parts(ids, prompt if isinstance(prompt, str) else None)
    text = prompt if isinstance(prompt, str) else "".join(parts)
    answer = choice["text"] if is_answered else ""
    logprobs = None if scores is None else _prompt_logprobs(parts, ids, scores, texts)
    if logprobs is not None and is_answered and choice["logprobs"] is not None:
        new = choice["logprobs"] | {"text_offset": [len(text) + each for each in choice["logprobs"]["text_offset"]]}
        logprobs = {name: values + new[name] for name, values in logprobs.items()}
    return choice | {"text": text + answer, "logprobs": logprobs}


def _prompt_logprobs(
    parts: Sequence[str], ids: Sequence[int], scores: PromptLogprobs, texts: TokenTexts
) -> dict[str, Any]:
    """`logprobs` of a prompt's tokens. Nothing comes before the first one, which has null."""
    assert len(scores.logprobs) == len(ids) - 1, (len(scores.logprobs), len(ids))
    offsets, at = list[int](), 0
    for part in parts:
        offsets.append(at)
        at += len(part)
    scored = [
        Scored(
            token=token,
            logprobs=TokenLogprobs(logprob=logprob, top=list(zip(top_ids, top_logprobs, strict=True))),
            offset=offset,
        )
        for token, logprob, top_ids, top_logprobs, offset in zip(
            ids[1:], scores.logprobs, scores.top_ids, scores.top_logprobs, offsets[1:], strict=True
        )
    ]
    first = {"tokens": texts.text_and_bytes(ids[0])[0], "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [first[name], *values] for name, values in text_logprobs(scored, texts).items()}
