"""Skewing changes no score, finds what queries have in common, and its file is taken for its own model alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from policies.skewing import (
    FILES,
    Skew,
    column_weights,
    query_products,
    skewing_basis,
    typical_queries,
)


def made_queries(heads: int, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """(1, heads, tokens, dim), with most of their length in directions that differ from head to head."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(heads, dim, dim, generator=generator) * torch.linspace(2, 0.01, dim)
    return (torch.randn(heads, tokens, dim, generator=generator) @ mix.mT)[None]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_the_basis_is_orthogonal_and_changes_no_score(heads: int, kv_heads: int) -> None:
    q_1NTH = made_queries(heads, 40, 16)
    k_KTH = made_queries(kv_heads, 40, 16, seed=1)[0]
    a_KHH = skewing_basis(query_products(q_1NTH, kv_heads)).float()
    assert a_KHH.shape == (kv_heads, 16, 16)
    assert (a_KHH.mT @ a_KHH - torch.eye(16)).abs().max() < 1e-6
    q_KGTH = q_1NTH[0].unflatten(0, (kv_heads, -1))
    scores = q_KGTH @ k_KTH[:, None].mT
    skewed = (q_KGTH @ a_KHH[:, None]) @ (k_KTH @ a_KHH)[:, None].mT
    assert (skewed - scores).abs().max() < 1e-4 * scores.abs().max()


def test_a_queries_length_is_in_its_first_columns() -> None:
    """A are the right singular vectors of the group's queries, the largest singular value first."""
    q_1NTH = made_queries(6, 40, 16)
    a_KHH = skewing_basis(query_products(q_1NTH, 2))
    for head, q_GTH in enumerate(q_1NTH[0].double().unflatten(0, (2, -1))):
        q_XH = q_GTH.flatten(0, 1)
        lengths = (q_XH @ a_KHH[head]).norm(dim=0)
        # Products in float32 know a singular value to about 1e-3 of the largest one.
        assert torch.allclose(lengths, torch.linalg.svdvals(q_XH), atol=1e-3 * float(lengths[0]))


def test_products_add_up_over_chunks_rows_and_heads() -> None:
    q_BNTH = torch.cat([made_queries(4, 12, 8), made_queries(4, 12, 8, seed=1)])
    whole = query_products(q_BNTH, 2)
    in_chunks = query_products(q_BNTH[:, :, :5], 2) + query_products(q_BNTH[:, :, 5:], 2)
    assert torch.allclose(whole, in_chunks, rtol=1e-5)
    by_hand = sum(torch.outer(x, x) for x in q_BNTH[:, 2:].flatten(0, 2))  # the second KV head's queries
    assert torch.allclose(whole[1], by_hand.double(), rtol=1e-4, atol=1e-4)


def test_typical_queries_stand_for_all_queries() -> None:
    products = query_products(made_queries(4, 40, 16), 2)
    typical_KHH = typical_queries(products)
    assert torch.allclose(typical_KHH.mT @ typical_KHH, products)
    lengths_KH = typical_KHH.norm(dim=-1)
    assert (lengths_KH.diff(dim=-1) <= 0).all()


def test_fewer_queries_than_dims_still_give_a_whole_basis() -> None:
    a_KHH = skewing_basis(query_products(made_queries(2, 3, 16), 1)).float()
    assert (a_KHH.mT @ a_KHH - torch.eye(16)).abs().max() < 1e-6


def test_a_column_that_is_the_same_in_all_keys_has_no_weight() -> None:
    q_KXH, k_KnH = torch.ones(1, 5, 3), torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0))
    k_KnH[..., 1] = 40.0
    q_KXH[..., 2] = 3.0
    weights = column_weights(q_KXH, k_KnH)[0]
    assert weights[1] == 0
    assert weights[2] == pytest.approx(3 * k_KnH[0, :, 2].std(correction=0).item())


def made_skew(layers: int = 3, kv_heads: int = 2, dim: int = 8) -> Skew:
    products = [query_products(made_queries(4, 30, dim, seed), kv_heads) for seed in range(layers)]
    return Skew.from_products(products, 30, at_position_0=True)


@pytest.mark.parametrize("at_position_0", [True, False])
def test_a_file_holds_what_was_put_in(tmp_path: Path, at_position_0: bool) -> None:
    skew, path = Skew(queries=made_skew().queries, at_position_0=at_position_0), tmp_path / "skew.safetensors"
    path.write_bytes(skew.packed("abc"))
    for found in (Skew.load(path, "abc"), Skew.load(path)):
        assert found.at_position_0 is at_position_0
        assert found.heads == [(2, 8)] * 3
        assert all(torch.equal(a, b) for a, b in zip(found.queries, skew.queries, strict=True))
    for queries_KHH in found.queries:
        basis_KHH = skewing_basis(queries_KHH.mT.double() @ queries_KHH.double()).float()
        assert (basis_KHH.mT @ basis_KHH - torch.eye(8)).abs().max() < 1e-6


ABOUT = {"kind": FILES.kind, "fingerprint": "abc", "at_position_0": "true"}


def packed(tensors: dict[str, Tensor], **about: str) -> bytes:
    return safetensors.torch.save(tensors, metadata={**ABOUT, **about})


GOOD = {"layer.0": torch.ones(2, 8, 8), "layer.1": torch.ones(1, 4, 4)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; make it with python -m policies.skew"),
        (b"", "cannot be read"),
        (b"a text, and not a short one", "cannot be read"),
        (packed(GOOD)[:-9], "cannot be read"),
        (safetensors.torch.save(GOOD), "is not a file of python -m policies.skew"),
        (packed(GOOD, kind="other"), "is not a file of python -m policies.skew"),
        (packed(GOOD, fingerprint="def"), "was made for another model; make one for this model"),
        (packed({"layer.1": GOOD["layer.1"]}), "wrong names, shapes or values"),
        (packed({**GOOD, "layer.1": torch.ones(4, 4)}), "wrong names, shapes or values"),
        (packed({**GOOD, "layer.1": torch.ones(2, 8, 4)}), "wrong names, shapes or values"),
        (packed({**GOOD, "layer.1": torch.ones(2, 8, 8).half()}), "wrong names, shapes or values"),
        (packed({**GOOD, "layer.1": torch.full((2, 8, 8), torch.nan)}), "wrong names, shapes or values"),
        (packed({}), "wrong names, shapes or values"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "skew.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        Skew.load(path, "abc")
    assert f"policy.skew={path}" in str(caught.value)
    assert f"out={path}" in str(caught.value), "no remedy"
    assert "\n" not in str(caught.value)


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    path = tmp_path / "skew.safetensors"
    path.write_bytes(packed(GOOD))
    assert Skew.load(path, "abc").heads == [(2, 8), (1, 4)]


def test_ranks_that_share_a_model_take_their_heads() -> None:
    skew = Skew(queries=[torch.rand(6, 4, 4), torch.rand(6, 4, 4)], at_position_0=True)
    shares = [skew.of_share(share, 3) for share in range(3)]
    assert all(share.heads == [(2, 4), (2, 4)] for share in shares)
    for layer, whole in enumerate(skew.queries):
        assert torch.equal(torch.cat([share.queries[layer] for share in shares]), whole)
