"""Progress bar on standard error, with an estimate of the time left."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):
    """Progress bar in any unit. The time left is estimated from the rate so far.

    Args:
        text: name of the work in progress.
        shown: whether this process shows the bar.
    """

    def __init__(self, text: str, *, shown: bool) -> None:
        shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        super().__init__(total=1, desc=text, bar_format=shape, disable=not shown, leave=False, mininterval=0.5)

    def say(self, text: str) -> None:
        self.set_postfix_str(text)

    def advance(self, amount: float) -> None:
        self.update(amount)

    def step_of(self, total: int, text: str) -> None:
        self.total = total
        self.say(text)
        self.advance(1)
