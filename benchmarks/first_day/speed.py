"""One GPU: TTFT and time per token by length, transformers beside it, rows of a server, memory after many prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.doctor.tasks import decoded_bytes
from benchmarks.first_day.visit import Visit
from benchmarks.harness.random_prompts import random_ids
from benchmarks.ttft.flops import prompt_flops
from benchmarks.ttft.references import PlainTransformers
from runahead.cache.attention import CausalAttention
from runahead.config import GenerationOptions
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row
from runahead.decoding.rows import Rows
from runahead.engine import Engine
from runahead.model.model import Model

LENGTHS, SMALL_LENGTHS = (1024, 4096, 16384, 65536, 120000), (64, 256)
"""Prompt lengths in tokens, on a GPU and in a rehearsal on a CPU."""

ROWS, SMALL_ROWS = (1, 4, 16, 64), (1, 2)
STEPS = 10
NEW_TOKENS = 40
"""The first three launch their kernels one by one; a graph has the others."""

ELEMENTWISE_BYTES = 40
"""Bytes that norms, rotations, activations and merges move per token, layer and dim of the model and its MLP."""


def by_length(visit: Visit) -> None:
    """TTFT and time per token by length, and the peak of memory."""
    model = load(visit)
    engine, layers = Engine(model, visit.ranks), model.num_layers

    def measure(length: int) -> None:
        ids = random_ids(length, model.vocab_size)
        for _ in range(2):
            if visit.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(visit.device)
            batch = engine.generate([ids], GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        assert batch.tpot_s is not None, "several tokens were decoded"
        visit.figures.note(f"TTFT of {length:,} tokens", batch.ttft_s * 1e3, "TTFT", *ttft_sizes(model, length))
        step_bytes = decoded_bytes(model, length)
        visit.figures.note(f"a token after {length:,}", batch.tpot_s * 1e3, "a replayed step", step_bytes, layers)
        if visit.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(visit.device) / 1e9
            visit.figures.note(f"peak at {length:,}", peak, "GB")

    _each_length(visit, lengths_of(visit, model), measure)


def beside_transformers(visit: Visit) -> None:
    """TTFT of the runtime and of transformers alone in turn, with weights of their own each."""
    options = visit.model_to_measure()
    model = load(visit)
    plain = PlainTransformers(options, device=visit.device, num_threads=torch.get_num_threads())
    engine = Engine(model, visit.ranks)

    def measure(length: int) -> None:
        ids = random_ids(length, model.vocab_size)
        ours, theirs = [], []
        for _ in range(3):
            ours.append(engine.generate([ids], GenerationOptions(max_new_tokens=1)).ttft_s)
            theirs.append(plain.first_token(ids)[1])
        sizes = ttft_sizes(model, length)
        visit.figures.note(f"TTFT of {length:,} tokens", min(ours[1:]) * 1e3, "TTFT", *sizes)
        visit.figures.note(f"transformers, {length:,} tokens", min(theirs[1:]) * 1e3, "TTFT", *sizes)

    _each_length(visit, lengths_of(visit, model)[:3], measure)


@torch.inference_mode()
def rows(visit: Visit) -> None:
    """Time of a step of a server's rows, of about 1,000 tokens each."""
    model = load(visit)
    length = 64 if visit.is_small else 1000
    for number in SMALL_ROWS if visit.is_small else ROWS:
        visit.say(f"{number} rows")
        live = Rows(Lanes(model))
        for n in range(number):
            ids = random_ids(length + n, model.vocab_size)
            cache = model.empty_cache(len(ids) + NEW_TOKENS)
            ids_1S = torch.tensor([ids], device=model.device)
            attention = CausalAttention(cache, start=0, pads=[0])
            logits_1V = model.forward(ids_1S, attention, start=0, pads=[0])
            row = Row(model, ids, GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True), seed=0)
            live.join([(n, 0)], [row], logits_1V, cache, [len(ids)])
        for _ in range(3):
            live.step()
        step_s = visit.seconds(lambda: [live.step() for _ in range(STEPS)]) / STEPS  # noqa: B023 (called at once)
        step_bytes = decoded_bytes(model, number * length)
        visit.figures.note(f"a step of {number} rows", step_s * 1e3, "a replayed step", step_bytes, model.num_layers)
        visit.figures.note(f"{number} rows", number / step_s, "tokens/s")


def memory(visit: Visit) -> None:
    """Reserved memory after prompts of growing length, each of which has its graph."""
    model = load(visit)
    engine, reserved = Engine(model, visit.ranks), []
    for n in range(30):
        ids = random_ids(500 + n, model.vocab_size)
        engine.generate([ids], GenerationOptions(max_new_tokens=6, ignore_eos=True))
        reserved.append(torch.cuda.memory_reserved(visit.device) >> 20)
        visit.say(f"{reserved[-1]:,} MiB after prompt {n}")
    visit.figures.note("growth from prompt 5 to 30", reserved[-1] - reserved[4], "MiB")


def load(visit: Visit) -> Model:
    """The model that is measured. Every rank calls this."""
    options = visit.model_to_measure()
    visit.say("loading the model")
    return visit.ranks.on_all_ranks(
        "the model", lambda: Model.load(options, visit.device, ranks_on_host=visit.ranks.local_size)
    )


def _each_length(visit: Visit, lengths: Sequence[int], measure: Callable[[int], None]) -> None:
    """Measure every length that the GPU has memory for."""
    for length in lengths:
        visit.say(f"{length:,} tokens")
        visit.figures.attempt(f"{length:,} tokens", partial(measure, length))
        if visit.device.type == "cuda":
            torch.cuda.empty_cache()


def lengths_of(visit: Visit, model: Model) -> list[int]:
    """Lengths that the model has positions for."""
    lengths: Sequence[int] = SMALL_LENGTHS if visit.is_small else LENGTHS
    return [length for length in lengths if length + NEW_TOKENS <= (model.max_positions or length + NEW_TOKENS)]


def ttft_sizes(model: Model, num_tokens: int) -> tuple[float, float, float, int]:
    """Operations of matrices and of attention, bytes of all else, and layers: what an estimate of TTFT depends on."""
    flops = prompt_flops(model, num_tokens)
    assert flops is not None, "no mixture of experts"
    dims = model.config.hidden_size + model.config.intermediate_size
    return flops.matmul, flops.attention, ELEMENTWISE_BYTES * dims * num_tokens * model.num_layers, model.num_layers
