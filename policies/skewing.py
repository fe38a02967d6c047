"""Skewing (InfiniGen, Lee et al., OSDI 2024, Sec. 4.2): columns in which queries have most of their length.

With Q = U S V^T the orthogonal A = V gives (Q A)(K A)^T = Q K^T, whatever the keys, and Q A has its length in its first
columns. One A serves the query heads that share a KV head. It is the better the more the queries that it was made of
are like those that it is used for, positions included: rotary positions turn queries, slow dims only a little from one
token to the next, so queries of other positions point elsewhere. Hence a file holds queries as they are at position 0,
to be turned to where they will ask.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, T tokens, X queries of one KV head, n slots, H head dim.

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

KIND = "runahead skewing 1"
REMEDY = "python -m policies.skew model=... out="


def query_products(q_BNTH: Tensor, num_kv_heads: int) -> Tensor:
    """Q^T Q (K, H, H), float64, of all queries that share a KV head, over all rows and tokens."""
    q_KXH = q_BNTH.unflatten(1, (num_kv_heads, -1)).movedim(1, 0).flatten(1, 3)
    # A chunk's products in float32 are exact enough; only their sum over a long text is not.
    return (q_KXH.float().transpose(-1, -2) @ q_KXH.float()).double()


def skewing_basis(products_HH: Tensor) -> Tensor:
    """The orthogonal A (..., H, H), float64, by falling singular value: right singular vectors of Q, from Q^T Q."""
    return torch.linalg.eigh(products_HH.double()).eigenvectors.flip(-1)


def typical_queries(products_HH: Tensor) -> Tensor:
    """As many queries as dims, (..., H, H), float64, one a row and the longest first, with the same products Q^T Q."""
    values_H, vectors_HH = torch.linalg.eigh(products_HH.double())
    return (vectors_HH * values_H.clamp_min(0).sqrt().unsqueeze(-2)).flip(-1).transpose(-1, -2)


def column_weights(q_KXH: Tensor, k_KnH: Tensor) -> Tensor:
    """How much each column of skewed queries and keys tells scores apart, (..., K, H).

    The root mean square of a column's queries times the standard deviation of its keys: by as much a query's scores
    differ in it from key to key. What all keys have in common moves all scores alike.
    """
    return q_KXH.square().mean(dim=-2).sqrt() * k_KnH.var(dim=-2, correction=0).sqrt()


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Typical queries of a model.

    Attributes:
        queries: of every layer (K, H, H) in float32, as of `typical_queries`.
        at_position_0: they are as they are at position 0, and to be turned to where they will ask. Else they are as
            they were in the sample: of a model without rotary positions, or with ones that are not known.
    """

    queries: list[Tensor]
    at_position_0: bool

    @classmethod
    def of(cls, products: list[Tensor], num_tokens: int, *, at_position_0: bool) -> Skew:
        """From the products (K, H, H) of each layer's queries, summed over so many tokens."""
        queries = [typical_queries(products_KHH / num_tokens).float().cpu() for products_KHH in products]
        return cls(queries=queries, at_position_0=at_position_0)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """KV heads and head dim (K, H) of every layer."""
        return [(queries_KHH.shape[0], queries_KHH.shape[2]) for queries_KHH in self.queries]

    @property
    def bases(self) -> list[Tensor]:
        """A (K, H, H) of every layer in float32, of the queries as they are here."""
        return [skewing_basis(q_KHH.double().mT @ q_KHH.double()).float() for q_KHH in self.queries]

    def packed(self, fingerprint: str) -> bytes:
        """The content of a file, which belongs to the model with this fingerprint."""
        tensors = {f"layer.{layer}": queries.contiguous() for layer, queries in enumerate(self.queries)}
        about = {"kind": KIND, "fingerprint": fingerprint, "at_position_0": str(self.at_position_0).lower()}
        return safetensors.torch.save(tensors, metadata=about)

    @classmethod
    def load(cls, path: str | os.PathLike[str], fingerprint: str | None = None) -> Skew:
        """Read what `packed` gave.

        Args:
            fingerprint: of the model that it is for; None takes any, for a look before there is a model.

        Raises:
            ValueError: there is no such file, it is damaged or of something else, or it belongs to another model.
        """
        name, remedy = f"policy.skew={os.fspath(path)}", f"{REMEDY}{os.fspath(path)}"
        if not Path(path).is_file():
            raise ValueError(f"{name}: there is no such file; make it with {remedy}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{name} cannot be read ({reason}); make it again with {remedy}") from error
        if about.get("kind") != KIND or about.get("at_position_0") not in ("true", "false"):
            raise ValueError(f"{name} is not a file of python -m policies.skew; make one with {remedy}")
        if fingerprint is not None and about.get("fingerprint") != fingerprint:
            raise ValueError(f"{name} was made for another model; make one for this model with {remedy}")
        layers = [f"layer.{layer}" for layer in range(len(found))]
        if not found or set(layers) != found.keys() or not all(_is_sound(tensor) for tensor in found.values()):
            raise ValueError(f"{name} has tensors of wrong names, shapes or values; make it again with {remedy}")
        return cls(queries=[found[layer] for layer in layers], at_position_0=about["at_position_0"] == "true")


def _is_sound(queries_KHH: Tensor) -> bool:
    square = queries_KHH.ndim == 3 and queries_KHH.shape[1] == queries_KHH.shape[2]
    sound = square and queries_KHH.dtype == torch.float32 and queries_KHH.numel() > 0
    return sound and bool(queries_KHH.isfinite().all())
