"""Checks of generation options that need a model's tokenizer and config, but not its weights."""

from __future__ import annotations

from typing import Any

from runahead.config import GenerationOptions
from runahead.decoding.sampling import check_options
from runahead.model.grammars import Grammars


def check_generation(generation: GenerationOptions, tokenizer: Any | None, config: Any) -> None:
    """Check that a model can generate with these options. Raises: ValueError.

    Args:
        config: of the text decoder.
    """
    ends = [getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)]
    eos_ids = {token for each in ends if each is not None for token in ([each] if isinstance(each, int) else each)}
    schemas = Grammars(tokenizer, config.vocab_size, eos_ids)
    check_options([generation], tokenizer, config.vocab_size, schemas)
