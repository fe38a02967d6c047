"""The policies that are compared: each entry of policies= under each budget, or once if it has no budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.inputs.policies import options_of, policies_of, wraps
from launch.inputs.policy_file import policy_class, policy_files
from policies import POLICIES
from policies.base import Policy
from policies.options import Budget
from policies.pyramidinfer import KeepSchedule, Select
from policies.retriever import Retriever
from runahead.config import Attention, CacheOptions, Positions, PrefillOptions, choice, require
from runahead.files import digest_of_path
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies

OF_RUN = ("positions", "bits", "attention")
"""Settings that are no options of a policy: policy.positions, cache.bits and prefill.attention."""

RECENT_RATIO = 0.2
"""Default `recent_ratio` of PyramidInfer: upper limit of the share of kept tokens that are recent ones."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy under a budget.

    A policy that retrieves does so from texts of any length, unless its settings say otherwise.

    Attributes:
        label: the policy for readers, without the budget.
        budget: one of budgets=, or that among its options; None if it has no budget.
        settings: name and options that it was made of.
        prefill: attention of the prompts.
        files: digest of what it reads and of a Python file that defines it, by path.
        once: why budgets= does not apply to it; None if it does, and for the full cache.
    """

    label: str
    budget: Budget | None
    settings: dict[str, Any]
    policies: RankPolicies
    prefill: PrefillOptions
    files: dict[str, str]
    once: str | None = None

    def check(self, model: Model) -> None:
        """Check that a model runs under it. Raises: ValueError that begins with its name."""
        try:
            self.policies.check(model)
            if self.prefill.streams and model.rotates_by_length:
                raise ValueError(
                    f"model {model.name} rotates by angles that depend on the length of a text, which "
                    "attention=streaming_heads does not know before the question; leave it out"
                )
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    @property
    def name(self) -> str:
        return self.label if self.budget is None else f"{self.label}, {budget_text(self.budget)}"


def budget_text(budget: Budget | None) -> str:
    """Text of a budget for tables and pictures."""
    if budget is None:
        return "-"
    return f"{budget:,} tokens" if isinstance(budget, int) else f"{100 * budget:g}%"


def contenders(entries: Sequence[Any], budgets: Sequence[Budget]) -> list[Contender]:
    """Make the contenders of all entries and budgets, in order.

    Raises:
        ValueError: in one line, for an unknown policy or option, a budget that a policy cannot have, or a policy twice.
    """
    found = []
    for entry in entries:
        settings = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(settings, dict):
            raise ValueError(f"policies has {entry}, which is neither a name nor {{name:<policy>,<option>:<value>}}")
        found += _of_entry(settings, budgets)
    names = [contender.name for contender in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"policies has {twice[0]} more than once; leave one out")
    return found


def _of_entry(settings: dict[str, Any], budgets: Sequence[Budget]) -> list[Contender]:
    """The contenders of one entry: one per budget, or one alone if it has a budget of its own or none."""
    keeper = _keeper(settings)
    if keeper is None:  # a name or an option is wrong, and its message comes from where policies are built
        return [_contender(_label(settings), None, settings)]
    if (once := keeper.why_once) is not None:
        return [_contender(_label(settings), None, settings, once=None if settings["name"] == "full" else once)]
    if keeper.own_budget is not None:
        _policies(settings)  # finds a budget that is none, too
        return [_contender(_label(keeper.without_budget()), keeper.own_budget, settings)]
    label = _label(settings)
    if not budgets:
        raise ValueError(f"policies: {label} needs budgets=[...], or a budget among its options")
    share = next((budget for budget in budgets if isinstance(budget, float)), None)
    if share is not None and not keeper.takes_shares:
        raise ValueError(
            f"budgets={share}: {label} takes no shares, since its budget is an int; give counts of tokens such as "
            f"budgets=[512,1024], or declare budget: Budget in {keeper.kind.__name__}"
        )
    return [_contender(label, budget, keeper.with_budget(budget)) for budget in budgets]


def _contender(label: str, budget: Budget | None, settings: dict[str, Any], once: str | None = None) -> Contender:
    try:
        policies = _policies(settings)
    except ValueError as error:
        if budget is None:
            raise
        raise ValueError(f"{label} with a budget of {budget_text(budget)}: {error}") from error
    read = [*(policy.reads for policy in policies.last if policy.reads is not None), *policy_files(settings)]
    files = {path: digest_of_path(Path(path)) for path in read}
    attention = settings.get("attention", "causal")
    require(attention in ("causal", "streaming_heads"), "attention", attention, "must be causal or streaming_heads")
    return Contender(
        label=label,
        budget=budget,
        settings=settings,
        policies=policies,
        prefill=PrefillOptions(attention=Attention[attention]),
        files=files,
        once=once,
    )


def _policies(settings: dict[str, Any]) -> RankPolicies:
    """Build the policies of these settings. Raises: ValueError."""
    own = {name: value for name, value in settings.items() if name not in OF_RUN}
    positions = choice("positions", Positions, settings.get("positions", Positions.original))
    storage = CacheOptions(bits=settings.get("bits"))
    return RankPolicies.everywhere(policies_of(_at_every_length(own), "policies"), positions, storage)


def _at_every_length(settings: Any) -> Any:
    """The settings of a policy, or of steps in a sequence, by which it retrieves from texts of any length.

    By default policies do not retrieve where that saves no time; what they lose would not be measured.
    """
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, dict):
        return settings
    if settings.get("name") == "sequence" and isinstance(settings.get("steps"), list):
        return settings | {"steps": [_at_every_length(step) for step in settings["steps"]]}
    keeper = _keeper(settings)
    retrieves = keeper is not None and issubclass(keeper.kind, Retriever)
    return keeper.entry({"min_tokens": 0} | keeper.options) if keeper is not None and retrieves else settings


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """The policy that decides how much an entry of policies= keeps, and so has its budget.

    It is the entry itself, the scorer that it wraps, or the last step of a sequence that has a budget.

    Attributes:
        kind: its class.
        options: those that are given.
        entry: its options -> the whole entry with them in place of the given ones.
    """

    kind: type[Policy]
    options: dict[str, Any]
    entry: Callable[[dict[str, Any]], dict[str, Any]]

    @property
    def why_once(self) -> str | None:
        """Why budgets= does not apply; None if it does."""
        if issubclass(self.kind, Retriever):
            return "it keeps all keys and values; its option fetch says how many of them a token reads"
        if "budget" not in self._known:
            return "it has no option budget, and its other options say what it keeps"
        for option in self.kind.replaces_budget:
            if option in self._given:
                return f"its {option} says what it keeps"
        if "mean_keep" in self._known and {"mean_keep", "budget"}.isdisjoint(self._given):
            for option, value in (("schedule", KeepSchedule.cosine), ("select", Select.top_p)):
                if self.options.get(option) == value.name:
                    return f"its mean_keep has no effect with {option}={value.name}"
        return None

    @property
    def own_budget(self) -> Budget | None:
        """The budget among its options."""
        own: list[Budget] = [self.options[name] for name in ("budget", "mean_keep") if name in self._given]
        return own[0] if own else None

    @property
    def takes_shares(self) -> bool:
        """Whether a share may be its budget, which a class of a user's own may declare as an int."""
        [kind] = [field.type for field in self._fields if field.name == "budget"]
        return "mean_keep" in self._known or kind not in (int, int | None, "int", "int | None")

    @property
    def _fields(self) -> tuple[Field[Any], ...]:
        return fields(self.kind)  # type: ignore[arg-type]  # a policy with options is a dataclass

    @property
    def _known(self) -> set[str]:
        return {field.name for field in self._fields}

    @property
    def _given(self) -> set[str]:
        return {name for name in self._known if self.options.get(name) is not None}

    def with_budget(self, budget: Budget) -> dict[str, Any]:
        """The entry with a budget; for PyramidInfer a share is the mean over layers."""
        if "mean_keep" not in self._known or isinstance(budget, int):
            return self.entry(self.options | {"budget": budget})
        # A layer must keep room for tokens that are not recent, and no minimum may raise the mean, above all in short
        # chunks.
        room = {"recent_ratio": min(RECENT_RATIO, budget / 2), "min_tokens": 1}
        return self.entry(room | self.options | {"mean_keep": budget})

    def without_budget(self) -> dict[str, Any]:
        """The entry without a budget among its options."""
        return self.entry({name: value for name, value in self.options.items() if name not in ("budget", "mean_keep")})


def _keeper(settings: Any) -> Keeper | None:
    """The policy that decides how much these settings keep; None if they are no policy's."""
    if isinstance(settings, str):
        settings = {"name": settings}
    if not isinstance(settings, dict):
        return None
    name = settings.get("name")
    if name == "sequence":
        return _keeper_of_steps(settings)
    if isinstance(name, str) and wraps(name):
        scorer = _keeper(settings.get("scorer", _default_scorer(settings)))
        return scorer and replace(scorer, entry=lambda options: settings | {"scorer": scorer.entry(options)})
    if name == "file" and isinstance(settings.get("options", {}), dict):
        return Keeper(
            kind=policy_class(settings.get("path")),
            options=settings.get("options", {}),
            entry=lambda options: settings | {"options": options},
        )
    if not isinstance(name, str) or name not in POLICIES:
        return None
    return Keeper(kind=POLICIES[name], options=settings, entry=lambda options: options)


def _keeper_of_steps(settings: dict[str, Any]) -> Keeper | None:
    """The last step of a sequence that has a budget, or the last one if none has."""
    steps = settings.get("steps")
    if not isinstance(steps, list) or not steps:
        return None
    keepers = [keeper for step in steps if (keeper := _keeper(step)) is not None]
    if len(keepers) < len(steps):
        return None
    at = max((at for at, keeper in enumerate(keepers) if keeper.why_once is None), default=len(steps) - 1)
    last = keepers[at]
    return replace(
        last, entry=lambda options: settings | {"steps": [*steps[:at], last.entry(options), *steps[at + 1 :]]}
    )


def _default_scorer(settings: dict[str, Any]) -> Any:
    """The policy that another one wraps by default."""
    [default] = [field.default for field in fields(options_of(settings["name"])) if field.name == "scorer"]
    return default


def _label(settings: dict[str, Any]) -> str:
    """A policy and its options; a policy of a file is called by its path."""
    name, given = settings.get("name"), settings
    if name == "file":
        name, given = settings.get("path"), settings.get("options", {})
    options = ", ".join(f"{option}={_short(value)}" for option, value in given.items() if option != "name")
    return f"{name}({options})" if options else str(name)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_short, value)) + "]"
    return _label(value) if isinstance(value, dict) and "name" in value else str(value)
