"""Drafts by the verifying model itself, made from the memory in which it verifies them."""

from __future__ import annotations

from runahead.attention.states import States
from runahead.cache.slabs import Slabs
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, RowId
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.generated_drafts import GeneratedDrafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.observed import first_observed
from runahead.model.model import Model

OBSERVED_TOKENS = 64
"""Last tokens of a prompt that are computed again: their queries tell policies what to keep."""

LEAST_NEW = 8
"""Least tokens of these where layers hold states."""


class OwnDrafter(GeneratedDrafter):
    """Base class of the drafters that read the keys and values of the model that verifies.

    They begin by computing the last tokens of each row once more. Layers that hold states can do that only from where a
    state is known: it is kept as it is after the prompt, and the drafter begins once LEAST_NEW tokens have come after
    it. Where it does not begin for so long that more than OBSERVED_TOKENS have come, it is kept anew.

    Args:
        whole: the memory of the verifying model, with the prompts stored.
    """

    runs_on_all = True

    def __init__(self, model: Model, whole: Lanes, first: Drafter | None = None, lead: Lead = ALONE) -> None:
        super().__init__(first, lead)
        self._model, self._whole = model, whole
        self._origins: dict[RowId, tuple[int, States]] = {}  # tokens of a row that are stored, and the states then

    def join(self, id: RowId, row: Row) -> None:
        super().join(id, row)
        if self._model.held is not None:
            lane, states = self._whole.lane(id), self._states_of(id)
            assert states is not None, "all layers that hold a state have one"
            self._origins[id] = lane.num_tokens, states

    def leave(self, id: RowId) -> None:
        super().leave(id)
        self._origins.pop(id, None)

    def get_ready(self) -> bool:
        is_ready = super().get_ready()
        for id, (num, states) in self._origins.items():
            lane = self._whole.lane(id)
            assert lane.cache.states is not None and not lane.again, "nothing was taken back before the first draft"
            if lane.num_tokens - num > OBSERVED_TOKENS:
                states.copy_from(lane.cache.states)
                num = lane.num_tokens
                self._origins[id] = num, states
            is_ready = is_ready and lane.num_tokens - num >= LEAST_NEW
        return is_ready

    def begin(self) -> None:
        super().begin()
        self._origins = {}

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(states.num_bytes for _, states in self._origins.values())

    def _observed(self, row: RowId, whole: Slabs, num_tokens: int, num_last: int) -> tuple[int, States | None]:
        """The first of a row's last `num_last` tokens that can be computed again, and the states before it.

        Where there are states, all tokens that came after them are.

        Args:
            whole: keys and values of the row.
            num_tokens: number of its tokens.
        """
        num, states = self._origins.get(row, (num_tokens - num_last, None))
        first = first_observed(self._model, whole, num_tokens, num_tokens - num)
        assert states is None or first == num, f"the states of row {row} are of {num} tokens, not of {first}"
        return first, states

    def _states_of(self, row: RowId) -> States | None:
        """A copy of the states of a row after all its tokens that are stored."""
        states = self._whole.lane(row).cache.states
        return None if states is None else states.fork()
