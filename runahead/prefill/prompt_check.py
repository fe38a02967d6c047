"""Checks of prompts: token ids and lengths that a model, its cache policies and a prefill strategy support.

A prompt may be as long as the model's context, or of any length if policies bound the positions that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies.layer_view import Phase
from policies.reuse import PromptTooLong, ReusingPrompt
from runahead.config import Positions, PrefillName, PrefillOptions
from runahead.model.loading.position_limit import longrope_threshold, max_positions
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies

DEFAULT_CHUNK_TOKENS = 512
"""Default chunk size in tokens for a prompt longer than the model's context."""

LEAST_REPLAYED = 64
"""Positions that a prompt leaves for a chunk of it and the request to repeat that, where a policy asks for it."""


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """Facts about a model and a run that limit its prompts.

    Attributes:
        max_positions: most positions of the model; None is no bound.
        num_layers: number of the model's layers that store keys and values.
        vocab_size: size of the vocabulary; None does not check token ids.
        policies: cache policies during prefill and decoding.
        prefill: options of the prefill.
        num_ranks: number of ranks among which `prefill` splits a prompt.
        uneven_limit: most tokens with which prompts of different lengths may run at once; None is any number.
        length_threshold: length above which LongRoPE has other tables; None for other models.
        name: the model's name in messages.
    """

    max_positions: int | None = None
    num_layers: int = 1
    vocab_size: int | None = None
    policies: RankPolicies = field(default_factory=RankPolicies)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    num_ranks: int = 1
    uneven_limit: int | None = None
    length_threshold: int | None = None
    name: str = "this model"

    @classmethod
    def of_config(cls, config: Any, policies: RankPolicies, prefill: PrefillOptions, num_ranks: int) -> PromptLimits:
        """Limits that are known before the weights are loaded. `config` is transformers' config of the text model."""
        return cls(
            max_positions=max_positions(config),
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            policies=policies,
            prefill=prefill,
            num_ranks=num_ranks,
            length_threshold=longrope_threshold(config),
        )

    @classmethod
    def of_model(cls, model: Model, policies: RankPolicies, prefill: PrefillOptions, num_ranks: int) -> PromptLimits:
        """Limits of a loaded model."""
        return replace(
            cls.of_config(model.config, policies, prefill, num_ranks),
            num_layers=model.num_layers,
            uneven_limit=model.uneven_limit,
            name=f"model {model.name} ({model.config.model_type})",
        )

    def outgrows(self, num_tokens: int, num_new: int) -> bool:
        """Whether a prompt may grow past the length where LongRoPE changes its tables. The last token is not fed."""
        threshold = self.length_threshold
        return threshold is not None and num_tokens <= threshold < num_tokens + num_new - 1

    def chunk_tokens(self, num_tokens: int) -> int | None:
        """Number of tokens of a prompt that one rank computes at a time; None is all of them."""
        if self.prefill.chunk_tokens is not None:
            return self.prefill.chunk_tokens
        if self.max_positions is None or num_tokens <= self.max_positions:
            return None
        if self.policies.clamped_to is not None:
            return max(1, min(DEFAULT_CHUNK_TOKENS, self.policies.clamped_to))
        stay = self.policies.most_slots(self.num_layers, Phase.prefill)
        if stay is None:
            return None
        return max(1, min(DEFAULT_CHUNK_TOKENS, self.max_positions - stay))

    def apart(self, lengths: Sequence[int], num_new: Sequence[int]) -> str | None:
        """Why prompts of these lengths, with so many new tokens each, cannot run at once; None if they can."""
        if len(set(lengths)) == 1:
            return None
        if self.uneven_limit is not None and max(lengths) + max(num_new) > self.uneven_limit:
            return (
                f"{self.name} counts positions from the start of the longest prompt, so prompts of different lengths "
                "cannot run at once"
            )
        limit = self.max_positions
        if limit is not None and self.policies.clamped_to is not None and max(lengths) > limit:
            return (
                f"prompts of {min(lengths)} to {max(lengths)} tokens cannot run at once, since those beyond the "
                f"model's {limit} positions retrieve together"
            )
        return None

    def together(self, lengths: Sequence[int], num_new: int) -> list[range]:
        """Runs of prompts that follow each other, of these lengths, each of which can run at once."""
        found = [range(0, 0)]
        for end in range(1, len(lengths) + 1):
            start = found[-1].start
            if self.apart(lengths[start:end], [num_new]) is None:
                found[-1] = range(start, end)
            else:
                found.append(range(end - 1, end))
        return found

    @property
    def longest_text(self) -> int | None:
        """Most tokens of a prompt and its answer for which the model has positions; None is no bound."""
        most = self.max_positions
        return None if most is None or self.remedy(most + 1, 1) is None else most

    def remedy(self, num_tokens: int, num_new: int) -> str | None:
        """Remedy for a prompt and `num_new` generated tokens that exceed the model's positions; None if they fit."""
        limit, policies = self.max_positions, self.policies
        if limit is None or num_tokens + num_new <= limit:
            return None
        fitting = limit - num_tokens
        shorter = "a shorter prompt"
        if fitting > 0:
            shorter = f"generation.max_new_tokens={fitting} or less, or {shorter}"
        one_rank = f"{shorter}, or one rank (prefill=single), which takes such a prompt chunk by chunk"
        is_split = num_tokens > limit and self.num_ranks > 1 and self.prefill.name is not PrefillName.single
        window = policies.clamped_to
        if window is not None:
            if is_split:
                return one_rank
            chunk_tokens = self.chunk_tokens(num_tokens)
            is_long = num_tokens > limit and chunk_tokens is not None and chunk_tokens > window
            return f"prefill.chunk_tokens={window} or less, as policy.recent, or {shorter}" if is_long else None
        stay = policies.most_slots(self.num_layers, Phase.prefill)
        if stay is None or policies.ragged:  # whose longest heads have no bound
            budget = max(1, min(1024, limit // 2))
            streams = f"policy=streaming_llm policy.budget={budget} policy.positions=reencoded"
            if policies:
                streams = f"a policy that keeps a fixed number of tokens, such as {streams}"
            return f"{shorter}, or {streams}"
        if policies.positions is not Positions.reencoded:
            return f"{shorter}, or policy.positions=reencoded"
        if is_split:
            return one_rank
        chunk_tokens = self.chunk_tokens(num_tokens)
        in_prefill = num_tokens if chunk_tokens is None else min(num_tokens, stay + chunk_tokens)
        if in_prefill > limit:
            return (
                f"{shorter}, or a cache that leaves room for a chunk: a smaller policy.budget or prefill.chunk_tokens"
            )
        stay_later = policies.most_slots(self.num_layers, Phase.decode)
        while_answering = min(stay, num_tokens) + num_new if stay_later is None else stay_later + 1
        if while_answering > limit:
            return f"{shorter}, or a policy that also forgets while it answers, such as streaming_llm"
        return None


def check_prompts(
    prompts: Sequence[Sequence[int] | ReusingPrompt],
    limits: PromptLimits,
    *,
    num_new: int | Sequence[int],
    names: Sequence[str] | None = None,
) -> None:
    """Check token ids and lengths of prompts that run at once.

    Args:
        prompts: token ids, or prompts that reuse segments.
        num_new: number of tokens that are generated after every prompt, or after each.
        names: the prompts' names in messages; by default "prompt 0" and so on.

    Raises:
        PromptTooLong: a prompt and its new tokens are.
        ValueError: there is no prompt; one is empty or holds an unknown id; or they cannot run at once.
    """
    if not prompts:
        raise ValueError("no prompt was given")
    names = names or [f"prompt {index}" for index in range(len(prompts))]
    after_each = [num_new] * len(prompts) if isinstance(num_new, int) else num_new
    for name, prompt, num in zip(names, prompts, after_each, strict=True):
        ids: Sequence[int] = prompt.ids if isinstance(prompt, ReusingPrompt) else prompt
        if not ids:
            raise ValueError(f"{name} is empty; it needs at least one token")
        if limits.vocab_size is not None and not all(0 <= token < limits.vocab_size for token in ids):
            raise ValueError(f"{name} holds token ids outside 0..{limits.vocab_size - 1}")
        if isinstance(prompt, ReusingPrompt):
            _check_end(name, prompt, num, limits.max_positions)
        _check_length(name, len(ids), num, limits)
    lengths = [len(prompt.ids) if isinstance(prompt, ReusingPrompt) else len(prompt) for prompt in prompts]
    if (apart := limits.apart(lengths, after_each)) is not None:
        raise ValueError(f"{apart}; use prompt.batch=1")


def _check_length(name: str, num_tokens: int, num_new: int, limits: PromptLimits) -> None:
    """Check the length of one prompt and its generated tokens. Raises: PromptTooLong."""
    helps = limits.remedy(num_tokens, num_new)
    if helps is not None:
        raise PromptTooLong(
            f"{name} has {num_tokens} tokens, and with generation.max_new_tokens={num_new} it is longer than the "
            f"model's {limits.max_positions} positions; use {helps}"
        )
    replaying = limits.policies.replaying
    if replaying is not None and limits.max_positions is not None and replaying.drops_of(num_tokens):
        most = limits.max_positions - LEAST_REPLAYED
        if num_tokens > most:
            raise PromptTooLong(
                f"{name} has {num_tokens} tokens, and policy {replaying.label} repeats it at positions after "
                f"it, of which the model has {limits.max_positions}; use at most {most} tokens, or another policy"
            )


def _check_end(name: str, prompt: ReusingPrompt, num_new: int, limit: int | None) -> None:
    """Check the last position of a prompt that reuses segments; positions may have gaps. Raises: PromptTooLong."""
    if limit is not None and prompt.end + num_new > limit:
        fitting = limit - prompt.end
        helps = f"generation.max_new_tokens={fitting} or less" if fitting > 0 else "a shorter schema or prompt"
        raise PromptTooLong(
            f"{name} ends at position {prompt.end:,}, and with {num_new} new tokens exceeds the model's {limit:,} "
            f"positions; use {helps}"
        )
