"""A prompt's decision on all layers at once, by scores of its layers, or of how the model repeats it.

To be repeated, chunks of the prompt go through the model again, as temporary tokens after it. Their keys and values are
never stored with the prompt's, so they leave no trace.
"""

# Legend: B batch, N query heads, K kv heads, C temporary tokens, n tokens of a row, m kept slots, H key dim, V value
# dim, X = H + V.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from policies.base import Policy
from policies.layer_view import LayerView, Phase
from policies.row_values import sent
from runahead.attention.answers import Answers
from runahead.attention.base import ForwardEndsHere
from runahead.attention.op import nothing
from runahead.attention.probabilities import QuerySignals
from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
from runahead.cache.index import AfterPrefix
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVSlab, Slabs
from runahead.model.layers.output_projection import projected_lengths
from runahead.model.model import Model
from runahead.rotary import Rotary
from runahead.thinning.cutting import cut_back
from runahead.thinning.rank_policies import RankPolicies


@torch.inference_mode()
def decide_on_prompt(
    model: Model,
    policies: RankPolicies,
    kept: KeptCache,
    ids_BS: Tensor,
    pads: Sequence[int],
    *,
    room: int = 0,
    on_layer: Callable[[], None] = nothing,
    answers: Answers | None = None,
) -> None:
    """Let the policy that decides on all layers cut back a prompt, if there is one.

    If the prompt is repeated, then row by row, each as it would be alone.

    Args:
        kept: stores all tokens of the prompt, in all layers, or what a policy that cascades has left.
        ids_BS: token ids of the padded prompt.
        pads: left padding of each row.
        room: new tokens for which a layer has room after tokens were dropped.
        on_layer: called after each layer of each chunk.
        answers: scores by repetition of this prompt, if it was repeated for other policies.

    Raises:
        ValueError: the prompt leaves no position for what repeats it.
    """
    policy = policies.deciding
    if policy is None or not policy.drops_of(ids_BS.shape[1]):
        return
    if policy.replay is None:
        scores = carried_scores(kept.layers, policy)
        for layer in kept.layers:
            layer.carried = {each: values for each, values in layer.carried.items() if each != policy.state_key}
    else:
        score = partial(score_prompt, model, policy, kept, ids_BS, pads, on_layer=on_layer)
        scores = score() if answers is None else answers.get((type(policy), policy.replay), score)
    is_whole = all(layer.end == ids_BS.shape[1] for layer in kept.layers)
    assert is_whole or policy.cascades, "a part of the prompt is not stored"
    cut = partial(cut_layers, model, policy, kept, scores, ids_BS.shape[1], room=room)
    model.in_step(torch.inference_mode()(cut))


def carried_scores(layers: Sequence[KeptLayer], policy: Policy) -> list[Tensor | None]:
    """Scores that a policy has stored in layers, minus infinity on padding; None if it has stored nothing."""
    carried = [layer.carried_BKn(policy.state_key) for layer in layers]
    return [
        None if each_BKn is None else each_BKn.masked_fill(layer.positions_BKn() < 0, -torch.inf)
        for layer, each_BKn in zip(layers, carried, strict=True)
    ]


def cut_layers(
    model: Model, policy: Policy, kept: KeptCache, scores: Sequence[Tensor | None], prompt_tokens: int, *, room: int
) -> None:
    """Cut back all layers of a prompt at once, or those that have attended if the policy cascades.

    Args:
        scores: of these layers, each this rank's; None where nothing is decided.
        prompt_tokens: length of the padded prompt.
        room: as of `decide_on_prompt`.
    """
    decided = [(layer, scores_BKn) for layer, scores_BKn in enumerate(scores) if scores_BKn is not None]
    if not decided:
        return
    of_all = [model.joined_over_shards(scores_BKn) for _, scores_BKn in decided]
    if policy.cascades:
        slots = policy.keep_so_far(of_all, prompt_tokens, sum(rule is None for rule in model.rules))
    else:
        slots = policy.keep_in_all(of_all, prompt_tokens)
    for (layer, scores_BKn), slots_BKm in zip(decided, slots, strict=True):
        if slots_BKm is None:
            continue
        first, num_heads = model.shard_number * scores_BKn.shape[1], scores_BKn.shape[1]
        own_BKm = slots_BKm[:, first : first + num_heads]  # heads of other ranks may keep more
        kept.put(layer, cut_back(kept.layers[layer], own_BKm, room=room))


def score_prompt(
    model: Model,
    policy: Policy,
    kept: KeptCache,
    ids_BS: Tensor,
    pads: Sequence[int],
    *,
    on_layer: Callable[[], None] = nothing,
) -> list[Tensor | None]:
    """Scores (B, K, n) of the prompt's tokens in each layer, minus infinity on padding; None in layers with windows.

    Raises:
        ValueError: as `decide_on_prompt`.
    """
    replay = policy.replay
    assert replay is not None
    request: list[int] = []
    if model.tokenizer is not None:
        request = model.tokenizer(replay.request, add_special_tokens=False).input_ids
    num_tokens = ids_BS.shape[1]
    scores: list[Tensor | None] = [
        torch.full((len(pads), shape.num_kv_heads, num_tokens), -torch.inf, device=model.device)
        if rule is None
        else None
        for shape, rule in zip(model.kv_shapes, model.rules, strict=True)
    ]
    for row, pad in enumerate(pads):
        ids, length = ids_BS[row, pad:].tolist(), num_tokens - pad
        step = replay.chunk_tokens
        if model.max_positions is not None:
            step = min(step, model.max_positions - length - len(request))
        if step < 1:
            raise ValueError(
                f"a prompt of {length} tokens leaves no room to repeat it among the {model.max_positions} positions of "
                f"model {model.name}; use a shorter prompt, or another policy than {policy.label}"
            )
        of_row = [None if scores_BKn is None else scores_BKn[row, :, pad:] for scores_BKn in scores]
        for start in range(0, length, step):
            chunk = range(start, min(start + step, length))
            ids_1C = sent(torch.tensor([[*request, *ids[chunk.start : chunk.stop]]]), model.device)
            stored = [_row_of(layer, row, pad) for layer in kept.layers]
            repetition = _Repetition(model, policy, stored, chunk, of_row, num_new=ids_1C.shape[1])
            attention = CausalAttention(
                repetition.cache,
                start=length,
                pads=[0],
                hooks=[repetition],
                ends=(model.num_layers - 1, "attended"),  # layers that read others do not score
                on_layer=on_layer,
            )
            with suppress(ForwardEndsHere):
                model.forward(ids_1C, attention, start=length, pads=[0], length=length)
    return scores


@dataclass(frozen=True, kw_only=True)
class _RotatedRow(KVSlab):
    """The unrotated keys of a row of which nothing was dropped, rotated to their slots by each reading."""

    rotary: Rotary

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_1KSH, v_1KSV = super().read(start, end)
        return self.rotary.rotated(k_1KSH.permute(2, 0, 1, 3), start, [0]).permute(1, 2, 0, 3), v_1KSV


def _row_of(layer: KeptLayer, row: int, pad: int) -> KVSlab:
    """A row of the prompt, keys rotated to their positions."""
    slab = layer.slab().row(row, pad)
    if layer.rotary is None:
        return slab
    return _RotatedRow(slab_TBKX=slab.slab_TBKX, key_dim=slab.key_dim, first=slab.first, rotary=layer.rotary)


class _Repetition(LayerHook):
    """Lets a policy score a chunk of a row by the attention of temporary tokens, which repeat it.

    Args:
        stored: the row's tokens in each layer.
        chunk: the tokens of the row that are repeated.
        scores: of the row's tokens in each layer (K, n), which are filled in for the chunk; None is a layer to skip.
        num_new: number of the temporary tokens, which are in other memory.

    Attributes:
        cache: the row's tokens, and room for the temporary ones.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        stored: Sequence[KVSlab],
        chunk: range,
        scores: Sequence[Tensor | None],
        *,
        num_new: int,
    ) -> None:
        self._stored = stored
        self._own = [
            KVSlab(
                slab_TBKX=slab.slab_TBKX.new_empty(num_new, *slab.slab_TBKX.shape[1:]),
                key_dim=slab.key_dim,
                first=slab.end,
            )
            for slab in stored
        ]
        self.cache = KVCache(Slabs.each_its_own(self._own), AfterPrefix(Slabs.each_its_own(stored)))
        self._model, self._policy, self._chunk, self._scores = model, policy, chunk, scores
        if policy.needs_attention_input:
            _ = model.attention_input_dims  # from then on forwards show them

    def attended(self, call: LayerCall) -> None:
        if call.layer != call.source:
            return
        scores_Kn, chunk = self._scores[call.layer], self._chunk
        if scores_Kn is not None:
            scores_Kn[:, chunk.start : chunk.stop] = self._policy.replay_score(self._view(call))[0]

    def _view(self, call: LayerCall) -> LayerView:
        """The chunk as its repetition sees it, among the sinks and the repetition itself."""
        layer, replay, chunk, stored = call.layer, self._policy.replay, self._chunk, self._stored[call.layer]
        assert replay is not None
        q_1NCH, start = call.seen.q_BNCH, call.tokens.start
        own = range(start, start + q_1NCH.shape[2])
        parts = [range(min(replay.sinks, chunk.start)), chunk, own]
        slabs = stored, stored, self._own[layer]
        read = [slab.read(part.start, part.stop) for slab, part in zip(slabs, parts, strict=True)]
        positions_1n = sent(torch.cat([torch.arange(part.start, part.stop) for part in parts]), q_1NCH.device)[None]
        chunk_keys = slice(len(parts[0]), len(parts[0]) + len(chunk))
        k_1KnH, v_1KnV = read[1]
        project = None
        if self._policy.needs_output_projection:
            weight_DX = self._model.output_projections[layer]
            project = partial(projected_lengths, v_1KnV, weight_DX, q_1NCH.shape[1])
        return LayerView(
            layer=layer,
            num_layers=self.cache.num_layers,
            phase=Phase.prefill,
            num_new=len(own),
            chunk_tokens=len(own),
            new_positions_BC=positions_1n[:, -len(own) :],
            prompt_tokens=start,
            pads=[0],
            positions_BKn=positions_1n[:, None, chunk_keys],
            k_BKnH=k_1KnH,
            v_BKnV=v_1KnV,
            carried_BKn=None,
            signals=QuerySignals(
                q_1NCH,
                torch.cat([k_1KSH for k_1KSH, _ in read], dim=2),
                call.terms,
                queries_BC=positions_1n[:, -len(own) :],
                keys_BKn=positions_1n[:, None],
                project=project,
                of_keys=chunk_keys,
            ),
            input_BCD=call.input_BCD,
        )
