"""The cache policies of each rank in a chain, their checks against a model, and the chunks they leave in each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from policies.base import ModelFacts, Phase, Policy, PromptPart
from policies.retriever import Retriever
from runahead.cache.kept import NEW_ROOM, KeptCache, KeptLayer
from runahead.cache.merged.cache import MergedCache, paired_layers
from runahead.cache.quantised.cache import QuantisedCache
from runahead.cache.quantised.layer import QuantisedLayer
from runahead.config import CacheOptions, DecodeName, DecodeOptions, Positions
from runahead.context import ContextPartition
from runahead.model.model import Model
from runahead.retrieval.cache import RetrievedCache
from runahead.retrieval.retrieval import Retrieval, num_observed
from runahead.rotary import Rotary
from runahead.thinning.quantised_ragged import QuantisedRagged
from runahead.thinning.ragged import RaggedLayer


@dataclass(frozen=True, kw_only=True)
class RankPolicies:
    """Cache policies by place in the chain. Several policies run one after the other.

    Only the last rank, which holds the KV cache for decoding, drops tokens from the cache: policies look at the
    prompt's last queries, which are in that rank's chunk. Earlier ranks can only narrow the computation of deeper
    layers, by the votes of their own chunk's last tokens. With sharded decoding all ranks decode: each runs its
    policies over its own tokens, as `of_part` says.

    Attributes:
        last: policies of the rank that decodes, also while it decodes.
        others: policies of the ranks before it.
        positions: whether kept tokens keep their positions or are re-encoded to their slots.
        part: the tokens that this rank keeps, where each rank keeps its own; `last` then are the policies for them.
        storage: how the rank that decodes stores what they keep.

    Raises:
        ValueError: the storage does not go with them.
    """

    last: list[Policy] = field(default_factory=list)
    others: list[Policy] = field(default_factory=list)
    positions: Positions = Positions.original
    part: PromptPart | None = None
    storage: CacheOptions = field(default_factory=CacheOptions)

    def __post_init__(self) -> None:
        if self.storage.bits is None:
            return
        if self.retriever is not None and self.retriever.pool.bytes is not None:
            raise ValueError(
                f"cache.bits={self.storage.bits} does not go with policy.pool.bytes={self.retriever.pool.bytes}, since "
                "in a full pool single tokens are replaced; leave one of them out"
            )
        if self.clamped_to is not None:
            raise ValueError(
                f"cache.bits={self.storage.bits} stores keys as they are rotated in the text; use policy.clamped=false"
            )
        if self.merging is not None:
            raise ValueError(
                f"cache.bits={self.storage.bits} does not go with policy {type(self.merging).__name__}, whose layers "
                "share what they store; use cache.bits=null or another policy, such as snapkv"
            )
        if self.positions is Positions.reencoded:
            raise ValueError(
                f"cache.bits={self.storage.bits} stores keys as they are rotated in the text; use "
                "policy.positions=original"
            )

    @classmethod
    def everywhere(
        cls,
        policies: Sequence[Policy],
        positions: Positions = Positions.original,
        storage: CacheOptions | None = None,
    ) -> RankPolicies:
        """Run the same policies on all ranks, as far as each rank supports them."""
        return cls(last=list(policies), others=list(policies), positions=positions, storage=storage or CacheOptions())

    def __bool__(self) -> bool:
        """Whether there is more to do than to compute and store all keys and values as they are."""
        return self.chooses or self.storage.bits is not None

    @property
    def chooses(self) -> bool:
        """Whether policies run on any rank."""
        return bool(self.last or self.others)

    @property
    def keeps_all(self) -> bool:
        """Whether all keys and values of a prompt are computed and kept as they are: policies, if any, retrieve."""
        return all(isinstance(each, Retriever) for each in (*self.last, *self.others)) and self.clamped_to is None

    @property
    def narrows(self) -> bool:
        """Whether layers compute fewer tokens from layer to layer, on some rank."""
        return any(policy.narrows for policy in (*self.last, *self.others))

    def by_chunk(self, decode: DecodeOptions) -> bool:
        """Whether what is kept depends on how a prompt is split: ranks narrow or keep their own chunks."""
        return self.narrows or (self.chooses and decode.name is DecodeName.sharded)

    @property
    def reuses_segments(self) -> bool:
        """Whether prompts may reuse segments: policies, if any, retrieve, and store a part of indices with segments."""
        return all(isinstance(each, Retriever) and each.clusters_key is not None for each in (*self.last, *self.others))

    @property
    def num_observed(self) -> int:
        """Last tokens of a prompt whose queries must be computed, since what is retrieved depends on them."""
        return 0 if self.retriever is None else num_observed(self.retriever)

    def of(self, *, is_last: bool) -> list[Policy]:
        """The policies that run on a rank."""
        if is_last or self.part is not None:
            return self.last
        return [policy for policy in self.others if policy.narrows]

    def of_part(self, part: PromptPart, *, is_last: bool) -> RankPolicies:
        """The policies of a rank that keeps its own tokens, as if these were a prompt of its own.

        Each number of tokens in the options, such as a budget, is the rank's share by the length of its chunk.
        """
        policies = [policy.of_part(part) for policy in (self.last if is_last else self.others)]
        return RankPolicies(last=policies, positions=self.positions, part=part, storage=self.storage)

    @property
    def retriever(self) -> Retriever | None:
        """The policy that retrieves, on the rank that decodes."""
        return next((policy for policy in self.last if isinstance(policy, Retriever)), None)

    @property
    def clamped_to(self) -> int | None:
        """Distance in tokens to which a policy that retrieves clamps larger ones; None: none does."""
        return self.retriever.recent if self.retriever is not None and self.retriever.clamps else None

    @property
    def while_decoding(self) -> list[Policy]:
        """The policies that decide after each generated token; one that retrieves keeps all tokens."""
        return [policy for policy in self.last if policy.while_decoding] if self.retriever is None else []

    @property
    def between_turns(self) -> list[Policy]:
        """Those, and the ones that carry something of each generated token to the next turn."""
        running = [policy for policy in self.last if policy.while_decoding or policy.carries_generated]
        return running if self.retriever is None else []

    @property
    def replaying(self) -> Policy | None:
        """The policy that decides on all layers after a prompt was repeated, on the rank that decodes."""
        return next((policy for policy in self.last if policy.replay is not None), None)

    @property
    def deciding(self) -> Policy | None:
        """The policy that decides on all layers at once after a prompt, on the rank that decodes."""
        return next((each for each in self.last if each.decides_on_all or each.replay is not None), None)

    @property
    def merging(self) -> Policy | None:
        """The policy that merges neighbouring layers, on the rank that decodes."""
        return next((policy for policy in self.last if policy.layer_pairs is not None), None)

    @property
    def ragged(self) -> bool:
        """Whether heads may keep different numbers of tokens."""
        return any(policy.keeps_ragged for policy in (*self.last, *self.others))

    @property
    def needs_whole(self) -> bool:
        """Whether a policy has to see all tokens of a prompt on one rank.

        It decides on all layers after the prompt, or by a model's marks, which are in the keys of the tokens after.
        """
        return any(
            policy.decides_on_all or policy.replay is not None or policy.follows_marks
            for policy in (*self.last, *self.others)
        )

    def cache(self, model: Model, *, batch: int, has_turns: bool = False) -> KeptCache:
        """An empty cache for the rank that decodes.

        Args:
            has_turns: whether other prompts follow, after which the policies choose again.

        Raises:
            ValueError: the policies cannot run on this model or in this storage, or a retrieving policy's pool is too
                small.
        """
        kept = KeptCache.empty(model.kv_shapes, batch=batch, device=model.device, rotaries=self.rotaries(model))
        if self.storage.bits is not None and self.retriever is None:
            by_token = self.drops_single_tokens(has_turns=has_turns)
            return QuantisedCache(
                kept.layers, partial(self._quantised, keys_by_token=by_token), waits=self.deciding is not None
            )
        if self.merging is not None and self.merging.layer_pairs is not None:
            return MergedCache(kept.layers, self._pairs(model), self.merging.layer_pairs)
        if self.retriever is None:
            return kept
        if self.storage.bits is not None and has_turns and len(self.last) > 1:
            raise ValueError(
                f"cache.bits={self.storage.bits} with policy {type(self.retriever).__name__} keeps keys in groups of "
                "tokens, of which policies before it in a sequence would drop some after a later turn; use one policy"
            )
        retrieval = Retrieval(self.retriever, model, kept.layers, batch=batch, part=self.part)
        return RetrievedCache(retrieval, None if self.storage.bits is None else self._quantised)

    def drops_single_tokens(self, *, has_turns: bool) -> bool:
        """Whether tokens are dropped after a prompt; policies that decide on all layers do so once."""
        return bool(self.last if has_turns and self.deciding is None else self.while_decoding)

    def _quantised(self, layer: KeptLayer, room: int, *, keys_by_token: bool = False) -> KeptLayer:
        """An exact layer in few bits."""
        storage = self.storage
        assert storage.bits is not None
        make: Callable[..., KeptLayer] = partial(QuantisedLayer.of, becomes_ragged=self.ragged)
        if isinstance(layer, RaggedLayer):
            make = QuantisedRagged.of_exact
        return make(
            layer,
            bits=storage.bits,
            residual=storage.residual,
            residual_bits=storage.residual_bits,
            keys_by_token=keys_by_token,
            room=room,
        )

    def room(self, num_new: int) -> int:
        """Room in tokens that a layer needs after a prompt if `num_new` tokens follow."""
        if self.retriever is not None and self.retriever.pool.bytes is None:
            return num_new
        return min(NEW_ROOM, num_new)

    def rotaries(self, model: Model) -> list[Rotary] | None:
        """The rotary embedding of each layer if positions are re-encoded or distances clamped, else None.

        Raises:
            ValueError: positions of this model cannot be re-encoded.
        """
        if self.clamped_to is not None:
            return model.rotaries_for("policy.clamped=true", "use policy.clamped=false")
        return model.rotaries if self and self.positions is Positions.reencoded else None

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """Bound on the slots of any layer on the rank that decodes, however long the text; None if there is none."""
        bounds = [policy.most_slots(num_layers, phase) for policy in self.last]
        return min((bound for bound in bounds if bound is not None), default=None)

    def check_before_loading(self, config: Any) -> None:
        """Check what needs no weights: files that the policies need, and marks that they follow. Raises: ValueError.

        Args:
            config: of the text decoder.
        """
        for policy in (*self.last, *self.others):
            policy.require_file()
        self._require_marks(config)

    def check(self, model: Model) -> None:
        """Check that the policies can run on this model. Raises: ValueError."""
        policies = [*self.last, *self.others]
        if policies and model.has_key_bias:
            raise ValueError(
                f"model {model.name} ({model.config.model_type}) adds a bias to its attention by distance (ALiBi), and "
                "cache policies change which key is where; use policy=full"
            )
        self._check_marks(model)
        self.rotaries(model)
        for policy in policies:
            if policy.narrows or isinstance(policy, Retriever) or policy.layer_pairs is not None:
                remedy = "use a policy that only evicts, such as snapkv"
                model.require_own_kv(f"policy {type(policy).__name__}", remedy)
        comparing = next(self._comparing_by_kv_head(), None)
        if comparing is not None and model.copies_kv_heads:
            kv_heads = model.config.num_key_value_heads
            raise ValueError(
                f"policy {comparing} compares what all query heads of a KV head attend to, and with {model.num_shards} "
                f"ranks that share the {kv_heads} KV heads of model {model.name} these are on different ranks; use at "
                f"most ranks.tensor={kv_heads}, or another policy"
            )
        for policy in policies:
            if policy.queries_from is not None:
                try:
                    _ = model.rotations
                except ValueError as error:
                    raise ValueError(
                        f"{error}, but policy {type(policy).__name__} turns queries to later positions; use another "
                        "policy, such as snapkv"
                    ) from error
            if policy.needs_output_projection:
                try:
                    _ = model.output_projections
                except ValueError as error:
                    raise ValueError(
                        f"{error}, but policy {type(policy).__name__} weighs values after them; use another policy, "
                        "such as snapkv"
                    ) from error
            if policy.needs_attention_input:
                try:
                    _ = model.attention_input_dims
                except ValueError as error:
                    raise ValueError(
                        f"{error}, but policy {type(policy).__name__} scores tokens by these; use another policy, such "
                        "as snapkv"
                    ) from error
        self._check_deciding()
        self._check_merging(model)
        self._check_ragged(model)
        self._check_retrieval(model)
        self._check_steps()
        self._require_files(policies, model)
        has_windows = any(rule is not None and not rule.sees_everything for rule in model.rules)
        for policy in policies:
            if policy.narrows and has_windows:
                raise ValueError(
                    f"policy {type(policy).__name__} drops tokens between layers, but layers of model {model.name} "
                    "look at windows of the text as it is; use a policy that only evicts, such as snapkv"
                )

    def check_stages(self, num_stages: int) -> None:
        """Check that the last stage of a chain, which keeps all tokens, knows what the policies need of each.

        Raises:
            ValueError: it does not.
        """
        for policy in self.last:
            if policy.needs_attention_input and policy.replay is None and num_stages > 1:
                raise ValueError(
                    f"policy {type(policy).__name__} scores tokens by hidden states, which {num_stages} stages do not "
                    "send each other; use prefill=single or decode=sharded"
                )

    def _require_marks(self, config: Any) -> None:
        """Check that a policy that follows a model's marks has some, by the model's config. Raises: ValueError."""
        for policy in (*self.last, *self.others):
            if policy.follows_marks and getattr(config, "dms_window_size", None) is None:
                raise ValueError(
                    f"policy {type(policy).__name__} evicts the tokens that a model marks, and this one "
                    f"({config.model_type}) marks none; use another policy, such as snapkv"
                )

    def _check_marks(self, model: Model) -> None:
        """Check that a policy that follows a model's marks has some, and that with marks no other one decides."""
        self._require_marks(model.config)
        for policy in (*self.last, *self.others):
            if not policy.follows_marks:
                model.require_unmarked(f"policy {type(policy).__name__}", "use policy=dms or policy=full")
        if self.storage.bits is not None:
            model.require_unmarked(f"cache.bits={self.storage.bits}", "use cache.bits=null")
        if self.positions is Positions.reencoded:
            model.require_unmarked("policy.positions=reencoded", "use policy.positions=original")

    def _comparing_by_kv_head(self) -> Iterator[str]:
        """Names of policies that decide by what all query heads of a KV head attend to.

        Those that vote with all heads of the model do, once another has chosen by head (`LayerView.over_heads`).
        """
        for policies in (self.last, self.others):
            evicting = [policy for policy in policies if not isinstance(policy, Retriever)]
            alike = all(policy.chooses_alike for policy in evicting)
            for policy in policies:
                if policy.compares_by_kv_head or (policy.votes_over_heads and not alike):
                    yield type(policy).__name__

    def _check_steps(self) -> None:
        """Check that no policy comes twice on a rank, since what one accumulates is stored by its class, and that one
        that narrows finds all new tokens."""
        for policies in (self.last, self.others):
            names = [type(policy).__name__ for policy in policies]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"policy {twice} is in a sequence twice; leave out one of the two")
            for policy in policies[1:]:
                if policy.narrows:
                    raise ValueError(
                        f"policy {type(policy).__name__} narrows what deeper layers compute, by votes on all new "
                        f"tokens, not after {names[0]} has dropped some; make it the first step of the sequence"
                    )

    def _check_deciding(self) -> None:
        """Check that a policy that decides after the prompt finds all of it."""
        if self.deciding is not None and any(policy.narrows for policy in self.others):
            raise ValueError(
                f"policy {type(self.deciding).__name__} decides on the whole prompt, of which earlier ranks may drop "
                "no tokens; use policy.ranks.others=full"
            )

    def _pairs(self, model: Model) -> list[tuple[int, int]]:
        """The layers that are merged, lower and upper one of each pair."""
        merging = self.merging
        assert merging is not None and merging.layer_pairs is not None
        sees_all = [rule is None or rule.sees_everything for rule in model.rules]
        return paired_layers(model.kv_shapes, sees_all, merging.layer_pairs.first_share)

    def _check_merging(self, model: Model) -> None:
        """Check that a policy that merges layers has some, which store the same tokens."""
        if self.merging is None:
            return
        name = type(self.merging).__name__
        if len(self.last) > 1 or any(policy.narrows for policy in self.others):
            raise ValueError(
                f"policy {name} merges layers that store the same tokens, and must be the only one on all ranks"
            )
        if not self._pairs(model):
            raise ValueError(
                f"policy {name} merges neighbouring layers that see the whole text, and model {model.name} "
                f"({model.config.model_type}) has none among its layers from policy.start_share on; use a smaller "
                "policy.start_share, or another policy"
            )

    def _check_ragged(self, model: Model) -> None:
        """Check that a policy whose heads keep different numbers of tokens goes with its positions and with others."""
        for policies in (self.last, self.others):
            for policy in policies:
                if not policy.keeps_ragged:
                    continue
                name = type(policy).__name__
                if len(policies) > 1:
                    self._check_ragged_step(policy, policies, model)
                if self.positions is Positions.reencoded:
                    raise ValueError(
                        f"policy {name} keeps other tokens in each head, at their positions; use "
                        "policy.positions=original"
                    )

    def _check_ragged_step(self, policy: Policy, policies: Sequence[Policy], model: Model) -> None:
        """Check a policy whose heads keep different numbers of tokens as a step of a sequence."""
        name = type(policy).__name__
        retriever = next((type(each).__name__ for each in policies if isinstance(each, Retriever)), None)
        if retriever is not None:
            raise ValueError(
                f"policy {name} leaves heads of different lengths, and {retriever} retrieves from heads of equal "
                "length; leave out one of the two"
            )
        if policy is self.deciding:
            raise ValueError(
                f"policy {name} decides on the whole prompt, of which others in a sequence drop tokens; it must be the "
                "only one"
            )
        if policy.compensates:
            raise ValueError(
                f"policy {name} stands in for the tokens that it drops, and not for those that others in a sequence "
                "drop; use policy.compensate=false"
            )
        if model.num_shards > 1:
            raise ValueError(
                f"policy {name} in a sequence leaves other numbers of tokens on each of the {model.num_shards} ranks "
                "that share the heads, which have to decide alike; use it alone, or ranks.tensor=1"
            )

    def _check_retrieval(self, model: Model) -> None:
        """Check that at most one policy retrieves, that it comes last, and that the model supports it."""
        for policies in (self.last, self.others):
            if any(isinstance(policy, Retriever) for policy in policies):
                self._check_retriever(policies, model)

    def _check_retriever(self, policies: Sequence[Policy], model: Model) -> None:
        retriever = next(policy for policy in policies if isinstance(policy, Retriever))
        if any(isinstance(policy, Retriever) for policy in policies[:-1]):
            raise ValueError(
                f"policy {type(retriever).__name__} decides what attention sees of all that is kept, so it must be the "
                "only one that does, and the last step of a sequence"
            )
        if retriever.turn_tokens and len(policies) > 1:
            raise ValueError(
                f"policy.turn_tokens={retriever.turn_tokens} is for a policy that retrieves alone; those before it in "
                "a sequence cut a turn back by its attention to all tokens; leave policy.turn_tokens out"
            )
        if self.positions is Positions.reencoded:
            raise ValueError(
                f"policy {type(retriever).__name__} keeps all tokens at their positions; use policy.positions=original"
            )
        if retriever.clamps:
            self._check_clamped(retriever, policies, model)
        if retriever.looks_ahead_on(model.device):
            _ = model.query_prediction

    def _check_clamped(self, retriever: Retriever, policies: Sequence[Policy], model: Model) -> None:
        """Check that a model has positions for clamped distances, and that nothing drops tokens before."""
        if len(policies) > 1:
            raise ValueError(
                f"policy {type(retriever).__name__} with clamped distances must be the only one, since those before it "
                "in a sequence drop tokens at their positions; use policy.clamped=false"
            )
        if model.max_positions is not None and retriever.recent >= model.max_positions:
            raise ValueError(
                f"policy.recent={retriever.recent} is the distance of all tokens before, and model {model.name} has "
                f"{model.max_positions} positions; use at most {model.max_positions - 1}"
            )

    def _require_files(self, policies: Sequence[Policy], model: Model) -> None:
        """Let policies that have a file for one model check and read it."""
        policies = [policy for policy in policies if type(policy).require is not Policy.require]
        if not policies:
            return
        facts = ModelFacts(
            name=model.name,
            fingerprint=model.fingerprint,
            heads=[(shape.num_kv_heads, shape.key_dim) for shape in model.kv_shapes],
            input_dims=model.attention_input_dims if any(each.needs_attention_input for each in policies) else [],
            share=model.shard_number,
            num_shares=model.num_shards,
            copies=model.kv_head_copies,
        )
        for policy in policies:
            policy.require(facts)

    def by_layer(
        self, partition: ContextPartition, num_layers: int, *, keep_parts: bool = False
    ) -> list[ContextPartition]:
        """The context partition of the tokens that are left in each layer.

        Args:
            keep_parts: each rank keeps its own tokens.

        Raises:
            ValueError: there are several ranks, and a policy does not know in advance how many tokens it leaves.
        """
        chain = partition.chain
        lengths = [[0] * partition.num_ranks for _ in range(num_layers)]
        for rank in chain:
            chunk = len(partition.chunk(rank))
            left = [chunk] * num_layers
            before, is_last = [sum(each) for each in lengths], rank == chain[-1]
            policies = self.of(is_last=is_last)
            if keep_parts:
                part = PromptPart(chunk=partition.chunk(rank), num_tokens=partition.num_tokens, row_pads=[])
                before, policies = [0] * num_layers, self.of_part(part, is_last=is_last).last
            for policy in policies:
                if policy.narrows and len(chain) > 1:
                    tokens = policy.layer_tokens(chunk, num_layers, before)
                    left = [min(a, b) for a, b in zip(left, tokens, strict=True)]
            for layer in range(num_layers):
                lengths[layer][rank] = left[layer]
        return [ContextPartition(boundaries=(0, *accumulate(each))) for each in lengths]
