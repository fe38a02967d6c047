"""Sample texts that a program reads to learn something about a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from launch.inputs.text_files import EXAMPLE_TEXT, text_or_example
from launch.program.compose import ROOT
from runahead.config import ModelOptions


def own_texts() -> Sequence[str]:
    """Paths of the texts that come with the programs: an example, and pages of the documentation if they are there."""
    return [str(path) for path in (ROOT / EXAMPLE_TEXT, *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def runs_of(texts: Iterable[str], tokenizer: Any, length: int) -> list[list[int]]:
    """Token ids of texts, each cut into runs of one length; what is left at its end is left out."""
    found = []
    for text in texts:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        found += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    return found


def sample_ids(model: ModelOptions, sample: str | None, tokens: int) -> list[int]:
    """Token ids of a text, of which `tokens` at a time are read. The model's weights are not needed.

    Args:
        sample: option `sample`: text in UTF-8; None: the one in examples/.
        tokens: option `tokens`.

    Raises:
        ValueError: the text has fewer tokens, or the model has fewer positions or no tokenizer; in one line.
    """
    from runahead.model import loading
    from runahead.model.loading.position_limit import max_positions

    name, text = text_or_example(sample, "sample")
    limit = max_positions(loading.load_decoder_config(model, progress=True))
    if limit is not None and tokens > limit:
        raise ValueError(f"tokens={tokens} is more than the model's {limit} positions; lower it")
    tokenizer = loading.load_tokenizer(model)
    if tokenizer is None:
        raise ValueError("a sample text needs a tokenizer, and this model has none; give a model that has one")
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(
            f"{name} has {len(ids)} tokens but tokens={tokens}; give a longer sample, or use tokens={len(ids)}"
            if ids
            else f"{name} has no tokens; give a text"
        )
    return ids
