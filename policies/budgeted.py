"""Base of policies whose budget includes tokens that always stay."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar

from policies.base import Policy
from policies.options import budget_tokens, require

MOST_TOKENS = 1 << 32
"""More than any budget."""


class Budgeted(Policy):
    """Base of policies whose budget, a number of tokens or a share, includes first and last ones that always stay."""

    without_room: ClassVar[str] = "of which as many stay as fit"
    """What is done with tokens that always stay, if a share has no room for them."""

    sinks: int
    recent: int

    @property
    def budget_option(self) -> str:
        """Name of the option that is the budget."""
        return "budget"

    def recent_of(self, num_kept: int) -> int:
        """Number of last tokens that always stay, of so many slots."""
        return self.recent

    def has_room(self, budget: int, most: int | None = None) -> bool:
        """Whether a budget, and each larger one, has room for the tokens that always stay.

        Args:
            most: tokens of the prompt, if the budget is a share of it.
        """
        return budget >= self.sinks + self.recent_of(budget)

    @property
    def stays(self) -> str:
        """Options that say which tokens always stay, in words."""
        return self.staying("sinks", "recent")

    def staying(self, *names: str) -> str:
        """Those of these options that are not 0, in words."""
        return " and ".join(f"policy.{name}={value}" for name in names if (value := getattr(self, name)))

    def require_room(self) -> None:
        """Check a budget in tokens, once the options on which its room depends are checked. Raises: ValueError."""
        budget = getattr(self, self.budget_option)
        if isinstance(budget, int) and not self.has_room(budget):
            least = bisect_left(range(MOST_TOKENS), True, lo=budget, key=self.has_room)
            remedy = f"use at least {least}" if least < MOST_TOKENS else "no budget has, so change one of these options"
            require(False, self.budget_option, budget, f"has no room for {self.stays}; {remedy}")

    def no_room(self, prompt_tokens: int) -> str:
        budget = getattr(self, self.budget_option, None)
        if not isinstance(budget, float):
            return ""
        tokens = budget_tokens(budget, prompt_tokens)
        if tokens == prompt_tokens or self.has_room(tokens, prompt_tokens):
            return ""
        share = f"policy.{self.budget_option}={budget} is {tokens:,} of {prompt_tokens:,} tokens"
        return f"{share}, with no room for {self.stays}, {self.without_room}"
