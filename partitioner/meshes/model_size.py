"""Sizes of a model from its config alone: bytes of weights and of keys and values per share, and its matrix products.

A share is what one of t ranks has of every layer, by transformers' plan for the family. Layers are taken for alike, but
for the states that some hold, and every query for attending to all tokens before it. Of experts those count for the
compute that a token is sent to.
"""

# Legend: D model dim, N query heads, K kv heads, H head dim, F width of the MLP.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from partitioner.cost.places import Places
from partitioner.meshes.experts import Experts
from partitioner.table.fingerprint import ModelShape, mlp_dim_of
from runahead.attention.base import ForwardEndsHere, Recording
from runahead.cache.slabs import KVShape
from runahead.config import DecodeOptions, ModelOptions, PrefillOptions
from runahead.features.facts import FACTS
from runahead.features.layer_types import attending_to_all
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.features.slower import Way, slower
from runahead.model import loading
from runahead.model.adapters import ADAPTERS
from runahead.model.held import Held
from runahead.model.layer_kinds import decoder_config
from runahead.model.loading import hf
from runahead.model.loading.position_limit import max_positions
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.seam import ATTENTION_NAME, SeamCache, register, set_attention
from runahead.model.shares import check_shares
from runahead.prefill.base import require_exact
from runahead.thinning.rank_policies import RankPolicies

SPLIT_FIRST = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise")
SPLIT_LAST = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise")
"""Styles of transformers' plans, by the dim of a weight that they split."""

STATE_FLOPS = 10
"""Operations per number of a state and token beside matrix products: about those of a delta rule in chunks of 64."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Parameters of a model that are alike.

    Attributes:
        split_dim: dim that is split over the shares; None if every share has all of it.
        kv_heads: number of KV heads that its first dim holds, for projections to keys and values; else 0.
        in_layers: whether it belongs to one of the layers.
        is_head: whether it multiplies the last hidden state to logits.
        is_embedding: whether it holds the embeddings of tokens.
        is_tied: whether it is the same memory as one before it. Shares have such parameters each.
        is_matrix: whether tokens are multiplied with it, in one of the layers.
        active: share of it with which a token is multiplied: of experts those that it is sent to.
    """

    shape: tuple[int, ...]
    item_bytes: int
    count: int = 1
    split_dim: int | None = None
    kv_heads: int = 0
    in_layers: bool = False
    is_head: bool = False
    is_embedding: bool = False
    is_tied: bool = False
    is_matrix: bool = False
    active: float = 1.0

    def elements(self, num_shares: int) -> int:
        """Elements of the largest share of all of them. Where shares are more than KV heads, some have the same."""
        if self.split_dim is None or num_shares == 1:
            return self.count * prod(self.shape)
        size = self.shape[self.split_dim]
        part = size // self.kv_heads if self.kv_heads and num_shares > self.kv_heads else -(-size // num_shares)
        return self.count * prod(self.shape) // size * part

    def num_bytes(self, num_shares: int) -> int:
        return 0 if self.is_tied and num_shares == 1 else self.elements(num_shares) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a model, as far as a plan depends on them.

    Attributes:
        item_bytes: bytes of a number in weights, activations, keys and values.
        weights: all parameters, those that are alike together.
        share_counts: numbers of ranks that the runtime can share its layers out to.
        places: of its layers.
        value_dim: dims of a head's values; those of its keys are in `shape`.
        state_numbers: numbers in the state of a place, their mean.
        max_positions: longest text in tokens, if the config says so.
        notes: what the plan takes otherwise than it is.
    """

    shape: ModelShape
    dtype: str
    item_bytes: int
    weights: tuple[Weight, ...]
    share_counts: tuple[int, ...]
    places: Places
    value_dim: int
    state_numbers: float = 0.0
    max_positions: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        options: ModelOptions,
        *,
        on_gpus: bool = False,
        decode: DecodeOptions | None = None,
        prefill: PrefillOptions | None = None,
        policies: RankPolicies | None = None,
    ) -> ModelSize:
        """Read the sizes from a model's config, without its weights.

        Args:
            on_gpus: it will run on GPUs, which have another dtype than CPUs for quantised weights.
            decode: how new tokens are to be computed, if that is not left to the plan.
            prefill: its options, if they are not all defaults.
            policies: cache policies of each rank, if any.

        Raises:
            ValueError, OSError: there is no such model, or it is one that cannot be planned for; one line.
        """
        config = loading.load_config(options, progress=True)
        text = decoder_config(config)
        label = f"model {options.path or options.config or options.name.name} ({text.model_type})"
        check(Setup(config=text, decode=decode, prefill=prefill, policies=policies))
        if prefill is not None and prefill.is_sparse:
            require_exact(prefill, attending_to_all(text), str(text.model_type))
        dtype = loading.expected_dtype(options, config, torch.device("cuda" if on_gpus else "cpu"))
        module = hf.empty_model(config, dtype, options, label=label)
        for fact, why in (
            (
                "states alone",
                "has no layer with attention, and plans reckon with its heads; measure it with "
                "python -m partitioner.search",
            ),
            ("passes", "runs its layers in passes (LCKV), on one stage alone, of which there is nothing to plan"),
            (
                "marks",
                "marks tokens that it evicts (DMS, DMC), and plans reckon with all; measure it with "
                "python -m partitioner.search",
            ),
        ):
            if FACTS[fact](Setup(config=text)):
                raise ValueError(f"{label} {why}")
        heads = int(text.num_attention_heads)
        kv_heads = _kv_heads(text) or heads
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        places, value_dim, numbers = Places.of_attention(int(text.num_hidden_layers)), head_dim, 0.0
        notes = [each for way, each in slower(Setup(config=text, prefill=prefill)).items() if way is Way.few_keys]
        experts = Experts.from_module(module, text, label)
        if experts is not None or Held.by_config(text) is not None:  # whose configs name sizes in several ways
            first, held = _looked_at(module, text, label)
            kv_heads, head_dim, value_dim = first.num_kv_heads, first.key_dim, first.value_dim
            if held is not None:
                places = Places.of_held(held)
                sizes = [prod(part.shape) for each in held.shapes for part in each.parts]
                numbers = sum(sizes) / len(held.shapes)
                notes.append(
                    f"what its {len(held.shapes)} states cost beside matrix products is taken for {STATE_FLOPS} "
                    "operations per number and token, at the rate of attention"
                )
        if experts is not None:
            notes.append(
                f"of its {experts.number} experts the {experts.chosen} count that a token is sent to, on all ranks "
                "alike"
            )
        shape = ModelShape(
            type=str(text.model_type),
            num_layers=places.num_layers,
            model_dim=int(text.hidden_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(text.vocab_size),
            mlp_dim=mlp_dim_of(text),
            num_states=len(places.states),
            state_bytes=sum(places.state_bytes),
        )
        plan = {} if text.model_type in ADAPTERS else dict(getattr(module, "_tp_plan", None) or {})
        if window := getattr(text, "sliding_window", None):
            notes.append(f"its sliding window of {window:,} tokens is taken for full attention")
        return cls(
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            item_bytes=dtype.itemsize,
            weights=tuple(
                replace(each, count=count) for each, count in Counter(_weights(module, plan, kv_heads, experts)).items()
            ),
            share_counts=tuple(_share_counts(text, heads)),
            places=places,
            value_dim=value_dim,
            state_numbers=numbers,
            max_positions=max_positions(text),
            notes=tuple(notes),
        )

    def fits(self, num_shares: int) -> bool:
        """Whether the runtime can share the model out to so many ranks."""
        return num_shares in self.share_counts

    def kv_heads(self, num_shares: int) -> int:
        """KV heads of a share."""
        return max(1, self.shape.num_kv_heads // num_shares)

    def kv_bytes_per_token(self, num_shares: int = 1) -> int:
        """Bytes of the keys and values of one token in one layer of a share."""
        return self.kv_heads(num_shares) * (self.shape.head_dim + self.value_dim) * self.item_bytes

    def sent_bytes_per_token(self, num_shares: int, wire_bits: int | None) -> int:
        """The same as they are sent, with `prefill.wire_bits`."""
        if wire_bits is None:
            return self.kv_bytes_per_token(num_shares)
        from runahead.cache.quantised.wire import record_bytes

        return self.kv_heads(num_shares) * record_bytes(self.shape.head_dim, self.value_dim, wire_bits)

    @property
    def num_attending(self) -> int:
        """Places with keys and values."""
        return len(self.places) - len(self.places.states)

    def weight_bytes(self, num_shares: int = 1) -> int:
        """Bytes of the weights of the largest share."""
        return sum(weight.num_bytes(num_shares) for weight in self.weights)

    def read_bytes(self, num_shares: int = 1, batch: int = 1) -> int:
        """Bytes of weights that one forward of a token of each row reads: all but the embeddings, of which it reads a
        row, and the experts that no row's token is sent to, if rows choose differently."""
        read = (weight for weight in self.weights if weight.in_layers or weight.is_head)
        return sum(
            int(weight.elements(num_shares) * min(1.0, batch * weight.active)) * weight.item_bytes for weight in read
        )

    @property
    def splits_embeddings(self) -> bool:
        """Whether every share has a part of the embeddings, so that an all-reduce adds them up."""
        return any(weight.is_embedding and weight.split_dim is not None for weight in self.weights)

    def mlp_dim(self, num_shares: int = 1) -> float:
        """Width of a gated MLP whose three matrices have as many weights as a place of a share has beside attention.

        It is below 0 if the projections of attention have fewer weights than their inputs and outputs say.
        """
        attention = self.attention_weights(num_shares)
        return (self.active_weights(num_shares) - attention) / (3 * self.shape.model_dim)

    def attention_weights(self, num_shares: int = 1) -> int:
        """Weights of the projections of attention if these are matrices of all inputs and outputs."""
        shape = self.shape
        heads = 2 * (shape.num_heads // num_shares + self.kv_heads(num_shares))
        return shape.model_dim * heads * shape.head_dim

    def active_weights(self, num_shares: int = 1) -> float:
        """Weights that a token is multiplied with in a place, their mean."""
        matrices = (weight for weight in self.weights if weight.is_matrix)
        return sum(weight.elements(num_shares) * weight.active for weight in matrices) / len(self.places)

    def read_per_active(self, num_shares: int = 1) -> float:
        """Weights that many tokens read for each that one of them is multiplied with: more than 1 with experts."""
        matrices = sum(weight.elements(num_shares) for weight in self.weights if weight.is_matrix)
        return matrices / (self.active_weights(num_shares) * len(self.places))


def _share_counts(config: Any, most: int) -> Iterator[int]:
    """Numbers of shares up to `most` that the runtime accepts."""
    for num_shares in range(1, most + 1):
        with suppress(ValueError):
            check_shares(config, num_shares)
            yield num_shares


def _kv_heads(config: Any) -> int | None:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)


def _looked_at(module: PreTrainedModel, config: Any, label: str) -> tuple[KVShape, Held | None]:
    """Keys and values of the first layer that attends, and what layers with states hold, by a forward without memory.

    It ends at the first attention if no layer holds a state. Where the model's code asks for values before that, as
    JetMoE's choice of queries does, its weights are zeros, each in the memory of one number.

    Raises:
        ValueError: the model's code needs other values.
    """
    register()
    for child in module.modules():
        if isinstance(child, PreTrainedModel):  # other forms ask for values: which experts are chosen
            child.config._experts_implementation = decoder_config(child.config)._experts_implementation = "batched_mm"
    set_attention(module, ATTENTION_NAME)
    held = Held.by_config(config)

    def recorded(weights: Mapping[str, Tensor], device: torch.device) -> tuple[Recording, SeamCache]:
        recording = Recording(start=0, pads=[0]) if held is not None else Recording(start=0, pads=[0], answer=_end_here)
        recording.states = None if held is None else held.nothing()
        forward = SeamCache(recording, 0, num_new=1, held=held)
        ids_11 = torch.zeros((1, 1), dtype=torch.long, device=device)
        given = {"input_ids": ids_11, "past_key_values": forward, "use_cache": True, "runahead": forward}
        with quiet(), torch.inference_mode(), suppress(ForwardEndsHere):
            functional_call(module, dict(weights), kwargs=given)
        return recording, forward

    try:
        try:
            recording, forward = recorded({}, module.device)
        except RuntimeError:
            if held is not None:  # all layers would be computed
                raise
            recording, forward = recorded(_zeros(module), torch.device("cpu"))
        if forward.states is not None:
            forward.states.save_pending()
        _, _, k_BKCH, v_BKCV, _ = recording.calls[0]
        held = held and held.as_called([layer for layer, *_ in recording.calls], recording)
    except Exception as error:  # the family's own code
        raise ValueError(
            f"{label} cannot be planned by its config alone ({one_line(error)}); measure it with "
            "python -m partitioner.search"
        ) from error
    heads, key_dim, value_dim = k_BKCH.shape[1], k_BKCH.shape[-1], v_BKCV.shape[-1]
    return KVShape(num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=k_BKCH.dtype), held


def _zeros(module: nn.Module) -> dict[str, Tensor]:
    """Zeros in place of a module's parameters and buffers, in the memory of one number each."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in named}


def _end_here(layer: int, zeros_BNCV: Tensor) -> Tensor:
    """End a forward at its first attention: what follows may need the values of tensors, as experts of DBRX do."""
    raise ForwardEndsHere


def _weights(
    module: PreTrainedModel, plan: Mapping[str, str], kv_heads: int, experts: Experts | None
) -> Iterator[Weight]:
    """Parameters of a model in the order of its modules, tied ones each time that they occur."""
    names = {child: name for name, child in module.named_modules()}
    head, embedding = (names.get(each) for each in (module.get_output_embeddings(), module.get_input_embeddings()))
    seen: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        style, in_layers = _style(name, plan), re.search(r"\.\d+\.", name) is not None
        of_experts = experts and experts.own(name, module.get_submodule(owner), parameter.shape)
        shape = of_experts or tuple(parameter.shape)
        split_dim = None
        if style in SPLIT_FIRST:
            split_dim = max(0, len(shape) - 2)  # before it, experts
        elif style in SPLIT_LAST and len(shape) >= 2:
            split_dim = len(shape) - 1
        yield Weight(
            shape=shape,
            item_bytes=parameter.element_size(),
            split_dim=split_dim,
            kv_heads=kv_heads if owner.endswith(("k_proj", "v_proj")) else 0,
            in_layers=in_layers,
            is_head=owner == head,
            is_embedding=owner == embedding,
            is_tied=id(parameter) in seen,
            is_matrix=in_layers and not name.endswith("bias") and (parameter.ndim == 2 or of_experts is not None),
            active=experts.active if experts and of_experts else 1.0,
        )
        seen.add(id(parameter))


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """Style of a parameter: plans name parameters or their modules, with * for the number of a layer."""
    generic = re.sub(r"\.\d+(?=\.)", ".*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])
