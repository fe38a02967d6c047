"""InfiniGen (Lee et al., OSDI 2024): keep all keys and values in host memory, and fetch what a layer will attend to.

A few columns of every key stay on the device, in a basis in which queries have most of their length in few columns
(skewing, Sec. 4.2). They give approximate scores for a query, which may be predicted a layer ahead (Sec. 4.3). Tokens
whose score is within alpha of the largest one are fetched; any other token has less than exp(-alpha) of its weight.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, w observed tokens, C new tokens, H key dim,
# r partial columns, X queries of one KV head.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from policies.base import ModelFacts
from policies.columns import Columns
from policies.options import require, require_default, require_least
from policies.retriever import Choice, Group, PromptView, Retriever, Slots, most_needed, num_needed, positions_ahead
from policies.skewing import Skew, column_weights, skewing_basis

TURNS = 16
"""Number of positions to which the typical queries of a file are rotated."""


class PartialKeys(Columns):
    """Index of some columns of every key in the skewed basis."""

    how: InfiniGen

    def __init__(self, view: PromptView, how: InfiniGen) -> None:
        self._to_keys_BKHr = how.columns_of(view)
        self._to_queries_BKHr = self._to_keys_BKHr * view.scaling
        super().__init__(view, how)

    def columns(self, k_BKCH: Tensor) -> Tensor:
        return (k_BKCH @ self._to_keys_BKHr).transpose(-1, -2)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._to_keys_BKHr.nbytes + self._to_queries_BKHr.nbytes

    @property
    def query_basis_BKHr(self) -> Tensor:  # noqa: N802
        return self._to_queries_BKHr

    def scores(self, q_BNH: Tensor) -> Tensor:
        batch, heads, dim, columns = self._to_queries_BKHr.shape
        q_XGr = q_BNH.reshape(batch * heads, -1, q_BNH.shape[-1])
        if q_BNH.shape[-1] == dim:
            q_XGr = q_XGr.bmm(self._to_queries_BKHr.view(-1, dim, columns))
        return self.products(q_XGr.unflatten(0, (batch, heads)))

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how = self.how
        if how.fetch is not None:
            return super().choose(q_BNH, slots)
        need_BKn = self.need(q_BNH, slots)
        slots.mark(need_BKn, how)
        # With alpha=inf padding is counted too, which changes nothing.
        wanted = min(num_needed(need_BKn, -how.alpha, slots), int(how.max_fetch * slots.num_slots))
        return most_needed(need_BKn, how.num_chosen(slots, wanted), slots)


@dataclass(kw_only=True)
class InfiniGen(Retriever, name="infinigen"):
    """Retrieve the tokens whose approximate score is within alpha of the largest one.

    Attributes:
        skew: basis of the columns: a file of `python -m policies.skew`, auto (from the prompt) or none (the keys as
            they are).
        ratio: share of the columns that stay on the device.
        alpha: distance in nats below the largest score of a query within which tokens are fetched. All KV heads of a
            row fetch the mean of their numbers, and all rows the number of the row that needs most.
        max_fetch: largest share of the slots that is fetched.
        first_ahead: first layer with a predicted query. Earlier layers use their own, since the input of the first
            layers predicts little.
        observed: number of last tokens of the prompt whose queries choose the columns, and of a turn after which they
            are chosen anew.
        ahead: predict queries from the layer before, so that fetching overlaps with its compute; false uses the
            layer's own query. None predicts on a GPU only: on a CPU nothing has to be fetched over a link.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = PartialKeys
    index_asks_device: ClassVar[bool] = True

    skew: str = "auto"
    ratio: float = 0.5
    alpha: float = 7.0
    max_fetch: float = 0.12
    first_ahead: int = 3  # type: ignore[misc]
    observed: int = 256  # type: ignore[misc]
    ahead: bool | None = None
    _skew: Skew | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ratio", "max_fetch"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "must be above 0 and at most 1")
        require(self.alpha >= 0, "alpha", self.alpha, "must not be negative; .inf fetches as much as max_fetch allows")
        require_least(self, observed=1)
        if self.late is not None and self.ahead:
            raise ValueError(
                f"policy.late={self.late} chooses by an earlier query, and policy.ahead=true by a predicted one; leave "
                "one of them out"
            )
        if self.fetch is None and self.group is not Group.union:
            raise ValueError(
                f"policy.group={self.group.name} has no scores within policy.alpha of each head's best; give "
                "policy.fetch, or use policy.group=union"
            )
        require(
            self.first_ahead >= 1, "first_ahead", self.first_ahead, "must be at least 1: no layer is before layer 0"
        )
        rule = f"with policy.fetch={self.fetch}, which is a fixed number; leave one of them out"
        require_default(self, "alpha", "max_fetch", given=self.fetch is not None, rule=rule)
        rule = "with policy.ahead=false, which predicts no queries; leave it out"
        require_default(self, "first_ahead", given=self.ahead is False, rule=rule)
        if self.skew not in ("auto", "none"):
            Skew.load(self.skew)  # finds mistakes in the file before the model is loaded

    @property
    def needs_queries(self) -> bool:
        return self.skew in ("auto", "none")  # a file has typical queries of its own

    def looks_ahead_on(self, device: torch.device) -> bool:
        return device.type != "cpu" if self.ahead is None else self.ahead

    @property
    def reads(self) -> str | None:
        return None if self.skew in ("auto", "none") else self.skew

    def require(self, model: ModelFacts) -> None:
        if self.skew not in ("auto", "none"):
            self._skew = Skew.load(self.skew, model.fingerprint).of_share(model.share, model.num_shares)
            if self._skew.heads != model.heads:
                raise ValueError(
                    f"policy.skew={self.skew} is for other heads than those of model {model.name}; make it again with "
                    f"python -m policies.skew out={self.skew}"
                )

    def columns_of(self, view: PromptView) -> Tensor:
        """The columns (B, K, H, r) of a layer's keys."""
        k_BKnH = view.k_BKnH
        q_BKXH = self._queries(view).float()
        basis_BKHH = self._basis(q_BKXH)
        columns = max(1, round(self.ratio * k_BKnH.shape[3]))
        # Sinks are left out: they are always chosen, and their keys differ from all others.
        weights_BKH = torch.stack(
            [
                column_weights(
                    q_BKXH[row] @ basis_BKHH[row], k_BKnH[row, :, pad + self.sinks :].float() @ basis_BKHH[row]
                )
                for row, pad in enumerate(view.pads)
            ]
        )
        chosen_BKr = weights_BKH.nan_to_num_(0.0).topk(columns, dim=-1).indices  # nan: the sinks are the only keys
        return basis_BKHH.take_along_dim(chosen_BKr[:, :, None], dim=3).to(k_BKnH.dtype)

    def _queries(self, view: PromptView) -> Tensor:
        """Queries (B, K, X, H) that resemble those of the decoding steps."""
        batch, heads, _, dim = view.k_BKnH.shape
        if self._skew is None:
            return view.q_BNwH.unflatten(1, (heads, -1)).flatten(2, 3)  # X: a group's heads x tokens
        typical_BKHH = self._skew.queries[view.layer].to(view.k_BKnH).expand(batch, heads, dim, dim)
        if not self._skew.at_position_0 or view.turn is None:
            return typical_BKHH
        places_BX = positions_ahead(view, TURNS).repeat_interleave(dim, dim=1)
        return view.turn(typical_BKHH.repeat(1, 1, TURNS, 1), places_BX)

    def _basis(self, q_BKXH: Tensor) -> Tensor:
        """Basis (B, K, H, H) of the columns."""
        if self.skew == "none":
            dim = q_BKXH.shape[-1]
            return torch.eye(dim, dtype=q_BKXH.dtype, device=q_BKXH.device).expand(*q_BKXH.shape[:2], dim, dim)
        return skewing_basis(q_BKXH.mT.double() @ q_BKXH.double()).float()
