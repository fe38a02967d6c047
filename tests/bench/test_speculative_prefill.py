"""benchmarks/studies/speculative_prefill: losses are transformers' own over the kept positions; its table."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from benchmarks.studies.speculative_prefill import losses as module
from benchmarks.studies.speculative_prefill.__main__ import STUDY, table
from benchmarks.studies.speculative_prefill.losses import PASSAGE, Losses
from benchmarks.studies.speculative_prefill.ways import EXACT, policies_of, prefill_of
from runahead import Ranks
from runahead.config import Device, RanksOptions, Speculative
from runahead.prompt_draft.drafting import PromptDraft
from tests.families import build, prompt, throughout
from tests.ranks.tasks import tiny_model

LENGTH, TEXT = 131, prompt(400, seed=7)


def losses(way: str, share: float) -> tuple[list[dict[str, float]], list[list[int]]]:
    """Losses of two samples, and the positions that were computed."""
    kept, chosen = list[list[int]](), PromptDraft.chosen

    def noted(self: PromptDraft, prompts: Any) -> Any:
        found = chosen(self, prompts)
        kept.extend(list(each.new_positions) for each in found.prompts)
        return found

    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    with (
        throughout(torch.float64),
        mock.patch.object(module, "text_ids", lambda model, text: TEXT),
        mock.patch.object(PromptDraft, "chosen", noted),
    ):
        of = Losses(tiny_model("llama_deep"), ranks, "", share, LENGTH, 2)
        return list(of.of(way)), kept


@torch.inference_mode()
def test_losses_are_transformers_own() -> None:
    found, kept = losses("layers=2", 0.5)
    assert [len(each) for each in kept] == [67, 67]  # of five chunks three, the last one shorter
    text, at = TEXT[:LENGTH], kept[0]
    for name, new in (("copy_nll", text[:PASSAGE]), ("following_nll", TEXT[LENGTH : LENGTH + PASSAGE])):
        ids = [*(text[each] for each in at), *new]
        positions = [*at, *range(LENGTH, LENGTH + PASSAGE)]
        with throughout(torch.float64):
            given = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
            logits_SV = build("llama_deep")(**given, use_cache=True).logits[0, len(at) - 1 : -1]
        assert found[0][name] == pytest.approx(float(F.cross_entropy(logits_SV, torch.tensor(new))), rel=1e-9)


def test_with_all_tokens_losses_are_the_exact_ones() -> None:
    exact, all_kept = losses(EXACT, 1.0)[0], losses("layers=2", 1.0)[0]
    for one, other in zip(exact, all_kept, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_the_table_compares_with_the_exact_prefill() -> None:
    about: dict[str, Any] = {"length": 4096, "share": 0.25, "date": "2026-11-28T09:00:00Z", "commit": "abc"}
    times = {EXACT: [4.0, 4.2, 4.1], "layers=5": [2.0, 2.0, 2.05]}
    lines: list[dict[str, Any]] = [
        about | {"measured": "time", "way": way, "ttft_s": each, "draft_s": [0.5 if way != EXACT else None] * 3}
        for way, each in times.items()
    ]
    lines += [
        about | {"measured": "loss", "way": way, "sample": number, "copy_nll": nll + number, "following_nll": nll}
        for way, nll in ((EXACT, 1.0), ("layers=5", 1.5))
        for number in range(2)
    ]
    head, _, exact, layers, *_ = table(lines).splitlines()
    assert head.count("|") == 10
    assert exact == "| `exact` | 4,096 | all | 4.10 | - | 1.00 | 1.50 | 1.00 | 2 |"
    assert layers == "| `layers=5` | 4,096 | 25% | 2.00 | 0.50 | 2.00 | +0.50 | +0.50 | 2 |"


def test_ways() -> None:
    assert prefill_of("layers=3", 0.5).speculative is Speculative.layers and not policies_of("layers=3", 0.5)
    assert policies_of("snapkv", 0.5).last[0].name == "snapkv"
    with pytest.raises(ValueError, match="fastest is no way"):
        list(STUDY.variants(STUDY.parser().parse_args(["--ways", "fastest"])))
