"""A rank of the study of sparse prefill: measures what `python -m benchmarks.studies.sparse_prefill` tells it to.

Requests come on standard input and answers go to standard output, a JSON line each; all ranks are sent the same ones:

    {"open": {"name": "smollm2"}}    the model, from now on
    {"way": "xattention", "tokens": 8000, "options": {"attention": "xattention"}}    a prefill: TTFT, split, density
    {"copy": 512, "tokens": 8000, "sample": 0, "options": {...}}    rank 0 alone: copy-NLL in nats
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import ROOT
from benchmarks.harness.random_prompts import random_ids
from benchmarks.harness.rank_answers import answer_requests
from launch.exact.copies import copy_nll
from launch.inputs.text_files import EXAMPLE_TEXT
from partitioner.auto.partition import AutoPartition
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks
from runahead.config import ModelName
from runahead.model.shares import load_model
from runahead.report import SparseReport


class Measured:
    """The model of a rank, with an engine for each way that was asked for."""

    def __init__(self, ranks: Ranks, folder: str) -> None:
        self.ranks, self._folder = ranks, folder
        self._engines: dict[str, Engine] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Measurement that a request asks for."""
        if "open" in request:
            self.model = self._opened(**request["open"])
            return None
        if "copy" in request:
            return self._copy(request["copy"], request["tokens"], request["sample"], request["options"])
        return self._prefill(**request)

    def _opened(self, name: str, config: str | None = None) -> Model:
        return load_model(ModelOptions(name=ModelName[name], config=config), self.ranks)

    @cached_property
    def _ids(self) -> list[int]:
        """Tokens of the example text, then of the documentation."""
        pages = [ROOT / EXAMPLE_TEXT, *sorted(Path(ROOT / "docs").glob("*.md"))]
        texts = [page.read_text(encoding="utf-8") for page in pages]
        ids: list[int] = self.model.tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _prompt(self, num_tokens: int, sample: int) -> list[int]:
        if self.model.tokenizer is None:
            return random_ids(num_tokens, self.model.vocab_size, sample)
        start = sample * num_tokens % max(1, len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]

    def _prefill(self, way: str, tokens: int, sample: int, options: dict[str, Any]) -> dict[str, Any]:
        if way not in self._engines:
            prefill, folder = PrefillOptions(**options), f"{self._folder}/{len(self._engines)}"
            split = AutoPartition.start(self.model, self.ranks, prefill=prefill, folder=folder, tell=lambda text: None)
            self._engines[way] = Engine(self.model, self.ranks, prefill=prefill, partition=split, lends=False)
        asked = GenerationOptions(max_new_tokens=1, ignore_eos=True)
        batch = self._engines[way].generate([self._prompt(tokens, sample)], asked)
        return {
            "ttft_s": batch.ttft_s,
            "boundaries": list(batch.boundaries),
            "wait_s": [each.wait_s for each in batch.ranks],
            "density": [None if each.attention is None else each.attention.mean_density for each in batch.ranks],
        }

    def _copy(self, passage: int, tokens: int, sample: int, options: dict[str, Any]) -> dict[str, Any]:
        """Loss of a prompt's first tokens where they come again after it: on rank 0, as it is the same on several."""
        ids = self._prompt(tokens - passage, sample)
        nll, sparse = copy_nll(self.model, self.ranks, ids, passage, PrefillOptions(**options))
        sparse = sparse or SparseReport(density=[1.0], covered=[1.0])
        return {"nll": nll, "density": sparse.mean_density, "covered": sparse.mean_covered}


if __name__ == "__main__":
    answer_requests(Measured)
