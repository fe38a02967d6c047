"""Layout as a table for a terminal: positions of modules, and the tokens that a prompt reuses."""

from __future__ import annotations

from collections.abc import Sequence

from policies.prompt_cache.layout import OUTSIDE, Layout, ModuleLayout
from policies.reuse import ReusingPrompt

TEXTS = ("module", "kind", "arguments")
"""Columns that are left-aligned."""


def layout_table(layout: Layout, prompt: ReusingPrompt | None = None) -> str:
    """Table of the modules of a schema by position; with a prompt, also the number of tokens that it reuses of each."""
    columns = ["module", "kind", "positions", "tokens", "arguments"] + (["reused"] if prompt is not None else [])
    reused = _reused_positions(prompt) if prompt is not None else set()
    rows = [columns]
    for module in layout.modules:
        row = [_name(layout, module), _kind(layout, module), _range(module), f"{len(module.tokens):,}", _slots(module)]
        if prompt is not None:
            row.append(f"{_count(layout, module, prompt, reused):,}")
        rows.append(row)
    lines = [f"schema {layout.schema.name}: {layout.num_positions:,} positions", *_aligned(rows)]
    lines += [f"scaffold: {' '.join(names)}" for names in layout.scaffolds]
    if prompt is not None:
        total = prompt.num_cached + len(prompt.new_ids)
        lines.append(
            f"prompt: {total:,} tokens, {prompt.num_cached:,} reused and {len(prompt.new_ids):,} computed; "
            f"the answer begins at position {prompt.end:,}"
        )
    return "\n".join(lines) + "\n"


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
    return ", ".join(f"{slot.param} ({slot.num_tokens} at {slot.start:,})" for slot in module.slots)


def _reused_positions(prompt: ReusingPrompt) -> set[tuple[int, int]]:
    """(position, token) of all reused tokens; members of a union share positions, so both are needed."""
    found = set()
    for use in prompt.uses:
        stored = [(use.segment.positions[i], use.segment.ids[i]) for i in use.segment.stored]
        found |= {stored[index] for part in use.parts for index in part}
    return found


def _count(layout: Layout, module: ModuleLayout, prompt: ReusingPrompt, reused: set[tuple[int, int]]) -> int:
    names = [layout.segment((module.name,)).name, *_scaffold_names(layout, module)]
    if not any(use.segment.name in names for use in prompt.uses):
        return 0
    return sum(token in reused for token in module.tokens.items())


def _scaffold_names(layout: Layout, module: ModuleLayout) -> list[str]:
    groups = [layout.scaffold_modules(names) for names in layout.scaffolds]
    return [layout.segment(group).name for group in groups if module.name in group]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if name in TEXTS else ">" for name in rows[0]]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
