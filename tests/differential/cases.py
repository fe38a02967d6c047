"""Random cases of a differential fuzzer: a family's default config in random sizes, prompts, and ranks for them.

Everything follows from the seed of a case.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from benchmarks.families.small import VOCABULARY, Sizes, small_config, small_model
from benchmarks.families.verdicts import RIGHT, verdicts_of_page
from runahead import PrefillOptions
from runahead.config import Attention, Exchange, PrefillName, Transfer
from runahead.features.layer_types import WITH_STATES
from runahead.model.layer_kinds import decoder_config
from runahead.model.loading.quiet import quiet

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

ROPE: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 8.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
"""Rotations beside a family's own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        config: of the model, whose weights follow from `seed`.
        prompts: token ids of each row.
        num_ranks: number of ranks.
        boundaries: of their chunks in the padded prompt.
        prefill: how the prompt is computed.
        num_new: number of new tokens.
    """

    seed: int
    model_type: str
    config: PreTrainedConfig
    prompts: list[list[int]]
    num_ranks: int
    boundaries: tuple[int, ...]
    prefill: PrefillOptions
    num_new: int

    def module(self, **options: Any) -> PreTrainedModel:
        return small_model(self.config, seed=self.seed, dtype=torch.float64, **options)


@cache
def right_families() -> list[str]:
    """Families that docs/models.md calls right, but hybrids: tests/ranks/test_states.py is their matrix.

    Their sizes follow from each other, and two of them compute a chunk of one token otherwise than a longer one.
    """
    right = [family for family, why in verdicts_of_page(PAGE.read_text()).items() if why == RIGHT]
    return [family for family in right if not _holds_states(family)]


def _holds_states(model_type: str) -> bool:
    with quiet():
        config = decoder_config(CONFIG_MAPPING[model_type]())
    return any(kind in WITH_STATES for kind in getattr(config, "layer_types", None) or [])


def family_of(seed: int) -> str:
    """The family of a seed. Neighbours have others, and so many seeds as there are families have all of them."""
    return right_families()[seed % len(right_families())]


def case_of(seed: int) -> Case:
    """The case of a seed."""
    random, model_type = Random(seed), family_of(seed)
    config = _config(model_type, random)
    num_rows = random.choice([1, 1, 2, 3])
    prompts = [
        random.choices(range(3, VOCABULARY - 1), k=random.choice([1, 3, 9, 17, 30, 44])) for _ in range(num_rows)
    ]
    num_ranks = random.choice([1, 2, 2, 3])
    longest = max(map(len, prompts))
    inner = sorted(random.choice([0, 1, longest, random.randint(0, longest)]) for _ in range(num_ranks - 1))
    # By transformers' cache later tokens would be rotated by tables of another length than earlier ones.
    is_dynamic = "dynamic" in str(getattr(decoder_config(config), "rope_parameters", ""))
    return Case(
        seed=seed,
        model_type=model_type,
        config=config,
        prompts=prompts,
        num_ranks=num_ranks,
        boundaries=(0, *inner, longest),
        prefill=_prefill(num_ranks, random),
        num_new=1 if is_dynamic else random.choice([1, 3]),
    )


def _prefill(num_ranks: int, random: Random) -> PrefillOptions:
    if num_ranks == 1:
        return PrefillOptions(chunk_tokens=random.choice([None, 1, 5, 16]))
    name = random.choice([PrefillName.kv_runahead] * 3 + [PrefillName.tsp, PrefillName.zigzag])
    return PrefillOptions(
        name=name,
        transfer=random.choice(list(Transfer)),
        attention=random.choice([Attention.dense, Attention.causal]),
        exchange=random.choice(list(Exchange)),
    )


def _config(model_type: str, random: Random) -> PreTrainedConfig:
    """A config of random sizes, and of other rotations and orders of layers where transformers takes them."""
    sizes = Sizes(
        layers=random.randint(2, 7),
        heads=4,
        group=random.choice([1, 2, 4]),
        head_dim=random.choice([8, 16]),
        window=random.randint(2, 20),
    )
    options: dict[str, Any] = {}
    plain = decoder_config(small_config(model_type, Sizes()))
    rope = getattr(plain, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and random.random() < 0.5:
        options["rope_parameters"] = {**rope, **random.choice(ROPE)}
        is_dynamic = options["rope_parameters"]["rope_type"] == "dynamic"
        options["max_position_embeddings"] = random.choice([16, 64, 256] if is_dynamic else [64, 256])
    kinds = sorted(set(getattr(plain, "layer_types", None) or []))
    if len(kinds) > 1 and random.random() < 0.5:
        options["layer_types"] = [random.choice(kinds) for _ in range(sizes.layers)]
    for given in ((sizes, options), (sizes, {}), (Sizes(), {})):
        with suppress(Exception):  # transformers may raise anything for what a family does not take
            config = small_config(model_type, given[0], **given[1])
            small_model(config, attention="eager")(input_ids=torch.arange(3, 12)[None], use_cache=False)
            return config
    if plain.model_type != model_type:  # transformers lacks a package for images
        return _config(plain.model_type, random)
    raise AssertionError(f"{model_type} is right by {PAGE.name}, but no small model can be built")
