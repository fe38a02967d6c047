"""Numbers of shares that a model's heads allow, and copies of KV heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from runahead.model.loading import sharing
from runahead.model.loading.sharing import HeadCopies
from runahead.model.shares import check_shares
from runahead.ranks.mesh import one_of
from tests.model.test_loading_hf import refusal


def check(model_type: str, heads: int, kv_heads: int, num_shares: int) -> None:
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model(model_type, **sizes)
    check_shares(config, num_shares)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [
        (8, 8, [1, 2, 4, 8]),
        (8, 4, [1, 2, 4, 8]),
        (8, 1, [1, 2, 4, 8]),
        (9, 3, [1, 3, 9]),
        (6, 2, [1, 2, 6]),
        (12, 6, [1, 2, 3, 6, 12]),
        (28, 4, [1, 2, 4, 28]),
    ],
)
def test_each_share_has_whole_kv_heads_or_a_copy_of_one(heads: int, kv_heads: int, fitting: list[int]) -> None:
    for num_shares in range(1, heads + 3):
        if num_shares in fitting:
            check("llama", heads, kv_heads, num_shares)
        else:
            message = refusal(lambda n=num_shares: check("llama", heads, kv_heads, n))
            start = f"{heads} heads and {kv_heads} KV heads cannot be shared out to {num_shares} ranks"
            assert message.startswith(f"{start}; {one_of(fitting)} would do")


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_family_without_a_plan_is_told(family: str) -> None:
    assert f"no tensor-parallel plan for {family}" in refusal(lambda: check(family, 8, 8, 2))


@pytest.mark.parametrize("shape", [(6, 5), (6,)])
def test_copies_of_heads_are_those_of_the_whole_tensor(shape: tuple[int, ...]) -> None:
    stored = torch.randn(shape)
    copies = HeadCopies(stored, copies=3, rows_of_head=3)
    whole = stored.unflatten(0, (2, 3)).repeat_interleave(3, 0).flatten(0, 1)
    assert copies.get_shape() == list(whole.shape)
    assert torch.equal(copies[...], whole)
    for start in range(0, 18, 3):
        for stop in (start, start + 3, start + 7):
            assert torch.equal(copies[start:stop], whole[start:stop])
    if len(shape) == 2:
        assert torch.equal(copies[(slice(3, 9), slice(1, 4))], whole[3:9, 1:4])


def test_modules_of_plans_that_are_not_there_are_left_out_and_broken_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans_of_test").mkdir()
    (tmp_path / "plans_of_test" / "lacking.py").write_text("import plans_of_nobody")
    (tmp_path / "plans_of_test" / "lacking_part.py").write_text("import plans_of_test.part_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sharing, "STYLES", ("plans_of_test.gone", "plans_of_nobody.styles", "plans_of_nobody"))
    sharing.import_styles()
    for name, missing in (("lacking", "plans_of_nobody"), ("lacking_part", "plans_of_test.part_of_nobody")):
        monkeypatch.setattr(sharing, "STYLES", (f"plans_of_test.{name}",))
        with pytest.raises(ModuleNotFoundError, match=missing):
            sharing.import_styles()
