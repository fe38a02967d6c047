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
from functools import cached_property
from typing import Any, NoReturn

from policies.prompt_cache.prompt import Import, Item, NewText, Prompt
from policies.prompt_cache.schema import MAX_PARAM_TOKENS, RESERVED, ROLES, Module, Node, Param, Role, Schema, Union
from policies.prompt_cache.xml_reader import PMLError

Values = Mapping[str, Any]
Condition = Callable[[Values], bool]
Entering = Callable[[Values], Values | None]
"""From the arguments around a module to those inside of it, or to None if a prompt does not import it."""


def message() -> AbstractContextManager[None]:
    """`with system(): ...`, `with user(): ...` or `with assistant(): ...` is a message of that role."""
    return nullcontext()


system = user = assistant = message


def prompt_program(**num_tokens: int) -> Callable[[Callable[..., None]], PromptProgram]:
    """Decorator that turns a function into a prompt program.

    Args:
        num_tokens: for each argument that is a parameter, the largest number of tokens of its value.

    Raises:
        PMLError: a bound is invalid or names no argument. `schema` reports mistakes inside the function.
    """
    return lambda function: PromptProgram(function, num_tokens)


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
        children, _ = self._read
        if not children:
            raise PMLError(self.source, self.function.__code__.co_firstlineno, self.name, "has no text")
        return Schema(name=self.name, children=children, source=self.source)

    def prompt(self, text: str = "", /, **values: Any) -> Prompt:
        """Prompt for these arguments of the function.

        Args:
            text: text at the end of the prompt.
            values: arguments of the function.

        Raises:
            TypeError: the function does not take these arguments.
            PMLError: as `schema`.
        """
        _, entering = self._read
        inside: dict[str | None, Values] = {None: self._bound(values)}
        items: list[Item] = []
        for module, place in self.schema.places.items():
            around = inside.get(place.parent)
            own = None if around is None else entering[module](around)
            if own is not None:
                inside[module] = own
                items.append(Import(module=module, arguments=self._arguments(module, own)))
        if text:
            items.append(NewText(text=text))
        arguments = self._arguments(None, inside[None])
        return Prompt(schema=self.schema.name, items=tuple(items), arguments=arguments, source=self.name)

    def _bound(self, values: Values) -> Values:
        bound = self.signature.bind(**values)
        bound.apply_defaults()
        return bound.arguments

    def _arguments(self, module: str | None, values: Values) -> dict[str, str]:
        return {name: str(values[name]) for name in self.schema.params(module) if values[name] is not None}

    @cached_property
    def _read(self) -> tuple[tuple[Node, ...], dict[str, Entering]]:
        reader = _ProgramReader(self, (), {})
        return reader.read(), reader.entering


class _ProgramReader:
    """Reader of a program's syntax tree.

    Args:
        program: the program.
        calls: the programs that call it.
        entering: by name, when and with which arguments a prompt imports the modules that are read.
    """

    def __init__(self, program: PromptProgram, calls: tuple[PromptProgram, ...], entering: dict[str, Entering]) -> None:
        self._program, self._calls, self.entering = program, (*calls, program), entering

    def read(self) -> tuple[Node, ...]:
        lines, first = inspect.getsourcelines(self._program.function)
        [function] = ast.parse(textwrap.dedent("".join(lines))).body
        assert isinstance(function, ast.FunctionDef)
        ast.increment_lineno(function, first - 1)
        return self._body(function.body)

    def _body(self, statements: list[ast.stmt]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for statement in statements:
            match statement:
                case ast.Pass():
                    continue
                case ast.Expr(value=ast.Constant(value=str(text))):
                    nodes += [text] if text else []
                case ast.Expr(value=ast.JoinedStr(values=parts)):
                    nodes += map(self._part, parts)
                case ast.Expr(value=ast.Call() as call):
                    nodes.append(self._call(call))
                case ast.If():
                    nodes.append(self._choose(self._branches(statement), statement))
                case ast.Match():
                    nodes.append(self._choose(self._cases(statement), statement))
                case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id=role)))]) if role in ROLES:
                    nodes.append(Role(role=role, children=self._body(statement.body), line=statement.lineno))
                case _:
                    self._refuse(statement, "a prompt program takes strings, if, match, with, pass and calls of others")
        return tuple(nodes)

    def _part(self, part: ast.expr) -> Node:
        """Text or parameter of an f-string."""
        if isinstance(part, ast.Constant):
            return str(part.value)
        name = part.value.id if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else None
        if name is None or name not in self._program.signature.parameters:
            self._refuse(part, "only arguments of the function may stand in {}")
        if name not in self._program.num_tokens:
            self._refuse(part, f"{{{name}}} needs a length in tokens; write @prompt_program({name}=16)")
        return Param(name=name, num_tokens=self._program.num_tokens[name], line=part.lineno)

    def _choose(self, branches: list[tuple[str, Condition, list[ast.stmt]]], statement: ast.stmt) -> Node:
        """Module of a single branch, or union of the modules of all branches, of which the first that holds counts."""
        members = []
        earlier: list[Condition] = []
        for name, holds, body in branches:
            if children := self._body(body):
                members.append(Module(name=name, children=children, line=body[0].lineno))
                self.entering[name] = _first_that_holds(holds, tuple(earlier))
            earlier.append(holds)
        if not members:
            self._refuse(statement, "has no text in any branch")
        only = len(branches) == 1
        return members[0] if only else Union(members=tuple(members), line=statement.lineno)

    def _branches(self, statement: ast.If) -> list[tuple[str, Condition, list[ast.stmt]]]:
        """Name, condition and body of if, elif and else."""
        name, holds = self._condition(statement.test)
        branches = [(name, holds, statement.body)]
        match statement.orelse:
            case []:
                return branches
            case [ast.If() as later]:
                return branches + self._branches(later)
            case otherwise:
                return [*branches, (f"no-{name}", _always, otherwise)]

    def _condition(self, test: ast.expr) -> tuple[str, Condition]:
        holds: Condition
        match test:
            case ast.Name(id=subject):
                name, holds = subject, lambda values: bool(values[subject])
            case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=subject)):
                name, holds = f"no-{subject}", lambda values: not values[subject]
            case ast.Compare(left=ast.Name(id=subject), ops=[ast.Eq()], comparators=[ast.Constant(value=wanted)]):
                name, holds = f"{subject}.{wanted!s}", _equals(subject, wanted)
            case _:
                self._refuse(test, "a condition is an argument, `not` an argument, or `argument == constant`")
        self._check_argument(subject, test)
        return self._named(name, test), holds

    def _cases(self, statement: ast.Match) -> list[tuple[str, Condition, list[ast.stmt]]]:
        if not isinstance(statement.subject, ast.Name):
            self._refuse(statement, "match takes an argument of the function")
        subject = statement.subject.id
        self._check_argument(subject, statement)
        found: list[tuple[str, Condition, list[ast.stmt]]] = []
        for case in statement.cases:
            match case.pattern:
                case ast.MatchValue(value=ast.Constant(value=wanted)) if case.guard is None:
                    name, holds = f"{subject}.{wanted!s}", _equals(subject, wanted)
                case ast.MatchAs(pattern=None, name=None) if case.guard is None:
                    name, holds = f"{subject}.other", _always
                case _:
                    self._refuse(case.pattern, "a case is a constant, or _")
            found.append((self._named(name, case.pattern), holds, case.body))
        return found

    def _call(self, call: ast.Call) -> Module:
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
        children = _ProgramReader(called, self._calls, self.entering).read()
        if not children:
            self._refuse(call, f"{called.name} has no text")
        module = Module(name=self._named(called.name, call), children=children, line=call.lineno)
        self.entering[module.name] = lambda outer: called._bound({key: take(outer) for key, take in sources.items()})
        return module

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


def _equals(name: str, wanted: Any) -> Condition:
    return lambda values: bool(values[name] == wanted)


def _always(values: Values) -> bool:
    return True


def _first_that_holds(holds: Condition, earlier: tuple[Condition, ...]) -> Entering:
    return lambda values: values if holds(values) and not any(each(values) for each in earlier) else None
