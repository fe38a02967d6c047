"""JSON schemas and grammars as constraints on tokens, by llguidance: which tokens keep a text on the way to one."""

# Legend: V vocabulary.

from __future__ import annotations

import json
import threading
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runahead.config import Guide
from runahead.failures import first_line
from runahead.ranks.worker import SubmittedCall, Worker

LAYOUT: Any = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False, "lenient": False}
"""At most one blank after a comma or a colon: where any whitespace is allowed, a model may write blanks without end.
Keywords that llguidance does not know are refused, whatever the schema says about that."""

MOST_GRAMMARS = 32
"""Schemas and grammars whose parsers are kept for the next rows; the one that was not used for longest goes first."""

FREE = r"""
ANY: /(.|\n)*/
BLANKS: /[ \n]{0,4}/
free_part: until_end BLANKS
"""
"""Rules of a free part, after which models write blanks. Another rule says that it ends where its end comes first."""


class Grammars:
    """Constraints by JSON schemas and grammars for the tokens of one model. Any thread may call it.

    Args:
        tokenizer: the model's; None if it has none.
        vocab_size: number of logits.
        eos_ids: token ids that end an answer.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: set[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._compiled: dict[Guide, SubmittedCall] = {}  # matchers, that which was used last at the end
        self._worker: Worker | None = None
        self._read_vocabulary: Any = None

    def warm_up(self) -> None:
        """Read the vocabulary now, so that no row has to wait for it. Without llguidance nothing is done."""
        with suppress(ValueError):  # `check` says why
            _ = self._vocabulary

    def check(self, guide: Guide) -> None:
        """Check that answers can follow a JSON schema or a grammar.

        Raises:
            ValueError: llguidance or a tokenizer is missing, or the schema or grammar is wrong, or the schema has a
                keyword that llguidance does not support.
        """
        self.constraint(guide)

    def prepare(self, guide: Guide) -> None:
        """Begin to compile a schema or grammar in a thread of its own, unless that was done."""
        job, is_new = self._job(guide)
        if is_new:
            with self._lock:
                self._worker = self._worker or Worker("grammars")
            self._worker.submit(job.run)

    def is_prepared(self, guide: Guide, block_s: float) -> bool:
        """Whether `constraint` would return at once. Blocks for `block_s` seconds at most until it would."""
        with self._lock:
            job = self._compiled.get(guide)
        return job is None or job.done.wait(block_s)

    def constraint(self, guide: Guide) -> GrammarConstraint:
        """The constraint of one row. Raises: ValueError, as `check`."""
        job, is_new = self._job(guide)
        if is_new:
            job.run()
        job.done.wait()
        if job.error is not None:
            with self._lock:
                if self._compiled.get(guide) is job:
                    del self._compiled[guide]
            raise job.error
        return GrammarConstraint(job.result.deep_copy(), self._vocab_size)

    def _job(self, guide: Guide) -> tuple[SubmittedCall, bool]:
        """The job that compiles a schema or grammar, and whether it is new, so that the caller has to run it."""
        with self._lock:
            job, is_new = self._compiled.pop(guide, None), False
            if job is None:
                job, is_new = SubmittedCall(partial(self._matcher, guide)), True
                if len(self._compiled) >= MOST_GRAMMARS:
                    del self._compiled[next(iter(self._compiled))]
            self._compiled[guide] = job
        return job, is_new

    def _matcher(self, guide: Guide) -> Any:
        vocabulary = self._vocabulary
        from llguidance import LLMatcher

        if guide.is_schema:
            try:
                grammar = LLMatcher.grammar_from_json_schema(guide.text, overrides=LAYOUT)
            except ValueError as error:
                raise ValueError(f"llguidance: {first_line(error)}") from error
        else:
            grammar = json.dumps({"grammars": [{"lark_grammar": guide.text}]})
        if guide.free_part is not None:
            grammar = self._after_free_part(grammar, *guide.free_part)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"llguidance: {matcher.get_error().strip().splitlines()[0]}")
        return matcher

    def _after_free_part(self, grammar: str, begin: str, end: str) -> str:
        """A grammar after a part of any text, which comes if `begin` is empty or the text begins with it."""
        ends_at_token = (last := self._terminal(end)).startswith("<")  # which no text of the lexer's holds
        until_end = f"until_end{'' if ends_at_token else '[lazy]'}: ANY {last}\n"
        start = f"start: ({self._terminal(begin)} free_part)? @then\n" if begin else "start: free_part @then\n"
        [then] = json.loads(grammar)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": start + until_end + FREE}, then | {"name": "then"}]})

    def _terminal(self, text: str) -> str:
        """A text in Lark: one token if it is a special one, which no other text matches."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        token = tokenizer.get_added_vocab().get(text)
        is_special = token is not None and not tokenizer.decode([token], skip_special_tokens=True)
        return f"<[{token}]>" if is_special else json.dumps(text)

    @property
    def _vocabulary(self) -> Any:
        """llguidance's form of the tokenizer, which takes up to a second to make."""
        with self._vocabulary_lock:
            if self._read_vocabulary is None:
                self._read_vocabulary = self._vocabulary_of_tokenizer()
            return self._read_vocabulary

    def _vocabulary_of_tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(
                f"guided answers need {error.name}, which is not installed; use pip install -e '.[guided]'"
            ) from error
        if self._tokenizer is None or not self._eos_ids:
            missing = "a tokenizer" if self._tokenizer is None else "an end token"
            raise ValueError(f"guided answers need a model with {missing}, and this one has none")
        own = self._tokenizer.eos_token_id
        eos_id = own if own in self._eos_ids else min(self._eos_ids)
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=eos_id)
        except Exception as error:  # of whatever kind llguidance raises for a tokenizer that it cannot read
            raise ValueError(f"llguidance cannot read this model's tokenizer: {first_line(error)}") from error


class GrammarConstraint:
    """Constraint of one row: a parser that has read the tokens so far. After what it reads only the end is allowed.

    Args:
        matcher: llguidance's.
        vocab_size: number of logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self, device: torch.device) -> Tensor:
        """The tokens that may come next, as bool (V)."""
        # An eighth of the bytes goes to a GPU, where the bits are spread out; the model's forward may still run there.
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        packed = packed.to(device, non_blocking=True)
        bits = torch.arange(8, dtype=torch.uint8, device=device)
        return (packed[:, None] >> bits & 1).flatten()[: self._vocab_size].bool()

    def add(self, token: int) -> None:
        """Take the token that came."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():  # a limit of llguidance's parser; the mask leaves the end token only
            reason = self._matcher.get_error().strip().splitlines()[0]
            warnings.warn(f"a guided answer ends before its time: {reason}", stacklevel=2)
