"""Adapters that peft makes for tests, and what its own forward gives with them."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from runahead.config import ModelOptions
from runahead.model.lora.adapter import WEIGHTS
from tests import families
from tests.needs import missing

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def need_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        missing("peft is not installed")


def base(folder: Path, family: str = "llama", **sizes: Any) -> PreTrainedModel:
    """Save a model in float32, as `AutoModelForCausalLM` reads it."""
    module = families.build(family, dtype=torch.float32, attention="eager", **sizes)
    module.save_pretrained(folder)
    return module


def adapt(model: Path, folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """An adapter of random numbers for the model in a folder, as peft saves it."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 7, "target_modules": PROJECTIONS, **settings}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        made = get_peft_model(read(model), LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, parameter in made.named_parameters():
            if "lora_magnitude" in name:
                parameter.data *= torch.rand_like(parameter) + 0.5
            elif any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                parameter.data.normal_(std=0.2)
        made.save_pretrained(folder)
    return folder


def read(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def peft_model(model: Path, adapters: Sequence[Path]) -> Any:
    """The model with peft's own layers, one adapter on the other; nothing is merged."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = PeftModel.from_pretrained(read(model), str(adapters[0]), adapter_name="0")
        for number, adapter in enumerate(adapters[1:], 1):
            made.load_adapter(str(adapter), adapter_name=str(number))
        made.base_model.set_adapter([str(number) for number in range(len(adapters))])
    return made.eval()


def peft_logits(model: Path, adapters: Sequence[Path], ids: Sequence[int]) -> Tensor:
    """Logits (S, V) of peft's own forward."""
    with torch.inference_mode():
        return peft_model(model, adapters)(input_ids=torch.tensor([ids])).logits[0]


def options(model: Path, *adapters: Path, **more: Any) -> ModelOptions:
    return ModelOptions(name="hf", path=str(model), adapter=[str(each) for each in adapters], **more)


def edit_settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
