"""Tokens per second with the largest batch whose KV cache fits into a fixed budget of bytes."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

from benchmarks.evaluation.contenders import Contender
from benchmarks.evaluation.material import Material
from benchmarks.evaluation.metrics import THROUGHPUT
from benchmarks.evaluation.options import EvaluateRun
from benchmarks.evaluation.tasks.base import COST_OF_NEW, Case, KVUse, Outcome, Runtime, Task
from runahead.config import GenerationOptions, PrefillName
from runahead.engine import Engine
from runahead.report import GenerationBatch

LAYERS_IN_FLIGHT = 2
"""Whole layers that a prefill under a policy holds at a time: the minimum, since nothing is sent."""


class Throughput(Task):
    """Generated tokens per second, including the time of the prompt. Every row's prompt is random tokens.

    KV cache bytes are proportional to the number of rows, so a run of one row, which is also the warm-up, tells how
    many fit. The peak has to fit: while the prompt is computed, after it, or after the last token.
    """

    metric = THROUGHPUT
    needs_tokenizer = False

    def __init__(self, run: EvaluateRun, material: Material) -> None:
        self._options = options = run.throughput
        self.cases = [{"round": number} for number in range(options.rounds)]
        self.settings = asdict(options)
        del self.settings["rounds"]
        material.require_positions(
            "throughput.prompt_tokens + throughput.new_tokens", options.prompt_tokens + options.new_tokens
        )
        draw = random.Random(0)
        self._prompts = [
            [draw.randrange(material.vocab_size) for _ in range(options.prompt_tokens)]
            for _ in range(options.max_batch)
        ]
        self._row_bytes: dict[str, int] = {}

    def cost(self, case: Case) -> float:
        return COST_OF_NEW * self._options.new_tokens + self._options.prompt_tokens * 8.0

    def run(self, runtime: Runtime, contender: Contender, case: Case) -> Outcome:
        model, options = runtime.model, self._options
        per_token = sum(shape.bytes_per_token() for shape in model.kv_shapes)
        of_states = sum(shape.num_bytes for shape in model.state_shapes)
        budget = options.kv_bytes or options.kv_tokens * per_token
        prefill = replace(contender.prefill, name=PrefillName.single, layers_in_flight=LAYERS_IN_FLIGHT)
        engine = Engine(model, runtime.ranks, prefill=prefill, policies=contender.policies)
        if contender.name not in self._row_bytes:
            self._row_bytes[contender.name] = _peak_bytes(self._generate(engine, 1))
        row_bytes = self._row_bytes[contender.name]
        if row_bytes > budget:
            raise ValueError(
                f"the throughput budget of {budget:,} bytes of K,V holds no row under {contender.name}, which takes "
                f"{row_bytes:,}; raise throughput.kv_tokens or throughput.kv_bytes"
            )
        rows = min(options.max_batch, budget // row_bytes)
        batch = self._generate(engine, rows)
        [report] = batch.ranks
        assert batch.tpot_s is not None
        assert _peak_bytes(batch) <= budget, (_peak_bytes(batch), budget)
        total_s = batch.ttft_s + batch.tpot_s * (options.new_tokens - 1)
        kv = KVUse(
            kv_bytes=report.kv_kept_bytes,
            full_kv_bytes=rows * (of_states + per_token * (options.prompt_tokens + options.new_tokens - 1)),
            num_tokens=options.prompt_tokens,
            kept_tokens=report.kept_tokens or [options.prompt_tokens] * model.num_layers,
            host_bytes=report.kv_host_bytes,
        )
        return Outcome(
            score=rows * options.new_tokens / total_s,
            seen_share=kv.seen_share_of(report.retrieval),
            kv=kv,
            ttft_s=batch.ttft_s,
            tpot_s=batch.tpot_s,
            details={"rows": rows, "budget_bytes": budget, "peak_bytes": _peak_bytes(batch)},
        )

    def _generate(self, engine: Engine, rows: int) -> GenerationBatch:
        generation = GenerationOptions(max_new_tokens=self._options.new_tokens, ignore_eos=True)
        return engine.generate(self._prompts[:rows], generation)


def _peak_bytes(batch: GenerationBatch) -> int:
    [report] = batch.ranks
    return max(report.kv_peak_bytes, report.kv_kept_bytes)
