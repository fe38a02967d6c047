"""Attention mass on the tokens that partial keys would fetch, and similarity of consecutive layers' inputs.

A text is read in one forward pass. For some tokens after its first part, the prompt, every layer measures the attention
probability that this token's queries give to all tokens before it, and the share of it on the tokens that would be
fetched: with queries predicted from the layer before, keys reduced to some columns, and a fixed share of tokens.
"""

# Legend: N query heads, K kv heads, G = N / K, g 1 or G, S tokens, P measured tokens, X queries that a basis is made
# of, n tokens before, m fetched ones, r columns, D model dim, H head dim, V value dim.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from policies.skewing import Skew, column_weights, skewing_basis
from runahead.attention.base import LayerInput
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.model.layers.narrowing import decoder_layers
from runahead.model.model import Model

SINKS = 4
"""Number of first tokens that are always fetched, and left out of statistics of keys."""
OBSERVED = 256
"""Number of last prompt tokens whose queries are observed."""
WINDOW = 256
"""Number of positions after the prompt to which queries are rotated."""
SAMPLE_POSITIONS = 16
"""Number of these positions to which each of a sample's queries is rotated."""

ORACLE, ALL_COLUMNS, OWN_INPUT = "oracle", "all columns", "own input"
"""References: the best selection; selection by full keys and predicted queries; by full keys and own queries."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to make partial keys.

    Attributes:
        queries: queries that A is made of: "none" (no skewing); "sample turned": another text's, rotated to positions
            after the prompt; "prompt": the prompt's last ones; "prompt turned": the same, rotated; "hindsight": those
            of the measured tokens.
        by_size: choose columns by mean |q| + mean |k| of the whole prompt, as in the paper; else by `column_weights` of
            the prompt's last queries, rotated to positions after the prompt.
        per_query_head: use one A and one choice of columns per query head rather than per KV head.
    """

    queries: str
    by_size: bool = False
    per_query_head: bool = False

    @property
    def name(self) -> str:
        return self.queries + " per query head" * self.per_query_head + ", columns by size" * self.by_size


NONE = Variant(queries="none")
SAMPLE_TURNED = Variant(queries="sample turned")
PROMPT_BY_SIZE = Variant(queries="prompt", by_size=True)
OURS = Variant(queries="prompt turned")
PER_QUERY_HEAD = Variant(queries="prompt turned", per_query_head=True)
HINDSIGHT = Variant(queries="hindsight")


@dataclass(kw_only=True)
class Reading:
    """Measurements of one text.

    Attributes:
        mass: by reference, or by variant and ratio of columns: the share of attention probability on fetched tokens in
            every measured layer, a mean over heads and tokens.
        similarity: by compared quantity: the cosine between a layer's and the previous layer's, from layer 1 on, a mean
            over tokens.
    """

    mass: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    similarity: dict[str, list[float]] = field(default_factory=dict)

    def mean_mass(self, name: str, ratio: float = 1.0) -> float:
        values = self.mass[name, ratio]
        return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of the measurement of a text.

    Attributes:
        prompt_tokens: number of first tokens that are the prompt.
        sample: queries of another text, at position 0.
        ratios: shares of columns in partial keys.
        share: share of the prompt's tokens that is fetched, in addition to the sinks.
        every: of the tokens after the prompt, every `every`th is measured.
        layers: layers to measure.
    """

    prompt_tokens: int
    sample: Skew
    variants: Sequence[Variant]
    ratios: Sequence[float]
    layers: Sequence[int]
    share: float = 0.05
    every: int = 8


@torch.inference_mode()
def read(model: Model, ids_S: Tensor, setup: Setup) -> Reading:
    """Read a text, the prompt and tokens after it, and measure attention mass and similarities."""
    layers = decoder_layers(model.module, model.num_layers)
    modules = [layer.get_submodule("self_attn") for layer in layers]
    attention = _Asking(model, len(ids_S), setup, modules)
    with ExitStack() as hooks:
        for layer, module in zip(layers, modules, strict=True):
            for what, of in (("block input", layer), ("attention input", module)):
                hooks.enter_context(of.register_forward_pre_hook(attention.notes_input(what), with_kwargs=True))
            for what, of in (("attention output", module), ("FFN output", layer.get_submodule("mlp"))):
                hooks.enter_context(of.register_forward_hook(attention.notes_output(what)))
        model.forward(ids_S[None].to(model.device), attention, start=0, pads=[0], all_hidden=True)
    return attention.reading


class _Asking(CausalAttention):
    """Causal attention that also measures the attention mass of fetched tokens in each layer.

    Args:
        modules: attention of each layer, of Llama's kind.
    """

    def __init__(self, model: Model, num_tokens: int, setup: Setup, modules: list[nn.Module]) -> None:
        super().__init__(model.empty_cache(num_tokens), start=0, pads=[0])
        self.model, self.rotaries, self.setup, self.modules = model, model.rotaries, setup, modules
        self.prediction = model.query_prediction  # made before the forward, whose inputs it passes on
        self.reading = Reading()
        first = setup.prompt_tokens + setup.every // 2
        self.asking_P = torch.arange(first, num_tokens, setup.every, device=model.device)
        self.num_fetched = SINKS + max(1, round(setup.share * setup.prompt_tokens))
        self._inputs: list[LayerInput] = []
        self._noted: dict[str, list[Tensor]] = {}

    def see_input(self, layer: int, given: LayerInput) -> None:
        self._inputs = [*self._inputs[-1:], given]

    def notes_input(self, what: str) -> Callable[..., None]:
        """Make a hook that notes a module's input."""
        return lambda _, args, keywords: self._note(what, args[0] if args else keywords["hidden_states"])

    def notes_output(self, what: str) -> Callable[..., None]:
        """Make a hook that notes a module's output."""
        return lambda _, __, output: self._note(what, output[0] if isinstance(output, tuple) else output)

    def _note(self, what: str, x_1SD: Tensor) -> None:
        """Record the cosine between this layer's value and that of the layer before."""
        last_two = self._noted[what] = [*self._noted.get(what, [])[-1:], x_1SD]
        if len(last_two) == 2:
            before, now = last_two
            cosine_1S = torch.nn.functional.cosine_similarity(now.float(), before.float(), dim=-1)
            self.reading.similarity.setdefault(what, []).append(float(cosine_1S.mean()))

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if layer in self.setup.layers:
            self._ask(layer, q_BNCH[0], k_BKCH[0], terms.scaling)
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def _ask(self, layer: int, q_NSH: Tensor, k_KSH: Tensor, scaling: float) -> None:
        heads = len(k_KSH)
        own_KGPH = q_NSH[:, self.asking_P].unflatten(0, (heads, -1)) * scaling
        asking_KGPH = self._predicted(layer).unflatten(0, (heads, -1)) * scaling
        is_before_PS = torch.arange(k_KSH.shape[1], device=k_KSH.device) < self.asking_P[:, None]
        hidden_PS = torch.zeros(is_before_PS.shape, device=k_KSH.device).masked_fill(~is_before_PS, -math.inf)
        scores_KGPS = own_KGPH @ k_KSH[:, None].mT + hidden_PS
        probability_KGPS = scores_KGPS.softmax(dim=-1)

        def note(name: str, need_KPS: Tensor, ratio: float = 1.0) -> None:
            need_KPS[..., :SINKS] = math.inf
            fetched_KPm = need_KPS.topk(self.num_fetched, dim=-1, sorted=False).indices
            seen_KGPm = probability_KGPS.take_along_dim(fetched_KPm[:, None], dim=-1)
            self.reading.mass.setdefault((name, ratio), []).append(float(seen_KGPm.sum(dim=-1).mean()))

        note(ORACLE, probability_KGPS.mean(dim=1))
        note(OWN_INPUT, need(scores_KGPS))
        note(ALL_COLUMNS, need(asking_KGPH @ k_KSH[:, None].mT + hidden_PS))
        for variant in self.setup.variants:
            a_KgHH, weights_KgH = self._columns(variant, layer, q_NSH, k_KSH)
            best_KgH = weights_KgH.argsort(dim=-1, descending=True)
            for ratio in self.setup.ratios:
                chosen_Kgr = best_KgH[..., : max(1, round(ratio * k_KSH.shape[2]))]
                a_KgHr = a_KgHH.take_along_dim(chosen_Kgr[:, :, None], dim=3)
                partial_KgrS = (k_KSH[:, None] @ a_KgHr).mT
                note(variant.name, need(asking_KGPH @ a_KgHr @ partial_KgrS + hidden_PS), ratio)

    def _predicted(self, layer: int) -> Tensor:
        """Queries (N, P, H) predicted from the input of the layer before."""
        return self.prediction.queries(layer, self._inputs[0])[0, :, self.asking_P]

    def _columns(self, variant: Variant, layer: int, q_NSH: Tensor, k_KSH: Tensor) -> tuple[Tensor, Tensor]:
        """A (K, g, H, H), and the weights (K, g, H) of its columns."""
        heads, dim, end = len(k_KSH), k_KSH.shape[2], self.setup.prompt_tokens
        k_K1nH = k_KSH[:, None, SINKS:end]
        turned_KGXH = self._turned(layer, q_NSH[:, max(0, end - OBSERVED) : end]).unflatten(0, (heads, -1))
        if variant.queries == "none":
            a_KgHH = torch.eye(dim, dtype=k_KSH.dtype, device=k_KSH.device).expand(heads, 1, dim, dim)
        else:
            q_KGXH = {
                "sample turned": self._sample_turned(layer).to(k_KSH)[:, None],
                "prompt": q_NSH[:, max(0, end - OBSERVED) : end].unflatten(0, (heads, -1)),
                "prompt turned": turned_KGXH,
                "hindsight": q_NSH[:, self.asking_P].unflatten(0, (heads, -1)),
            }[variant.queries]
            q_KgXH = q_KGXH if variant.per_query_head else q_KGXH.flatten(1, 2)[:, None]
            a_KgHH = skewing_basis(q_KgXH.double().mT @ q_KgXH.double()).to(k_KSH)
        observed_KGXH = q_NSH[:, :end].unflatten(0, (heads, -1)) if variant.by_size else turned_KGXH
        observed_KgXH = observed_KGXH if variant.per_query_head else observed_KGXH.flatten(1, 2)[:, None]
        q_KgXH, k_KgnH = observed_KgXH @ a_KgHH, k_K1nH @ a_KgHH
        if variant.by_size:
            return a_KgHH, q_KgXH.abs().mean(dim=2) + k_KgnH.abs().mean(dim=2)
        return a_KgHH, column_weights(q_KgXH, k_KgnH)

    def _turned(self, layer: int, q_NXH: Tensor) -> Tensor:
        """The prompt's last queries (N, X, H), rotated to positions spread over the window after it."""
        count = q_NXH.shape[1]
        places_X = torch.arange(count, device=q_NXH.device)
        by_1X = (places_X * WINDOW // count + count - places_X)[None]
        return self.rotaries[layer].turned(q_NXH[None], by_1X)[0]

    def _sample_turned(self, layer: int) -> Tensor:
        """Queries (K, X, H) of the sample, rotated to positions in the window."""
        q_KHH = self.setup.sample.queries[layer]
        steps = torch.arange(SAMPLE_POSITIONS) * WINDOW // SAMPLE_POSITIONS
        by_1X = (self.setup.prompt_tokens + steps).repeat_interleave(q_KHH.shape[1])[None]
        return self.rotaries[layer].turned(q_KHH.repeat(1, SAMPLE_POSITIONS, 1)[None], by_1X)[0]


def need(scores_KGPS: Tensor) -> Tensor:
    """Scores minus the largest of the same query, the maximum over the heads of a group, (K, P, S)."""
    return (scores_KGPS - scores_KGPS.amax(dim=-1, keepdim=True)).amax(dim=1)
