"""Prompt programs: a decorated Python function that is read as a schema and makes prompts (paper, 3.2.4).

    @prompt_program(duration=4)
    def trip(duration: str, surfs: bool, city: str) -> None:
        f"Plan a trip of {duration}."
        if surfs:
            "The traveller surfs."
        match city:
            case "miami":
                miami()
            case "paris":
                "Paris has many bridges."

    trip.schema
    trip.prompt("Highlight the surf spots.", duration="3 days", surfs=True, city="miami")

The function is never run; its source is read. Every string statement is text, including the first one. `{argument}` in
it is a parameter, whose length in tokens the decorator gives. `if` is a module; `if` with `else` and `match` are
unions; a call of another prompt program is a module with its name; `with system():`, `user()` or `assistant()` is a
message. Modules are named after their condition: `surfs`, `city.miami`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from policies.prompt_cache.prompt import Import, Item, NewText, Prompt
from policies.prompt_cache.schema import MAX_PARAM_TOKENS, RESERVED, ROLES, Module, Node, Param, Role, Schema, Union
from policies.prompt_cache.xml_reader import PMLError

Values = Mapping[str, Any]
Condition = Callable[[Values], bool]


def system() -> AbstractContextManager[None]:
    """`with system(): ...` in a prompt program is a system message."""
    return nullcontext()


def user() -> AbstractContextManager[None]:
    """`with user(): ...` in a prompt program is a message of the user."""
    return nullcontext()


def assistant() -> AbstractContextManager[None]:
    """`with assistant(): ...` in a prompt program is a message of the model."""
    return nullcontext()


def prompt_program(**num_tokens: int) -> Callable[[Callable[..., None]], PromptProgram]:
    """Decorator that turns a function into a prompt program.

    Args:
        num_tokens: for each argument that is a parameter, the largest number of tokens of its value.

    Raises:
        PMLError: a bound is invalid or names no argument. `schema` reports mistakes inside the function.
    """
    return lambda function: PromptProgram(function, num_tokens)


@dataclass(frozen=True)
class _Choice:
    """A module that a prompt may import: its condition, its parameters, and the modules inside of it."""

    module: str
    applies: Condition
    params: list[str]
    inner: list[_Choice]
    values: Callable[[Values], Values] = field(default=lambda values: values)


class PromptProgram:
    """A function that is read as a schema; made by `prompt_program`."""

    def __init__(self, function: Callable[..., None], num_tokens: Mapping[str, int]) -> None:
        self.name, self.function, self.num_tokens = function.__name__, function, dict(num_tokens)
        self.signature = inspect.signature(function)
        self.source = inspect.getsourcefile(function) or "program"
        line = function.__code__.co_firstlineno
        for name, bound in num_tokens.items():
            if name not in self.signature.parameters:
                raise PMLError(self.source, line, self.name, f"has no argument {name}, for which a length is given")
            if not 1 <= bound <= MAX_PARAM_TOKENS:
                raise PMLError(self.source, line, self.name, f"{name}={bound} must be from 1 to {MAX_PARAM_TOKENS:,}")

    @cached_property
    def schema(self) -> Schema:
        """Schema that the function describes.

        Raises:
            PMLError: the function has statements that a schema cannot express.
        """
        children, _, _ = self._read
        if not children:
            raise PMLError(self.source, self.function.__code__.co_firstlineno, self.name, "has no text")
        return Schema(name=self.name, children=tuple(children), source=self.source)

    def prompt(self, text: str = "", /, **values: Any) -> Prompt:
        """Prompt for these arguments of the function.

        Args:
            text: text at the end of the prompt.
            values: arguments of the function.

        Raises:
            TypeError: the function does not take these arguments.
            PMLError: as `schema`.
        """
        _, params, choices = self._read
        bound = self._bound(values)
        items: list[Item] = _imports(choices, bound)
        if text:
            items.append(NewText(text=text))
        arguments = _arguments(params, bound)
        return Prompt(schema=self.schema.name, items=tuple(items), arguments=arguments, source=self.name)

    def _bound(self, values: Values) -> Values:
        bound = self.signature.bind(**values)
        bound.apply_defaults()
        return bound.arguments

    @cached_property
    def _read(self) -> tuple[list[Node], list[str], list[_Choice]]:
        return _Reader(self, ()).read()


def _imports(choices: list[_Choice], values: Values) -> list[Item]:
    items: list[Item] = []
    for choice in choices:
        if choice.applies(values):
            own = choice.values(values)
            items.append(Import(module=choice.module, arguments=_arguments(choice.params, own)))
            items += _imports(choice.inner, own)
    return items


def _arguments(params: list[str], values: Values) -> dict[str, str]:
    return {name: str(values[name]) for name in params if values[name] is not None}


class _Reader:
    """Reader of a program's syntax tree. `calls` are the programs that call this one."""

    def __init__(self, program: PromptProgram, calls: tuple[PromptProgram, ...]) -> None:
        self._program, self._calls = program, (*calls, program)

    def read(self) -> tuple[list[Node], list[str], list[_Choice]]:
        lines, first = inspect.getsourcelines(self._program.function)
        [function] = ast.parse(textwrap.dedent("".join(lines))).body
        assert isinstance(function, ast.FunctionDef)
        ast.increment_lineno(function, first - 1)
        return self._body(function.body)

    def _body(self, statements: list[ast.stmt]) -> tuple[list[Node], list[str], list[_Choice]]:
        """Nodes, the names of their own parameters, and the modules that may be imported."""
        nodes: list[Node] = []
        params: list[str] = []
        choices: list[_Choice] = []
        for statement in statements:
            match statement:
                case ast.Pass():
                    continue
                case ast.Expr(value=ast.Constant(value=str(text))):
                    nodes += [text] if text else []
                case ast.Expr(value=ast.JoinedStr(values=parts)):
                    for part in parts:
                        nodes.append(self._part(part, params))
                case ast.Expr(value=ast.Call() as call):
                    module, choice = self._call(call)
                    nodes.append(module)
                    choices.append(choice)
                case ast.If():
                    branches = self._branches(statement)
                    nodes.append(self._choose(branches, statement, choices))
                case ast.Match():
                    nodes.append(self._choose(self._cases(statement), statement, choices))
                case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id=role)))]) if role in ROLES:
                    inner, inner_params, inner_choices = self._body(statement.body)
                    nodes.append(Role(role=role, children=tuple(inner), line=statement.lineno))
                    params += inner_params
                    choices += inner_choices
                case _:
                    self._refuse(statement, "a prompt program takes strings, if, match, with, pass and calls of others")
        return nodes, params, choices

    def _part(self, part: ast.expr, params: list[str]) -> Node:
        """Text or parameter of an f-string."""
        if isinstance(part, ast.Constant):
            return str(part.value)
        name = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else None
        if name is None or name not in self._program.signature.parameters:
            self._refuse(part, "only arguments of the function may stand in {}")
        if name not in self._program.num_tokens:
            self._refuse(part, f"{{{name}}} needs a length in tokens; write @prompt_program({name}=16)")
        params.append(name)
        return Param(name=name, num_tokens=self._program.num_tokens[name], line=part.lineno)

    def _choose(
        self, branches: list[tuple[str, Condition, list[ast.stmt]]], statement: ast.stmt, choices: list[_Choice]
    ) -> Node:
        """Module of a single branch, or union of the modules of all branches."""
        members = []
        for name, applies, body in branches:
            children, params, inner = self._body(body)
            if not children:
                continue
            members.append(Module(name=name, children=tuple(children), line=body[0].lineno))
            choices.append(_Choice(name, applies, params, inner))
        if not members:
            self._refuse(statement, "has no text in any branch")
        only = len(branches) == 1
        return members[0] if only else Union(members=tuple(members), line=statement.lineno)

    def _branches(self, statement: ast.If) -> list[tuple[str, Condition, list[ast.stmt]]]:
        """Name, condition and body of if, elif and else."""
        name, holds = self._condition(statement.test)
        branches = [(name, holds, statement.body)]
        rest = statement.orelse
        if len(rest) == 1 and isinstance(rest[0], ast.If):
            later = self._branches(rest[0])
        elif rest:
            later = [(f"no-{name}", lambda values: True, rest)]
        else:
            later = []
        return branches + [(each, _both(_negated(holds), applies), body) for each, applies, body in later]

    def _condition(self, test: ast.expr) -> tuple[str, Condition]:
        match test:
            case ast.Name(id=name):
                self._check_argument(name, test)
                return self._named(name, test), lambda values: bool(values[name])
            case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
                self._check_argument(name, test)
                return self._named(f"no-{name}", test), lambda values: not values[name]
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=wanted)]):
                self._check_argument(name, test)
                return self._named(f"{name}.{wanted!s}", test), lambda values: bool(values[name] == wanted)
            case _:
                self._refuse(test, "a condition is an argument, `not` an argument, or `argument == constant`")

    def _cases(self, statement: ast.Match) -> list[tuple[str, Condition, list[ast.stmt]]]:
        if not isinstance(statement.subject, ast.Name):
            self._refuse(statement, "match takes an argument of the function")
        subject = statement.subject.id
        self._check_argument(subject, statement)
        found: list[tuple[str, Condition, list[ast.stmt]]] = []
        earlier: list[Any] = []
        for case in statement.cases:
            match case.pattern:
                case ast.MatchValue(value=ast.Constant(value=wanted)) if case.guard is None:
                    earlier.append(wanted)
                    found.append(
                        (self._named(f"{subject}.{wanted!s}", case.pattern), _equals(subject, wanted), case.body)
                    )
                case ast.MatchAs(pattern=None, name=None) if case.guard is None:
                    found.append((self._named(f"{subject}.other", case.pattern), _none_of(subject, earlier), case.body))
                case _:
                    self._refuse(case.pattern, "a case is a constant, or _")
        return found

    def _call(self, call: ast.Call) -> tuple[Module, _Choice]:
        """Module of a called program."""
        name = call.func.id if isinstance(call.func, ast.Name) else None
        scope = inspect.getclosurevars(self._program.function)
        called = {**scope.builtins, **scope.globals, **scope.nonlocals}.get(name or "")
        if name is None or not isinstance(called, PromptProgram):
            self._refuse(call, "is no call of a prompt program")
        if called in self._calls:
            self._refuse(call, f"{called.name} contains itself; modules cannot recur")
        positional = list(called.signature.parameters)
        given = dict(zip(positional, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in positional}
        if len(given) < len(call.args) + len(call.keywords):
            self._refuse(call, f"{called.name} does not take these arguments")
        sources = {key: self._value(value) for key, value in given.items()}
        children, params, inner = _Reader(called, self._calls).read()
        if not children:
            self._refuse(call, f"{called.name} has no text")

        def values(outer: Values) -> Values:
            return called._bound({key: take(outer) for key, take in sources.items()})

        module = Module(name=self._named(called.name, call), children=tuple(children), line=call.lineno)
        return module, _Choice(called.name, lambda outer: True, params, inner, values)

    def _value(self, value: ast.expr) -> Callable[[Values], Any]:
        if isinstance(value, ast.Constant):
            constant = value.value
            return lambda values: constant
        if not isinstance(value, ast.Name):
            self._refuse(value, "is neither an argument of the function nor a constant")
        name = value.id
        self._check_argument(name, value)
        return lambda values: values[name]

    def _named(self, name: str, where: ast.AST) -> str:
        """A name with characters that a module's name may have."""
        name = re.sub(r"[^\w.-]+", "-", name)
        if name in RESERVED:
            self._refuse(where, f"{name} has a meaning of its own in PML; choose another name")
        return name

    def _check_argument(self, name: str, where: ast.AST) -> None:
        if name not in self._program.signature.parameters:
            self._refuse(where, f"{name} is not an argument of {self._program.name}")

    def _refuse(self, where: ast.AST, rule: str) -> NoReturn:
        raise PMLError(self._program.source, getattr(where, "lineno", None), self._program.name, rule)


def _negated(condition: Condition) -> Condition:
    return lambda values: not condition(values)


def _both(a: Condition, b: Condition) -> Condition:
    return lambda values: a(values) and b(values)


def _equals(name: str, wanted: Any) -> Condition:
    return lambda values: bool(values[name] == wanted)


def _none_of(name: str, others: list[Any]) -> Condition:
    return lambda values: values[name] not in others
