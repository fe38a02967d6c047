"""A row of the table of refused combinations, with the phrases that several subjects share."""

from __future__ import annotations

from dataclasses import dataclass

from runahead.features.combination import Combination

OTHERS_KV = "{1} read the keys and values of other layers, which {0} does not support"
MARKED = "{1} marks tokens that it evicts (DMS, DMC), which {0} does not support"
NOT_ITSELF = "{1} do not see the token itself, or take passes over a whole prompt (LCKV), which {0} does not support"
CHAIN = "use prefill=kv_runahead or prefill=single"
ALL_KEYS = "use prefill.attention=causal"
NO_SHARES = "leave ranks.tensor out, and use another prefill than tensor"


@dataclass(frozen=True)
class Refused(Combination):
    """Facts that do not go together.

    Attributes:
        why: with {0} for what the first fact is called, and so on, {model} and {retriever}.
        remedy: in the same form.
    """

    why: str
    remedy: str

    @property
    def sentence(self) -> str:
        return "; ".join(part for part in (self.why, self.remedy) if part)
