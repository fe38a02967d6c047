"""State of retrieval in one layer."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, o queries, H key dim, V value dim.

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from policies.retriever import Index
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.model.layers.query_prediction import FoldedProjection


@dataclass(kw_only=True)
class LayerRetrieval:
    """One layer's index, and statistics of what was retrieved.

    Attributes:
        folded: predicts queries in the index's basis, if that is possible.
        observed_BNoH: some of the queries that the index was built from, rotated to the positions that it is built
            for; None if it is not built from queries.
        terms: of this layer's attention.
        asked_BNH: query of the last generated token, by which slots are chosen for the next one; None if its own
            chooses.
        age: new tokens since the index was built, those that other ranks store among them.
        steps: decoding steps, and turns that retrieve, in which slots were chosen.
        fetched, resident: chosen and stored slots, summed over these steps.
        evicted: slots of each row and KV head whose token was replaced or dropped.
        late_choices, chosen_again: choices by the query of the token before, one for each row and KV head, and those
            of them that were replaced by one by the token's own query.
        hit_mass: attention probability of the chosen slots in each sampled step.
        out_of_order: whether a slot was overwritten, so that slots are not in the order of positions.
    """

    index: Index
    terms: AttentionTerms
    folded: FoldedProjection | None = None
    observed_BNoH: Tensor | None = None
    asked_BNH: Tensor | None = None
    age: int = 0
    steps: int = 0
    fetched: int = 0
    resident: int = 0
    evicted: int = 0
    late_choices: int = 0
    chosen_again: int = 0
    hit_mass: list[float] = field(default_factory=list)
    out_of_order: bool = False

    def append(self, kept: KeptLayer, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Add the slots of the layer to the index that it lacks.

        Args:
            new: keys (B, K, C, H) and values (B, K, C, V) of the last ones, where they need not be read from the layer.
        """
        num_lacking = kept.num_slots - self.index.num_slots
        if num_lacking == 0:
            return
        # More than the new ones if there were too few to choose from.
        if new is None or num_lacking != new[0].shape[2]:
            k_BKnH, v_BKnV = kept.read()
            new = k_BKnH[:, :, self.index.num_slots :], v_BKnV[:, :, self.index.num_slots :]
        self.index.append(*new)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index, the folded projection, and the queries kept for rebuilding."""
        folded = 0 if self.folded is None else self.folded.num_bytes
        return self.index.num_bytes + folded + (0 if self.observed_BNoH is None else self.observed_BNoH.nbytes)
