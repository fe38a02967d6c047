"""A schema at work for one model: prompts in, segments and new tokens out."""

from __future__ import annotations

import os
from typing import Any

from policies.prompt_cache.layout import Layout
from policies.prompt_cache.layout_table import layout_table
from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.placement import LINK_TOKENS, place
from policies.prompt_cache.prompt import Prompt
from policies.prompt_cache.schema import Schema
from policies.prompt_cache.xml_reader import PMLError
from policies.reuse import ReusingPrompt, Segment


class PromptCache:
    """Turns prompts of a schema into what the engine generates from.

    Args:
        schema: of the prompts.
        tokenizer: of the model, as transformers has it.
        max_positions: of the model; None is no end.
        link_tokens: first tokens of every run of reused ones that are computed again in context.
        sinks: first tokens of the schema that all modules see while they are encoded.

    Raises:
        PMLError: the schema does not fit the model.
        ValueError: a negative number of tokens.
    """

    def __init__(
        self,
        schema: Schema,
        tokenizer: Any,
        *,
        max_positions: int | None = None,
        link_tokens: int = LINK_TOKENS,
        sinks: int = 0,
    ) -> None:
        for name, value in (("link_tokens", link_tokens), ("sinks", sinks)):
            if value < 0:
                raise ValueError(f"policy.{name}={value} must not be negative; 0 is none")
        self.schema, self.link_tokens = schema, link_tokens
        self._text = ModelText(tokenizer)
        self.layout = Layout.of(schema, self._text, max_positions=max_positions, sinks=sinks)

    @property
    def segments(self) -> list[Segment]:
        """All that there is to encode."""
        return self.layout.segments

    def prompt(self, source: Prompt | str | os.PathLike[str], *, name: str = "prompt") -> ReusingPrompt:
        """A prompt, from a prompt program, a file, or XML itself in a string that begins with "<".

        Args:
            name: what messages are to call XML that is in no file.

        Raises:
            PMLError: it does not fit the schema or the model.
            OSError: the file cannot be read.
        """
        if not isinstance(source, Prompt):
            source = Prompt.from_xml(source, self.schema, name=name)
        if source.schema != self.schema.name:
            raise PMLError(source.source, source.line, "prompt", f"is of {source.schema}, not of {self.schema.name}")
        return place(source, self.layout, self._text, link_tokens=self.link_tokens)

    def table(self, prompt: ReusingPrompt | None = None) -> str:
        """The layout for a terminal; with a prompt, what that takes of it."""
        return layout_table(self.layout, prompt)
