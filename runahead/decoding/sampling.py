"""Sampling: the next token of a row from its logits, with transformers' own logits processors."""

# Legend: V vocabulary.

from __future__ import annotations

import math

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

    def next_token(self, token_ids: list[int], logits_V: Tensor) -> int:
        """Choose the token after `token_ids`: the most likely one, or a sampled one.

        Raises:
            ValueError: a logit is NaN or plus infinity.
        """
        if not logits_V.max() < math.inf:  # false for NaN
            raise ValueError(
                "the model's logits are not numbers, so there is no next token; check its weights, or use another "
                "model.dtype"
            )
        scores_1V = logits_V[None]
        if self._processors:
            seen = token_ids if self._looks_back else []
            ids_1S = torch.tensor([seen], dtype=torch.long, device=logits_V.device)
            scores_1V = self._processors(ids_1S, scores_1V)
        if self._generator is None:
            return int(scores_1V.argmax(dim=-1))
        return int(torch.multinomial(scores_1V.softmax(dim=-1)[0], 1, generator=self._generator))


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
