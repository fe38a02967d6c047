"""Skewing (InfiniGen, Lee et al., OSDI 2024, Sec. 4.2): a basis with the length of queries in few columns.

With Q = U S V^T the orthogonal A = V gives (Q A)(K A)^T = Q K^T for any keys, and Q A has most of its length in its
first columns. One A serves the query heads that share a KV head. It works best if the queries that it was made of
resemble those that it is used for, including their positions: rotary positions rotate queries, so queries at distant
positions have other directions. Therefore a file holds queries as they are at position 0, to be rotated to the
positions of the queries to come.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, T tokens, X queries of one KV head, n slots, H head dim.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.model_file import ModelFiles, PathLike

FILES = ModelFiles(kind="runahead skewing 1", option="policy.skew", program="policies.skew")


def query_products(q_BNTH: Tensor, num_kv_heads: int) -> Tensor:
    """Q^T Q (K, H, H), float64, over the queries of all rows and tokens that share a KV head."""
    q_KXH = q_BNTH.unflatten(1, (num_kv_heads, -1)).movedim(1, 0).flatten(1, 3)
    # float32 is exact enough for the products of a chunk, but not for their sum over a long text.
    return (q_KXH.float().transpose(-1, -2) @ q_KXH.float()).double()


def skewing_basis(products_HH: Tensor) -> Tensor:
    """Orthogonal A (..., H, H), float64: right singular vectors of Q, by falling singular value, from Q^T Q."""
    return torch.linalg.eigh(products_HH.double()).eigenvectors.flip(-1)


def typical_queries(products_HH: Tensor) -> Tensor:
    """H queries (..., H, H), float64, one per row, the longest first, with the same products Q^T Q."""
    values_H, vectors_HH = torch.linalg.eigh(products_HH.double())
    return (vectors_HH * values_H.clamp_min(0).sqrt().unsqueeze(-2)).flip(-1).transpose(-1, -2)


def column_weights(q_KXH: Tensor, k_KnH: Tensor) -> Tensor:
    """Contribution of each column of skewed queries and keys to differences between scores, (..., K, H).

    It is the root mean square of the column's queries times the standard deviation of its keys. The mean of the keys
    shifts all scores of a query alike and does not count.
    """
    return q_KXH.square().mean(dim=-2).sqrt() * k_KnH.var(dim=-2, correction=0).sqrt()


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Typical queries of a model.

    Attributes:
        queries: typical queries of every layer (K, H, H) in float32; see `typical_queries`.
        at_position_0: whether they are as they are at position 0, and have to be rotated to the positions where they
            are used. Otherwise they are as in the sample: the model's rotations do not exist or are not known.
    """

    queries: list[Tensor]
    at_position_0: bool

    @classmethod
    def from_products(cls, products: list[Tensor], num_tokens: int, *, at_position_0: bool) -> Skew:
        """Typical queries from the products (K, H, H) of each layer's queries, summed over `num_tokens` tokens."""
        queries = [typical_queries(products_KHH / num_tokens).float().cpu() for products_KHH in products]
        return cls(queries=queries, at_position_0=at_position_0)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Number of KV heads and head dim (K, H) of every layer."""
        return [(queries_KHH.shape[0], queries_KHH.shape[2]) for queries_KHH in self.queries]

    def of_share(self, share: int, num_shares: int) -> Skew:
        """The queries of a share of the KV heads, which ranks that share a model have in order."""
        heads = [queries_KHH.shape[0] // num_shares for queries_KHH in self.queries]
        own = [
            queries_KHH[share * num : (share + 1) * num] for num, queries_KHH in zip(heads, self.queries, strict=True)
        ]
        return Skew(queries=own, at_position_0=self.at_position_0)

    def packed(self, fingerprint: str) -> bytes:
        """Content of a file for the model with this fingerprint."""
        tensors = {f"layer.{layer}": queries for layer, queries in enumerate(self.queries)}
        return FILES.packed(tensors, fingerprint, at_position_0=str(self.at_position_0).lower())

    @classmethod
    def load(cls, path: PathLike, fingerprint: str | None = None) -> Skew:
        """Read a file that `packed` made, for any model or for the one with this fingerprint.

        Raises:
            ValueError: as `ModelFiles.read`.
        """
        found, about = FILES.read(path, fingerprint)
        if about.get("at_position_0") not in ("true", "false"):
            raise FILES.of_another_kind(path)
        layers = [f"layer.{layer}" for layer in range(len(found))]
        if not found or set(layers) != found.keys() or not all(_is_sound(tensor) for tensor in found.values()):
            raise FILES.damaged(path)
        return cls(queries=[found[layer] for layer in layers], at_position_0=about["at_position_0"] == "true")


def _is_sound(queries_KHH: Tensor) -> bool:
    square = queries_KHH.ndim == 3 and queries_KHH.shape[1] == queries_KHH.shape[2]
    sound = square and queries_KHH.dtype == torch.float32 and queries_KHH.numel() > 0
    return sound and bool(queries_KHH.isfinite().all())
