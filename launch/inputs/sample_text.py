"""The sample text that a program reads to learn something about a model."""

from __future__ import annotations

from launch.inputs.text_files import text_or_example
from runahead.config import ModelOptions


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
