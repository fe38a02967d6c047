"""transformers without warnings and progress bars, and its errors on one line."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr

import huggingface_hub.utils.logging as hub_logging
import transformers.utils.logging as transformers_logging

LONGEST_REASON = 240
"""Longest error text, in characters."""


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Context manager without warnings of transformers and the hub, and with progress bars only if `bars`.

    Without bars standard error is discarded as a whole, since one of transformers' bars has no switch.
    """
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    with warnings.catch_warnings(), nullcontext() if bars else redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        if not bars:
            transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            hub_logging.set_verbosity(hub_verbosity)
            if had_bars:
                transformers_logging.enable_progress_bar()


def one_line(error: BaseException | str) -> str:
    """First sentence of an error. transformers' messages are often a page long, with tables and escape sequences."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0]
    for line in lines[1:]:
        if not text.endswith(":"):
            break
        text += f" {line}"
    if isinstance(error, KeyError):
        text = f"KeyError {text}"  # by itself it is only the key in quotes
    # A sentence ends in a full stop before a capital letter; "e.g. x" and "v5.1" do not.
    text = re.split(r"(?<=[a-z\)\]`'\"])[.!] (?=[A-Z])", text, maxsplit=1)[0].rstrip(".! ")
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
