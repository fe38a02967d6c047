"""The cache policies of each rank in a chain, their checks against a model, and the chunks they leave in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from policies.base import Phase, Policy, PromptPart
from policies.retriever import ModelFacts, Retriever
from runahead.cache.kept import NEW_ROOM, KeptCache
from runahead.config import Positions
from runahead.context import ContextPartition
from runahead.model.model import Model
from runahead.retrieval.cache import RetrievedCache
from runahead.retrieval.retrieval import Retrieval
from runahead.rotary import Rotary


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
    """

    last: list[Policy] = field(default_factory=list)
    others: list[Policy] = field(default_factory=list)
    positions: Positions = Positions.original
    part: PromptPart | None = None

    @classmethod
    def everywhere(cls, policies: Sequence[Policy], positions: Positions = Positions.original) -> RankPolicies:
        """Run the same policies on all ranks, as far as each rank supports them."""
        return cls(last=list(policies), others=list(policies), positions=positions)

    def __bool__(self) -> bool:
        return bool(self.last or self.others)

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
        return RankPolicies(last=policies, positions=self.positions, part=part)

    @property
    def retriever(self) -> Retriever | None:
        """The policy that retrieves, on the rank that decodes."""
        return next((policy for policy in self.last if isinstance(policy, Retriever)), None)

    @property
    def while_decoding(self) -> list[Policy]:
        """The policies that decide after each generated token; one that retrieves keeps all tokens."""
        return self.last if self.retriever is None else []

    def cache(self, model: Model, *, batch: int) -> KeptCache:
        """An empty cache for the rank that decodes.

        Raises:
            ValueError: the policies cannot run on this model, or a retrieving policy's pool is too small.
        """
        kept = KeptCache.empty(model.kv_shapes, batch=batch, device=model.device, rotaries=self.rotaries(model))
        if self.retriever is None:
            return kept
        return RetrievedCache(Retrieval(self.retriever, model, kept.layers, batch=batch, part=self.part))

    def room(self, num_new: int) -> int:
        """Room in tokens that a layer needs after a prompt if `num_new` tokens follow."""
        if self.retriever is not None and self.retriever.pool.bytes is None:
            return num_new
        return min(NEW_ROOM, num_new)

    def rotaries(self, model: Model) -> list[Rotary] | None:
        """The rotary embedding of each layer if positions are re-encoded, else None.

        Raises:
            ValueError: positions of this model cannot be re-encoded.
        """
        return model.rotaries if self and self.positions is Positions.reencoded else None

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """Bound on the slots of any layer on the rank that decodes, however long the text; None if there is none."""
        bounds = [policy.most_slots(num_layers, phase) for policy in self.last]
        return min((bound for bound in bounds if bound is not None), default=None)

    def check(self, model: Model) -> None:
        """Check that the policies can run on this model. Raises: ValueError."""
        policies = [*self.last, *self.others]
        if policies and model.has_key_bias:
            raise ValueError(
                f"model {model.name} ({model.config.model_type}) adds a bias to its attention by distance (ALiBi), and "
                "cache policies change which key is where; use policy=full"
            )
        self.rotaries(model)
        for policy in policies:
            if policy.compares_by_kv_head and model.copies_kv_heads:
                kv_heads = model.config.num_key_value_heads
                raise ValueError(
                    f"policy {type(policy).__name__} compares what all query heads of a KV head attend to, and with "
                    f"{model.num_shards} ranks that share the {kv_heads} KV heads of model {model.name} these are on "
                    f"different ranks; use at most ranks.tensor={kv_heads}, or another policy"
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
        self._check_retrieval(model)
        has_windows = any(rule is not None and not rule.sees_everything for rule in model.rules)
        for policy in policies:
            if policy.narrows and has_windows:
                raise ValueError(
                    f"policy {type(policy).__name__} drops tokens between layers, but layers of model {model.name} "
                    "look at windows of the text as it is; use a policy that only evicts, such as snapkv"
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
        if self.positions is Positions.reencoded:
            raise ValueError(
                f"policy {type(retriever).__name__} keeps all tokens at their positions; use policy.positions=original"
            )
        heads = [(shape.num_kv_heads, shape.key_dim) for shape in model.kv_shapes]
        retriever.require(
            ModelFacts(
                name=model.name,
                fingerprint=model.fingerprint,
                heads=heads,
                share=model.shard_number,
                num_shares=model.num_shards,
            )
        )
        if retriever.looks_ahead_on(model.device):
            _ = model.query_prediction

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
