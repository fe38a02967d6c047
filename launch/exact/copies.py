"""Losses of prompts whose first tokens come again, with some layers exact while the others choose keys.

Sets of exact layers that begin alike compute their first layers alike. So what a layer is given is kept wherever sets
that are to be measured differ for the first time, and the later ones go on from there. Hidden states are all that is
kept: the tokens that come again have theirs, so that nobody reads keys and values of earlier layers.
"""

# Legend: V vocabulary, C tokens that come again.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from launch.exact.search import Exact, Loss
from runahead.cache.attention import CausalAttention
from runahead.config import PrefillOptions
from runahead.context import ContextPartition
from runahead.model.layers.resuming import beginning_at, num_bytes
from runahead.model.model import Model
from runahead.prefill.base import PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import run_in_chain
from runahead.ranks.ranks import Ranks
from runahead.report import SparseReport

MOST_BYTES = 4 << 30
"""Most bytes of hidden states in host memory, also during a forward; those that were not used for longest go first."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a layer is given.

    Attributes:
        prompt, copy: output of the layer before it, of the prompt and of the tokens that come again.
        density: share of blocks that are computed, by layer that stores keys and values, as far as it is known.
    """

    prompt: Any = None
    copy: Any = None
    density: Sequence[float | None] = ()

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.prompt) + num_bytes(self.copy)


class Copies:
    """Losses of prompts by sets of exact layers, which compute together those that they begin with alike.

    Args:
        prompts: token ids of each.
        passage: number of tokens that come again.
        prefill: of the prompts, whose exact layers are replaced.
        most_bytes: bytes of hidden states that are kept at most.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        prompts: Sequence[Sequence[int]],
        passage: int,
        prefill: PrefillOptions,
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._model, self._ranks, self._prompts, self._passage = model, ranks, prompts, passage
        self._prefill, self._most_bytes = prefill, most_bytes
        self._layers = model.decoder_layers if model.has_layers else ()
        read_later = [model.kv_layers[number] for number in model.reads_kv_of.values()]
        self._last_fork = min([len(self._layers), *read_later])
        self._kept: dict[tuple[int, int, Exact], Beginning] = {}
        self._token_bytes = self._bytes_between_layers()

    def losses(self, number: int, sets: Sequence[Exact], ahead: Sequence[Exact] = ()) -> Iterator[Loss]:
        """Losses of a prompt, of each set.

        Args:
            number: of the prompt.
            ahead: further sets, which may be asked for later.
        """
        for at, exact in enumerate(sets, start=1):
            differ = [min(exact ^ other) for other in (*sets[at:], *ahead) if other != exact]
            yield self._loss(number, exact, dict.fromkeys(min(layer, self._last_fork) for layer in differ))

    def _bytes_between_layers(self) -> int:
        """Bytes of what a layer hands on of a token; 1 if no layers are known, none of which is then kept."""
        found = dict[int, Any].fromkeys([1] if self._layers else [])
        keeping = beginning_at(self._layers, 0, None, found)
        copy_nll(self._model, self._ranks, self._prompts[0][:2], 1, PrefillOptions(), copy_context=keeping)
        return max(1, sum(map(num_bytes, found.values())))

    def _loss(self, number: int, exact: Exact, forks: Iterable[int]) -> Loss:
        """Loss of a prompt, computed from the last layer on whose input is kept.

        Args:
            forks: layers from which other sets may go on, the next set's first.
        """
        known = [fork for of, fork, before in self._kept if of == number and before == _before(exact, fork)]
        first, begins = max(known, default=0), Beginning()
        if known:
            key = (number, first, _before(exact, first))
            begins = self._kept[key] = self._kept.pop(key)  # the newest
        each = (len(self._prompts[number]) + self._passage) * self._token_bytes
        new = [fork for fork in forks if fork > first][: (self._most_bytes - begins.num_bytes) // each]
        while sum(kept.num_bytes for kept in self._kept.values()) > self._most_bytes - len(new) * each:
            del self._kept[next(iter(self._kept))]
        of_prompt, of_copy = (dict[int, Any].fromkeys(new) for _ in range(2))
        nll, sparse = copy_nll(
            self._model,
            self._ranks,
            self._prompts[number],
            self._passage,
            replace(self._prefill, exact_layers=sorted(exact)),
            prompt_context=beginning_at(self._layers, first, begins.prompt, of_prompt),
            copy_context=beginning_at(self._layers, first, begins.copy, of_copy),
        )
        report = SparseReport(density=[], covered=[]) if sparse is None else sparse
        places = zip(self._model.kv_layers, report.density, strict=False)
        report.density = [begins.density[n] if layer < first else own for n, (layer, own) in enumerate(places)]
        for fork, prompt in of_prompt.items():
            key = (number, fork, _before(exact, fork))
            self._kept[key] = Beginning(prompt=prompt, copy=of_copy[fork], density=report.density)
        density = report.mean_density
        return Loss(nll=nll, density=1.0 if density is None else density)


def _before(exact: Exact, fork: int) -> Exact:
    return frozenset(layer for layer in exact if layer < fork)


def copy_nll(
    model: Model,
    ranks: Ranks,
    ids: Sequence[int],
    passage: int,
    prefill: PrefillOptions,
    *,
    prompt_context: AbstractContextManager[None] | None = None,
    copy_context: AbstractContextManager[None] | None = None,
) -> tuple[float, SparseReport | None]:
    """Loss of a prompt's first tokens where they come again after it, in nats per token, and what it attended to.

    It is computed on this rank; a chain chooses the same. What comes again attends to all keys.

    Args:
        ids: token ids of the prompt.
        passage: number of tokens that come again.
        prefill: of the prompt.
        prompt_context, copy_context: of the forwards of the prompt and of what comes again.
    """
    with torch.inference_mode():
        with prompt_context or nullcontext():
            prefilled = run_in_chain(
                PrefillJob(
                    model=model,
                    ranks=ranks,
                    batch=PromptBatch.from_prompts([list(ids)], ranks.device),
                    partition=ContextPartition(boundaries=(0,) + (len(ids),) * ranks.num_stages),
                    capacity=len(ids) + passage,
                    options=prefill,
                )
            )
        assert prefilled.cache is not None and prefilled.logits_BV is not None
        attention = CausalAttention(prefilled.cache, start=len(ids), pads=[0])
        copied_1C = torch.tensor([ids[:passage]], device=ranks.device)
        with copy_context or nullcontext():
            logits_CV = model.forward(copied_1C, attention, start=len(ids), pads=[0], all_logits=True)[0]
        before_CV = torch.cat([prefilled.logits_BV, logits_CV[:-1]]).float().log_softmax(dim=-1)
        return -before_CV.gather(1, copied_1C.T).mean().item(), prefilled.report.attention
