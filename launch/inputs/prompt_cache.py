"""Schemas and prompts of policy=prompt_cache, from its options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.inputs.options import PromptOptions, RunOptions
from launch.inputs.policies import prompt_cache_options
from launch.inputs.prompts import Prompts, is_jsonl, sources, text_of_line, usable, use_template
from launch.inputs.text_files import read_text
from launch.outputs.layout_table import layout_table
from policies.prompt_cache import PromptCache, Schema
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from policies.prompt_cache.schemas import Schemas
from policies.reuse import ReusingPrompt
from runahead.model import loading
from runahead.model.loading.position_limit import max_positions


def read_prompt_cache(policy: PromptCacheOptions, tokenizer: Any | None, config: Any) -> PromptCache:
    """Prompt Cache of a schema for a model.

    Args:
        policy: options of policy=prompt_cache.
        tokenizer: the model's tokenizer.
        config: the text model's config of transformers.

    Raises:
        ValueError: in one line, if there is not one schema, or it is wrong or does not fit the model.
    """
    if len(policy.schemas) != 1:
        raise ValueError("policy=prompt_cache needs policy.schema=<xml file>, which names one file")
    return _maker(policy, tokenizer, config)(_read(policy.schemas[0]))


def read_schemas(policy: PromptCacheOptions, tokenizer: Any | None, config: Any, *, max_tokens: int) -> Schemas:
    """Schemas of a server: those of policy.schema, and room for those that requests bring.

    Args:
        max_tokens: most tokens of all schemas that requests bring.

    Raises:
        ValueError: in one line, as `read_prompt_cache`; two schemas have the same name.
    """
    own: dict[str, PromptCache] = {}
    make = _maker(policy, tokenizer, config)
    for path in policy.schemas:
        cache = make(_read(path))
        if cache.schema.name in own:
            raise ValueError(f"policy.schema={path} has the name of another schema, {cache.schema.name}; rename one")
        own[cache.schema.name] = cache
    return Schemas(list(own.values()), _maker(policy, tokenizer, config, max_tokens), max_tokens=max_tokens)


def _maker(
    policy: PromptCacheOptions, tokenizer: Any | None, config: Any, max_tokens: int | None = None
) -> Callable[[Schema], PromptCache]:
    """Return the function that makes the Prompt Cache of a schema. Raises: ValueError: the model has no tokenizer."""
    if tokenizer is None:
        raise ValueError("policy=prompt_cache needs a tokenizer, and this model has none")

    def make(schema: Schema) -> PromptCache:
        return PromptCache(
            schema,
            tokenizer,
            max_positions=max_positions(config),
            link_tokens=policy.link_tokens,
            recompute=policy.recompute,
            sinks=policy.sinks,
            max_tokens=max_tokens,
        )

    return make


def _read(path: str) -> Schema:
    read_text(path, f"policy.schema={path}", pipes=False)  # reports a missing or binary file as for other files
    return Schema.from_xml(Path(path))


def read_reusing_prompts(options: PromptOptions, cache: PromptCache) -> Prompts:
    """Read prompts in PML from prompt.text, an XML file, or a .jsonl file with one per line.

    Raises:
        ValueError: in one line; with `skip_invalid`, only if none of several prompts can be used.
    """
    if (options.text is None) == (options.file is None):
        raise ValueError("policy=prompt_cache needs a prompt in PML as prompt.file=<xml or jsonl> or prompt.text=")
    lines = is_jsonl(options.file)

    def prompt_of(source: tuple[str, str]) -> ReusingPrompt:
        text, name = source
        text = text_of_line(text, None, name) if lines else text
        if not text.lstrip().startswith("<"):
            raise ValueError(f'{name} is no prompt in PML; it begins with <prompt schema="{cache.schema.name}">')
        return cache.prompt(text, name=name)

    given = sources(options)
    if options.file is not None and not lines:  # whose lines messages count
        given = [(text, options.file) for text, _ in given]
    reusing, skipped = usable(given, prompt_of, skip_invalid=options.skip_invalid and lines)
    return Prompts(ids=[each.ids for each in reusing], one_text=not lines, reusing=reusing, skipped=skipped)


def print_layout(run: RunOptions) -> None:
    """Print the layout of a run's schema, and the tokens that each of its prompts reuses.

    Raises:
        ValueError: in one line.
    """
    if run.policy["name"] != "prompt_cache":
        raise ValueError("--layout is for policy=prompt_cache")
    policy = prompt_cache_options(run.policy)
    config = loading.load_decoder_config(run.model, progress=True)
    tokenizer = loading.load_tokenizer(run.model)
    use_template(tokenizer, run.prompt.chat_template, "prompt.chat_template")
    cache = read_prompt_cache(policy, tokenizer, config)
    if run.prompt.text is None and run.prompt.file is None:
        print(layout_table(cache.layout), end="")
        return
    for prompt in read_reusing_prompts(run.prompt, cache).reusing or []:
        print(layout_table(cache.layout, prompt), end="")
