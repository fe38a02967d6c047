"""The seam between transformers' models and our attention.

transformers lets a program register an attention function by name, and passes it every keyword that a model's forward
does not know. So a forward is passed as a keyword (`runahead=`), never as a global, and the model's own code stays
untouched. For the few families that drop keywords it is an attribute of the keys, set by the cache. Families outside
the interface have an adapter each (`runahead/model/adapters/`).
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from runahead.attention.base import ALL_ROWS, Block, BlockEndsHere, LastTokenAlone, LayerAttention
from runahead.attention.masks import MaskRule, keep_mask_rule, rule_of
from runahead.attention.partial import AttentionTerms
from runahead.cache.new_tokens import NewTokens
from runahead.model.held import Held, StatesOfForward
from runahead.model.layer_kinds import decoder_config
from runahead.model.marking.marks import Marks

ATTENTION_NAME = "runahead"

HARMLESS_KEYWORDS = frozenset(
    {
        "dropout",
        "is_causal",
        "sliding_window",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "layer_idx",
        "use_cache",
        "training",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "logits_to_keep",
        "max_length_q",
        "max_length_k",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
    }
)
"""Keywords that attention may ignore: inference has no dropout; window and causality are in the mask rule."""


def for_tokens(value: Any, num_tokens: int, take: Callable[[Tensor], Tensor]) -> Any:
    """A module's argument or output in which every tensor (B or 1, C, ...) of so many tokens is what `take` returns."""
    if isinstance(value, tuple):
        return tuple(for_tokens(part, num_tokens, take) for part in value)
    if isinstance(value, dict):
        return {name: for_tokens(part, num_tokens, take) for name, part in value.items()}
    is_by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens
    return take(value) if is_by_token else value


class SeamCache(Cache):
    """One forward, as a KV cache for transformers that stores nothing: it tells how many tokens came before.

    The attention object stores keys and values, since it alone knows where those of this forward go.

    Every decoder layer is given it, so hooks on the layers learn from it what this forward computes: a server runs a
    forward between two layers of another one.

    Args:
        attention: the attention of this forward.
        start: index of the first new token.
        num_new: number of new tokens.
        tokens: those that are left, if layers may compute fewer of them from layer to layer.
        ends_with_last: layers after the last one that stores compute the last token alone.
        last_layer: the last one that stores keys and values, if it may run again for the last token alone.
        sources: layer that stores no keys and values -> the one whose it reads.
        marks: how tokens mark others, in a model that was trained for it.
        held: what the layers hold; None: keys and values alone.
        pads, one_by_one: as of `StatesOfForward`, for layers that hold states.
        block_ends: of the blocks of rows in which layers are computed; () is all at once.
        in_place: layers may write the output for a block over their input.
        stores_first: layers store the keys and values of all blocks before any block attends.

    Attributes:
        width: number of tokens that a layer's modules are given.
        num_skipped: those of them before the last token, where a layer computes this one alone.
        needs_last_alone: nobody needs the output of the layer that runs for other tokens than the last.
        taken: what marks have taken out of the layer that runs, for its attention.
    """

    def __init__(
        self,
        attention: LayerAttention,
        start: int,
        *,
        num_new: int = 0,
        tokens: NewTokens | None = None,
        ends_with_last: bool = False,
        last_layer: int | None = None,
        sources: Mapping[int, int] | None = None,
        marks: Marks | None = None,
        held: Held | None = None,
        pads: Sequence[int] = (),
        one_by_one: bool = False,
        block_ends: Sequence[int] = (),
        in_place: bool = False,
        stores_first: bool = False,
    ) -> None:
        self.states: StatesOfForward | None = None
        if held is not None:
            self.states = StatesOfForward(
                attention,
                held,
                start=start,
                num_new=num_new,
                pads=pads,
                one_by_one=one_by_one,
                first_block=block_ends[0] if block_ends else None,
            )
        super().__init__(layers=self.states or [])
        self.attention, self.start, self.num_new, self.tokens = attention, start, num_new, tokens
        self.ends_with_last, self._sources, self.marks = ends_with_last, sources or {}, marks
        self.block_ends, self.in_place, self.width, self.num_skipped = block_ends, in_place, num_new, 0
        self._stores_first, self.pads, self.taken = stores_first, pads, dict[str, Any]()
        self._last_layer, self.needs_last_alone = last_layer, False

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """Output (B, N, C, V) of a layer's attention, as `LayerAttention.attend`."""
        if self.marks is not None:
            q_BNCH, k_BKCH, v_BKCV, terms = self.marks.marked(self, layer, q_BNCH, k_BKCH, v_BKCV, terms)
        if self.states is not None:
            layer = self._layer  # modules that several layers share do not know it
            self.states.before_attention(layer)
            layer = self.states.held.kv_of[layer]
        source = self._sources.get(layer)
        if source is None:
            self.attention.needs_last_alone = self.needs_last_alone and layer == self._last_layer
            return self.attention.attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)
        skipped = self.width - q_BNCH.shape[2]
        return self.attention.attend_shared(layer, source, q_BNCH, k_BKCH, v_BKCV, terms, skipped=skipped)

    def blocks(self, *, has_kv: bool) -> Iterator[tuple[int, int]]:
        """The blocks of rows [first, end), for each of which a layer is to be called.

        Args:
            has_kv: the layer stores keys and values.
        """
        passes = [(True, False), (False, True)] if has_kv and self._stores_first else [(True, True)]
        try:
            for stores, attends in passes:
                for first, end in pairwise((0, *self.block_ends)):
                    self.attention.block = Block(first, end == self.num_new, stores, attends)
                    self.width = end - first
                    yield first, end
        finally:
            self.attention.block, self.width = ALL_ROWS, self.num_new

    def passes(self, number: int, first: Mapping[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """So many passes of layers over all new tokens, which store over what the pass before has stored.

        Several tokens need attention that `takes_passes`.

        Args:
            first: keys and values that the first pass finds, by layer.
        """
        assert self.num_new == 1 or self.attention.takes_passes, f"{type(self.attention).__name__} takes no passes"
        try:
            self.attention.block = Block(is_last=False, attends=False)
            for layer, (k_BKCH, v_BKCV) in first.items():
                with suppress(BlockEndsHere):
                    self.attention.attend(layer, k_BKCH, k_BKCH, v_BKCV, AttentionTerms(scaling=1.0))
            for left in reversed(range(number)):
                self.attention.block = Block(is_last=left == 0)
                yield
        finally:
            self.attention.block = ALL_ROWS

    def last_alone(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a layer for the last token alone, whose position a layer may count by `get_seq_length`."""
        self.num_skipped = self.width - 1
        hidden = (args[0] if args else keywords["hidden_states"])[..., -1:, :]
        rest, keywords = (for_tokens(each, self.width, lambda x: x[:, -1:]) for each in (args[1:], keywords))
        return ((hidden, *rest), keywords) if args else (args, keywords | {"hidden_states": hidden})

    @staticmethod
    def among(args: tuple[Any, ...], keywords: dict[str, Any]) -> SeamCache | None:
        """The one that a layer is given; None while transformers' own attention computes."""
        return next((given for given in (*args, *keywords.values()) if isinstance(given, SeamCache)), None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int = 0, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        key_states.runahead = self  # type: ignore[attr-defined]
        self._layer = layer_idx
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        with self.layers.only_asked():
            state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
            return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        with self.layers.only_asked():
            state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
            return state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **keywords: Any) -> Tensor:
        full: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **keywords)
        self.layers.updated(layer_idx, "conv_states", state_idx)
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **keywords: Any
    ) -> Tensor:
        state: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **keywords)
        self.layers.updated(layer_idx, "recurrent_states", state_idx)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start + self.attention.block.first + self.num_skipped

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start + self.attention.block.first

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else len(query_length)
        return self.start + length, 0


def run_for_last(forward: Callable[..., Any], widens: bool, /, *args: Any, **keywords: Any) -> Any:
    """Run the last layer until it has stored keys and values, and again for the last token, if nobody needs others.

    Args:
        forward: of the layer, which stores keys and values alone.
        widens: modules after it may expect as many tokens as the model was given. Each is given the last one.
    """
    seam = SeamCache.among(args, keywords)
    if seam is None or not seam.ends_with_last:
        return forward(*args, **keywords)
    seam.width = (args[0] if args else keywords["hidden_states"]).shape[-2]  # if policies leave fewer, too
    seam.needs_last_alone = True
    try:
        return forward(*args, **keywords)
    except LastTokenAlone:
        pass
    finally:
        seam.needs_last_alone = False
    args, keywords = seam.last_alone(args, keywords)
    output = forward(*args, **keywords)
    if not widens and not seam.block_ends:
        return output
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    hidden = hidden.expand(*hidden.shape[:-2], seam.width, -1)
    return (hidden, *rest) if isinstance(output, tuple) else hidden


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sees_own: bool = True,
    runahead: SeamCache | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers: calls that of the forward.

    Args:
        query, key, value: of the new tokens, (B, N, C, H), (B, K, C, H) and (B, K, C, V).
        attention_mask: the mask as a rule, since our mask function is registered too.
        scaling: of the scores; H ** -0.5 by default.
        softcap, s_aux: soft cap of the scores, and sink logits (N).
        sees_own: as of `AttentionTerms`.
        runahead: the forward.

    Returns:
        output (B, C, N, V), as transformers expects it.

    Raises:
        ValueError: the family needs something of its attention that ours does not compute.
    """
    family = type(module).__name__
    forward: SeamCache | None = getattr(key, "runahead", None) if runahead is None else runahead
    if forward is None:
        raise ValueError(
            f"{family} passes neither keywords nor cached keys on to attention; it is not supported (a model of an "
            "engine runs by itself in Engine.generate_with alone)"
        )
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise ValueError(f"{family} builds its own attention mask ({type(attention_mask).__name__}); not supported")
    unknown = {name for name, val in keywords.items() if val is not None} - HARMLESS_KEYWORDS
    if unknown:
        raise ValueError(f"{family} asks its attention for {', '.join(sorted(unknown))}, which is not supported")
    terms = AttentionTerms(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        rule=rule_of(attention_mask),
        softcap=softcap,
        sinks_N=s_aux,
        sees_own=sees_own,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    # Contiguous, since some families call view() on it.
    return forward.attend(layer, query, key, value, terms).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register our attention and mask functions with transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, attention_function)
    AttentionMaskInterface.register(ATTENTION_NAME, keep_mask_rule)


def set_attention(module: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of all submodules by name, also for families that transformers restricts."""
    for child in module.modules():
        if isinstance(child, PreTrainedModel):
            child.config._attn_implementation = name
            decoder_config(child.config)._attn_implementation = name
