"""A rank of one commit's job: measures what `python -m benchmarks.studies.commits` tells it to, a JSON line at a time.

It runs in a checkout of that commit, and uses what the commit has. Requests come on standard input, answers go to
standard output, one line each:

    {"prefill": "kv_runahead", "tokens": 1024}      all ranks: a prefill; answers with the TTFT in seconds
    {"open": "snapkv", "tokens": 4096, "room": 64}  rank 0: a KV cache of drawn keys and values, to decode from
    {"decode": 8}                                   rank 0: that many tokens; answers with seconds per token
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

import runahead
from benchmarks.studies.retrieved_prompt import LAST_TOKENS, NUM_CENTRES, FullCache, RetrievedPrompt
from policies.adakv import AdaKV
from policies.base import Policy
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, ModelOptions, PrefillOptions, Ranks, from_ratios
from runahead.config import CacheOptions, PrefillName, RanksOptions
from runahead.decoding.forward import Forward, fastest_form, forward_over
from runahead.model.shares import load_model

SHARES = [0.58, 0.42]
"""Split of kv_runahead, near what a search finds for two cores."""
BUDGET = 0.25
FULL = "full"
DECODED: dict[str, tuple[Callable[[], Policy], CacheOptions]] = {
    "snapkv": (lambda: SnapKV(budget=BUDGET), CacheOptions()),
    "adakv": (lambda: AdaKV(scorer=SnapKV(budget=BUDGET)), CacheOptions()),
    "4 bits": (Offload, CacheOptions(bits=4)),
    "infinigen": (InfiniGen, CacheOptions()),
}
"""The caches that are decoded from beside the full one: a policy, and the precision of what it keeps."""


class Measured:
    """The model and the ranks of a commit, and what they measure."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model = load_model(ModelOptions(), ranks)
        self._engines: dict[str, Engine] = {}
        self._decode: Callable[[int], float] | None = None

    def answer(self, request: dict[str, Any]) -> float | None:
        """Seconds of what a request measures; None if it measures nothing."""
        if "prefill" in request:
            return self._prefill(request["prefill"], request["tokens"])
        if "open" in request:
            self._decode = None  # frees the last one first
            self._decode = self._opened(request["open"], request["tokens"], request["room"])
            return None
        assert self._decode is not None, "nothing is open"
        return self._decode(request["decode"])

    def _prefill(self, name: str, num_tokens: int) -> float:
        if name not in self._engines:
            options = PrefillOptions(name=PrefillName[name])
            self._engines[name] = Engine(self.model, self.ranks, prefill=options, partition=from_ratios(SHARES))
        ids = self._ids(num_tokens)
        return self._engines[name].generate([ids], GenerationOptions(max_new_tokens=1, ignore_eos=True)).ttft_s

    def _opened(self, name: str, num_tokens: int, room: int) -> Callable[[int], float]:
        make = RetrievedPrompt.filled if num_tokens > LAST_TOKENS + NUM_CENTRES else RetrievedPrompt
        prompt = make(self.model, self._ids(num_tokens))
        if name == FULL:
            full = FullCache.copy_of(prompt.under(Offload()), room)
            forward = self._over(fastest_form(full.cache, self.model, pads=[0], num_tokens=num_tokens), num_tokens)
        else:
            policy, storage = DECODED[name]
            conversation = prompt.under(policy(), storage)
            forward = self._over(conversation.cache, num_tokens)
        starts = count(num_tokens)

        @torch.inference_mode()
        def decode(number: int) -> float:
            places = [next(starts) for _ in range(number)]
            began_s = time.perf_counter()
            for place in places:
                forward(torch.tensor([[3 + place % 1000]]), place)
            return (time.perf_counter() - began_s) / number

        return decode

    def _over(self, cache: Any, num_tokens: int) -> Forward:
        return forward_over(self.model, cache, [], pads=[0], prompt_tokens=num_tokens)

    def _ids(self, num_tokens: int) -> list[int]:
        generator = torch.Generator().manual_seed(num_tokens)
        return torch.randint(3, self.model.vocab_size, (num_tokens,), generator=generator).tolist()


def main() -> None:
    """Answer requests until standard input ends."""
    assert Path(runahead.__file__).is_relative_to(Path.cwd()), f"{runahead.__file__} is not of the commit's checkout"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    with Ranks.start(RanksOptions(threads=1)) as ranks:
        measured = Measured(ranks)
        print(json.dumps(None), file=answers, flush=True)  # ready
        for request in sys.stdin:
            print(json.dumps(measured.answer(json.loads(request))), file=answers, flush=True)


if __name__ == "__main__":
    main()
