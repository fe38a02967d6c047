"""A bar on standard error, with the time that is probably left."""

from __future__ import annotations

from tqdm import tqdm


class Bar:
    """Progress in any unit; the time left is what the rate so far lets expect.

    Args:
        text: what is going on.
        shown: is this the process that shows it?
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
        """Make room for a line of text."""
        self._tqdm.clear()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._tqdm.close()
