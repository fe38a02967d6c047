"""A rank of the study of speculative prefill: measures what `python -m benchmarks.studies.speculative_prefill` asks.

Requests come on standard input and answers go to standard output, a JSON line each; all ranks are sent the same ones:

    {"open": {"name": "smollm2"}, "share": 0.25, "text": "..."}   the model; number of tokens of the text
    {"way": "layers=6", "tokens": 4096}                           a prefill: TTFT, split, and what the draft took
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.rank_answers import answer_requests
from benchmarks.studies.speculative_prefill.ways import policies_of, prefill_of, text_ids
from partitioner.auto.partition import AutoPartition
from runahead import Engine, GenerationOptions, Model, ModelOptions, Ranks
from runahead.model.shares import load_model


class Measured:
    """The model of a rank, with an engine for each way."""

    model: Model
    ids: list[int]
    share: float

    def __init__(self, ranks: Ranks, folder: str) -> None:
        self.ranks, self.folder = ranks, folder
        self.engines: dict[str, Engine] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Measurement that a request asks for."""
        if "open" in request:
            self.model = load_model(ModelOptions(**request["open"]), self.ranks)
            self.ids, self.share = text_ids(self.model, request["text"]), request["share"]
            return len(self.ids)
        return self._prefill(**request)

    def _prefill(self, way: str, tokens: int) -> dict[str, Any]:
        if way not in self.engines:
            split = AutoPartition.start(self.model, self.ranks, folder=f"{self.folder}/{way}", tell=lambda _: None)
            self.engines[way] = Engine(
                self.model,
                self.ranks,
                partition=split,
                prefill=prefill_of(way, self.share),
                policies=policies_of(way, self.share),
                lends=False,
            )
        options = GenerationOptions(max_new_tokens=1, ignore_eos=True)
        batch = self.engines[way].generate([self.ids[:tokens]], options)
        report = batch.speculative
        return {
            "ttft_s": batch.ttft_s,
            "boundaries": batch.boundaries,
            "draft_s": None if report is None else report.draft_s,
        }


if __name__ == "__main__":
    answer_requests(Measured)
