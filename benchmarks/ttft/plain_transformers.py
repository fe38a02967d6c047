"""Baseline: plain transformers in one process, on the CPU threads of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runahead.config import ModelOptions
from runahead.model import loading


class PlainTransformers:
    """The model of `options`, with the same weights as the runtime's, run by transformers alone.

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

    def ttft_s(self, ids: list[int]) -> float:
        """TTFT of the prompt in seconds."""
        return self.first_token(ids)[1]

    @torch.inference_mode()
    def first_token(self, ids: list[int]) -> tuple[int, float]:
        """The most likely first token, and its TTFT in seconds."""
        with _threads(self._num_threads):
            began_s = time.perf_counter()
            ids_1S = torch.tensor([ids], device=self._device)
            logits_11V = self._module(input_ids=ids_1S, use_cache=True, logits_to_keep=1).logits
            token = int(logits_11V[0, -1].argmax())
            return token, time.perf_counter() - began_s


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
