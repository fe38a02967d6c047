"""Tasks of ranks in test_failures.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runahead import DecodeOptions, Engine, GenerationOptions, Model, Ranks
from runahead.cache.attention import LayerCall
from runahead.cache.base import KVStore, LayerStore
from runahead.config import DecodeName
from runahead.kv_transfer import copy, gloo
from runahead.prefill.chain_run import ChainRun
from tests.ranks.silence import Silence

NUM_LAYERS = 12


def _engine(ranks: Ranks, seed: int = 0, decode: DecodeName = DecodeName.auto) -> Engine:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    return Engine(Model(LlamaForCausalLM(config).eval()), ranks, decode=DecodeOptions(name=decode))


def _in_layer(layer: int, action: Any) -> None:
    """Let this process's attention run `action` when it comes to a layer of a prefill."""
    before_save = ChainRun.before_save

    def act_before(self: ChainRun, call: LayerCall) -> None:
        if call.layer == layer:
            action()
        before_save(self, call)

    ChainRun.before_save = act_before  # type: ignore[method-assign]


def generate(
    ranks: Ranks,
    num_tokens: int = 30,
    max_new_tokens: int = 4,
    seed: int = 0,
    decode: DecodeName = DecodeName.auto,
) -> tuple[str, float]:
    """("ok" or the error, seconds until then)."""
    engine = _engine(ranks, seed, decode)
    began = time.monotonic()
    try:
        engine.generate([list(range(num_tokens))], GenerationOptions(max_new_tokens=max_new_tokens, ignore_eos=True))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "ok", time.monotonic() - began


def hang_in_layer(ranks: Ranks, layer: int, silence: Silence) -> str:
    """One rank stands still inside a layer, alive and silent, until the others have ended."""
    if ranks.rank == silence.silent:
        _in_layer(layer, silence.keep)
    outcome, _ = generate(ranks)
    silence.end(ranks.rank)
    return outcome


def compute_in_layer(ranks: Ranks, working: int, layer: int, seconds: float) -> tuple[str, float]:
    """The working rank computes for a long time inside a layer."""

    def work() -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            torch.ones(64, 64) @ torch.ones(64, 64)

    if ranks.rank == working:
        _in_layer(layer, work)
    return generate(ranks)


def different_prompts(ranks: Ranks) -> tuple[str, float]:
    """Every rank has a prompt of its own."""
    return generate(ranks, num_tokens=30 + ranks.rank)


def different_weights(ranks: Ranks) -> tuple[str, float]:
    """Every rank has a model of its own."""
    return generate(ranks, seed=ranks.rank)


def raise_in_layer(ranks: Ranks, failing: int, layer: int) -> tuple[str, float]:
    """The failing rank raises inside a layer."""

    def fail() -> None:
        raise RuntimeError("out of luck")

    if ranks.rank == failing:
        _in_layer(layer, fail)
    return generate(ranks)


def signal_in_layer(ranks: Ranks, failing: int, layer: int, number: int) -> tuple[str, float]:
    """The failing rank is killed or stopped inside a layer."""
    if ranks.rank == failing:
        _in_layer(layer, lambda: os.kill(os.getpid(), number))
    return generate(ranks)


def slow_decode(ranks: Ranks, seconds_per_token: float, num_tokens: int) -> tuple[str, float]:
    """A long decode that is never silent for long."""
    engine = _engine(ranks)
    forward = engine.model.forward

    def slow_forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == 1:
            time.sleep(seconds_per_token)
        return forward(ids, *args, **kwargs)

    engine.model.forward = slow_forward  # type: ignore[method-assign]
    began = time.monotonic()
    result = engine.generate([list(range(9))], GenerationOptions(max_new_tokens=num_tokens, ignore_eos=True))
    return result.generations[0].finish_reason, time.monotonic() - began


STANDSTILL_S = 0.5
"""Time after which a wait counts as one that does not end by itself."""


def stop_receiving(ranks: Ranks, num_tokens: int, release: str) -> tuple[str, int]:
    """The last rank takes no K,V until rank 0 has come to a standstill. Returns the layers that rank 0 opened by then.

    Args:
        release: file that rank 0 makes then, for which the last rank waits.
    """
    opened: list[int] = []
    seen: list[int] = []
    released, over = Path(release), threading.Event()

    def stand_still() -> None:
        while not released.exists():
            ranks.progress()  # alive, and at work on something else
            time.sleep(0.01)

    def watch() -> None:
        wait, since_s = None, time.monotonic()
        while not seen and not over.wait(0.01):
            if not opened or ranks.waiting_for is None or ranks.waiting_for is not wait:
                wait, since_s = ranks.waiting_for, time.monotonic()
            elif time.monotonic() - since_s > STANDSTILL_S:
                seen.append(len(opened))
                released.touch()

    if ranks.rank == 0:
        for carrier in (gloo.GlooTransfer, copy.CopyTransfer):

            def counted(self: Any, layer: int, open_layer: Any = carrier.open) -> None:
                open_layer(self, layer)
                opened.append(layer)

            carrier.open = counted  # type: ignore[method-assign]
        threading.Thread(target=watch, daemon=True).start()
    else:
        _in_layer(0, stand_still)
    outcome, _ = generate(ranks, num_tokens)
    over.set()
    return outcome, seen[0] if seen else -1


SIGKILL, SIGSTOP = int(signal.SIGKILL), int(signal.SIGSTOP)


def _sharded(ranks: Ranks, failing: int, action: Any, step: int = 3) -> tuple[str, float]:
    """Decode on all ranks; the failing one runs `action` before a step."""
    steps = itertools.count()
    open_cache = KVStore.open

    def open_with_action(self: KVStore, layer: int, *args: Any) -> LayerStore:
        if layer == 0 and next(steps) == step:
            action()
        return open_cache(self, layer, *args)

    if ranks.rank == failing:
        KVStore.open = open_with_action  # type: ignore[method-assign]
    return generate(ranks, max_new_tokens=8, decode=DecodeName.sharded)


def signal_in_sharded_decoding(ranks: Ranks, failing: int, number: int) -> tuple[str, float]:
    """The failing rank is killed or stopped in the middle of decoding."""
    return _sharded(ranks, failing, lambda: os.kill(os.getpid(), number))


def hang_in_sharded_decoding(ranks: Ranks, silence: Silence) -> str:
    """One rank stands still in the middle of decoding, alive and silent, until the others have ended."""
    outcome, _ = _sharded(ranks, silence.silent, silence.keep)
    silence.end(ranks.rank)
    return outcome


def raise_in_sharded_decoding(ranks: Ranks, failing: int) -> tuple[str, float]:
    """The failing rank raises in the middle of decoding."""

    def fail() -> None:
        raise RuntimeError("out of luck")

    return _sharded(ranks, failing, fail)
