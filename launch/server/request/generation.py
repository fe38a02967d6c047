"""Fields of a request that say how its answers are generated, as generation options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.server.errors import wrong
from launch.server.request.guides import read_guide
from launch.server.request.reader import Fields, check_unicode, is_token
from launch.server.request.tools import Tools
from runahead.config import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY, MAX_SEED, GenerationOptions

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_BIASES = 1024
MAX_NEW_TOKENS = 2**31
MAX_STOP_IDS = 1024
LEAST_TEMPERATURE = 0.01
"""A lower temperature is greedy: logits divided by it might overflow."""


def read_generation(
    fields: Fields, defaults: GenerationOptions, *, tools: Tools | None, least_new: int = 1
) -> tuple[GenerationOptions, str | None, bool, str | None]:
    """Options of one answer, the field that gave its length, whether it has a seed of the client's, and what guides it.

    Args:
        tools: of a chat; None for a completion.
        least_new: tokens that the client has to ask for. For none one is generated.

    Raises:
        APIError: a field is wrong.
    """
    lengths = {
        name: fields.number(name, least_new, MAX_NEW_TOKENS, whole=True)
        for name in ("max_completion_tokens", "max_tokens")
    }
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(set(given.values())) == 2:
        raise wrong("max_tokens", "and 'max_completion_tokens' differ; give one")
    seed = fields.number("seed", -(2**63), 2**63 - 1, whole=True)  # OpenAI's and vLLM's range
    stops, biases, guide = _stops(fields), _biases(fields), read_guide(fields, defaults, tools)
    ignore_eos = fields.flag("ignore_eos") or defaults.ignore_eos
    if guide.field is not None and ignore_eos:
        raise wrong(guide.field, "does not go with 'ignore_eos': true")
    least = fields.number("min_tokens", 0, MAX_NEW_TOKENS, whole=True)
    most = next(iter(given.values()), defaults.max_new_tokens)
    if least and least > most:
        what = f"'{next(iter(given))}'" if given else f"the {most} of 'max_tokens' that this server takes by default"
        raise wrong("min_tokens", f"is more than {what}")
    repetition = fields.number("repetition_penalty", 0.1, 10)
    presence, frequency = (
        fields.number(name, -MAX_PENALTY, MAX_PENALTY) for name in ("presence_penalty", "frequency_penalty")
    )
    chosen = replace(
        defaults,
        max_new_tokens=max(1, most),
        min_new_tokens=defaults.min_new_tokens if least is None else least,
        **_sampling(fields, defaults),
        repetition_penalty=repetition or defaults.repetition_penalty,
        presence_penalty=defaults.presence_penalty if presence is None else presence,
        frequency_penalty=defaults.frequency_penalty if frequency is None else frequency,
        logit_bias=defaults.logit_bias if biases is None else biases,
        seed=(seed or 0) % (MAX_SEED + 1),
        stop=defaults.stop if stops is None else stops,
        **_text_options(fields, defaults),
        ignore_eos=ignore_eos,
        json_schema=guide.json_schema,
        grammar=guide.grammar,
        free_part=defaults.free_part if guide.field is not None else [],
        logprobs=(_text_logprobs if tools is None else _chat_logprobs)(fields, defaults.logprobs),
    )
    return chosen, next(iter(given), None), seed is not None, guide.field


def _sampling(fields: Fields, defaults: GenerationOptions) -> dict[str, Any]:
    """Options of sampling, which are set back where nothing is sampled, so that equal requests are equal."""
    temperature = fields.number("temperature", 0, 100)
    top_p = fields.number("top_p", 0, 1, above=True)
    top_k = fields.number("top_k", -1, 2**31, whole=True)
    min_p = fields.number("min_p", 0, 1)
    samples = defaults.do_sample
    if temperature is not None:
        samples = temperature >= LEAST_TEMPERATURE
    elif any(value is not None for value in (top_p, top_k, min_p)):
        samples = True
    if not samples:
        return {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {
        "do_sample": True,
        "temperature": defaults.temperature if temperature is None else temperature,
        "top_p": top_p or defaults.top_p,
        "top_k": defaults.top_k if top_k is None else max(0, top_k),
        "min_p": defaults.min_p if min_p is None else min_p,
    }


def _text_options(fields: Fields, defaults: GenerationOptions) -> dict[str, Any]:
    """Options of what ends a text beside stop strings, and of what is in it."""

    def flag(name: str, default: bool) -> bool:
        given = fields.take(name, lambda value: isinstance(value, bool), "must be true or false")
        return default if given is None else given

    ids = fields.take("stop_token_ids", lambda value: isinstance(value, list), "must be a list of token ids")
    if ids is not None and (len(ids) > MAX_STOP_IDS or not all(map(is_token, ids))):
        raise wrong("stop_token_ids", f"must be a list of at most {MAX_STOP_IDS:,} token ids")
    return {
        "stop_token_ids": defaults.stop_token_ids if ids is None else ids,
        "include_stop": flag("include_stop_str_in_output", defaults.include_stop),
        "skip_special_tokens": flag("skip_special_tokens", defaults.skip_special_tokens),
    }


def _stops(fields: Fields) -> list[str] | None:
    stop = fields.take("stop", lambda value: isinstance(value, str | list), "must be a text or a list of texts")
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise wrong("stop", f"has {len(stops):,} texts; {MAX_STOPS} is the most")
    for each in stops:
        if not isinstance(each, str) or not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise wrong("stop", f"must hold texts of 1 to {MAX_STOP_CHARACTERS:,} characters")
        check_unicode(each, "stop")
    return stops


def _biases(fields: Fields) -> dict[int, float] | None:
    given = fields.take("logit_bias", lambda value: isinstance(value, dict), "must be an object")
    if given is None:
        return None
    if len(given) > MAX_BIASES:
        raise wrong("logit_bias", f"has {len(given):,} tokens; {MAX_BIASES:,} is the most")
    for token, bias in given.items():
        is_id = token.isascii() and token.isdecimal() and len(token) < 10
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_id or not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise wrong("logit_bias", f"must have numbers from -{MAX_BIAS} to {MAX_BIAS} by token id")
    return {int(token): float(bias) for token, bias in given.items()}


def _chat_logprobs(fields: Fields, default: int | None) -> int | None:
    asked = fields.take("logprobs", lambda value: isinstance(value, bool), "must be true or false")
    number = fields.number("top_logprobs", 0, MAX_LOGPROBS, whole=True)
    if number and not asked:
        raise wrong("top_logprobs", "needs 'logprobs': true")
    return default if asked is None else (number or 0) if asked else None


def _text_logprobs(fields: Fields, default: int | None) -> int | None:
    number = fields.number("logprobs", 0, MAX_LOGPROBS, whole=True)
    return default if number is None else number
