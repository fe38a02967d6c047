"""Quantised checkpoints through programs on two ranks: answers of the dequantised model, and damage in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from launch.program.ending import MISTAKE
from tests import families
from tests.families import prompt
from tests.model.quantised import checkpoints
from tests.model.test_loading_forms import MXFP4
from tests.model.test_loading_gguf import random_blocks, write_gguf
from tests.model.test_loading_hf import edit_config, edit_weights
from tests.ranks.test_infer import INFER
from tests.serving.test_server import Job
from tests.tokenizers_for_tests import byte_level
from tests.warm_program import WarmJob, run_warm

pytestmark = pytest.mark.slow

IDS, NUM_NEW = prompt(30), 8
GGUF = {"Q4_0": 32, "Q8_0": 32, "IQ4_NL": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Common types of a GGUF file, and the columns of a block."""

FORMS = [*checkpoints.FORMS, "mxfp4", *GGUF]
SCALES = ("scales", "_scale", "_scale_inv", ".absmax", ".SCB")
"""Endings of the names of scales, of which each form has one."""


def saved(folder: Path, form: str) -> tuple[Path, Callable[[], Any]]:
    """A small quantised model with a tokenizer: its path, and what loads transformers' model of its weights."""
    folder.mkdir()
    if form in GGUF:
        path = folder / "m.gguf"
        size = max(GGUF[form], 64)
        packed = write_gguf(
            path, form=GGMLQuantizationType[form], blocks=random_blocks, hidden_size=size, intermediate_size=size
        )
        return path, lambda: packed
    sizes: dict[str, Any] = {"vocab_size": len(byte_level())}
    if form == "mxfp4":
        families.build("gpt_oss", dtype=torch.float32, intermediate_size=32, **sizes).save_pretrained(folder)
        expected = packed_experts(folder)
    else:
        expected = checkpoints.save(folder, form, **sizes)
    byte_level().save_pretrained(folder)
    plain = folder.with_name(f"{folder.name} plain")

    def load() -> Any:
        shutil.copytree(folder, plain)
        checkpoints.save_plain(plain, expected)
        return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")

    return folder, load


def packed_experts(folder: Path) -> dict[str, Tensor]:
    """Store experts as random codes of 4 bits; returns all weights, these as transformers decodes them."""
    expected: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def change(weights: dict[str, Tensor]) -> None:
        expected.update(weights)
        for name in [name for name in weights if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]:
            num_experts, num_inputs, num_outputs = weights.pop(name).shape
            size = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, size, generator=generator, dtype=torch.uint8)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)

    edit_weights(folder, change)
    edit_config(folder, quantization_config=MXFP4)
    return expected


def options(path: Path) -> list[str]:
    return ["model=hf", f"model.path={path}", "partition=even", "ranks.threads=1"]


def to_infer(path: Path, ids_file: Path, report: Path) -> list[str]:
    ids_file.write_text(json.dumps(IDS))
    generation = [f"generation.max_new_tokens={NUM_NEW}", "generation.ignore_eos=true"]
    return [*options(path), *generation, f"prompt.ids_file={ids_file}", f"report={report}"]


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_programs_are_those_of_the_dequantised_model(form: str, tmp_path: Path) -> None:
    path, load = saved(tmp_path / "m", form)
    report, cache = tmp_path / "run.json", {"RUNAHEAD_CACHE": str(tmp_path / "cache")}
    out = load().generate(torch.tensor([IDS]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    expected = out[0, len(IDS) :].tolist()
    run_warm(INFER, to_infer(path, tmp_path / "ids.json", report), environment=cache)
    found = json.loads(report.read_text())
    assert (found["new_token_ids"], found["world_size"]) == (expected, 2)
    server = Job(*options(path), environment=cache)
    try:
        server.wait_until_ready()
        answer = server.post({"prompt": IDS, "max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0}).json()
        assert answer["usage"]["completion_tokens"] == NUM_NEW
        assert answer["choices"][0]["text"] == byte_level().decode(expected, skip_special_tokens=True) == found["text"]
    finally:
        server.kill()


def without_a_scale(path: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        del weights[_scale(weights)]

    edit_weights(path, change)


def with_a_group_more(path: Path) -> None:
    """Scales of other groups than the settings say: twice the last dim, or the same number twice."""

    def change(weights: dict[str, Tensor]) -> None:
        name = _scale(weights)
        weights[name] = torch.cat([torch.atleast_1d(weights[name])] * 2, dim=-1)

    edit_weights(path, change)


def cut_short(path: Path) -> None:
    file = path if path.is_file() else path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _scale(weights: dict[str, Tensor]) -> str:
    return max(name for name in weights if name.endswith(SCALES) and not name.endswith("input_scale"))


DAMAGE = {"scale missing": without_a_scale, "group of another size": with_a_group_more, "cut short": cut_short}
CASES = [(form, damage) for form in FORMS for damage in DAMAGE if damage == "cut short" or form not in GGUF]


@pytest.mark.parametrize(("form", "damage"), CASES)
def test_damage_ends_both_programs_in_one_sentence(form: str, damage: str, tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "m", form)
    DAMAGE[damage](path)
    cache, said = {"RUNAHEAD_CACHE": str(tmp_path / "cache")}, []
    args = to_infer(path, tmp_path / "ids.json", tmp_path / "run.json")
    for job in (WarmJob(INFER, [args] * 2, cache), Job(*options(path), environment=cache)):
        try:
            assert MISTAKE in [rank.wait(120) for rank in job.ranks]
            [line] = "".join(rank.errors for rank in job.ranks).splitlines()
            said.append(line)
        finally:
            job.kill()
    assert said[0] == said[1]
    words = "is not a complete" if damage == "cut short" else "without" if damage == "scale missing" else "has shape"
    assert f"model.path={path}: " in said[0] or damage == "cut short"
    assert words in said[0]
    assert not (tmp_path / "run.json").exists()
