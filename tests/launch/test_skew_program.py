"""python -m policies.skew: from a text to a file that its own model takes, whatever the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.skew import skew_of
from policies.skewing import Skew, typical_queries
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from tests.families import build, prompt
from tests.launch.learning import ended
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level


def test_the_file_is_taken_by_its_own_model_alone(
    folder: Path, own: Model, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "skew=1, of a model.safetensors"
    assert ended("skew", folder, sample, out) == 0
    assert "3 layers from 96 tokens, as at position 0" in capsys.readouterr().out
    skew = Skew.load(out, own.fingerprint)
    assert skew.heads == [(2, 8)] * 3
    ids = byte_level()(sample.read_text(encoding="utf-8"), verbose=False)["input_ids"][:96]
    in_one = skew_of(own, ids, rotaries=own.rotaries, chunk=96)
    for ours, theirs in zip(skew.queries, in_one.queries, strict=True):
        # As products: of equal lengths any mixture is typical too.
        assert torch.allclose(ours.mT @ ours, theirs.mT @ theirs, atol=1e-4)
    other = Model(build("llama", dtype=torch.float32, vocab_size=98))
    with pytest.raises(ValueError, match="another model"):
        Skew.load(out, other.fingerprint)


@pytest.mark.parametrize("family", ["llama", "phi", "gpt_bigcode", "opt", "falcon", "bloom"])
def test_queries_are_those_that_attention_sees(family: str) -> None:
    """GQA, a partial rotation, MQA, positions in the hidden states, an adapter with rotation, ALiBi."""
    model = tiny_model(family, torch.float32)
    ids, shapes = prompt(24), model.kv_shapes
    skew = skew_of(model, ids, rotaries=model.known_rotaries, chunk=10)
    assert skew.heads == [(shape.num_kv_heads, shape.key_dim) for shape in shapes]
    assert skew.at_position_0 is (family in ("llama", "phi", "falcon"))
    if skew.at_position_0:
        expected = products_at_0(model, ids)
        for ours, theirs in zip(skew.queries, expected, strict=True):
            # Cosines and sines in float32, and products of queries that are up to 30 long.
            assert torch.allclose(ours.mT @ ours, theirs.float(), atol=1e-3 * float(theirs.abs().max()))


def products_at_0(model: Model, ids: list[int]) -> list[torch.Tensor]:
    """Q^T Q per token and KV head, of a forward that has its positions from an attention that rotates."""
    found = []
    cache = model.empty_cache(len(ids))

    class Rotating(CausalAttention):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.rotates = True  # so that queries and keys come as they are at position 0

        def attend(self, layer: int, q: Any, k: Any, v: Any, terms: AttentionTerms) -> Any:
            rotary = model.rotaries[layer]
            q_KXH = q[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2).double()
            found.append(q_KXH.mT @ q_KXH / len(ids))
            q, k = (rotary.rotated(x.permute(2, 0, 1, 3), 0, [0]).permute(1, 2, 0, 3) for x in (q, k))
            return super().attend(layer, q, k, v, terms)

    model.forward(torch.tensor([ids]), Rotating(cache, start=0, pads=[0]), start=0, pads=[0], all_hidden=True)
    return [typical_queries(x).mT @ typical_queries(x) for x in found]
