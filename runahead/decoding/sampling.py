"""Sampling: the next token of a row from its logits."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from policies.row_values import sent
from runahead.config import GenerationOptions
from runahead.decoding.scored_tokens import ROW_ENDED, unpack
from runahead.failures import cut_short
from runahead.model.grammars import Grammars

LEAST_SCORE = -1e30
"""Least logit of an allowed token. Divided by a low temperature it is still a number."""

LONGEST_VALUE = 200
"""Characters of an option's value in a message: grammars are long."""

NOT_NUMBERS = (
    "the model's logits are not numbers, so there is no next token; check its weights, or use another model.dtype"
)
"""Error of a row, such as one whose activations overflow in float16."""


class Constraint(Protocol):
    """Rule that a row's text follows."""

    def allowed(self, device: torch.device) -> Tensor:
        """The tokens that may come next, as bool (V). There is always one."""

    def add(self, token: int) -> None:
        """Take the token that came."""


class Sampler:
    """Sampler of one row. It sees that row's logits alone, so a row in a batch samples what it would alone.

    Logits become scores in these steps, each of which is left out if its option asks for nothing:

    1. `logit_bias` is added.
    2. `repetition_penalty` divides the positive logits of all tokens of the prompt and the text, and multiplies their
       negative ones (arXiv:1909.05858).
    3. The penalties of OpenAI's API, over the new tokens alone: logit - `frequency_penalty` * count -
       `presence_penalty` * (count > 0).
    4. Tokens that end the row get minus infinity until there are `min_new_tokens` of it, and those that the constraint
       does not allow; if it allows nothing but the end, that comes.
    5. With `do_sample`: `temperature`, `top_k`, `top_p`, and `min_p`, which leaves out tokens less probable than that
       share of the most probable one's probability.

    This is the order of `transformers.generate`, and vLLM's but for min-p, which vLLM applies before top-k and top-p.
    The token is that of the largest score, or is drawn by a generator of the row's own. Log-probabilities are those of
    the model, before the first step.

    Args:
        options: which of the steps, and log-probabilities.
        seed: seed of this row's generator.
        device: device of the logits.
        prompt: token ids of the prompt, for the repetition penalty.
        constraint: of the row's text; None allows any.
        ends: token ids that end the row, which `min_new_tokens` rules out at first.
    """

    def __init__(
        self,
        options: GenerationOptions,
        seed: int,
        device: torch.device,
        *,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self.num_logprobs = options.logprobs
        self._ends, self._num_before_ends = ends, options.min_new_tokens if ends else 0
        self._options, self._device, self._constraint = options, device, constraint
        self._prompt = prompt if options.repetition_penalty != 1.0 else ()
        self._counts_new = bool(options.presence_penalty or options.frequency_penalty)
        self._seen_V: Tensor | None = None
        self._counts_V: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        if options.logit_bias:
            ids, values = list(options.logit_bias), list(options.logit_bias.values())
            self._bias = torch.tensor(ids, device=device), torch.tensor(values, device=device)
        self._warpers = warpers(options)
        self._generator = torch.Generator(device).manual_seed(seed) if options.do_sample else None

    @property
    def takes_largest(self) -> bool:
        """Whether the next token is that of the largest logit."""
        changes_logits = self._bias is not None or self._looks_back or self._constraint is not None
        changes_logits = changes_logits or self._num_before_ends > 0
        return self._generator is None and not changes_logits

    @property
    def _looks_back(self) -> bool:
        return self._options.repetition_penalty != 1.0 or self._counts_new

    def ahead(self) -> Sampler:
        """A copy that is to guess the tokens that this sampler is about to choose.

        It makes the same draws, so from about the same logits it mostly chooses the same tokens. It has no constraint.
        """
        other = copy(self)
        other.num_logprobs, other._constraint = None, None
        other._seen_V = None if self._seen_V is None else self._seen_V.clone()
        other._counts_V = None if self._counts_V is None else self._counts_V.clone()
        other._generator = None if self._generator is None else self._generator.clone_state()
        return other

    def choose(self, logits_V: Tensor) -> Tensor:
        """The next token, on the device: that of the largest score, or a drawn one. `add` tells that it came."""
        scores_V = self.scores(logits_V)
        if self._generator is None:
            return scores_V.argmax(dim=-1)
        # As torch.multinomial draws, without its checks, for which the host would wait for a GPU.
        probabilities_V = scores_V.softmax(dim=-1)
        times_V = torch.empty_like(probabilities_V).exponential_(generator=self._generator)
        return (probabilities_V / times_V).argmax(dim=-1)

    def scores(self, logits_V: Tensor) -> Tensor:
        """Scores from which the next token is taken. The logits are left as they are."""
        scores_V, options = logits_V, self._options
        if self._bias is not None:
            ids, values = self._bias
            scores_V = scores_V.index_add(0, ids, values.to(scores_V.dtype))
        if self._looks_back:
            self._look_back(len(logits_V))
        if self._seen_V is not None:
            penalty = options.repetition_penalty
            penalized_V = torch.where(scores_V < 0, scores_V * penalty, scores_V / penalty)
            scores_V = torch.where(self._seen_V, penalized_V, scores_V)
        if self._counts_V is not None:
            scores_V = scores_V - options.frequency_penalty * self._counts_V
            scores_V = scores_V - options.presence_penalty * (self._counts_V > 0)
        if self._num_before_ends > 0:
            ends = sent(torch.tensor(self._ends), self._device)
            scores_V = scores_V.index_fill(0, ends, -math.inf)
        if self._constraint is not None:
            # Above minus infinity, so that there is a token even if the model itself rules out all that are allowed.
            allowed_V = self._constraint.allowed(self._device)
            scores_V = scores_V.clamp(min=LEAST_SCORE).masked_fill(~allowed_V, -math.inf)
        scores_1V, no_ids = scores_V[None], torch.empty(1, 0, dtype=torch.long)
        for warper in self._warpers:
            scores_1V = warper(no_ids, scores_1V)
        return scores_1V[0]

    def add(self, token: int) -> None:
        """Take the token that came, for the penalties, the constraint and the least number of tokens."""
        self._num_before_ends -= 1
        if self._seen_V is not None:
            self._seen_V[token : token + 1] = True  # filled; for the place of one number the host would wait
        if self._counts_V is not None:
            self._counts_V[token] += 1
        if self._constraint is not None:
            self._constraint.add(token)

    def _look_back(self, vocab_size: int) -> None:
        """Make the memory of tokens that were there, before the first token."""
        if self._options.repetition_penalty != 1.0 and self._seen_V is None:
            seen_V = torch.zeros(vocab_size, dtype=torch.bool)
            seen_V[torch.tensor([token for token in self._prompt if token < vocab_size], dtype=torch.long)] = True
            self._seen_V = sent(seen_V, self._device)
        if self._counts_new and self._counts_V is None:
            self._counts_V = torch.zeros(vocab_size, device=self._device)


@torch.inference_mode()  # in which samplers keep what they remember, wherever they are called from
def next_tokens(samplers: Sequence[Sampler | None], logits_BV: Tensor) -> list[int | None]:
    """Choose the next token of every row, and tell its sampler. The host waits for the device once.

    Args:
        samplers: of each row, which may be others in every call; None for a row that has ended.

    Returns:
        a token per row, None for those that have ended or of which a logit is NaN or plus infinity; a `ScoredToken` for
        rows that asked for log-probabilities.
    """
    finite_B = logits_BV.amax(dim=-1) < math.inf  # false for NaN
    if all(sampler is None or sampler.takes_largest for sampler in samplers):
        tokens_B = logits_BV.argmax(dim=-1)
    else:
        numbers_BV = logits_BV.masked_fill(~finite_B[:, None], 0.0)  # sampling from what is no number ends the process
        none = finite_B.new_zeros((), dtype=torch.long)
        tokens_B = torch.stack(
            [
                none if sampler is None else sampler.choose(logits_V)
                for sampler, logits_V in zip(samplers, numbers_BV, strict=True)
            ]
        )
    num_logprobs = [None if sampler is None else sampler.num_logprobs for sampler in samplers]
    message = tokens_B.where(finite_B, ROW_ENDED)
    if any(number is not None for number in num_logprobs):
        asked = [(row, number) for row, number in enumerate(num_logprobs) if number is not None]
        scored = [_logprobs(logits_BV[row], tokens_B[row], number) for row, number in asked]
        message = torch.cat([message.double(), *scored])
    chosen = unpack(message, num_logprobs)
    for row, (sampler, token) in enumerate(zip(samplers, chosen, strict=True)):
        if sampler is None:
            chosen[row] = None
        elif token is not None:
            sampler.add(token)
    return chosen


def _logprobs(logits_V: Tensor, token: Tensor, number: int) -> Tensor:
    """Log-probability of a token, the largest ones and their ids, on the device, as `unpack` reads them."""
    logprobs_V = logits_V.log_softmax(dim=-1)
    largest, ids = logprobs_V.topk(number)
    return torch.cat([logprobs_V.gather(0, token[None]).double(), largest.double(), ids.double()])


def warpers(options: GenerationOptions) -> list[LogitsProcessor]:
    """Steps for sampling alone, in the order of `transformers.generate`."""
    chosen: list[LogitsProcessor] = []
    if options.do_sample:
        if options.temperature != 1.0:
            chosen.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            chosen.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1.0:
            chosen.append(TopPLogitsWarper(options.top_p))
        if options.min_p:
            chosen.append(MinPLogitsWarper(options.min_p))
    return chosen


def check_options(
    options: Sequence[GenerationOptions], tokenizer: Any | None, vocab_size: int, grammars: Grammars
) -> None:
    """Check that a model can generate with these options. Raises: ValueError."""
    for each in options:
        found = refused_option(each, tokenizer, vocab_size, grammars)
        if found is not None:
            name, reason = found
            raise ValueError(
                f"generation.{name}={cut_short(str(getattr(each, name)), LONGEST_VALUE)} {reason}; leave it out"
            )


def refused_option(
    options: GenerationOptions, tokenizer: Any | None, vocab_size: int, grammars: Grammars
) -> tuple[str, str] | None:
    """Name of an option that a model cannot follow, and why it cannot; None if it can follow all of them."""
    if options.stop and tokenizer is None:
        return "stop", "needs a tokenizer, and this model has none"
    if any(token >= vocab_size for token in options.logit_bias):
        return "logit_bias", f"has token {max(options.logit_bias)}, and this model's are 0 to {vocab_size - 1}"
    if options.logprobs is not None and options.logprobs > vocab_size:
        return "logprobs", f"asks for more than the {vocab_size} tokens of this model"
    if any(token >= vocab_size for token in options.stop_token_ids):
        return "stop_token_ids", f"has token {max(options.stop_token_ids)}, and this model's are 0 to {vocab_size - 1}"
    if options.kept_tokens and tokenizer is None:
        return "kept_tokens", "needs a tokenizer, and this model has none"
    if options.json_schema is not None or options.grammar is not None:
        assert options.guide is not None
        try:
            grammars.check(options.guide)
        except ValueError as error:
            return "json_schema" if options.guide.is_schema else "grammar", f"cannot be followed: {error}"
    return None
