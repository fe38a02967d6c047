"""A model that compares its logits with others, and computes accordingly: in its last layer, in chunks, in blocks."""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from runahead.attention import flash
from runahead.attention.base import LayerAttention
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.config import Weights
from runahead.failures import PeerFailure, is_lack_of_memory
from runahead.files import cache_folder
from runahead.kernels.operators import KERNELS
from runahead.model.checks.known_checks import KnownCheck
from runahead.model.checks.logits_check import LogitsCheck, StatesLost, check_text, differ, routes_to_experts
from runahead.model.fingerprint import model_fingerprint
from runahead.model.held import Held
from runahead.model.layers.fusing import apart, is_fused, unfuse
from runahead.model.layers.int8 import unrounded
from runahead.model.layers.pieces import give_in_blocks, give_in_pieces
from runahead.model.loading.kernels import library_folder
from runahead.model.loading.quiet import one_line
from runahead.model.model_layers import ModelLayers
from runahead.ranks.agreement import fact

BLOCK_OF_CHECK = 3
"""Tokens of a block in the comparison of logits."""


class CheckedModel(ModelLayers):
    """A model with the checks that are made when it is loaded, shared by ranks, or first computes blocks of rows.

    Where logits are right only in one of several ways, the model goes on in that way.

    Attributes:
        check: "done" by this run, "kept" from an earlier one, or "none", as there is nothing to compare with.
        gives_one_by_one: layers that hold a state are given the tokens after one by one, but for a text's first chunk.
    """

    check = "none"
    gives_one_by_one = False
    weights: Weights
    _wrong_in_blocks: str | None = None  # not known yet
    _writes_in_place = False

    @abstractmethod
    def forward(
        self,
        ids_BC: Tensor,
        attention: LayerAttention,
        *,
        start: int,
        pads: list[int],
        all_logits: bool = False,
        row_tokens: int | None = None,
    ) -> Tensor:
        """The forward of `Model`, with the arguments that its checks need."""

    @abstractmethod
    def empty_cache(self, num_tokens: int) -> KVCache:
        """A KV cache with room for `num_tokens` tokens in every layer."""

    def _check_logits(self, made_from: str) -> None:
        """`_compare_logits`, unless a run before did so for a model made from the same."""
        if not self.has_reference:
            return
        known, fused, last = None, is_fused(self.module), self.last_layer
        if made_from and self.held is None:
            uses_kernels = KERNELS.in_use or self.weights is Weights.int8
            kernels = library_folder().name if uses_kernels else flash.in_use()  # what computes attention, or products
            about = fact(f"{made_from} {fused} {kernels}")
            weights = model_fingerprint(self.module)
            known = KnownCheck.of_model(cache_folder(), weights, about, self.dtype, self.device)
        self.check = "kept" if known is not None and known.is_kept() else "done"
        if self.check == "done":
            self._compare_logits()
            is_as_before = is_fused(self.module) == fused and self.last_layer == last  # or each run says what it found
            if known is not None and is_as_before:
                known.keep()

    def _compare_logits(self) -> None:
        """Compare the logits with transformers' own; what is fused is taken apart if they are right only without it.

        Raises:
            ValueError: they are others.
        """
        try:
            self._require_logits()
        except PeerFailure:
            raise
        except Exception as error:  # the family's code may change in place what it has given to several modules
            if lacks_memory(error):
                raise
            if self._is_right_whole(self._require_logits):
                self._tell_whole(error)
                return
            if not unfuse(self.module):
                raise
            self.gives_one_by_one = False
            self._compare_logits()
            warnings.warn(f"{self.family} is computed as with model.fuse=off ({one_line(error)})", stacklevel=2)

    def _require_logits(self) -> None:
        check = self._logits_check()
        with unrounded(self.module):
            if self.held is None:
                check.require(*check.expected(), "transformers' own")
            else:
                self._require_states(check, self.held)
                check.require_last_alone()
        if self.weights is Weights.int8:
            check.require_products()

    def _tell_whole(self, error: Exception) -> None:
        warnings.warn(
            f"{self.family} computes all tokens of a prompt in its last layer ({one_line(error)})", stacklevel=3
        )

    def _is_right_whole(self, require: Callable[[], None]) -> bool:
        """Whether logits are right if the last layer computes all tokens, as it does from now on in that case.

        Args:
            require: raises an error if they are not.
        """
        last, self.last_layer = self.last_layer, None
        if last is None:
            return False
        try:
            require()
        except PeerFailure:
            raise
        except Exception as error:
            if lacks_memory(error):
                raise
            self.last_layer, self.gives_one_by_one = last, False
            return False
        self._is_whole_only = True
        return True

    def _require_states(self, check: LogitsCheck, held: Held) -> None:
        """Check that layers begin from given states, if need be with tokens one by one, and see when they read these.

        Raises:
            ValueError: they do not, or only without what is fused.
        """
        give_in_pieces(self.module, self._run_one_token)
        try:
            check.require_states(held)
        except StatesLost as error:
            if is_fused(self.module) and self._begins_apart(check, held):
                raise
            self.gives_one_by_one = True
            try:
                check.require_states(held)
            except PeerFailure:
                raise
            except Exception as other:  # as above: the family's code may return what is not put together from tokens
                if lacks_memory(other):
                    raise
                raise error from None
        else:
            self.held = replace(held, reads_late=True)
            self.held = self.held if check.reads_late() else held

    def _begins_apart(self, check: LogitsCheck, held: Held) -> bool:
        """Whether layers begin from given states by the family's own code."""
        with apart(self.module):
            try:
                check.require_states(held)
            except StatesLost:
                return False
        return True

    def _logits_check(self) -> LogitsCheck:
        return LogitsCheck(
            module=self.module,
            name=self.name,
            shares=self.shares,
            forward=self.forward,
            empty_cache=self.empty_cache,
            run_one_token=self._run_one_token,
        )

    def wrong_in_blocks(self) -> str:
        """Why layers must not compute blocks of rows, in a sentence; "". All shares of a model call this alike.

        The first call compares logits; the next one, where that failed for lack of memory or was interrupted.
        """
        if self._wrong_in_blocks is None:
            found: str | None = None
            self._wrong_in_blocks = ""  # for the forwards of the comparison
            try:
                found = self._compare_blocks()
            except PeerFailure:
                raise
            except Exception as error:  # the family's code may expect all tokens
                if lacks_memory(error):
                    raise
                found = one_line(error)
            finally:
                self._wrong_in_blocks = found
        if not self._wrong_in_blocks:
            return ""
        return (
            f"{self.family} gives other logits where layers compute a chunk in blocks of rows ({self._wrong_in_blocks})"
        )

    def _compare_blocks(self) -> str:
        """Have layers compute blocks of rows from now on, and say how logits of a short text are off, or "".

        Layers write over their input, so that a forward needs memory for one, unless the model's code reads it again.
        """
        held, layers = self.held, enumerate(self._layers)
        kv_layers = set(self.kv_layers)
        give_in_blocks(
            (each, number in kv_layers) for number, each in layers if held is None or not self._is_whole(held, number)
        )
        if routes_to_experts(self.module) and self.dtype.itemsize < 4:  # rounding exchanges experts
            return ""
        ids_1C, off = check_text(self.vocab_size, self.device), ""

        def logits(row_tokens: int | None) -> Tensor:
            attention = CausalAttention(self.empty_cache(ids_1C.shape[1]), start=0, pads=[0])
            return self.forward(ids_1C, attention, start=0, pads=[0], all_logits=True, row_tokens=row_tokens)

        whole_1CV = logits(None)
        for self._writes_in_place in (True, False):
            off = differ(logits(BLOCK_OF_CHECK), whole_1CV, self.dtype)
            if self.shares is not None:
                off = next(filter(None, self.shares.gather(off)), "")
            if not off:
                break
        return off

    @property
    def computes_blocks(self) -> bool:
        """Whether layers can compute their tokens in blocks of rows: see `forward`."""
        return self.has_layers and self.has_reference and not self._wrong_in_blocks

    def _is_whole(self, held: Held, layer: int) -> bool:
        """Whether a layer computes all tokens of a forward at once."""
        return layer in held.state_of and (self.gives_one_by_one or layer in held.kv_of)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, by an error or by that which caused it."""
    known = [each for each in (error, error.__cause__) if each is not None]
    return any(isinstance(each, torch.OutOfMemoryError) or is_lack_of_memory(each) for each in known)
