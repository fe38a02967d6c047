"""Sampling: the next token of a row from its logits, with transformers' own logits processors."""

# Legend: V vocabulary.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runahead.config import GenerationOptions


class Sampler:
    """Sampler of one row. Each row has a generator of its own, so a row in a batch samples what it would alone.

    Args:
        options: greedy or sampling, and the settings of the processors.
        seed: seed of this row's generator.
        device: device of the logits.
    """

    def __init__(self, options: GenerationOptions, seed: int, device: torch.device) -> None:
        self._processors = processors(options)
        self._looks_back = options.repetition_penalty != 1.0
        self._generator = torch.Generator(device).manual_seed(seed) if options.do_sample else None

    @property
    def takes_largest(self) -> bool:
        """Whether the next token is that of the largest logit."""
        return self._generator is None and not self._processors

    def choose(self, token_ids: list[int], logits_V: Tensor) -> Tensor:
        """The token after `token_ids`, on the device: the most likely one, or a sampled one."""
        scores_1V = logits_V[None]
        if self._processors:
            seen = token_ids if self._looks_back else []
            ids_1S = torch.tensor([seen], dtype=torch.long, device=logits_V.device)
            scores_1V = self._processors(ids_1S, scores_1V)
        if self._generator is None:
            return scores_1V.argmax(dim=-1)[0]
        return torch.multinomial(scores_1V.softmax(dim=-1)[0], 1, generator=self._generator)[0]


def next_tokens(
    samplers: Sequence[Sampler | None], token_ids: Sequence[list[int]], logits_BV: Tensor
) -> list[int | None]:
    """Choose the next token of every row. The host waits for the device once.

    Args:
        samplers: of each row; None for a row that has ended.
        token_ids: of each row so far.

    Returns:
        a token per row, None for those that have ended.

    Raises:
        ValueError: a logit of a row that goes on is NaN or plus infinity.
    """
    finite_B = logits_BV.amax(dim=-1) < math.inf  # false for NaN
    if all(sampler is None or sampler.takes_largest for sampler in samplers):
        tokens_B = logits_BV.argmax(dim=-1)
    else:
        logits_BV = logits_BV.masked_fill(~finite_B[:, None], 0.0)  # sampling from what is no number ends the process
        none = finite_B.new_zeros((), dtype=torch.long)
        tokens_B = torch.stack(
            [
                none if sampler is None else sampler.choose(ids, logits_V)
                for sampler, ids, logits_V in zip(samplers, token_ids, logits_BV, strict=True)
            ]
        )
    tokens = tokens_B.where(finite_B, -1).tolist()
    if any(sampler is not None and token < 0 for sampler, token in zip(samplers, tokens, strict=True)):
        raise ValueError(
            "the model's logits are not numbers, so there is no next token; check its weights, or use another "
            "model.dtype"
        )
    return [None if sampler is None else token for sampler, token in zip(samplers, tokens, strict=True)]


def processors(options: GenerationOptions) -> LogitsProcessorList:
    """Logits processors in the order of `transformers.generate`; temperature, top-k and top-p only for sampling."""
    chosen = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.do_sample:
        if options.temperature != 1.0:
            chosen.append(TemperatureLogitsWarper(options.temperature))
        if options.top_k:
            chosen.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1.0:
            chosen.append(TopPLogitsWarper(options.top_p))
    return chosen
