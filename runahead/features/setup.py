"""`Setup`: what is known of a run, of which facts are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runahead.config import CacheOptions, DecodeOptions, GenerationOptions, PrefillOptions, Weights

DYNAMIC_CACHE = "a DynamicCache"
SEGMENTS = "reuse of segments"
"""Name of the reuse of segments in messages, where no option asks for it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Facts that are known of a run. None is what is not known yet, or not asked for.

    Models and policies are `Any`, since the modules that define them use this one.

    Attributes:
        options: given options that the runtime does not take, by their names, such as `prompt.question`.
        num_stages: of the chain.
        num_shares: ranks that share one model, as of `ranks.tensor`.
        num_chunks: chunks of a prompt that are not empty.
        policy: the option that names a cache policy, such as "policy=snapkv"; "" if none is named.
        policies: the `RankPolicies`.
        place: "last" or "others": the place in `policies` that facts are asked of. `check` asks them of each in turn,
            where the two differ.
        model: the `Model`.
        config: transformers' config of the text model, where the model is not loaded.
        prefixes: what asks for reuse of prefixes, in messages; "" if nothing does.
        segments: what asks for reuse of segments, in messages; "" if nothing does.
        blends: whether some tokens of reused segments are computed again.
        scores: whether the tokens of prompts are scored.
        drafting: the `RankPolicies` that choose what drafts are made of, or the model that makes them.
        rows: rows of a conversation.
        outgrows: a text may grow past the length where LongRoPE changes its tables, while it is answered.
        weights: as `model.weights`.
        device: type of device of the ranks, such as "cuda".
        backend: that sends messages between ranks, such as "nccl".
    """

    prefill: PrefillOptions | None = None
    decode: DecodeOptions | None = None
    cache: CacheOptions | None = None
    generation: GenerationOptions | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    num_stages: int | None = None
    num_shares: int | None = None
    num_chunks: int | None = None
    policy: str | None = None
    policies: Any = None
    place: str = "last"
    model: Any = None
    config: Any = None
    prefixes: str | None = None
    segments: str | None = None
    blends: bool | None = None
    scores: bool | None = None
    drafting: Any = None
    rows: int | None = None
    outgrows: bool | None = None
    weights: Weights | None = None
    device: str | None = None
    backend: str | None = None

    @property
    def steps(self) -> Sequence[Any]:
        """The policies that run one after another at `place` alone; none if they are not known."""
        return [] if self.policies is None else getattr(self.policies, self.place)

    @property
    def retriever(self) -> Any:
        """The policy that retrieves at `place` alone; None if none does, or if they are not known."""
        return next((step for step in self.steps if step.retrieves), None)

    @property
    def text_config(self) -> Any:
        """transformers' config of the text model; None if it is not known."""
        return self.config if self.model is None else self.model.config

    @property
    def model_name(self) -> str:
        """The model, in messages."""
        if self.model is None:
            return f"this {self.config.model_type} model"
        return f"model {self.model.name} ({self.model.config.model_type})"
