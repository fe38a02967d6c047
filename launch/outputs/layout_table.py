"""Layout as a table for a terminal: positions of modules, and the tokens that a prompt reuses."""

from __future__ import annotations

from launch.program.text_table import text_table
from policies.prompt_cache.layout import OUTSIDE, Layout, ModuleLayout
from policies.reuse import ReusingPrompt


def layout_table(layout: Layout, prompt: ReusingPrompt | None = None) -> str:
    """Table of the modules of a schema by position; with a prompt, also the number of tokens that it reuses of each."""
    rows = [["module", "kind", "positions", "tokens", "arguments"] + (["reused"] if prompt is not None else [])]
    for module in layout.modules:
        row = [_name(layout, module), _kind(layout, module), _range(module), f"{len(module.tokens):,}", _slots(module)]
        if prompt is not None:
            row.append(f"{_num_reused(layout, module, prompt):,}")
        rows.append(row)
    text = f"schema {layout.schema.name}: {layout.num_positions:,} positions\n" + text_table(rows, left=(0, 1, 4))
    text += "".join(f"scaffold: {' '.join(names)}\n" for names in layout.scaffolds)
    if prompt is not None:
        total, again = len(prompt.ids), sum(use.num_tokens for use in prompt.blended)
        blended = f" ({prompt.share:.0%} of {again:,} computed again)" if again else ""
        text += (
            f"prompt: {total:,} tokens, {prompt.num_cached:,} reused{blended} and "
            f"{len(prompt.new_ids) - again:,} computed; the answer begins at position {prompt.end:,}\n"
        )
    return text


def _name(layout: Layout, module: ModuleLayout) -> str:
    depth, parent = 0, module.parent
    while parent is not None:
        depth, parent = depth + 1, layout.by_name[parent].parent
    return "  " * depth + (module.name or "(outside)")


def _kind(layout: Layout, module: ModuleLayout) -> str:
    if module.name == OUTSIDE:
        return "always"
    kind = "module" if module.union is None else f"one of union {module.union}"
    return f"{kind}, pinned" if module.pinned else kind


def _range(module: ModuleLayout) -> str:
    return f"{module.start:,} to {module.end - 1:,}" if module.end > module.start else "-"


def _slots(module: ModuleLayout) -> str:
    return ", ".join(f"{param} ({len(slot)} at {slot.start:,})" for param, slot in module.slots.items())


def _num_reused(layout: Layout, module: ModuleLayout, prompt: ReusingPrompt) -> int:
    groups = [(module.name,), *(layout.scaffold_modules(names) for names in layout.scaffolds)]
    own = [layout.segment(names) for names in groups if module.name in names]
    # Members of a union share positions, so both position and token tell what is reused.
    reused = {token for use in prompt.all_uses if use.segment in own for token in use.tokens}
    return len(reused & module.tokens.items())
