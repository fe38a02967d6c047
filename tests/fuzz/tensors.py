"""Files of tensors that we write ourselves: queries for skewing, maps to scores, and K,V of segments."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from policies.score_maps import FILES as SCORE_FILES
from policies.score_maps import ScoreMaps
from policies.skewing import FILES, Skew, skewing_basis
from runahead.cache.slabs import KVShape
from runahead.reuse.tiers.file_format import FORMAT, StoredLayers, checksum, read_layers
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import PIECES, PLACES, VALUES, changed, changed_bytes, paths_of, with_change
from tests.fuzz.target import Target

KEY = "0123456789abcdef" * 4
TOKENS = 3
SHAPES = [KVShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float32)] * 2
FINGERPRINT = "fedcba9876543210"


@cache
def skew_file() -> bytes:
    draw = torch.Generator().manual_seed(0)
    queries = [torch.randn(2, 4, 4, generator=draw) for _ in range(2)]
    return Skew(queries=queries, at_position_0=True).packed(FINGERPRINT)


@cache
def score_file() -> bytes:
    draw = torch.Generator().manual_seed(0)
    weights, biases = ({layer: torch.randn(*shape, generator=draw) for layer in (0, 2)} for shape in ((2, 4), (2,)))
    return ScoreMaps(weights=weights, biases=biases).packed(FINGERPRINT)


@cache
def segment_file() -> bytes:
    tensors = {f"layer.{layer}": torch.zeros(TOKENS, 2, 8) for layer in range(2)}
    sums = json.dumps([checksum(layer) for layer in tensors.values()])
    return save(tensors, metadata={"format": FORMAT, "key": KEY, "segment": "a", "crc32": sums})


def other_tensors() -> list[bytes]:
    """Whole files of tensors that are not what is asked for."""
    odd = {
        "nan": torch.full((2, 4, 4), float("nan")),
        "empty": torch.zeros(0, 4, 4),
        "none wide": torch.zeros(2, 0, 0),
        "whole": torch.zeros(2, 4, 4, dtype=torch.int64),
        "half": torch.zeros(2, 4, 4, dtype=torch.bfloat16),
        "flat": torch.zeros(32),
        "scalar": torch.zeros(()),
    }
    return [
        save({f"layer.{layer}": tensor.clone() for layer in range(2)}, metadata=about)
        for tensor in odd.values()
        for about in (
            {"kind": FILES.kind, "fingerprint": FINGERPRINT, "at_position_0": "true"},
            {"kind": SCORE_FILES.kind, "fingerprint": FINGERPRINT},
            {"format": FORMAT, "key": KEY, "segment": "a", "crc32": "[0, 0]"},
        )
    ]


@st.composite
def tensor_files(draw: st.DrawFn, valid: bytes) -> bytes:
    """A file with changes anywhere, or with other values in its header, whose length is then right."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(other_tensors()))
    if kind < 5:
        return draw(changed_bytes([valid]))
    length = int.from_bytes(valid[:8], "little")
    header, body = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    for _ in range(draw(st.integers(1, 3))):
        paths = list(paths_of(header))
        header = with_change(header, paths[draw(PLACES) % len(paths)], draw(st.integers(0, 9)), draw(VALUES))
    text = json.dumps(header).encode()
    if draw(st.booleans()):
        text = changed(text, "insert", draw(PLACES), 0, draw(st.sampled_from(PIECES)))
    text += b" " * (-len(text) % 8)
    said = draw(st.sampled_from([len(text), len(text), len(text), len(text) + 8, 0, 2**40, 2**64 - 1]))
    return said.to_bytes(8, "little") + text + body


def check_skew(content: bytes, folder: Path) -> Outcome:
    path = folder / "skew.safetensors"
    path.write_bytes(content)

    def use(skew: Skew) -> None:
        assert all(skewing_basis(q_KHH.mT.double() @ q_KHH.double()).isfinite().all() for q_KHH in skew.queries)
        assert all(heads >= 1 and dim >= 1 for heads, dim in skew.heads)
        Skew.load(path)

    return judged(lambda: Skew.load(path, FINGERPRINT), use, names=[str(path)], folder=folder)


def check_scores(content: bytes, folder: Path) -> Outcome:
    path = folder / "kvzap.safetensors"
    path.write_bytes(content)

    def use(maps: ScoreMaps) -> None:
        for layer, weight_KD in maps.weights.items():
            assert maps.scores(layer, torch.ones(1, 3, weight_KD.shape[1])).shape == (1, len(weight_KD), 3)
        ScoreMaps.load(path)

    return judged(lambda: ScoreMaps.load(path, FINGERPRINT), use, names=[str(path)], folder=folder)


def check_segment(content: bytes, folder: Path) -> Outcome:
    """A damaged file counts as absent: it is computed again."""
    path = folder / f"{KEY}.safetensors"
    path.write_bytes(content)

    def use(found: StoredLayers | None) -> None:
        if found is not None:
            assert len(found.checksums) == 2
            assert [tuple(layer.shape) for layer in found.layers_TKX] == [(TOKENS, 2, 8)] * 2
            sum(layer.sum() for layer in found.layers_TKX)

    return judged(
        lambda: read_layers(path, key=KEY, shapes=SHAPES, num_tokens=TOKENS), use, names=[str(path)], folder=folder
    )


TARGETS = (
    Target(
        name="skew files",
        reads="policies/skewing.py Skew.load",
        inputs=st.deferred(lambda: tensor_files(skew_file())),
        check=check_skew,
        share=6,
    ),
    Target(
        name="files of score maps",
        reads="policies/score_maps.py ScoreMaps.load",
        inputs=st.deferred(lambda: tensor_files(score_file())),
        check=check_scores,
        share=4,
    ),
    Target(
        name="files of a prompt cache's store",
        reads="runahead/reuse/tiers/file_format.py read_layers",
        inputs=st.deferred(lambda: tensor_files(segment_file())),
        check=check_segment,
        share=5,
    ),
)
