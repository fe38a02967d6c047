"""`Conversation`: several turns over one KV cache in one process; feed tokens, let the model answer, feed more.

Tokens that a policy dropped after one turn are missing in the next. Use it for a chat under a cache policy, for a long
text in chunks that each see what was kept of the text before, and for a question about a context whose tokens were
chosen without it. On several ranks, without policies: `ShardedConversation`.
"""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import Cache

from policies.row_values import row_values
from runahead.attention.answers import Answers
from runahead.attention.op import nothing
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.config import GenerationOptions, Speculate
from runahead.decoding.forward import Forward, forward_one_by_one, forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, RowId, batch_ids
from runahead.decoding.rows import Choose, Decoded, choose_alone, decode
from runahead.decoding.sampling import check_options
from runahead.decoding.speculative.speculator import Draft, Speculator
from runahead.features.refused import check
from runahead.features.setup import DYNAMIC_CACHE, Setup
from runahead.model.model import Model
from runahead.prefill.scoring import PromptScorer
from runahead.report import SpeculationReport
from runahead.thinning.policy_hook import attention_under
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.replay import decide_on_prompt
from runahead.thinning.steps import PolicySteps


class Conversation:
    """A text so far and its KV cache, as far as policies keep it.

    A text that grows past the length where LongRoPE changes its tables, with a turn or in an answer, is computed anew
    there, under policies as one prompt.

    Args:
        model: the model.
        policies: run after each layer in every turn, as on the rank that decodes; by default all tokens are kept.
        length: number of tokens that the conversation will have, for models whose RoPE depends on it.
        draft: what drafts answers with `generation.speculate=model` or `policy`, as of `Engine`.

    Attributes:
        rank_policies: the policies as given.
        length: number of tokens as given; 0 if it is unknown.
        pads: left padding of each row.
        rows: token ids of each row, without padding, including generated ones.
        cache: the KV cache; None before the first turn.
        num_tokens: number of tokens per row that went through the cache, including padding.
        long_rows: rows whose keys are rotated by LongRoPE's tables for long texts.
        logits_BV: logits of the last token that was fed; None after an answer, whose last token is fed with the next
            turn.
        speculation: statistics of the last answer that was drafted.

    Raises:
        ValueError: the policies cannot run on this model.
    """

    def __init__(
        self,
        model: Model,
        policies: RankPolicies | None = None,
        *,
        length: int | None = None,
        draft: Model | RankPolicies | Draft | None = None,
    ) -> None:
        policies = policies or RankPolicies()
        self._setup = Setup(policies=policies, cache=policies.storage, model=model, num_shares=model.num_shards, rows=0)
        check(self._setup)
        policies.read_files(model)
        self.model, self.policies = model, policies.on_rank(is_last=True)
        self._between_turns, self.rank_policies = policies.between_turns, policies
        self._speculator = Speculator(model, draft, on_layer=nothing)
        self.speculation: SpeculationReport | None = None
        self.pads: list[int] = []
        self.rows: list[list[int]] = []
        self.cache: KeptCache | None = None
        self.num_tokens = 0
        self.long_rows = frozenset[int]()
        self.logits_BV: Tensor | None = None
        self.length = length or 0
        self._unfed_B1: Tensor | None = None
        self._is_whole = True
        self._is_decided = policies.deciding is None

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for kept tokens."""
        return 0 if self.cache is None else self.cache.num_bytes

    @property
    def full_kv_bytes(self) -> int:
        """Bytes that the keys and values of all tokens so far would take, with the states of the rows."""
        rows = len(self.pads)
        states = rows * sum(shape.num_bytes for shape in self.model.state_shapes)
        return states + self.num_tokens * sum(shape.bytes_per_token(rows) for shape in self.model.kv_shapes)

    @property
    def kept_tokens(self) -> list[int]:
        """Number of kept tokens of the longest row, by layer, on average over KV heads."""
        return [] if self.cache is None else [layer.tokens_per_head - min(layer.pads) for layer in self.cache.layers]

    @torch.inference_mode()
    def feed(
        self, ids_BC: Tensor, *, pads: list[int] | None = None, all_logits: bool = False, cut_back: bool = True
    ) -> Tensor:
        """Append tokens to the conversation.

        Args:
            ids_BC: token ids; a single row is used for all rows of the conversation.
            pads: left padding of each row; under cache policies or `cache.bits` only with the first tokens.
            all_logits: return the logits of all these tokens instead of the last one's. Under policies that narrow,
                those of the other tokens are computed as by `peek` in a second forward, since dropped tokens have none.
            cut_back: False to drop no tokens yet: in all chunks of a prompt but the last one, if policies need to see
                the whole prompt. A policy that decides on all layers at once does so once, and keeps all later tokens.

        Returns:
            logits (B, V), or (B, C, V), in at least float32. On padding of a later turn they are those of tokens before
            it, which are computed again in its place.

        Raises:
            ValueError: no or unknown tokens, another number of rows, padding that is not possible, more tokens than the
                model has positions, or an earlier turn failed half-way.
        """
        keeps_all = not self.rank_policies and self._moves_rows
        pads = self._checked_pads(ids_BC, pads, keeps_all=keeps_all)
        if self.cache is None:
            self.pads, self.rows = pads, [[] for _ in pads]
            self.cache = self.rank_policies.cache(self.model, batch=len(pads), has_turns=True)
        with self._advancing():
            given, is_first = ids_BC.shape[1], not self.num_tokens
            ids_BC = self._taken_in(ids_BC, pads)
            if self._outgrows(self.num_tokens + ids_BC.shape[1], [] if is_first else pads):
                ids_BC = self._begun_anew(self.rows)
            elif any(pads) and not is_first:
                self._forget_last(pads)
                ids_BC = self._newest(ids_BC.shape[1])
            every = None
            if all_logits and ids_BC.shape[1] > 1 and any(policy.narrows for policy in self.policies):
                every = self._unthinned()._forward(ids_BC, all_logits=True, cut_back=False)
            logits = self._forward(ids_BC, all_logits=all_logits and every is None, cut_back=cut_back)
        self.logits_BV = logits[:, -1] if logits.ndim == 3 else logits
        if not all_logits:
            return self.logits_BV
        if every is not None:
            every[:, -1] = self.logits_BV
            logits = every
        return logits[:, -given:]

    @torch.inference_mode()
    def take(self, cache: Cache, ids_BC: Tensor, *, pads: list[int] | None = None) -> None:
        """Begin with what transformers computed: the `past_key_values` that its model or `generate` returns.

        The first layer's keys and values of all tokens that it holds are compared with those of the ids, and the last
        token's in all layers up to the first one with a window that has lost tokens. So ids of tokens that the first
        layer has lost, before its window, are not checked. Tokens that the cache lacks are fed, such as the last one of
        an answer.

        Args:
            cache: a `DynamicCache`, which is copied.
            ids_BC: the text, which begins with the tokens of the cache.
            pads: left padding of each row.

        Raises:
            ValueError: the conversation has begun, the cache is not one of this text and model, or not of a form that
                goes with this conversation.
        """
        check(replace(self._setup, options={DYNAMIC_CACHE: True}))
        if self.cache is not None:
            raise ValueError("this conversation has begun; take the cache into a new one")
        num_tokens, num_given = cache.get_seq_length(), ids_BC.shape[1]
        if not 0 < num_tokens <= num_given:
            raise ValueError(
                f"the cache has {num_tokens} tokens and {num_given} ids were given; give the ids of all of its tokens, "
                "and then those that it lacks"
            )
        pads = self._checked_pads(ids_BC, pads)
        if max(pads) >= num_tokens:
            raise ValueError(f"pads={pads}: each row has a token in the cache, which has {num_tokens} with padding")
        from runahead.dynamic_cache.taken import kv_of_last, require_same, require_same_ids, taken

        made = taken(cache, self.model, num_tokens=num_tokens, pads=pads)
        require_same_ids(made, self.model, ids_BC[:, :num_tokens].to(self.model.device), pads)
        self.pads, self.rows, self.cache = pads, [[] for _ in pads], made
        with self._advancing():
            ids_BS = self._taken_in(ids_BC[:, :num_tokens], pads)
            given = [each.clone() for each in kv_of_last(made)]
            made.take_back(1)
            self.num_tokens = num_tokens - 1
            logits_BV = self._forward(ids_BS[:, -1:], all_logits=False, cut_back=True)
            computed = kv_of_last(made)
            is_compared = require_same(computed, given, made, self.model, pads)
            for mine_BKX, theirs_BKX in zip(computed, given, strict=True):
                mine_BKX.copy_(theirs_BKX)
        self.logits_BV = logits_BV if is_compared else None
        if num_given > num_tokens:
            self.feed(ids_BC[:, num_tokens:])

    def peek(self, ids_BC: Tensor) -> Tensor:
        """Logits (B, C, V) after each of these tokens if they came next, without changing the conversation.

        Every token sees the kept tokens of earlier turns and all earlier tokens of this one. Under a retrieving policy
        it sees what is retrieved for it, as generated tokens do.

        Raises:
            ValueError: as `feed`.
        """
        if self.cache is not None and self.rank_policies.retriever is not None:
            return self.fork().follow(ids_BC)
        return self._unthinned().feed(ids_BC, all_logits=True)

    @torch.inference_mode()
    def follow(self, ids_BC: Tensor, *, at_once: bool = False) -> Tensor:
        """Append these tokens one at a time, as if the model had generated them.

        Args:
            at_once: compute them in one forward if `follows_at_once`, with the same result but for rounding.

        Returns:
            logits (B, C, V) after each of them, in at least float32.

        Raises:
            ValueError: as `feed`, or nothing was fed before.
        """
        if self.cache is None:
            raise ValueError("there is nothing that tokens could follow; feed some first")
        pads = self._checked_pads(ids_BC, None)
        with self._advancing():
            given, ids_BC, logits = ids_BC.shape[1], self._taken_in(ids_BC, pads), list[Tensor]()
            while num_left := ids_BC.shape[1]:
                if self._outgrows(self.num_tokens + 1):
                    so_far = [ids[: len(ids) - num_left + 1] for ids in self.rows]
                    logits.append(self._forward(self._begun_anew(so_far), all_logits=False, cut_back=True)[:, None])
                else:
                    ends = enumerate(range(self.num_tokens + 1, self.num_tokens + num_left + 1))
                    num = next((num for num, end in ends if self._outgrows(end)), num_left)
                    at_once = at_once and self.follows_at_once
                    logits.append(self._forward_in_turn(ids_BC[:, :num], at_once=at_once))
                    self.num_tokens += num
                ids_BC = ids_BC[:, logits[-1].shape[1] :]
        logits_BCV = torch.cat(logits, dim=1)
        self.logits_BV = logits_BCV[:, -1]
        return logits_BCV[:, -given:]

    def generate(self, options: GenerationOptions | None = None) -> Decoded:
        """Generate an answer, greedily by default. Rows that have ended wait for the others, and then go on with them.

        Raises:
            ValueError: there is nothing to answer, more tokens than the model has positions, an earlier turn failed
                half-way, or options ask for drafts that cannot be made or verified.
        """
        options = (options or GenerationOptions()).resolved(self.model.module.generation_config)
        self._require_whole()
        if self.cache is None or self.logits_BV is None:
            raise ValueError("there is nothing to answer; feed tokens first")
        check_options([options], self.model.tokenizer, self.model.vocab_size, self.model.grammars)
        for end in (self.num_tokens, self.num_tokens + options.max_new_tokens - 1):
            self._check_length(end, self.pads)
        rows = [Row(self.model, ids, options, seed=options.seed + index) for index, ids in enumerate(self.rows)]
        speculates = options.asks_for_drafts
        if speculates:
            lengths, setup = [len(row.prompt) for row in rows], replace(self._setup, rows=len(rows))
            self._speculator.check([options] * len(rows), lengths, setup)
        if options.speculate is Speculate.policy:  # drafts are made over the memory that verifies them
            if any(self.pads):
                raise ValueError(
                    f"generation.speculate=policy drafts from a text without padding, and pads={self.pads} were fed; "
                    "feed the row without padding, or use generation.speculate=lookup"
                )
            self.cache.free(room=options.max_new_tokens)
        with self._advancing():
            lanes, is_anew = self._lanes(batch_ids(len(rows))), False

            def anew(lanes: Lanes, others: Mapping[RowId, Row]) -> tuple[Tensor, Lanes]:
                nonlocal is_anew
                is_anew = True
                lanes.release()
                self.rows = [list(row.ids) for row in others.values()]
                ids_BC = self._begun_anew(self.rows)
                logits_BV = self._forward(ids_BC, all_logits=False, cut_back=True)
                return logits_BV, self._lanes(list(others))

            drafts = self._speculator.drafts(rows, lanes) if speculates else None
            decoded = decode(rows, self.logits_BV, lambda: (lanes, drafts), choose=self._choose(), anew=anew)
            self.rows = [row.ids for row in rows]
            if is_anew:
                self.num_tokens = len(self.rows[0]) - 1
                if len(rows) > 1:  # some may have ended before
                    ids_BC = self._begun_anew([ids[:-1] for ids in self.rows])
                    self._forward(ids_BC, all_logits=False, cut_back=True)
            else:
                lanes.recompute()
                waited = [decoded.num_steps - len(row.new_ids) for row in rows]
                self.num_tokens += decoded.num_steps - 1
                if any(waited) and self._moves_rows:
                    self._forget_last(waited)
        if drafts is not None:
            self.speculation = drafts.report
        self.logits_BV = None
        self._unfed_B1 = row_values([row.new_ids[-1] for row in rows], self.model.device)[:, None]
        return decoded

    def _lanes(self, ids: Sequence[RowId]) -> Lanes:
        """The rows, for an answer."""
        assert self.cache is not None
        return Lanes.holding(
            self.model,
            ids,
            self.cache,
            self._one_token_forward(),
            pads=self.pads,
            num_tokens=self.num_tokens,
            deciding=self._between_turns,
            length=self.length,
        )

    def fork(self) -> Conversation:
        """An independent copy of the conversation. Both share memory until new tokens are appended."""
        other = copy(self)
        other.rows = [list(row) for row in self.rows]
        other.cache = None if self.cache is None else self.cache.fork()
        return other

    @property
    def _moves_rows(self) -> bool:
        """Whether the last tokens of single rows can be forgotten: a slot has a token of its own in each row alone."""
        policies = self.rank_policies
        is_plain = policies.storage.bits is None and policies.retriever is None and policies.merging is None
        forgets = self.model.held is None  # a state forgets no tokens
        if self.cache is not None and any(layer.first for layer in self.cache.layers):
            return False  # an earlier token would see what a layer with a window has lost
        return is_plain and forgets and not policies.ragged and not self._between_turns

    @torch.inference_mode()
    def _forget_last(self, nums: Sequence[int]) -> None:
        """Forget the last tokens of each row, and move its others behind as much more padding."""
        assert self.cache is not None
        for layer in self.cache.layers:
            left_B = [max(0, layer.num_slots - pad - num) for pad, num in zip(layer.pads, nums, strict=True)]
            slots_n, device = torch.arange(layer.num_slots, device=self.cache.device), self.cache.device
            slots_Bn = (slots_n - row_values(nums, device)[:, None]).clamp_min(-1)
            layer.keep(slots_Bn[:, None], room=0, tokens_B=left_B)
        self.pads = [pad + num for pad, num in zip(self.pads, nums, strict=True)]

    def _newest(self, num: int) -> Tensor:
        """Ids (B, C) of the last tokens of each row, padded on the left where it has fewer."""
        last = [ids[-num:] for ids in self.rows]
        return torch.tensor([[0] * (num - len(ids)) + ids for ids in last], device=self.model.device)

    def _outgrows(self, end: int, pads: Sequence[int] = ()) -> bool:
        """Whether LongRoPE has other tables for a row of a text of `end` tokens than those of its keys.

        Args:
            pads: padding of each row that comes with the newest tokens.
        """
        return self.num_tokens > 0 and self._long_at(end, pads) != self.long_rows

    def _long_at(self, end: int, pads: Sequence[int] = ()) -> frozenset[int]:
        """The rows for which LongRoPE takes its tables for long texts where the text has `end` tokens."""
        longest_short = self.model.length_threshold
        if longest_short is None:
            return frozenset()
        all_pads = [old + new for old, new in zip(self.pads, pads or [0] * len(self.pads), strict=True)]
        return frozenset(row for row, pad in enumerate(all_pads) if max(end, self.length) - pad > longest_short)

    def _begun_anew(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Forget all that is stored. Returns the ids (B, C) of rows, padded.

        Args:
            rows: token ids with which those in `self.rows` begin, which may have more that are fed later.
        """
        longest = max(map(len, rows))
        self.cache = None  # whose memory is free then
        self.cache = self.rank_policies.cache(self.model, batch=len(rows), has_turns=True)
        self.num_tokens, self.pads = 0, [longest - len(ids) for ids in rows]
        self._is_decided = self.rank_policies.deciding is None
        return torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in rows], device=self.model.device)

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        """Context manager of a turn's forwards. If one raises, some layers may store tokens that others do not."""
        self._is_whole = False
        yield
        self._is_whole = True

    def _require_whole(self) -> None:
        """Check that no turn failed half-way. Raises: ValueError."""
        if not self._is_whole:
            raise ValueError(
                "an earlier turn of this conversation failed half-way, so it is not known what its layers store; go on "
                "from a fork that was made before that turn, or start a new conversation"
            )

    def _one_token_forward(self) -> Forward:
        assert self.cache is not None
        return forward_over(
            self.model,
            self.cache,
            self._between_turns,
            pads=self.pads,
            prompt_tokens=self.num_tokens,
            length=self.length,
        )

    @property
    def follows_at_once(self) -> bool:
        """Whether `follow` can compute its tokens in one forward."""
        return self.model.repeats_steps and self.rank_policies.retriever is None

    def _forward_in_turn(self, ids_BC: Tensor, *, at_once: bool) -> Tensor:
        """Logits (B, C, V) after each of these tokens, which are stored one at a time."""
        assert self.cache is not None
        if at_once:
            return forward_one_by_one(
                self.model,
                self.cache,
                self._between_turns,
                ids_BC,
                start=self.num_tokens,
                pads=self.pads,
                length=self.length,
            )
        forward = self._one_token_forward()
        steps = enumerate(ids_BC.split(1, dim=1), start=self.num_tokens)
        return torch.stack([forward(ids_B1, index) for index, ids_B1 in steps], dim=1)

    def _choose(self) -> Choose:
        """The function that chooses generated tokens."""
        return choose_alone

    def _unthinned(self) -> Conversation:
        """A fork without policies, so that no more tokens are dropped."""
        other = self.fork()
        other.policies, other._between_turns = [], []
        return other

    def _forward(self, ids_BC: Tensor, *, all_logits: bool, cut_back: bool) -> Tensor:
        """Logits of new tokens, which are stored and cut back as the policies decide."""
        assert self.cache is not None
        end = self.num_tokens + ids_BC.shape[1]
        self.long_rows = self._long_at(end)
        tokens = NewTokens(self.num_tokens, self.pads)
        steps = self._steps(tokens, end, cut_back=cut_back)
        scorer = None
        if self.rank_policies.needs_surprise:
            pads = [max(0, pad - self.num_tokens) for pad in self.pads]
            scorer = PromptScorer(self.model, ids_BC, pads, None)
        with nullcontext() if scorer is None else scorer.keeping():
            logits = self.model.forward(
                ids_BC,
                attention_under(steps, self.cache),
                start=self.num_tokens,
                pads=self.pads,
                length=max(end, self.length),
                tokens=tokens if any(policy.narrows for policy in self.policies) else None,
                all_logits=all_logits,
                all_hidden=scorer is not None and not all_logits,
            )
        if scorer is not None:
            scorer.score([range(ids_BC.shape[1])])
            surprise_BC = scorer.surprise(range(ids_BC.shape[1]))
            if self.logits_BV is not None and self.num_tokens:  # after the turn before
                first_B1 = -self.logits_BV.log_softmax(dim=-1).gather(1, ids_BC[:, :1])
                surprise_BC[:, :1] = first_B1.double().cpu()
            self.cache.see_surprise(surprise_BC, self.num_tokens)
        self.num_tokens = end
        if cut_back and self.policies:
            self.decide()
        if ids_BC.shape[1] > 1:  # single tokens use the remaining room
            (self.cache.end_turn if cut_back else self.cache.free)(room=0)
        return logits

    def decide(self, answers: Answers | None = None) -> None:
        """Let the policy that decides on all layers cut back the first turn, if there is one and it has not yet.

        Args:
            answers: what other conversations with this prompt have asked of it.
        """
        assert self.cache is not None
        if not self._is_decided:
            texts = [[0] * pad + ids for pad, ids in zip(self.pads, self.rows, strict=True)]
            ids_BS = torch.tensor([ids[: self.num_tokens] for ids in texts])  # later ones are not fed yet
            decide_on_prompt(self.model, self.rank_policies, self.cache, ids_BS, self.pads, answers=answers)
            self._is_decided = True

    def _steps(self, tokens: NewTokens, end: int, *, cut_back: bool) -> PolicySteps:
        """The policies' part in a forward of these tokens, after which the conversation has `end` tokens."""
        policies = self.policies if not self._is_decided or self.rank_policies.deciding is None else []
        return PolicySteps(self.model, policies, tokens, prompt_tokens=end, evicts=cut_back, cache=self.cache)

    def _taken_in(self, ids_BC: Tensor, pads: list[int]) -> Tensor:
        """Add new ids to `rows`. Returns the ids to compute: that of an unfed last answer token, then the new ones."""
        ids_BC = ids_BC.to(self.model.device).expand(len(self.pads), -1)
        for row, ids, pad in zip(self.rows, ids_BC.tolist(), pads, strict=True):
            row += ids[pad:]
        if self._unfed_B1 is not None:
            ids_BC, self._unfed_B1 = torch.cat([self._unfed_B1, ids_BC], dim=1), None
        return ids_BC

    def _checked_pads(self, ids_BC: Tensor, pads: list[int] | None, *, keeps_all: bool = False) -> list[int]:
        """Check new tokens and return their number of padding tokens by row.

        Args:
            keeps_all: any tokens may be computed again.

        Raises:
            ValueError: as `feed`.
        """
        self._require_whole()
        batch, num_new = ids_BC.shape
        if num_new == 0:
            raise ValueError("no tokens were given; a turn has at least one")
        if int(ids_BC.min()) < 0 or int(ids_BC.max()) >= self.model.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.model.vocab_size - 1}")
        if self.cache is None:
            pads = [0] * batch if pads is None else pads
            if len(pads) != batch or not all(0 <= pad < num_new for pad in pads):
                raise ValueError(f"pads={pads} must give the padding of {batch} rows, below {num_new} tokens")
        else:
            if pads is not None and any(pads):
                if not keeps_all:
                    raise ValueError(f"pads={pads}: only the first turn may be padded here; feed rows of equal length")
                if len(pads) != batch or batch != len(self.pads) or not all(0 <= pad < num_new for pad in pads):
                    raise ValueError(
                        f"pads={pads} must give the padding of {len(self.pads)} rows, below {num_new} tokens"
                    )
            if batch not in (1, len(self.pads)):
                raise ValueError(f"{batch} rows were given but the conversation has {len(self.pads)}")
            if len({pad + len(row) for pad, row in zip(self.pads, self.rows, strict=True)}) > 1:
                raise ValueError(
                    "rows ended their answers after different numbers of tokens, so they cannot go on together here; "
                    "use one row, or generation.ignore_eos=true"
                )
            pads = pads or [0] * len(self.pads)
        end = self.num_tokens + (self._unfed_B1 is not None) + num_new
        all_pads = [old + new for old, new in zip(self.pads or [0] * len(pads), pads, strict=True)]
        self._check_length(end, all_pads)
        return pads

    def _check_length(self, end: int, pads: list[int]) -> None:
        """Check that the model supports `end` tokens, including padding.

        Raises:
            ValueError: they exceed the model's positions, or rows have different lengths where the model allows one.
        """
        model = self.model
        num_positions = end - min(pads)
        if self.cache is not None and self.cache.rotates:  # positions of kept and new tokens alone
            num_positions = max(self.cache.slots_by_layer) + end - self.num_tokens
            window = self.rank_policies.clamped_to
            if window is not None and end - self.num_tokens <= window:
                num_positions = window + 1
        if model.max_positions is not None and num_positions > model.max_positions:
            raise ValueError(
                f"the conversation would have {num_positions} tokens, which exceeds the {model.max_positions} "
                f"positions of model {model.name}; shorten it"
            )
        if len(set(pads)) > 1 and model.uneven_limit is not None and end > model.uneven_limit:
            raise ValueError(
                f"model {model.name} ({model.config.model_type}) counts positions from the start of the longest row, "
                "so rows of different lengths cannot run at once; use one row"
            )
