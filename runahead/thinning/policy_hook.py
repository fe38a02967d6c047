"""Cache policies after each layer's attention to a cache of kept tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from runahead.attention.op import nothing
from runahead.cache.attention import CausalAttention, End, LayerCall, LayerHook
from runahead.cache.base import KVStore
from runahead.cache.kept_cache import KeptCache
from runahead.thinning.steps import PolicySteps


class PolicyHook(LayerHook):
    """Lets policies drop tokens of a layer once nothing reads it any more.

    Args:
        cache: holds the kept tokens, or this rank's part of them.
        steps: the policies of this forward.
    """

    def __init__(self, cache: KeptCache, steps: PolicySteps) -> None:
        self._cache, self._steps = cache, steps

    def closed(self, call: LayerCall) -> None:
        kept = self._cache.layers[call.layer]
        self._steps.input_BCD = call.input_BCD
        stored = self._steps.run(call.layer, kept, call.seen, call.terms)
        if stored is not kept:
            self._cache.put(call.layer, stored)
        self._cache.close(call.layer, room=self._steps.room)


def attention_under(
    steps: PolicySteps,
    cache: KVStore,
    *,
    hooks: Sequence[LayerHook] = (),
    ends: End | None = None,
    on_layer: Callable[[], None] = nothing,
    stops: Collection[int] = (),
) -> CausalAttention:
    """Attention of new tokens to the kept ones of all tokens before them, after which policies drop some.

    Args:
        steps: the policies of this forward.
        cache: holds the kept tokens, or this rank's part of them, and receives the new ones.
        hooks: outside of that of the policies.
        ends, on_layer, stops: as of `CausalAttention`.
    """
    assert isinstance(cache, KeptCache), type(cache)
    tokens = steps.tokens
    return CausalAttention(
        cache,
        start=tokens.start,
        pads=tokens.row_pads,
        tokens=tokens,
        hooks=[*hooks, PolicyHook(cache, steps)],
        ends=ends,
        on_layer=on_layer,
        stops=stops,
    )
