"""A rank of the study of hybrid models: measures what `python -m benchmarks.studies.hybrid` tells it to.

Requests come on standard input and answers go to standard output, a JSON line each; all ranks are sent the same ones:

    {"open": "hybrid", "layers": 48, ...}                           a model of random weights, from now on
    {"prefill": "kv_runahead", "model": "hybrid", "tokens": 4096}   a prefill: TTFT, split, bytes and waits
    {"probe": "hybrid", "tokens": 4096}                             compute, by all ranks at once, and the link
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.harness.random_prompts import random_ids
from benchmarks.harness.rank_answers import answer_requests
from partitioner.auto.partition import PING_BYTES, AutoPartition
from partitioner.cost.places import Places
from partitioner.measure import ping, probe_compute
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.config import PrefillName

HEAD_DIM = 64
SHORTEST_PROBE = 64
VOCAB_SIZE = 32_000


def config_of(kind: str, *, layers: int, hidden: int, mlp: int, period: int) -> Qwen3NextConfig:
    """Qwen3-Next's shape, scaled down: heads of attention are as wide as two model dims, keys of linear attention as
    wide as one and values as two; all layers have a dense MLP.

    Args:
        kind: "hybrid", in which the last of every `period` layers attends, or "attention", in which all do.
    """
    full, linear = "full_attention", "linear_attention"
    attends = [kind == "attention" or layer % period == period - 1 for layer in range(layers)]
    return Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        layer_types=[full if each else linear for each in attends],
        mlp_only_layers=list(range(layers)),
        num_attention_heads=2 * hidden // HEAD_DIM,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        linear_num_key_heads=hidden // HEAD_DIM,
        linear_num_value_heads=2 * hidden // HEAD_DIM,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        max_position_embeddings=1 << 17,
    )


def random_model(kind: str, **sizes: int) -> Model:
    """A model of `config_of`, with random weights in float32, the same on every rank."""
    torch.manual_seed(0)
    module = Qwen3NextForCausalLM._from_config(config_of(kind, **sizes), dtype=torch.float32)
    return Model(module.eval().requires_grad_(False), name=kind)


class Measured:
    """The models of a rank, each with an engine for one rank and one for the chain."""

    def __init__(self, ranks: Ranks, folder: str) -> None:
        self.ranks, self.folder = ranks, folder
        self.models: dict[str, Model] = {}
        self.engines: dict[tuple[str, str], Engine] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """Measurement that a request asks for."""
        if "open" in request:
            return self._open(request.pop("open"), **request)
        if "probe" in request:
            return self._probe(request["probe"], request["tokens"])
        return self._prefill(**request)

    def _open(self, kind: str, **sizes: int) -> None:
        model = self.models[kind] = random_model(kind, **sizes)
        split = AutoPartition.start(model, self.ranks, folder=f"{self.folder}/{kind}", tell=lambda sentence: None)
        single = PrefillOptions(name=PrefillName.single)
        self.engines[kind, "single"] = Engine(model, self.ranks, prefill=single, lends=False)
        self.engines[kind, "kv_runahead"] = Engine(model, self.ranks, partition=split, lends=False)

    def _prefill(self, prefill: str, model: str, tokens: int, record: bool = False) -> dict[str, Any]:
        engine, options = self.engines[model, prefill], GenerationOptions(max_new_tokens=1, ignore_eos=True)
        batch = engine.generate([random_ids(tokens, VOCAB_SIZE)], options, record_timeline=record)
        return {
            "ttft_s": batch.ttft_s,
            "boundaries": list(batch.boundaries),
            "sent_bytes": [each.kv_sent_bytes for each in batch.ranks],
            "wait_s": [each.wait_s for each in batch.ranks],
            "spans": [[astuple(span) for span in spans] for spans in batch.spans],
        }

    def _probe(self, kind: str, tokens: int) -> dict[str, Any]:
        model, lengths = self.models[kind], [min(SHORTEST_PROBE, tokens // 4)]
        while lengths[-1] < tokens:
            lengths.append(min(2 * lengths[-1], tokens))
        self.ranks.barrier("all ranks to time layers")
        tick: Callable[[str], None] = lambda text: self.ranks.progress()  # noqa: E731
        cost = probe_compute(model, chunks=lengths, prefixes=lengths, on_progress=tick)
        link, places = ping(self.ranks, num_bytes=PING_BYTES), Places.of_model(model)
        assert link is not None
        return {
            "cost": cost.to_json(),
            "link": link.as_json(),
            "kv_bytes_per_token": model.kv_shapes[0].bytes_per_token(),
            "state_bytes": places.bytes_of_state,
        }


if __name__ == "__main__":
    answer_requests(Measured)
