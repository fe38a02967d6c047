"""Keyformer (Adnan et al., MLSys 2024, arXiv 2403.09054): H2O with noise, for the tokens that are no longer there.

Where tokens are dropped, those that are left receive more attention than they would have, and unevenly. So scores are
accumulated from a softmax of the logits with Gumbel noise, at a temperature that rises as the text grows: more tokens
have a chance to be kept. As in the paper, 30% of the budget is the recent window.

Noise is added as published, to each logit of prompt and answer, and averaged over a KV head's group, which the paper
does not have. It depends on `seed`, layer, query head and the two positions, so that rows of a batch and chunks of a
prompt do not change what is kept; the published code adds the scores of all rows of a batch. The temperature reaches
its end after `tau_tokens` generated tokens (published: with the last one). Without noise and at temperature 1 it is
H2O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from policies.h2o import H2O
from policies.layer_view import LayerView
from policies.options import require, require_default, require_least


@dataclass(kw_only=True)
class Keyformer(H2O, name="keyformer"):
    """Score: softmax((x + noise) / tau) of the logits x, summed over all queries since the token was stored.

    Attributes:
        tau: temperature in a prompt.
        last_tau: temperature that it rises to.
        tau_tokens: number of generated tokens over which it rises; in the paper all that are generated.
        noise: whether noise is added.
        seed: seed of the noise.
    """

    recent_share: float = 0.3
    evict_every: int = 8
    tau: float = 1.0
    last_tau: float = 2.0
    tau_tokens: int = 256
    noise: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_least(self, tau_tokens=1, seed=0)
        require_default(self, "seed", given=not self.noise, rule="with policy.noise=false; leave it out")
        for option in ("tau", "last_tau"):
            value = getattr(self, option)
            require(0.01 <= value < math.inf, option, value, "must be a temperature of at least 0.01")
        super().__post_init__()

    def received(self, view: LayerView) -> Tensor:
        progress = min(1.0, view.num_generated / self.tau_tokens)
        tau = self.tau + (self.last_tau - self.tau) * progress
        return view.signals.received(temperature=tau, seed=self.seed if self.noise else None)
