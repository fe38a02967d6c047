"""KV heads that keep different numbers of tokens: memory by the operating system's count, and decoding time per token.

    python -m benchmarks.studies.unequal_heads --lengths 2000 4000 8000
    python -m benchmarks.studies.unequal_heads --draw-only

A prompt is computed once, and cut back under each policy: SnapKV, whose heads keep equally many tokens, and Ada-KV
around it, with the same number of tokens in all. "masked" is what Ada-KV chooses over the full cache under a mask, as
in libraries whose caches have no heads of different lengths: nothing is freed, and all keys are read. "4 bits" is with
cache.bits=4, which stores all but the newest tokens of each head in 4 bits.

Memory is what the process has more of resident after a policy's cache was made, with all else as it was; freed is its
share that the full cache needs and the policy does not. The bound of the gain is in bytes, since a step of one token
reads each of them once: weights and the stored keys and values. Policies decode in turn, a few tokens each, round after
round. Appends a JSON line per length and policy to benchmarks/results/unequal_heads.jsonl.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run, Study, newest, option
from benchmarks.harness.text_samples import EXAMPLE, repeated, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieved_prompt import FullCache, RetrievedPrompt, full_bytes, weight_bytes
from launch.program.text_table import text_table
from policies.adakv import AdaKV
from policies.base import Policy
from policies.offload import Offload
from policies.snapkv import SnapKV
from runahead import Model, ModelOptions
from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms, cpu_flash
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.kv_cache import KVCache
from runahead.config import CacheOptions
from runahead.decoding.forward import Forward, fastest_form, forward_over
from runahead.thinning.ragged import RaggedLayer

T = TypeVar("T")

FULL, EQUAL, MASKED = "full", "equal heads", "masked"
CHOICES: dict[str, Callable[[float], Policy]] = {
    EQUAL: lambda budget: SnapKV(budget=budget),
    "adakv, alpha=0.2": lambda budget: AdaKV(scorer=SnapKV(budget=budget), alpha=0.2),
    "adakv, alpha=0": lambda budget: AdaKV(scorer=SnapKV(budget=budget), alpha=0.0),
}
STORAGES = {"": CacheOptions(), ", 4 bits": CacheOptions(bits=4)}
"""Suffix of the name of a choice -> how it is stored."""
LIKE_MASKED = "adakv, alpha=0.2"


class MaskedDecoding(LayerAttention):
    """Attention of one new token to a full cache under a mask of its KV heads.

    Args:
        masks_1K1T: additive mask of each layer, over all tokens for which the cache has room.
        start: index of the new token.
    """

    def __init__(self, cache: KVCache, masks_1K1T: list[Tensor], start: int) -> None:
        super().__init__(start=start, pads=[0])
        self._cache, self._masks = cache, masks_1K1T

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        slab, end = self._cache.layer(layer), self.start + 1
        slab.write(self.start, k_BKCH, v_BKCV)
        k_BKTH, v_BKTV = slab.read(0, end)
        # A group's heads as queries of one head, so that keys are read once for all of them.
        q_BKGH = q_BNCH.view(1, k_BKTH.shape[1], -1, q_BNCH.shape[-1])
        mask = self._masks[layer][..., :end].expand(-1, -1, q_BKGH.shape[2], -1)
        out_BKGV, _ = cpu_flash(q_BKGH, k_BKTH, v_BKTV, False, terms.scaling, mask)
        return out_BKGV.reshape(q_BNCH.shape)


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and policy."""
    options = run.options
    torch.set_num_threads(1)
    model = Model.load(ModelOptions(), torch.device("cpu"))
    text = text_ids(model, options.text)
    room = options.tokens * (options.rounds + 1)
    for length in options.lengths:
        ids = repeated(text, length)
        prompt = RetrievedPrompt(model, ids)

        def full_cache(prompt: RetrievedPrompt = prompt) -> FullCache:
            return FullCache.of(prompt.under(Offload()), room)

        full_cache()  # libraries allocate what they keep
        full, resident_bytes = _growth(full_cache)
        resident = {FULL: resident_bytes}
        caches, masks = dict[str, KeptCache](), list[Tensor]()
        for (choice, make), (stored_as, storage) in product(CHOICES.items(), STORAGES.items()):
            name = choice + stored_as
            conversation, resident[name] = _growth(partial(prompt.under, make(options.budget), storage))
            cache = conversation.cache
            assert cache is not None
            if name == LIKE_MASKED:
                masks = [_mask(layer, length + room, model.dtype) for layer in cache.layers]
            caches[name] = cache
        stored = {name: cache.num_bytes for name, cache in caches.items()}
        copied = FullCache.of(prompt.under(Offload()), room)
        turns = {
            FULL: _turn(_over_full(model, full, length), ids, length, options.tokens),
            MASKED: _turn(_masked(model, copied.cache, masks), ids, length, options.tokens),
        }
        for name, cache in caches.items():
            forward = forward_over(model, cache, [], pads=[0], prompt_tokens=length)
            turns[name] = _turn(forward, ids, length, options.tokens)
        seconds = run.in_turn(turns, options.rounds, warmup=1)
        full_kv = full_bytes(model, length) - weight_bytes(model)
        for name in turns:
            kv_bytes = stored.get(name, full_kv)
            about = {"model": model.name, "policy": name, "length": length, "budget": options.budget}
            yield about | {
                "tpot_s": seconds[name],
                "kv_bytes": kv_bytes,
                "resident_bytes": resident.get(name),
                "step_bytes": kv_bytes + weight_bytes(model),
            }


def _growth(make: Callable[[], T]) -> tuple[T, int]:
    """The result of `make`, and the bytes that the process then has more of resident."""
    before = _resident_bytes()
    made = make()
    return made, _resident_bytes() - before


def _resident_bytes() -> int:
    """Resident memory of this process by the kernel's count, without what the C library keeps of freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _mask(layer: KeptLayer, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (1, K, 1, T) of the tokens that each head keeps of the prompt; all later ones are seen."""
    assert isinstance(layer, RaggedLayer), type(layer)
    positions_Kn = layer.positions_BKn()[0].long()
    mask_KT = torch.full((len(positions_Kn), num_tokens), -torch.inf, dtype=dtype)
    mask_KT[:, int(positions_Kn.max()) + 1 :] = 0
    for mask_T, positions_n in zip(mask_KT, positions_Kn, strict=True):
        mask_T[positions_n[positions_n >= 0]] = 0
    return mask_KT[None, :, None]


def _over_full(model: Model, full: FullCache, length: int) -> Forward:
    """Decoding as the engine does without a policy."""
    cache = fastest_form(full.cache, model, pads=[0], num_tokens=length)
    return forward_over(model, cache, [], pads=[0], prompt_tokens=length)


def _masked(model: Model, cache: KVCache, masks_1K1T: list[Tensor]) -> Forward:
    return lambda ids_B1, start: model.forward(ids_B1, MaskedDecoding(cache, masks_1K1T, start), start=start, pads=[0])


def _turn(forward: Forward, ids: list[int], length: int, num_tokens: int) -> Callable[[int], float]:
    """Make a function that measures seconds per token of a turn; a round decodes the tokens after the last one's."""
    starts = count(length, num_tokens)

    def turn(number: int) -> float:
        start = next(starts)
        chosen = [ids[(50 + at) % length] for at in range(start, start + num_tokens)]
        began_s = time.perf_counter()
        for at, token in enumerate(chosen, start):
            forward(torch.tensor([[token]]), at)
        return (time.perf_counter() - began_s) / num_tokens

    return turn


def ratio(line: Line, other: Line) -> float:
    """How many times as fast a policy decodes as another one, the median over rounds."""
    return median(theirs / own for own, theirs in zip(line["tpot_s"], other["tpot_s"], strict=True))


def table(found: list[Line]) -> str:
    """Rows of the last runs, one per length and policy."""
    latest = newest(found, "length", "budget", "policy")
    rows: Rows = [
        (
            "tokens",
            "kept",
            "policy",
            "MB stored",
            "MB resident",
            "freed",
            "ms a token",
            "gain",
            "bound",
            "of equal heads",
        )
    ]
    for (length, budget, name), line in latest.items():
        full, equal = latest[length, budget, FULL], latest[length, budget, EQUAL]
        resident, freed = "-", "-"
        if line["resident_bytes"] is not None:
            resident = f"{line['resident_bytes'] / 1e6:.1f}"
            freed = f"{1 - line['resident_bytes'] / full['resident_bytes']:.1%}"
        milliseconds, gain = f"{1e3 * median(line['tpot_s']):.1f}", f"{ratio(line, full):.2f}"
        bound, to_equal = f"{full['step_bytes'] / line['step_bytes']:.2f}", f"{ratio(line, equal):.2f}"
        about = f"{length:,}", f"{budget:.0%}", name, f"{line['kv_bytes'] / 1e6:.1f}"
        rows.append((*about, resident, freed, milliseconds, gain, bound, to_equal))
    return text_table(rows, left=(2,))


STUDY = Study(
    name="unequal_heads",
    text=__doc__,
    has="policy",
    measure=measure,
    table=table,
    options={
        "lengths": option([2000, 4000, 8000]),
        "budget": option(0.25, "share of the tokens that is kept"),
        "tokens": option(8, "of one turn"),
        "rounds": option(7),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
)

if __name__ == "__main__":
    STUDY.main()
