"""The cache policies of each rank in a chain, their checks against a model, and the chunks they leave in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate

from policies.base import LayerForm, ModelFacts, Policy
from policies.layer_view import Phase, PromptPart
from policies.retriever import Retriever
from runahead.cache.kept import NEW_ROOM
from runahead.cache.kept_cache import KeptCache
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.form import InFewBits
from runahead.config import CacheOptions, DecodeName, DecodeOptions, Positions
from runahead.context import ContextPartition
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.model.model import Model
from runahead.rotary import Rotary


def numbered(policies: Sequence[Policy]) -> list[Policy]:
    """The policies of a sequence, which count those of their class before them."""
    found = list[Policy]()
    for policy in policies:
        occurrence = sum(type(each) is type(policy) for each in found)
        if policy.occurrence != occurrence:
            policy = copy(policy)
            policy.occurrence = occurrence
        found.append(policy)
    return found


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
    """

    last: list[Policy] = field(default_factory=list)
    others: list[Policy] = field(default_factory=list)
    positions: Positions = Positions.original
    part: PromptPart | None = None
    storage: CacheOptions = field(default_factory=CacheOptions)

    def __post_init__(self) -> None:
        for name in ("last", "others"):
            object.__setattr__(self, name, numbered(getattr(self, name)))

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
    def narrows(self) -> bool:
        """Whether layers compute fewer tokens from layer to layer, on some rank."""
        return any(policy.narrows for policy in (*self.last, *self.others))

    def by_chunk(self, decode: DecodeOptions) -> bool:
        """Whether what is kept depends on how a prompt is split: ranks narrow or keep their own chunks."""
        return self.narrows or (self.chooses and decode.name is DecodeName.sharded)

    @property
    def num_observed(self) -> int:
        """Last tokens of a prompt whose queries must be computed, since what is kept or retrieved depends on them."""
        if self.retriever is not None:
            from runahead.retrieval.retrieval import num_observed
        observed = (num_observed(each) if isinstance(each, Retriever) else each.last_queries or 0 for each in self.last)
        return max(observed, default=0)

    def on_rank(self, *, is_last: bool) -> list[Policy]:
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
    def needs_surprise(self) -> bool:
        """Whether what is retrieved depends on how the prompt surprises the model."""
        return self.retriever is not None and self.retriever.needs_surprise

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
        return next((policy for policy in self.last if policy.merges_layers), None)

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
            ValueError: a retrieving policy's pool is too small.
        """
        kept = KeptCache.empty(model.kv_shapes, batch=batch, device=model.device, rotaries=self.rotaries(model))
        kept.form = self.form(model)
        if self.storage.bits is not None:
            retrieves = self.retriever is not None
            few = FewBits(
                bits=self.storage.bits,
                residual=self.storage.residual,
                residual_bits=self.storage.residual_bits,
                keys_by_token=not retrieves and self.drops_single_tokens(has_turns=has_turns),
                becomes_ragged=self.ragged,
            )
            kept.form = InFewBits(
                few=few,
                waits=not retrieves and self.deciding is not None,
                most_room=NEW_ROOM if retrieves else None,
            )
        if self.retriever is not None:
            from runahead.retrieval.cache import RetrievedCache
            from runahead.retrieval.retrieval import Retrieval

            retrieval = Retrieval(self.retriever, model, kept.layers, batch=batch, part=self.part)
            kept = RetrievedCache(retrieval, kept.form)
        kept.states = model.empty_states()
        return kept

    def check_pools(self, model: Model, *, batch: int, keep_parts: bool) -> None:
        """Check that limited pools have room for the tokens that always stay, before a prompt is computed for them.

        Args:
            batch: rows that are computed at once.
            keep_parts: each rank keeps its own tokens.

        Raises:
            ValueError: a retrieving policy's pool is too small.
        """
        for policy in (*self.last, *(self.others if keep_parts else [])):
            if isinstance(policy, Retriever):
                from runahead.retrieval.pool_limit import check_pool

                check_pool(policy, model, batch)

    def drops_single_tokens(self, *, has_turns: bool) -> bool:
        """Whether tokens are dropped after a prompt; policies that decide on all layers do so once."""
        return bool(self.last if has_turns and self.deciding is None else self.while_decoding)

    def room(self, num_new: int) -> int:
        """Room in tokens that a layer needs after a prompt if `num_new` tokens follow."""
        if self.retriever is not None and self.retriever.pool.bytes is None:
            return num_new
        return min(NEW_ROOM, num_new)

    def rotaries(self, model: Model) -> list[Rotary] | None:
        """The rotary embedding of each layer if positions are re-encoded or distances clamped, else None."""
        is_reencoded = self and self.positions is Positions.reencoded
        return model.rotaries if is_reencoded or self.clamped_to is not None else None

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """Bound on the slots of any layer on the rank that decodes, however long the text; None if there is none."""
        bounds = [policy.most_slots(num_layers, phase) for policy in self.last]
        return min((bound for bound in bounds if bound is not None), default=None)

    def no_room(self, prompt_tokens: int, *, retrieved: bool) -> list[str]:
        """A sentence for each policy of the rank that decodes whose share of a padded prompt has no room for others.

        Args:
            retrieved: whether a policy that retrieves has done so; if not, all tokens were read.
        """
        used = [policy for policy in self.last if retrieved or not policy.retrieves]
        return [sentence for policy in used if (sentence := policy.no_room(prompt_tokens))]

    def require_files(self) -> None:
        """Check that the policies were given the files that they need. Raises: ValueError."""
        for policy in (*self.last, *self.others):
            policy.require_file()

    def check(self, model: Model) -> None:
        """Check that the policies can run on this model. Raises: ValueError."""
        check(Setup(policies=self, cache=self.storage, model=model))
        self.read_files(model)

    def read_files(self, model: Model) -> None:
        """Let policies that have a file for one model check and read it. Raises: ValueError."""
        policies = [each for each in (*self.last, *self.others) if type(each).require is not Policy.require]
        if not policies:
            return
        facts = facts_of(model, with_input=any(each.needs_attention_input for each in policies))
        for policy in policies:
            policy.require(facts)

    def form(self, model: Model) -> LayerForm | None:
        """How a policy that merges layers stores those of a model; None: there is none, or it can merge no layers."""
        if self.merging is None:
            return None
        sees_all = [rule is None for rule in model.rules]
        return self.merging.layer_form(model.kv_shapes, sees_all, model.kv_layers)

    def by_layer(
        self, partition: ContextPartition, num_layers: int, *, keep_parts: bool = False
    ) -> list[ContextPartition]:
        """The context partition of the tokens that are left in each layer.

        Args:
            keep_parts: each rank keeps its own tokens.

        Raises:
            ValueError: there are several ranks, and a policy does not know in advance how many tokens it leaves.
        """
        if not self.narrows:
            return [partition] * num_layers
        chain = partition.chain
        lengths = [[0] * partition.num_ranks for _ in range(num_layers)]
        for rank in chain:
            chunk = len(partition.chunk(rank))
            left = [chunk] * num_layers
            before, is_last = [sum(each) for each in lengths], rank == chain[-1]
            policies = self.on_rank(is_last=is_last)
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


def facts_of(model: Model, *, with_input: bool = False) -> ModelFacts:
    """Facts of a model that policies may check.

    Args:
        with_input: with the widths of the attention's input.
    """
    return ModelFacts(
        name=model.name,
        fingerprint=model.fingerprint,
        heads=[(shape.num_kv_heads, shape.key_dim) for shape in model.kv_shapes],
        input_dims=model.attention_input_dims if with_input else [],
        share=model.shard_number,
        num_shares=model.num_shards,
        copies=model.kv_head_copies,
    )
