"""Reference runs outside the engine: TTFT(p) with all keys and values there from the start, and transformers alone."""

# Legend: B batch, N query heads, K kv heads, C chunk, S tokens, H key dim, V value dim or vocabulary.

from __future__ import annotations

import time
from contextlib import suppress

import torch

from runahead.attention.base import ForwardEndsHere
from runahead.cache.attention import CausalAttention, End
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.config import ModelOptions
from runahead.context import ContextPartition
from runahead.model import loading
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import clock_for


def compute_only_s(model: Model, ranks: Ranks, ids: list[int], partition: ContextPartition) -> float:
    """Seconds that the slowest rank takes for its chunk of KV-Runahead, computed as in a run without any waiting.

    A bound from measured compute is as old as its measurement, and a machine's speed drifts. This bound runs in turn
    with the variants that it bounds. Every rank makes the same call.
    """
    ranks.barrier("all ranks to compute")
    seconds = ranks.on_all_ranks("the chunks alone", lambda: _chunk_s(model, ids, partition, ranks.rank))
    return max(ranks.gather(seconds, "the chunks' seconds"))


def _chunk_s(model: Model, ids: list[int], partition: ContextPartition, rank: int) -> float:
    chunk = partition.chunk(rank)
    if not chunk:
        return 0.0
    spans = [(model.first_needed(layer, chunk.start, [0]), chunk.stop) for layer in range(model.num_layers)]
    cache = KVCache(Slabs.empty(model.kv_shapes, batch=1, spans=spans, num_slabs=model.num_layers, device=model.device))
    for layer in range(model.num_layers):
        cache.layer(layer).slab_TBKX.normal_()  # the cost of attention does not depend on the values
    ids_1C = torch.tensor([ids[chunk.start : chunk.stop]], device=model.device)
    ends: End | None = None if chunk.stop == partition.num_tokens else (model.num_layers - 1, "saved")
    attention = CausalAttention(cache, start=chunk.start, pads=[0], ends=ends)  # the prefix is there
    clock = clock_for(model.device)
    began = clock.mark()
    with suppress(ForwardEndsHere):
        model.forward(ids_1C, attention, start=chunk.start, pads=[0], length=partition.num_tokens)
    return clock.seconds(clock.mark()) - clock.seconds(began)


class PlainTransformers:
    """Baseline: the model of `options`, with the same weights as the runtime's, run by transformers alone.

    It uses SDPA attention and a DynamicCache, transformers' defaults. Other ranks should be idle while it runs.

    Args:
        device: device that computes.
        num_threads: CPU threads while it computes. More than the processors available to this process gain nothing.

    Raises:
        ValueError, OSError: as `loading.load`; also for a family without SDPA attention.
    """

    def __init__(self, options: ModelOptions, *, device: torch.device, num_threads: int) -> None:
        self._module = loading.load(options, device=device, attn_implementation="sdpa").module
        self._device, self._num_threads = device, num_threads

    @torch.inference_mode()
    def first_token(self, ids: list[int]) -> tuple[int, float]:
        """The most likely first token, and its TTFT in seconds."""
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            began_s = time.perf_counter()
            ids_1S = torch.tensor([ids], device=self._device)
            logits_11V = self._module(input_ids=ids_1S, use_cache=True, logits_to_keep=1).logits
            token = int(logits_11V[0, -1].argmax())
            return token, time.perf_counter() - began_s
        finally:
            torch.set_num_threads(threads_before)
