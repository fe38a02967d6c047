"""Progress bar on standard error, with an estimate of the time left."""

from __future__ import annotations

from tqdm import tqdm


class Bar:
    """Progress bar in any unit. The time left is estimated from the rate so far.

    Args:
        text: name of the work in progress.
        shown: whether this process shows the bar.
    """

    def __init__(self, text: str, *, shown: bool) -> None:
        shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._tqdm = tqdm(total=1, desc=text, bar_format=shape, disable=not shown, leave=False, mininterval=0.5)

    @property
    def total(self) -> float:
        return float(self._tqdm.total)

    @total.setter
    def total(self, value: float) -> None:
        self._tqdm.total = value

    def say(self, text: str) -> None:
        self._tqdm.set_postfix_str(text)

    def advance(self, amount: float) -> None:
        self._tqdm.update(amount)

    def step_of(self, total: int, text: str) -> None:
        self.total = total
        self.say(text)
        self.advance(1)

    def clear(self) -> None:
        """Remove the bar until the next update, so that a line of text can be printed."""
        self._tqdm.clear()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._tqdm.close()
