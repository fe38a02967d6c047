"""Sizes of a model from its config alone: bytes of weights and of keys and values per share, and its matrix products.

A share is what one of t ranks has of every layer, by transformers' plan for the family. Layers are taken for alike, and
every query for attending to all tokens before it.
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
from transformers import PreTrainedModel

from partitioner.table.fingerprint import ModelShape, mlp_dim_of
from runahead.config import ModelOptions
from runahead.features.facts import Setup
from runahead.features.refused import check
from runahead.model import loading
from runahead.model.adapters import ADAPTERS
from runahead.model.layer_kinds import decoder_config
from runahead.model.loading import hf
from runahead.model.loading.position_limit import max_positions
from runahead.model.shares import check_shares

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of a config for the number of experts."""

SPLIT_FIRST = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise")
SPLIT_LAST = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise")
"""Styles of transformers' plans, by the dim of a weight that they split."""


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
        max_positions: longest text in tokens, if the config says so.
        notes: what the plan takes otherwise than it is.
    """

    shape: ModelShape
    dtype: str
    item_bytes: int
    weights: tuple[Weight, ...]
    share_counts: tuple[int, ...]
    max_positions: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, options: ModelOptions, *, on_gpus: bool = False) -> ModelSize:
        """Read the sizes from a model's config, without its weights.

        Args:
            on_gpus: it will run on GPUs, which have another dtype than CPUs for quantised weights.

        Raises:
            ValueError, OSError: there is no such model, or it is one that cannot be planned for; one line.
        """
        config = loading.load_config(options, progress=True)
        text = decoder_config(config)
        label = f"model {options.path or options.config or options.name.name} ({text.model_type})"
        check(Setup(config=text, options={"a search or a plan": True}))
        if any(getattr(text, name, None) for name in EXPERTS):
            raise ValueError(
                f"{label} is a mixture of experts, whose compute depends on the text; measure it with "
                "python -m partitioner.search"
            )
        dtype = loading.expected_dtype(options, config, torch.device("cuda" if on_gpus else "cpu"))
        module = hf.empty_model(config, dtype, options, label=label)
        heads = int(text.num_attention_heads)
        kv_heads = _kv_heads(text) or heads
        shape = ModelShape(
            type=str(text.model_type),
            num_layers=int(text.num_hidden_layers),
            model_dim=int(text.hidden_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            vocab_size=int(text.vocab_size),
            mlp_dim=mlp_dim_of(text),
        )
        plan = {} if text.model_type in ADAPTERS else dict(getattr(module, "_tp_plan", None) or {})
        window = getattr(text, "sliding_window", None)
        return cls(
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            item_bytes=dtype.itemsize,
            weights=tuple(
                replace(each, count=count) for each, count in Counter(_weights(module, plan, kv_heads)).items()
            ),
            share_counts=tuple(_share_counts(text, heads)),
            max_positions=max_positions(text),
            notes=(f"its sliding window of {window:,} tokens is taken for full attention",) if window else (),
        )

    def fits(self, num_shares: int) -> bool:
        """Whether the runtime can share the model out to so many ranks."""
        return num_shares in self.share_counts

    def kv_heads(self, num_shares: int) -> int:
        """KV heads of a share."""
        return max(1, self.shape.num_kv_heads // num_shares)

    def kv_bytes_per_token(self, num_shares: int = 1) -> int:
        """Bytes of the keys and values of one token in one layer of a share."""
        return 2 * self.kv_heads(num_shares) * self.shape.head_dim * self.item_bytes

    def weight_bytes(self, num_shares: int = 1) -> int:
        """Bytes of the weights of the largest share."""
        return sum(weight.num_bytes(num_shares) for weight in self.weights)

    def read_bytes(self, num_shares: int = 1) -> int:
        """Bytes of weights that one forward of one token reads: all but the embeddings, of which it reads a row."""
        read = (weight for weight in self.weights if weight.in_layers or weight.is_head)
        return sum(weight.elements(num_shares) * weight.item_bytes for weight in read)

    @property
    def splits_embeddings(self) -> bool:
        """Whether every share has a part of the embeddings, so that an all-reduce adds them up."""
        return any(weight.is_embedding and weight.split_dim is not None for weight in self.weights)

    def mlp_dim(self, num_shares: int = 1) -> float:
        """Width of a gated MLP whose three matrices have as many weights as a layer of a share has beside attention."""
        shape = self.shape
        matrices = sum(each.elements(num_shares) for each in self.weights if each.in_layers and len(each.shape) == 2)
        heads = 2 * (shape.num_heads // num_shares + self.kv_heads(num_shares))
        attention = shape.model_dim * heads * shape.head_dim
        return (matrices / shape.num_layers - attention) / (3 * shape.model_dim)


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


def _weights(module: PreTrainedModel, plan: Mapping[str, str], kv_heads: int) -> Iterator[Weight]:
    """Parameters of a model in the order of its modules, tied ones each time that they occur."""
    names = {child: name for name, child in module.named_modules()}
    head, embedding = (names.get(each) for each in (module.get_output_embeddings(), module.get_input_embeddings()))
    seen: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        style = _style(name, plan)
        split_dim = None
        if style in SPLIT_FIRST:
            split_dim = 0
        elif style in SPLIT_LAST and parameter.ndim == 2:
            split_dim = 1
        yield Weight(
            shape=tuple(parameter.shape),
            item_bytes=parameter.element_size(),
            split_dim=split_dim,
            kv_heads=kv_heads if owner.endswith(("k_proj", "v_proj")) else 0,
            in_layers=re.search(r"\.\d+\.", name) is not None,
            is_head=owner == head,
            is_embedding=owner == embedding,
            is_tied=id(parameter) in seen,
        )
        seen.add(id(parameter))


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """Style of a parameter: plans name parameters or their modules, with * for the number of a layer."""
    generic = re.sub(r"\.\d+(?=\.)", ".*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])
