"""Counts of what the structure of runahead/ is judged by: `python -m tests.structure [folder with runahead/]`.

Classes and calls are read from the source. `--path` runs a small model, for the way to the first token. `--list` names
what is counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

STORES = ("KVStore", "LayerStore", "SeenKV", "Memory", "Codec", "Run", "LayerKV", "KVCache")
"""Interfaces of stores, of which a tree has some."""

HOOK = {"before_save", "save", "wait_for_load", "closed", "attended"}
"""Methods of a hook of a forward."""


@dataclass(frozen=True)
class Class:
    """A class of the source.

    Attributes:
        bases: names of its bases, without packages and type parameters.
        methods: names of the functions in it.
        required: those of them that others have to define: abstract ones, and those that only raise.
    """

    name: str
    path: str
    bases: tuple[str, ...]
    methods: frozenset[str]
    required: frozenset[str]
    is_protocol: bool


@dataclass
class Source:
    """Modules of a package by path, with their classes by name."""

    modules: dict[str, ast.Module]
    classes: dict[str, Class] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path, package: str) -> Source:
        paths = sorted((root / package).rglob("*.py"))
        made = cls({path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths})
        for path, module in made.modules.items():
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef):
                    made.classes[node.name] = _class(node, path)
        return made

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        for path, module in self.modules.items():
            yield from ((path, node) for node in ast.walk(module))

    def inherits(self, name: str, base: str) -> bool:
        """Whether a class is another one or has it among its bases, at any depth."""
        found = self.classes.get(name)
        return name == base or (found is not None and any(self.inherits(each, base) for each in found.bases))

    def all_methods(self, name: str) -> frozenset[str]:
        found = self.classes.get(name)
        if found is None:
            return frozenset()
        return found.methods.union(*(self.all_methods(base) for base in found.bases))

    def stores(self) -> list[str]:
        """Classes that implement an interface of stores, by a base or by having the methods that it requires."""
        kinds = [self.classes[name] for name in STORES if name in self.classes]
        interfaces = {kind.name for kind in kinds if kind.required}
        return [
            name
            for name in self.classes
            if name not in interfaces
            and any(
                self.inherits(name, kind.name) or (kind.required and kind.required <= self.all_methods(name))
                for kind in kinds
            )
        ]

    def attention(self) -> list[str]:
        """Subclasses of LayerAttention."""
        return [name for name in self.classes if name != "LayerAttention" and self.inherits(name, "LayerAttention")]

    def hooks(self) -> list[str]:
        """Hooks of a forward, by a base or by having a method of one."""
        return [
            name
            for name, found in self.classes.items()
            if not found.is_protocol and (self.inherits(name, "LayerHook") or len(HOOK & found.methods) > 1)
        ]


def _class(node: ast.ClassDef, path: str) -> Class:
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    is_protocol = any(_name(base) == "Protocol" for base in node.bases)
    return Class(
        name=node.name,
        path=path,
        bases=tuple(_name(base) for base in node.bases),
        methods=frozenset(each.name for each in functions),
        required=frozenset(each.name for each in functions if is_protocol or _is_required(each)),
        is_protocol=is_protocol,
    )


def _is_required(function: ast.FunctionDef) -> bool:
    abstract = any(_name(each) == "abstractmethod" for each in function.decorator_list)
    return abstract or any(
        isinstance(each, ast.Raise) and _raises(each, "NotImplementedError") for each in function.body
    )


def _name(node: ast.AST | None) -> str:
    """The last part of a name, such as C of a.b.C[int]."""
    if isinstance(node, ast.Subscript | ast.Call):
        return _name(node.value if isinstance(node, ast.Subscript) else node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _raises(node: ast.AST, error: str) -> bool:
    return isinstance(node, ast.Raise) and _name(node.exc) == error


def checks_of_stores(source: Source) -> list[str]:
    """Places where `isinstance` asks for a class of store."""
    stores, found = set(source.stores()), []
    for path, node in source.nodes():
        if isinstance(node, ast.Call) and _name(node.func) == "isinstance" and len(node.args) == 2:
            kinds = [_name(each) for each in ast.walk(node.args[1]) if isinstance(each, ast.Name | ast.Attribute)]
            if stores.intersection(kinds):
                found.append(f"{path}:{node.lineno} {', '.join(kinds)}")
    return found


def not_implemented(source: Source) -> list[str]:
    """Methods that only raise NotImplementedError."""
    return [f"{path}:{node.lineno}" for path, node in source.nodes() if _raises(node, "NotImplementedError")]  # type: ignore[attr-defined]


def drivers(source: Source) -> list[str]:
    """Functions that give new tokens to rows: `row.add(token)`."""
    found = []
    for path, node in source.nodes():
        if isinstance(node, ast.FunctionDef):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            if any(re.search(r"\b(?:row|_?rows\[\w+\])\.add$", ast.unparse(each)) for each in calls):
                found.append(f"{path}:{node.lineno} {node.name}")
    return found


FEATURE = re.compile(
    r"\b(?:prefill|decode|cache|policy|generation|serve|prompt|draft|ranks|partition)(?:=|\.\w+)|\bpolicy \{|"
    r"\bpolicies\b|\bmodel \{|\{name\} |\bsegments?\b|\bconversation\b|\bKV heads?\b|\bin a sequence\b|\bstages\b"
)
"""Words for a feature in a message: an option, policies, a model, reused segments."""


def refusals(source: Source) -> list[str]:
    """Messages of a ValueError, or ends of one, that name two features: an estimate, for what is still to be moved."""
    found = []
    for path, node in source.nodes():
        if "/features/" in path:
            continue
        text = ""
        if _raises(node, "ValueError") and isinstance(node.exc, ast.Call) and node.exc.args:  # type: ignore[attr-defined]
            text = _text(node.exc.args[0])  # type: ignore[attr-defined]
        elif isinstance(node, ast.Assign) and _name(node.targets[0]) in ("against", "why"):
            text = "why " + _text(node.value)
        names = {each.strip() for each in FEATURE.findall(text)}
        if len(names) > 1:
            found.append(f"{path}:{node.lineno} {text[:100]}")  # type: ignore[attr-defined]
    return found


def path_to_first_token() -> list[tuple[str, list[str]]]:
    """Files of runahead/ that a prompt passes on one rank, from `Engine.generate` to the first token, in order.

    A function counts once, when it is first called, so a loop over layers does. A file that is left and entered again
    comes again; functions that call nothing of another file are no part of the way.

    Returns:
        each file that is entered, with the functions that count.
    """
    from runahead import Engine, GenerationOptions, Ranks, RanksOptions
    from runahead.config import Device
    from tests.ranks.tasks import tiny_model

    engine = Engine(tiny_model("llama"), Ranks.start(RanksOptions(device=Device.cpu, threads=1)))
    calls: list[tuple[str, tuple[str, str]]] = []
    callers: set[tuple[str, str]] = set()
    stack: list[tuple[str, str]] = []
    package = f"{ROOT}/runahead/"

    def profile(frame: Any, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(package):
            return
        if event == "return":
            stack.pop()
            return
        function = path.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname
        if stack and stack[-1][0] != function[0]:
            callers.add(stack[-1])
        stack.append(function)
        calls.append((function[0], function))

    def stop(tokens: object) -> list[int]:
        sys.setprofile(None)
        return []

    sys.setprofile(profile)
    try:
        engine.generate([[5, 6, 7, 8, 9]], GenerationOptions(max_new_tokens=2), on_tokens=stop)
    finally:
        sys.setprofile(None)
    way, seen = list[tuple[str, list[str]]](), set[tuple[str, str]]()
    for path, function in calls:
        if function not in seen and function in callers:
            if not way or way[-1][0] != path:
                way.append((path, []))
            way[-1][1].append(function[1])
        seen.add(function)
    return way


def _text(node: ast.AST) -> str:
    """The text of a literal, with {...} for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) for each in node.values)
    return "{" + ast.unparse(node.value) + "}" if isinstance(node, ast.FormattedValue) else ""


def main(arguments: list[str]) -> None:
    folders = [Path(each) for each in arguments if not each.startswith("-")]
    root = folders[0] if folders else ROOT
    source, policies, launch = (Source.read(root, package) for package in ("runahead", "policies", "launch"))
    counted = {
        "store classes": source.stores(),
        "attention classes": source.attention(),
        "hooks": source.hooks(),
        "isinstance on stores": checks_of_stores(source),
        "raise NotImplementedError": [*not_implemented(source), *not_implemented(policies)],
        "drivers of new tokens": drivers(source),
        "refusals outside features": [*refusals(source), *refusals(launch)],
    }
    if "--path" in arguments:
        way = path_to_first_token()
        distinct = len({path for path, _ in way})
        counted[f"files to the first token, {distinct} of them distinct"] = [
            f"{path}: {', '.join(functions)}" for path, functions in way
        ]
    for name, found in counted.items():
        print(f"{len(found):4} {name}")
        if "--list" in arguments:
            print(*(f"       {each}" for each in found), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
