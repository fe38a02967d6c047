"""Loading of a policy from a Python file outside the repository (policy=file)."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import policies
from launch.inputs.text_files import read_text
from policies.base import Policy
from policies.retriever import Index, Retriever
from runahead.failures import USERS_FILE, first_line
from runahead.ranks.agreement import secret
from runahead.ranks.ranks import Ranks


def policy_class(path: str | None, option: str = "policy") -> type[Policy]:
    """The policy class that a file defines. Files of an option with the same content are loaded once.

    Args:
        option: which names the file in messages, also in those of errors that come through the file later: `policy` or
            `draft.policy`.

    Raises:
        ValueError: in one line, if the file cannot be read or does not define exactly one policy dataclass.
        Exception: whatever its code raises.
    """
    if path is None:
        raise ValueError(f"{option}=file needs {option}.path=<python file>")
    name = f"{option}.path={path}"
    source = read_text(path, name, pipes=False)
    # The name depends on option and content only: rank 0 pickles policies for the others, and pickle finds a class by
    # the name of its module.
    module = ModuleType(f"{option.replace('.', '_')}_file_{hashlib.sha256(source.encode()).hexdigest()}")
    is_new = module.__name__ not in sys.modules
    module = sys.modules.setdefault(module.__name__, module)  # dataclasses look up the types of their fields there
    vars(module)[USERS_FILE] = name
    if is_new:
        try:
            exec(compile(source, path, "exec"), module.__dict__)
        except Exception as error:
            del sys.modules[module.__name__]
            if isinstance(error, SyntaxError):  # which comes from no line that runs
                raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
            if isinstance(error, ImportError):  # a module of this package may have moved
                moved = [each for each in policies.__all__ if f"'{each}'" in error.msg]
                error.msg += "".join(f"; use from policies import {each}" for each in moved)
            raise
    found = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Policy)
        and kind.__module__ == module.__name__
        and not inspect.isabstract(kind)
    ]
    found = [kind for kind in found if not _is_base(kind, found)]
    if len(found) != 1:
        what = f"{len(found)} policies ({', '.join(kind.__name__ for kind in found)})" if found else "no policy"
        raise ValueError(f"{name} defines {what}; define one dataclass that inherits from policies.base.Policy")
    [policy] = found
    if "__dataclass_fields__" not in vars(policy):
        raise ValueError(f"{name}: {policy.__name__} is no dataclass; write @dataclass(kw_only=True) above it")
    return policy


def _is_base(kind: type[Policy], found: Sequence[type[Policy]]) -> bool:
    """Whether a class has no index of its own, and another one inherits from it: it is no policy, but their base."""
    says_none = issubclass(kind, Retriever) and (kind.index_class, kind.index) == (Index, Retriever.index)
    return says_none and any(issubclass(other, kind) for other in found if other is not kind)


def load_files(policy: Any, ranks: Ranks, option: str = "policy") -> None:
    """Load all policy files that an option names, also in steps. Every rank makes the same call.

    Raises:
        ValueError: a file cannot be used, or its content differs between ranks; SharedError on the other ranks.
        Exception: whatever the code of a file raises.
    """
    for path in policy_files(policy):
        kind = ranks.on_all_ranks("the policy file", partial(policy_class, path, option))
        ranks.require_same({f"{option}.path={path}": secret(kind.__module__)}, "give every rank the same file")


def policy_files(value: Any) -> Iterator[str]:
    """Paths of the policy files that policy= names, also in steps, places and scorers."""
    if isinstance(value, dict):
        if value.get("name") == "file" and isinstance(value.get("path"), str):
            yield value["path"]
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        yield from policy_files(each)
