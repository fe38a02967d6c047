"""The tables of policies with their options, for docs/policies.md: `python -m tests.policy_table` writes them."""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from launch.inputs.policy_help import shown
from policies import POLICIES
from policies.base import Policy
from policies.retriever import Retriever
from policies.scorer import Scorer

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/policies.md"
BEGIN, END = "<!-- {}: python -m tests.policy_table -->\n", "<!-- end of the table -->\n"
BASES = {Scorer: "score tokens", Retriever: "retrieve"}


def tables() -> dict[str, str]:
    """The tables as Markdown by what the policies do: a line for what they share, and one for each of them."""
    kinds = list(POLICIES.values())
    return {
        "policies that keep": table([kind for kind in kinds if not kind.retrieves]),
        "policies that retrieve": table([kind for kind in kinds if kind.retrieves]),
    }


def table(kinds: list[type[Policy]]) -> str:
    lines = ["|policy|what it does|its options|\n", "|---|---|---|\n"]
    for base, what in BASES.items():
        if any(issubclass(kind, base) for kind in kinds):
            lines.append(f"|all that {what}| |{_options(base, Policy)}|\n")
    for kind in kinds:
        parent = next(each for each in kind.__mro__[1:] if each in BASES or each in kinds or each is Policy)
        also = f"as `{parent.name}`, " if issubclass(parent, Policy) and parent.name else ""
        rest = "" if kind.while_decoding else " All generated tokens stay."
        path = Path(inspect.getfile(kind)).relative_to(ROOT).as_posix()
        does = (sys.modules[kind.__module__].__doc__ or "").partition("\n")[0]
        lines.append(f"|[`{kind.name}`](../{path})|{does}{rest}|{also}{_options(kind, parent)}|\n")
    return "".join(lines)


def _options(kind: type, parent: type) -> str:
    """Options that a class has and its parent has not, or with another default."""
    theirs = _defaults(parent)
    own = {name: value for name, value in _defaults(kind).items() if name not in theirs or theirs[name] != value}
    return ", ".join(f"`{name}`" if is_dataclass(value) else f"`{name}={shown(value)}`" for name, value in own.items())


def _defaults(kind: type) -> dict[str, Any]:
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in (fields(kind) if is_dataclass(kind) else ())
        if each.init
    }


if __name__ == "__main__":
    path = ROOT / PAGE
    text = path.read_text(encoding="utf-8")
    for what, lines in tables().items():
        before, begin, rest = text.partition(BEGIN.format(what))
        text = before + begin + lines + END + rest.partition(END)[2]
    path.write_text(text, encoding="utf-8")
