"""Tasks of ranks in test_tensor.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from launch.infer import INFER, infer
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, even
from runahead.config import PrefillName
from runahead.model.shares import load_model, shard_model
from runahead.prefill.stage_run import StageRun
from runahead.report import GenerationBatch
from tests.families import build, keeping
from tests.ranks.tasks import Steps

SIZES: dict[str, Any] = {
    "vocab_size": 100,  # transformers 5.17 shares out what divides
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TENSOR = PrefillOptions(name=PrefillName.tensor)


@contextmanager
def arranged(ranks: Ranks, num_shares: int | None = None) -> Iterator[None]:
    """While it is open, stages have so many ranks; all of them by default."""
    ranks.arrange(num_shares or ranks.size)
    try:
        yield
    finally:
        ranks.arrange(1)


@cache
def shared_model(ranks: Ranks, family: str, dtype: torch.dtype, num_shares: int, **sizes: Any) -> Model:
    """This rank's share of a family's model. The ranks are arranged so."""
    assert num_shares == ranks.num_shares
    model = whole_model(family, dtype, **sizes)
    shard_model(model, ranks)
    return model


def whole_model(family: str, dtype: torch.dtype = torch.float64, **sizes: Any) -> Model:
    module = build(family, dtype=dtype, **(SIZES | sizes))
    module.forward = keeping(module.forward, dtype)
    return Model(module, name=family)


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    dtype: torch.dtype = torch.float64,
) -> tuple[GenerationBatch, Steps]:
    """Result of `Engine.generate` on this rank, and the calls of `on_tokens` there."""
    steps: Steps = []
    with arranged(ranks):
        engine = Engine(shared_model(ranks, family, dtype, ranks.size), ranks, prefill=TENSOR)
        return engine.generate(prompts, options, on_tokens=steps.append, record_timeline=True), steps


def last_logits(ranks: Ranks, family: str, ids: list[int], dtype: torch.dtype = torch.float64) -> list[float]:
    """This rank's logits behind the last token."""
    logits: list[torch.Tensor] = []
    with arranged(ranks), note_logits(logits):
        model = shared_model(ranks, family, dtype, ranks.size)
        logits.clear()
        Engine(model, ranks, prefill=TENSOR).generate([ids], GenerationOptions(max_new_tokens=1))
    return logits[0][0].tolist()


def in_blocks_by_memory(ranks: Ranks, ids: list[int], memory: list[float]) -> tuple[list[float], int | None]:
    """Logits behind the last token, and the tokens of a block, where each rank has so many bytes of memory."""
    logits: list[torch.Tensor] = []
    with (
        arranged(ranks),
        patch("runahead.model.memory._memory_bytes", lambda *_: memory[ranks.rank]),
        patch("runahead.model.memory.LEAST_ROW_TOKENS", 1),
        patch("runahead.prefill.reusing.LEAST_ROW_TOKENS", 1),
    ):
        model = whole_model("llama")
        shard_model(model, ranks)
        with note_logits(logits):
            batch = Engine(model, ranks, prefill=TENSOR).generate([ids], GenerationOptions(max_new_tokens=1))
    return logits[-1][0].tolist(), batch.ranks[ranks.rank].row_tokens


def logits_of_wrong_single_tokens(ranks: Ranks, ids: list[int]) -> tuple[list[str], list[float]]:
    """Warnings and logits of a shared model whose last MLP is wrong for one token, once it is shared."""
    logits: list[torch.Tensor] = []
    with arranged(ranks), warnings.catch_warnings(record=True) as told, note_logits(logits):
        warnings.simplefilter("always")
        model = whole_model("llama")
        assert model.last_layer is not None
        mlp = model.module.model.layers[-1].mlp
        mlp.register_forward_hook(lambda _, __, out: -out if out.shape[-2] == 1 else out)
        shard_model(model, ranks)
        assert model.last_layer is None
        Engine(model, ranks, prefill=TENSOR).generate([ids], GenerationOptions(max_new_tokens=1))
    return [str(each.message) for each in told], logits[-1][0].tolist()


class note_logits:  # noqa: N801 (used like a function)
    """While it is open, logits of forwards are kept in a list."""

    def __init__(self, logits: list[torch.Tensor]) -> None:
        self._logits = logits

    def __enter__(self) -> None:
        self._forward = forward = Model.forward

        def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._logits.append(forward(*args, **kwargs))
            return self._logits[-1]

        Model.forward = noting  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Model.forward = self._forward  # type: ignore[method-assign]


def bytes_of_weights(ranks: Ranks, family: str) -> int:
    """Memory behind this rank's share."""
    storages = {}
    with arranged(ranks):
        model = shared_model(ranks, family, torch.float64, ranks.size)
    for parameter in model.module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def tokens_of_loaded(ranks: Ranks, options: ModelOptions, ids: list[int]) -> tuple[list[int], list[int]]:
    """Greedy tokens of the model that `options` name, by all ranks in shares, and by a rank alone."""
    greedy = GenerationOptions(max_new_tokens=6, ignore_eos=True)
    tokens = []
    for name, num_shares in ((PrefillName.tensor, ranks.size), (PrefillName.single, 1)):
        with arranged(ranks, num_shares):
            model = load_model(options, ranks)
            batch = Engine(model, ranks, prefill=PrefillOptions(name=name)).generate([ids], greedy)
            tokens.append(batch.generations[0].new_token_ids)
    return tokens[0], tokens[1]


def message_of(ranks: Ranks, task: Callable[..., Any], *args: Any) -> str:
    """The error that a task raises on this rank."""
    try:
        task(ranks, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def shard_whole(ranks: Ranks, family: str, sizes: dict[str, Any]) -> None:
    with arranged(ranks):
        shard_model(Model(build(family, **sizes), name=family), ranks)


def whole_model_in_a_stage(ranks: Ranks) -> None:
    with arranged(ranks):
        Engine(Model(build("llama")), ranks)


def shared_model_on_single_ranks(ranks: Ranks) -> None:
    with arranged(ranks):
        model = shared_model(ranks, "llama", torch.float64, ranks.size)
    Engine(model, ranks)


def tensor_in_stages(ranks: Ranks) -> None:
    Engine(Model(build("llama")), ranks, prefill=TENSOR)


def run_program(ranks: Ranks, overrides: list[str]) -> None:
    try:
        infer(INFER.compose(overrides), ranks, even)
    finally:
        ranks.arrange(1)


def make_ready(ranks: Ranks) -> None:
    with arranged(ranks):
        shared_model(ranks, "llama", torch.float32, ranks.size)


def generate_and_act(ranks: Ranks, num_shares: int, acting: int, layer: int, action: str) -> str:
    """The acting rank does something in a layer of its prefill; the others tell how they end."""
    ranks.arrange(num_shares)
    model = shared_model(ranks, "llama", torch.float32, num_shares)
    after_layer = StageRun._after_layer

    def act_before(self: StageRun) -> None:
        if self.num_done == layer:
            if action == "raise":
                raise ValueError("out of luck")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
        after_layer(self)

    if ranks.rank == acting:
        StageRun._after_layer = act_before  # type: ignore[method-assign]
    Engine(model, ranks).generate([list(range(30))], GenerationOptions(max_new_tokens=2))
    return "ok"
