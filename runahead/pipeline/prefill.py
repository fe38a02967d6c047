"""Chunked pipeline parallelism, as SGLang, Mooncake and vLLM-Ascend prefill long prompts: an opponent of the chain.

Every stage has some of the layers, and their keys and values of all tokens. It computes chunk after chunk as their
hidden states arrive, and hands its own on while it goes on to the next one. All stages decode, token by token: rank 0
is the first to know a token again, since the last one tells them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.pipeline.hidden import Boundary
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chunked import run_chunked
from runahead.ranks.ranks import Ranks

CHUNKS = 8
"""Chunks per stage: the last one begins p - 1 chunks late."""
LEAST_TOKENS = 128
"""Tokens of a chunk below which products take longer than it is worth."""


class Pipeline(Prefill):
    """Prefill of chunk after chunk by stages of layers. `split` returns the chunks' boundaries, as many as there are.

    The chosen partitioner is asked for `CHUNKS` chunks per stage, and may return any number.

    Args:
        chunk_tokens: most tokens of a chunk, of which all are then even.
    """

    def __init__(self, chunk_tokens: int | None = None) -> None:
        self._chunk_tokens = chunk_tokens

    @classmethod
    def of(cls, options: PrefillOptions) -> Self:
        return cls(options.chunk_tokens)

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        if self._chunk_tokens is not None:
            return even(num_tokens, -(-num_tokens // self._chunk_tokens))
        most = CHUNKS * num_stages if num_stages > 1 else 1
        return chosen(num_tokens, max(1, min(most, num_tokens // LEAST_TOKENS)))

    def first_token_stage(self, partition: ContextPartition, num_stages: int) -> int:
        return num_stages - 1

    def connect(
        self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions, *, stored_on: Sequence[int] = ()
    ) -> None:
        if ranks.backend == "nccl" and ranks.num_stages > 1:
            ranks.nccl_links(ranks.mesh.links([(stage, stage + 1) for stage in range(ranks.num_stages - 1)]))

    def run(self, job: PrefillJob) -> Prefilled:
        boundary, partition = job.model.boundary, job.partition
        chunks = [partition.chunk(number) for number in partition.chain]
        job.chunk_tokens = max(map(len, chunks))
        if boundary is None:
            return run_chunked(job, partition)
        assert isinstance(boundary, Boundary), boundary
        with boundary.chunks(chunks, batch=len(job.batch.pads), record=job.record) as passage:
            prefilled = run_chunked(job, partition)
        passage.describe(prefilled.report)
        prefilled.spans += passage.spans() if job.record else []
        return prefilled
