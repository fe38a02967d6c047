"""Facts about a run, by the words that users know: each holds, or does not, or is not known yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runahead.config import (
    CacheOptions,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    Positions,
    PrefillName,
    PrefillOptions,
    Speculate,
    Speculative,
    Weights,
)

NORMS_BY_HEAD = {"cohere": "use_qk_norm"}
"""By model_type: the option with which norms of queries and keys have weights by head, which plans leave whole."""

STATES_ALONE = ("linear_attention", "conv")
"""Layer types of transformers' configs that hold a state in place of keys and values: of linear attention, state spaces
or a convolution."""

WITH_STATES = (*STATES_ALONE, "hybrid", "hybrid_sliding")
"""All layer types that hold a state, the last two beside attention."""

MARKING = ("dms_window_size", "dmc_window_size")
"""Options of configs of models that mark tokens. With the last one layers hold the mean so far, as a state."""

WITHOUT_CACHE = ("moe", "mlp")
"""Layer types that hold nothing of earlier tokens."""


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


DYNAMIC_CACHE = "a DynamicCache"
SEGMENTS = "reuse of segments"
"""Name of the reuse of segments in messages, where no option asks for it."""

Words = str | None
"""Name of a fact that holds in messages; "" if it does not hold, and None if that is not known yet."""

Fact = Callable[[Setup], Words]


def _if(holds: object, words: str) -> str:
    return words if holds else ""


def _named(policy: Any) -> str:
    return "" if policy is None else policy.label


def _option(name: str, section: str | None = None) -> Fact:
    """An option that is not off, by its name on the command line, of a section of `Setup` or of `Setup.options`."""

    def fact(setup: Setup) -> Words:
        options = setup.options if section is None else getattr(setup, section)
        if options is None or (section is None and name not in options):
            return None
        value = options[name] if section is None else getattr(options, name.partition(".")[2])
        return _if(value not in (None, False, 0, ""), f"{name}={'true' if value is True else value}")

    return fact


def _choice(section: str, *names: str) -> Fact:
    """The choice of a section, such as prefill, if it is one of these."""

    def fact(setup: Setup) -> Words:
        options = getattr(setup, section)
        return None if options is None else _if(options.name.name in names, f"{section}={options.name.name}")

    return fact


def _other(section: str, *names: str) -> Fact:
    """The choice of a section, such as prefill, if it is none of these."""

    def fact(setup: Setup) -> Words:
        options = getattr(setup, section)
        return None if options is None else _if(options.name.name not in names, f"{section}={options.name.name}")

    return fact


def _speculative(*kinds: Speculative) -> Fact:
    """The draft that chooses what is computed of a prompt, if it is one of these; by default any."""

    def fact(setup: Setup) -> Words:
        if setup.prefill is None:
            return None
        kind = setup.prefill.speculative
        return _if(kind in (kinds or (Speculative.layers, Speculative.model)), f"prefill.speculative={kind.name}")

    return fact


def _draft(*kinds: Speculate) -> Fact:
    """The kind of draft, if it is one of these."""

    def fact(setup: Setup) -> Words:
        if setup.generation is None:
            return None
        kind = setup.generation.speculate
        return _if(kind in kinds, f"generation.speculate={kind.name}")

    return fact


def _number(name: str, words: str = "{}") -> Fact:
    """A number of `Setup` that is above 1."""

    def fact(setup: Setup) -> Words:
        number = getattr(setup, name)
        return None if number is None else _if(number > 1, words.format(number))

    return fact


def _policies(words: Callable[[Any], str]) -> Fact:
    """Something about the policies of both places, whichever is asked of."""
    return lambda setup: None if setup.policies is None else words(setup.policies)


def _of_last(fact: Fact) -> Fact:
    """Mark a fact of the rank that decodes alone: it does not hold for the place of earlier ranks."""
    return lambda setup: fact(setup) if setup.place == "last" else ""


def _retriever(words: Callable[[Any], str]) -> Fact:
    """Something about the policy that retrieves at the place that is asked of."""

    def fact(setup: Setup) -> Words:
        if setup.policies is None:
            return None
        return "" if setup.retriever is None else words(setup.retriever)

    return fact


def _step(holds: Callable[[Any], Any]) -> Fact:
    """The first policy for which something holds, at the place that is asked of."""

    def fact(setup: Setup) -> Words:
        return None if setup.policies is None else _named(next((step for step in setup.steps if holds(step)), None))

    return fact


def _drafting(holds: Callable[[Any], Any]) -> Fact:
    """The last of the policies that choose what drafts are made of, if something holds for these.

    They are asked about whatever `Setup.place` is, which is a place in the policies of the run.
    """

    def fact(setup: Setup) -> Words:
        policies = setup.drafting
        if not hasattr(policies, "last") or not holds(policies):
            return ""
        steps = policies.last or policies.others
        return _named(steps[-1]) if steps else "full"

    return fact


def _model(holds: Callable[[Any], Any]) -> Fact:
    """The model, if something holds for it once it is loaded."""
    return lambda setup: None if setup.model is None else _if(holds(setup.model), setup.model_name)


def _words_of(words: Callable[[Any], str]) -> Fact:
    """Something about the model, in its own words, once it is loaded."""
    return lambda setup: None if setup.model is None else words(setup.model)


def _share(holds: Callable[[Any], Any]) -> Fact:
    """The model, if something holds for it that does not where each rank has the whole model."""

    def fact(setup: Setup) -> Words:
        splits = setup.prefill is None or setup.prefill.name is PrefillName.tensor or setup.num_shares != 1
        return _model(holds)(setup) if setup.model is not None or splits else ""

    return fact


def _lacks(part: str) -> Fact:
    """Why a model lacks a part, as the ValueError says that asking for it raises."""

    def fact(setup: Setup) -> Words:
        if setup.model is None:
            return None
        try:
            getattr(setup.model, part)
        except ValueError as error:
            return str(error)
        return ""

    return fact


def _name_of_a_policy(setup: Setup) -> Words:
    if setup.policy is not None:
        return setup.policy
    return None if setup.policies is None else next((f"policy {_named(step)}" for step in setup.steps), "")


def _any_policy(setup: Setup) -> Words:
    if setup.policy is not None:
        return _if(setup.policy, "cache policies")
    return None if setup.policies is None else _if(setup.policies.chooses, "cache policies")


def _compares_by_kv_head(setup: Setup) -> Words:
    """A policy that decides by what all query heads of a KV head attend to.

    Those that vote with all heads of the model do, once another has chosen by head (`LayerView.over_heads`).
    """
    alike = all(step.chooses_alike for step in setup.steps if not step.retrieves)
    return _step(lambda step: step.compares_by_kv_head or (step.votes_over_heads and not alike))(setup)


def _drops_tokens(setup: Setup) -> Words:
    """A policy that does not keep all tokens, as the user named it."""
    name, retrieve = _step(lambda step: not step.retrieves)(setup), setup.options.get("policy.retrieve")
    return name and (f"policy {name}" if retrieve is None else f"policy.retrieve={retrieve}")


def _comes_twice(setup: Setup) -> Words:
    """A policy that is in a sequence twice, with the same options."""
    steps = list(setup.steps)
    return _named(next((step for place, step in enumerate(steps) if step in steps[:place]), None))


def _looks_ahead(setup: Setup) -> Words:
    """A policy that retrieves and predicts queries a layer ahead on the model's device."""
    if setup.policies is not None and setup.retriever is None:
        return ""
    if setup.model is None:
        return None
    return _step(lambda step: step.retrieves and step.looks_ahead_on(setup.model.device))(setup)


def _no_pairs(setup: Setup) -> Words:
    """The model, if it has no neighbouring layers that the merging policy can merge."""
    if setup.model is None or setup.policies is None:
        return None
    return _if(not setup.policies.form(setup.model), setup.model_name)


def _no_positions_left(setup: Setup) -> Words:
    """The largest distance to which a policy may clamp, if that to which it does leaves no position of the model."""
    if setup.model is None or setup.model.max_positions is None:
        return None if setup.model is None else ""
    positions = setup.model.max_positions
    return _retriever(lambda policy: _if(policy.clamps and policy.recent >= positions, str(positions - 1)))(setup)


def _last_keeps_all(setup: Setup) -> Words:
    """The number of stages of a chain whose last one keeps all tokens."""
    if setup.prefill is None or setup.decode is None or setup.num_stages is None:
        return None
    is_chain = setup.prefill.name is PrefillName.kv_runahead and setup.decode.name is not DecodeName.sharded
    return _if(is_chain and setup.num_stages > 1, str(setup.num_stages))


def _may_shard(setup: Setup) -> Words:
    """The way of decoding, if keys and values may stay on several stages."""
    return "" if setup.num_stages == 1 else _other("decode", "last")(setup)


def _auto(setup: Setup) -> Words:
    """The way of decoding, if it is left open whether keys and values stay on several stages."""
    is_auto = _choice("decode", "auto")(setup)
    several = _number("num_stages")(setup)
    return is_auto and (several and is_auto)


def _joins_none(setup: Setup) -> Words:
    """Rows of one batch: of no server, or of one that does not decode all of its rows on one stage."""
    together, serves = _may_shard(setup), _option("a server")(setup)
    if serves and together is None:
        return None
    return _if(not serves or bool(together), "rows of one batch")


def _is_split(setup: Setup) -> Words:
    if setup.prefill is None or not setup.prefill.takes_partition:
        return None if setup.prefill is None else ""
    return _number("num_chunks")(setup)


def _outgrows(setup: Setup) -> Words:
    """The length at which LongRoPE changes its tables, if texts grow past it."""
    if setup.model is None or setup.outgrows is None:
        return None
    threshold = setup.model.length_threshold
    return f"{threshold:,}" if setup.outgrows and threshold else ""


def _marks(setup: Setup) -> Words:
    """The model, if it marks tokens that it evicts."""
    if setup.model is not None:
        return _if(setup.model.marks is not None, setup.model_name)
    return None if setup.config is None else _if(not _no_marks(setup), setup.model_name)


def _no_marks(setup: Setup) -> Words:
    """The model's type, if it marks no tokens."""
    config = setup.text_config
    marks = any(getattr(config, option, None) is not None for option in MARKING)
    return None if config is None else _if(not marks, str(config.model_type))


def _shared_kv(setup: Setup) -> Words:
    """The layers that read keys and values of others."""
    if setup.model is not None:
        return _if(setup.model.reads_kv_of, f"{len(setup.model.reads_kv_of)} layers of {setup.model_name}")
    shares = getattr(setup.config, "num_kv_shared_layers", 0) or getattr(setup.config, "kv_sources", None)
    return None if setup.config is None else _if(shares, f"layers of {setup.model_name}")


def _passes(setup: Setup) -> Words:
    """The layers that read keys and values by the model's config, later ones among them."""
    config = setup.text_config
    return None if config is None else _if(getattr(config, "kv_sources", None), f"layers of {setup.model_name}")


def _states(setup: Setup) -> Words:
    """The layers that hold a state of the text before."""
    config = setup.text_config
    kinds = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind in WITH_STATES})
    if getattr(config, MARKING[-1], None) is not None:
        kinds = ["averaging (DMC)"]
    return None if config is None else _if(kinds, f"{' and '.join(kinds)} layers of {setup.model_name}")


def _states_alone(setup: Setup) -> Words:
    """The model, if none of its layers stores keys and values."""
    config = setup.text_config
    kinds = set(getattr(config, "layer_types", None) or [])
    return None if config is None else _if(kinds and kinds <= {*STATES_ALONE, *WITHOUT_CACHE}, setup.model_name)


def _norms_by_head(setup: Setup) -> Words:
    config = setup.text_config
    option = "" if config is None else NORMS_BY_HEAD.get(config.model_type, "")
    return None if config is None else _if(getattr(config, option, False), f"{option}=true of {setup.model_name}")


def _windows(model: Any) -> bool:
    return any(rule is not None for rule in model.rules)


OF_MODEL: dict[str, Fact] = {
    "marks": _marks,
    "no marks": _no_marks,
    "shared KV layers": _shared_kv,
    "passes": _passes,
    "states": _states,
    "states alone": _states_alone,
    "states one by one": _model(lambda model: model.gives_one_by_one),
    "norms by head": _norms_by_head,
    "windows": _model(_windows),
    "ALiBi": _model(lambda model: model.has_key_bias),
    "angles by length": _model(lambda model: model.rotates_by_length),
    "angles by length, of each token": _model(lambda model: model.rotates_by_length and model.length_threshold is None),
    "an answer past LongRoPE's threshold": _outgrows,
    "own positions": _model(lambda model: model.uneven_limit is not None),
    "KV heads that ranks copy": _share(lambda model: model.copies_kv_heads),
    "a share of a model": _share(lambda model: model.num_shards > 1),
    "rotations unknown": _lacks("rotations"),
    "positions that cannot be re-encoded": _of_last(_lacks("rotaries")),
    "output projections unknown": _lacks("output_projections"),
    "attention inputs unknown": _lacks("attention_input_dims"),
    "queries that cannot be predicted": _lacks("query_prediction"),
    "no list of layers": _model(lambda model: not model.has_layers),
    "no layers to merge": _no_pairs,
    "steps that differ": _words_of(lambda model: model.steps_differ),
    "no kernel for graphs": _words_of(lambda model: model.lacks_step_kernel),
    "no kernels of our own": _words_of(lambda model: model.lacks_kernels),
    "a policy that looks ahead": _looks_ahead,
    "policy.recent of all positions": _no_positions_left,
}
"""Facts that the model decides, by its config or once it is loaded."""

OF_RANKS: dict[str, Fact] = {
    "decode other than last on several stages": _may_shard,
    "decode=auto on several stages": _auto,
    "rows of one batch": _joins_none,
    "a GPU": lambda setup: None if setup.device is None else _if(setup.device == "cuda", "a GPU"),
    "ranks.backend=nccl": lambda setup: None if setup.backend is None else _if(setup.backend == "nccl", "NCCL"),
    "one stage": lambda setup: None if setup.num_stages is None else _if(setup.num_stages == 1, "one stage"),
    "several stages": _number("num_stages"),
    "several stages with decode=last": _last_keeps_all,
    "a prompt in several chunks": _is_split,
}
"""Facts that the ranks decide, their number and devices, and the length of the prompt."""

FACTS: dict[str, Fact] = {
    # of options
    "prefill=tsp or zigzag": _choice("prefill", "tsp", "zigzag"),
    "prefill=zigzag": _choice("prefill", "zigzag"),
    "prefill=tensor": _choice("prefill", "tensor"),
    "prefill=pipeline": _choice("prefill", "pipeline"),
    "prefill other than kv_runahead": _other("prefill", "kv_runahead"),
    "prefill.chunk_tokens": _option("prefill.chunk_tokens", "prefill"),
    "prefill.row_tokens": _option("prefill.row_tokens", "prefill"),
    "prefill.speculative": _speculative(),
    "prefill.speculative=layers": _speculative(Speculative.layers),
    "prefill.speculative=model": _speculative(Speculative.model),
    "prefill.wire_bits": _option("prefill.wire_bits", "prefill"),
    "prefill.attention=xattention": lambda setup: (
        None if setup.prefill is None else _if(setup.prefill.is_sparse, "prefill.attention=xattention")
    ),
    "prefill.attention=streaming_heads": lambda setup: (
        None if setup.prefill is None else _if(setup.prefill.streams, "prefill.attention=streaming_heads")
    ),
    "decode=sharded": _choice("decode", "sharded"),
    "decode other than last": _other("decode", "last"),
    "cache.bits": _of_last(_option("cache.bits", "cache")),
    "cache.tier_bits": _option("cache.tier_bits", "cache"),
    "generation.speculate": _draft(Speculate.lookup, Speculate.policy, Speculate.model),
    "generation.speculate=lookup or model": _draft(Speculate.lookup, Speculate.model),
    "generation.speculate=policy": _draft(Speculate.policy),
    "generation.speculate=policy or model": _draft(Speculate.policy, Speculate.model),
    "draft.speculate=model": _option("draft.speculate"),
    "model.weights=int8": lambda setup: (
        None if setup.weights is None else _if(setup.weights is Weights.int8, "model.weights=int8")
    ),
    "option ranks.tensor": _option("ranks.tensor"),
    "option policy.positions": _option("policy.positions"),
    "ranks.tensor": _number("num_shares", "ranks.tensor={}"),
    "prompt.question": _option("prompt.question"),
    "prompt.ids_file": _option("prompt.ids_file"),
    "prompt.random_tokens": _option("prompt.random_tokens"),
    "prompt.chat": _option("prompt.chat"),
    "partition=ratios or table": _option("partition"),
    "a server": _option("a server"),
    DYNAMIC_CACHE: lambda setup: _if(setup.options.get(DYNAMIC_CACHE), DYNAMIC_CACHE),
    "serve.decode_ranks": _option("serve.decode_ranks"),
    "serve.handover": _option("serve.handover"),
    # of texts
    "reuse of prefixes": lambda setup: setup.prefixes,
    "echo with logprobs": lambda setup: None if setup.scores is None else _if(setup.scores, "echo with logprobs"),
    "policy=prompt_cache": lambda setup: setup.segments,
    "policy.recompute": lambda setup: None if setup.blends is None else _if(setup.blends, "policy.recompute"),
    "a conversation": _of_last(lambda setup: None if setup.rows is None else "a conversation"),
    "a conversation of several rows": _number("rows"),
    # of the policies of both places
    "cache policies": _any_policy,
    "cache policies or cache.bits": _policies(lambda policies: _if(policies, "cache policies or cache.bits")),
    "policy.positions=reencoded": _policies(
        lambda policies: _if(policies and policies.positions is Positions.reencoded, "policy.positions=reencoded")
    ),
    "a policy that needs the whole prompt": _policies(lambda policies: _if(policies.needs_whole, "this policy")),
    "a policy of earlier ranks that narrows": _of_last(
        _policies(lambda policies: _named(next((policy for policy in policies.others if policy.narrows), None)))
    ),
    # of the policies of the rank that decodes
    "a policy that decides on each token": _of_last(
        _step(lambda step: not step.retrieves and (step.while_decoding or step.carries_generated))
    ),
    "a policy that decides on the whole prompt": _of_last(_policies(lambda policies: _named(policies.deciding))),
    "no policy of streaming heads alone": _of_last(
        _policies(lambda policies: _if([each.streams for each in policies.last] != [True], "no policy of such heads"))
    ),
    "a policy that repeats the prompt": _of_last(
        _policies(lambda policies: _named(next((each for each in policies.last if each.replay is not None), None)))
    ),
    "a policy that merges layers": _of_last(_policies(lambda policies: _named(policies.merging))),
    "a policy that needs all tokens of a prompt": _of_last(
        _step(lambda step: not step.retrieves and step.last_queries is None)
    ),
    "a policy that needs attention inputs of each token": _of_last(
        _step(lambda step: step.needs_attention_input and step.replay is None)
    ),
    # of the policies at the place that is asked of, which is each in turn
    "a policy": _name_of_a_policy,
    "a retrieving policy": _retriever(_named),
    "policy.clamped=true": _retriever(lambda policy: _if(policy.clamps, "policy.clamped=true")),
    "policy.pool.bytes": _retriever(
        lambda policy: _if(policy.pool.bytes is not None, f"policy.pool.bytes={policy.pool.bytes}")
    ),
    "policy.events.by=surprise": _retriever(lambda policy: _if(policy.needs_surprise, "policy.events.by=surprise")),
    "policy.events.refine": _retriever(lambda policy: _if(policy.compares_layers, "policy.events.refine=modularity")),
    "a policy that follows marks": _step(lambda step: step.follows_marks),
    "a policy that follows no marks": _step(lambda step: not step.follows_marks),
    "a policy that drops tokens": _drops_tokens,
    "a policy that narrows": _step(lambda step: step.narrows),
    "a policy that narrows, retrieves or merges layers": _step(
        lambda step: step.narrows or step.retrieves or step.merges_layers
    ),
    "a policy that narrows later": lambda setup: _named(next((step for step in setup.steps[1:] if step.narrows), None)),
    "a policy that compares by KV head": _compares_by_kv_head,
    "a policy that turns queries": _step(lambda step: step.queries_from is not None),
    "a policy that needs output projections": _step(lambda step: step.needs_output_projection),
    "a policy that needs attention inputs": _step(lambda step: step.needs_attention_input),
    "a sequence": lambda setup: _if(len(setup.steps) > 1, _named(setup.steps[0]) if setup.steps else ""),
    "a policy twice": _comes_twice,
    "unequal heads": _step(lambda step: step.keeps_ragged),
    "unequal heads, decided on the whole prompt": _step(
        lambda step: step.keeps_ragged and (step.decides_on_all or step.replay is not None)
    ),
    "unequal heads, compensated": _step(lambda step: step.keeps_ragged and step.compensates),
    "a step after one that retrieves": lambda setup: _named(
        next((step for before, step in zip(setup.steps, setup.steps[1:], strict=False) if before.retrieves), None)
    ),
    # of drafting policies
    "drafts by a retrieving policy after others": _drafting(
        lambda policies: policies.retriever is not None and len(policies.last) > 1
    ),
    "drafts by policy.late or policy.pool": _drafting(
        lambda policies: (
            policies.retriever is not None
            and (policies.retriever.late is not None or policies.retriever.pool.bytes is not None)
        )
    ),
    "drafts by policy.events.by=surprise": _drafting(lambda policies: policies.needs_surprise),
    "drafts by policy.clamped=true": _drafting(lambda policies: policies.clamped_to is not None),
    "drafts by a policy that narrows": _drafting(lambda policies: any(policy.narrows for policy in policies.last)),
    "drafts by a policy that decides on layers together": _drafting(
        lambda policies: any(
            step.decides_on_all or step.replay is not None or step.merges_layers
            for step in (*policies.last, *policies.others)
        )
    ),
    "drafts by policy.positions=reencoded": _drafting(lambda policies: policies.positions is Positions.reencoded),
    **OF_MODEL,
    **OF_RANKS,
}
"""By the words that users know."""
