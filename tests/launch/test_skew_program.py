"""python -m policies.skew: from a text to a file that its own model takes, whatever the family; mistakes in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.skew import main, skew_of
from policies.skewing import Skew, typical_queries
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.config import ModelName, ModelOptions
from tests.exit_status import exit_status, one_line_error
from tests.families import build, prompt
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    build("llama", dtype=torch.float32, vocab_size=len(byte_level()), eos_token_id=None).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.txt"
    path.write_text("the letters of the captain to his sister, from the ice. " * 20, encoding="utf-8")
    return path


def arguments(folder: Path, sample: Path, out: Path, *more: str) -> list[str]:
    return [
        "model=hf",
        f"model.path={folder}",
        f"sample={sample}",
        "tokens=96",
        "chunk=40",
        f"out={out}",
        "ranks.threads=1",
        "ranks.device=cpu",
        *more,
    ]


def ended(args: list[str]) -> int:
    return exit_status(main, args)


def test_the_file_is_taken_by_its_own_model_alone(
    folder: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "skew=1, of a model.safetensors"
    assert ended(arguments(folder, sample, out)) == 0
    assert "3 layers from 96 tokens, as at position 0" in capsys.readouterr().out
    model = Model.load(ModelOptions(name=ModelName.hf, path=str(folder)), torch.device("cpu"))
    skew = Skew.load(out, model.fingerprint)
    assert skew.heads == [(2, 8)] * 3
    ids = byte_level()(sample.read_text(encoding="utf-8"), verbose=False)["input_ids"][:96]
    in_one = skew_of(model, ids, rotaries=model.rotaries, chunk=96)
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
        rotates = True  # so that queries and keys come as they are at position 0

        def attend(self, layer: int, q: Any, k: Any, v: Any, terms: AttentionTerms) -> Any:
            rotary = model.rotaries[layer]
            q_KXH = q[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2).double()
            found.append(q_KXH.mT @ q_KXH / len(ids))
            q, k = (rotary.rotated(x.permute(2, 0, 1, 3), 0, [0]).permute(1, 2, 0, 3) for x in (q, k))
            return super().attend(layer, q, k, v, terms)

    model.forward(torch.tensor([ids]), Rotating(cache, start=0, pads=[0]), start=0, pads=[0])
    return [typical_queries(x).mT @ typical_queries(x) for x in found]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["out=null"], "out=<file.safetensors> is needed"),
        (["tokens=0"], "tokens=0 must be at least 1"),
        (["chunk=0"], "chunk=0 must be at least 1"),
        (["tokens=500"], "tokens but tokens=500; give a longer sample, or use tokens="),
        (["tokens=1000"], "tokens=1000 is more than the model's 512 positions"),
        (["sample=missing.txt"], "sample=missing.txt does not exist"),
        (["out=missing/skew.safetensors"], "there is no folder"),
        (["token=1"], "did you mean tokens?"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    out = tmp_path / "skew.safetensors"
    assert ended(arguments(folder, sample, out, *more)) != 0
    assert message in one_line_error(capsys)
    assert not out.exists()


def test_a_model_without_a_tokenizer_is_told(
    folder: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_bytes((folder / "config.json").read_bytes())
    given = [f"out={tmp_path / 'x'}", f"sample={sample}", "tokens=9", "ranks.device=cpu"]
    assert ended(["model=random", f"model.config={config}", *given]) != 0
    assert "needs a tokenizer" in capsys.readouterr().err


def test_more_ranks_than_one_are_refused(
    folder: Path, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.skew import SkewRun, _prepare

    class TwoRanks:
        size = 2

    with pytest.raises(ValueError, match="one rank but 2 were started"):
        _prepare(SkewRun(out="x"), TwoRanks())  # type: ignore[arg-type]


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m policies.skew" in capsys.readouterr().out
