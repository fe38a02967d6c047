"""A loaded model as the runtime uses it: limits, and a forward with our attention, compared with transformers'."""

# Legend: B batch, C new tokens, V vocabulary.

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.precision import widened
from policies.row_values import row_values
from runahead.attention.base import LayerAttention, Recording
from runahead.attention.masks import MaskRule
from runahead.attention.partial import takes_sequences
from runahead.attention.states import States
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import Slabs
from runahead.config import Fuse, ModelOptions, Weights
from runahead.failures import PeerFailure
from runahead.model import loading
from runahead.model.adapters import ADAPTERS, adapt
from runahead.model.checks.checked_model import CheckedModel, lacks_memory
from runahead.model.fingerprint import model_fingerprint, samples_of_share, whole_fingerprint, with_changes
from runahead.model.grammars import Grammars
from runahead.model.layer_kinds import unsupported_kinds
from runahead.model.layers.cpu_linear import multiply_fast
from runahead.model.layers.fusing import is_fused, is_wanted, kernel_bytes, takes_rounding, unfuse, watching
from runahead.model.layers.gated import fuse_gated
from runahead.model.layers.int8 import encoded_layers, encoded_share
from runahead.model.layers.narrowing import narrow
from runahead.model.layers.norms import fuse_norms
from runahead.model.layers.products import fuse_alone, fuse_products
from runahead.model.layers.rotary_functions import fuse_rotations
from runahead.model.loading.memory import PeakMemory
from runahead.model.loading.position_limit import longrope_threshold
from runahead.model.loading.quiet import one_line
from runahead.model.loading.sharing import Shares, copies_of_heads, share_model
from runahead.model.marking.marks import Marks
from runahead.model.marking.means import Means
from runahead.model.memory import activation_bytes, memory_after_call
from runahead.model.model_layers import Boundary
from runahead.model.rope_length import length_dependent_rotaries, rotary_length
from runahead.model.seam import ATTENTION_NAME, SeamCache, register, set_attention
from runahead.model.token_kinds import token_kinds
from runahead.report import MemoryReport
from runahead.rotary import Rotary
from runahead.timeline.ranges import NamedRanges, Ranges

T = TypeVar("T")


class Model(CheckedModel):
    """A transformers causal language model whose attention layers call ours.

    The logits of a short text are compared with those of transformers' own attention. What is known of its layers is in
    `ModelLayers`, and of its checks in `CheckedModel`.

    Args:
        module: the model, in eval mode, on its device.
        tokenizer: its tokenizer, if it has one.
        name: for reports and messages; the model type by default.
        shares: the ranks that hold the model together, if `module` is this rank's share. All of them make one, and
            then the same calls in the same order.
        fuse: as of `ModelOptions`. Shares of a model, float64 and what marks tokens stay as they are, with a warning.
        is_mapped: weights are in the page cache of files, and are not copied to be fused.
        made_from: digest of the files and options that the weights come from: if a check of just this model is kept in
            the cache folder, it is not done again. By default, and of shares, it is always done.
        compares: False leaves the comparison to who makes the model of a stage of layers.

    Attributes:
        marks: how tokens mark those that are evicted, in a model that was trained for it.
        lacks_kernels: why attention on a CPU is PyTorch's where ours could be used, in a sentence; "" if it is not.
        unrecordable: why its decoding steps cannot be replayed on a CPU, as the first one that was tried has shown; "".
        recorded_steps: those that no prompt has at present, by what they are of.
        boundary: where forwards begin and end at other ranks, which have the other layers; None: all are here.
        overrides: what the config has in place of the checkpoint's, as one line; "" for nothing.
        adapters: digests of the adapters that are merged into the weights; "" for none.
        adapter_names: their names, which `name` has, too.
        stored_as: format and bits of weights that were dequantised, and the dtype that they have now; int8 where they
            are rounded to 8 bits; "" for others.
        weights: int8 if linear layers have them in 8 bits.
        memory: memory of this rank while it loaded the weights; None if they were given.
        ranges: names of what is done with the model in a profile; see `name_ranges`.

    Raises:
        ValueError: a layer does not call our attention, or the check fails: this family is not supported.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str = "",
        shares: Shares | None = None,
        fuse: Fuse = Fuse.off,
        is_mapped: bool = False,
        made_from: str = "",
        compares: bool = True,
    ) -> None:
        register()
        super().__init__(module, name=name, shares=shares)
        self.tokenizer = tokenizer
        unfuse(module)  # what another `Model` has fused
        multiply_fast(module)
        self.overrides = self.adapters = self.lacks_kernels = self.unrecordable = self.stored_as = ""
        self.adapter_names: Sequence[str] = ()
        self.recorded_steps = dict[Hashable, Any]()
        self.boundary: Boundary | None = None
        self.weights = Weights.int8 if encoded_layers(module) else Weights.full
        self.ranges = Ranges()
        self.memory: MemoryReport | None = None
        self._peak: PeakMemory | None = None
        if (why := unsupported_kinds(self.config)) is not None:
            raise ValueError(f"{self.family} {why}")
        set_attention(module, ATTENTION_NAME)
        self._passes_keywords = self.config.model_type not in ADAPTERS
        if not self._passes_keywords:
            adapt(module, self.config.model_type)
        parameters = inspect.signature(module.forward).parameters
        # "cache" from transformers 5.24 on; state spaces had a name of their own before.
        self._cache_name = next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")
        self._optional = {name for name in ("position_ids", "logits_to_keep") if name in parameters}
        self._rotaries = length_dependent_rotaries(module)
        self._narrows = False
        try:
            self.marks = Means.from_config(self.config) or Marks.from_config(self.config)
            is_checked = shares is None and self.has_reference
            if is_checked and is_wanted(fuse, self.device, self.dtype):
                with watching(module) as calls:
                    self._look_at_layers()
                fuse_gated(calls)
                fuse_products(module, calls, may_move=not is_mapped)
                fuse_alone(calls)
                fuse_norms(calls)
                if self.dtype is torch.float32 and self.device.type == "cpu" and self.held is None:
                    fuse_rotations(module)
                del calls
            else:
                self._look_at_layers()
            if fuse is Fuse.on and not is_fused(module):
                warnings.warn(f"model.fuse=on has no effect on {self.family} ({self._unfused()})", stacklevel=2)
            if compares:
                self._check_logits(made_from if shares is None else "")
        except PeerFailure:
            raise
        except Exception as error:  # the family's own code may raise anything on input that it does not expect
            if lacks_memory(error):
                raise
            reason = one_line(error)
            has_no_memory = isinstance(error.__cause__, RuntimeError)  # for keys and values
            if isinstance(error, ValueError) and (has_no_memory or reason.startswith(f"model {self.name} ")):
                raise
            if SeamCache.__name__ in reason:
                reason = "its layers keep what they store in a cache of their own, outside transformers' interface"
            elif getattr(self.config, "num_attention_heads", None) is None:
                reason = "its config has no attention heads"
            elif MaskRule.__name__ in reason:
                reason = "its own code computes attention with a mask, outside transformers' attention interface"
            if shares is not None:
                raise ValueError(self._unshared(shares, reason)) from error
            raise ValueError(f"{self.family} is not supported: {reason}") from error

    @classmethod
    def load(
        cls,
        options: ModelOptions,
        device: torch.device,
        *,
        progress: bool = False,
        ranks_on_host: int = 1,
        shares: Shares | None = None,
    ) -> Model:
        """Load a model, or this rank's share of it.

        Args:
            options: source, path, dtype and so on.
            device: where the weights go.
            progress: show progress bars on standard error.
            ranks_on_host: processes on this host that load the same model, for the check of free memory.
            shares: load a share only; every rank of the group calls this. A rank that cannot load its share must end
                the others, which wait for it.

        Raises:
            ValueError, OSError: the model cannot be loaded; one line that names the path and the remedy.
        """
        loaded = load_weights(options, device, progress=progress, ranks_on_host=ranks_on_host, shares=shares)
        return cls.of_weights(loaded)

    @classmethod
    def of_weights(cls, loaded: loading.LoadedWeights, *, compares: bool = True) -> Model:
        """Make a model of loaded weights, and check it: the second half of `load`, in which shares wait for others.

        Args:
            compares: as of the class.
        """
        model = cls(
            loaded.module,
            loaded.tokenizer,
            name=loaded.name,
            shares=loaded.shares,
            fuse=loaded.fuse,
            is_mapped=loaded.is_mapped,
            made_from=loaded.made_from,
            compares=compares,
        )
        model.memory, model._peak, model.overrides = loaded.memory, loaded.peak, loaded.overrides
        model.adapters, model.adapter_names = loaded.adapters, loaded.adapter_names
        if loaded.stored_as:
            model.stored_as = f"{loaded.stored_as}, dequantised to {str(loaded.dtype).removeprefix('torch.')}"
        if model.weights is Weights.int8:
            rounded = f"int8 ({encoded_share(model.module):.0%} of the parameters)"
            if loaded.num_coded:
                layers = len(encoded_layers(model.module))
                model.stored_as = (
                    f"{loaded.stored_as}, as {rounded}; codes of {loaded.num_coded} of {layers} layers as stored"
                )
            else:
                model.stored_as = f"{model.stored_as}, then {rounded}" if model.stored_as else rounded
        return model

    def name_ranges(self, ranges: Ranges) -> None:
        """Name layers, chunks, messages, decoding steps and policies in a profile, from now on. To be called once.

        Raises:
            ValueError: the model has no list of layers.
        """
        if isinstance(ranges, NamedRanges):
            if not self.has_layers:
                raise ValueError(
                    f"the names of layers in a profile: {self.family} has no list of layers; use profile=none"
                )
            ranges.name_layers(self._layers)
        self.ranges = ranges

    def shard(self, shares: Shares) -> None:
        """Keep only this rank's share of a whole model, by transformers' tensor parallelism.

        From then on `kv_shapes` are those of this rank's heads, logits are the same on all ranks, and all ranks of the
        group must make the same calls in the same order.

        Raises:
            ValueError: transformers cannot shard this model, or the shards give other logits than the whole model.
        """
        unfuse(self.module)
        expected = self._logits_check().expected()
        _ = self.fingerprint  # of the whole model, before this rank's share replaces it
        share_model(self.module, shares.group, self.device)
        self.shares, self._wrong_in_blocks = shares, None

        def require() -> None:
            self._logits_check().require(*expected, "the whole model")

        try:
            self._look_at_layers()
            try:
                require()
            except ValueError as error:  # on all ranks
                if lacks_memory(error) or not self._is_right_whole(require):
                    raise
                self._tell_whole(error)
        except (ValueError, PeerFailure):
            raise
        except Exception as error:  # shares may be of other shapes than the family's code expects
            if lacks_memory(error):
                raise
            raise ValueError(self._unshared(shares, one_line(error))) from error

    def _unshared(self, shares: Shares, reason: str) -> str:
        """Why ranks cannot share this model."""
        return f"{self.family} cannot be shared by {shares.count} ranks: {reason}; leave ranks.tensor out"

    def _unfused(self) -> str:
        """Why none of the modules is fused."""
        reasons = {
            "ranks that share it": self.shares is not None,
            "marks of tokens (DMS, DMC)": self.marks is not None,
            "layers that do not see the token itself (LCKV)": self.runs_in_passes,
            f"{self.dtype}": not takes_rounding(self.dtype),
            "model.weights=int8, and it has no norms that can be fused": self.weights is Weights.int8,
        }
        return next((why for why, holds in reasons.items() if holds), "it has no layers that can be fused")

    @property
    def copies_kv_heads(self) -> bool:
        """Whether several shares have the same KV head, each with some of its query heads."""
        return self.kv_head_copies > 1

    @property
    def kv_head_copies(self) -> int:
        """Number of shares that have the same KV head."""
        return max((copies for copies, _ in copies_of_heads(self.module).values()), default=1)

    def of_tightest_share(self, own_bytes: float) -> float:
        """The least memory of the ranks that share the model. All of them call this alike."""
        return own_bytes if self.shares is None else min(self.shares.gather(own_bytes))

    @property
    def shard_number(self) -> int:
        """Number of this rank's share."""
        return 0 if self.shares is None else self.shares.number

    def joined_over_shards(self, x_BKn: Tensor) -> Tensor:
        """Values of the KV heads of all ranks that share the model, in order. All of them call this, inside a forward.

        Each rank's are filled up with minus infinity at their end to the longest.
        """
        return x_BKn if self.shares is None else self.shares.joined(x_BKn)

    def of_first_share(self, numbers: Tensor) -> Tensor:
        """Numbers of the first of the ranks that share the model, in host memory. All of them call this alike."""
        shares = self.shares
        return numbers if shares is None else shares.run(lambda: shares.of_first(numbers.to(self.device)).cpu())

    def in_step(self, call: Callable[[], T]) -> T:
        """Run a call in which the ranks that share the model wait for each other, such as a forward."""
        return call() if self.shares is None else self.shares.run(call)

    def kernel_bytes(self, num_threads: int | None = None) -> int:
        """Most memory in bytes that threads keep for products of many rows; of so many threads, or as there are now."""
        return kernel_bytes(self.module, num_threads)

    def memory_after(
        self, *, kv_bytes: int, batch: int, num_tokens: int, row_tokens: int | None, num_threads: int | None = None
    ) -> MemoryReport | None:
        """`memory` with the peak of a call; None if the weights were given.

        Args:
            kv_bytes: peak of the call's KV cache.
            batch: number of rows.
            num_tokens: most tokens of a row that it computed at a time.
            row_tokens: of these, most tokens that a layer computed at a time; None is all.
            num_threads: most that computed at a time; None: as many as now.
        """
        if self.memory is None or self._peak is None:
            return None
        activations = (row_tokens or num_tokens) * activation_bytes(self.config, self.dtype, self.num_shards)
        if row_tokens is not None:  # the layers' input, which else is beside their output and the embeddings
            copies = 1 if self._writes_in_place else 3
            activations += copies * num_tokens * int(self.config.hidden_size) * self.dtype.itemsize
        activations *= batch
        return memory_after_call(
            self.memory,
            self._peak,
            self.device,
            kv_bytes=kv_bytes,
            activations=activations,
            kernel_bytes=self.kernel_bytes(num_threads),
        )

    @property
    def eos_token_ids(self) -> set[int]:
        """Token ids that end a generation, from the generation config, else from the model's config."""
        for config in (self.module.generation_config, self.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return {ids} if isinstance(ids, int) else set(ids)
        return set()

    @cached_property
    def grammars(self) -> Grammars:
        """Constraints by which answers follow JSON schemas."""
        return Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)

    @property
    def length_threshold(self) -> int | None:
        """Length in tokens above which LongRoPE uses other tables; None for other models."""
        return longrope_threshold(self.config)

    @cached_property
    def token_kinds(self) -> Tensor:
        """Kind of every token of the vocabulary (V), int8; see `policies.layer_view.TokenKind`."""
        return token_kinds(self.tokenizer, self.vocab_size).to(self.device)

    @property
    def weights_in_words(self) -> str:
        """The form of the stored weights, as `stored_as`, and the adapters in them; "" if they are as stored."""
        several = "s" if len(self.adapter_names) > 1 else ""
        merged = f"with adapter{several} {', '.join(self.adapter_names)}" if self.adapter_names else ""
        return ", ".join(filter(None, (self.stored_as, merged)))

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the whole model, stored in files that are valid for this model only.

        It is that of the weights, of what the config has in place of the checkpoint's, and of adapters' files.
        """
        if self.shares is None:
            weights = model_fingerprint(self.module)
        else:
            weights = whole_fingerprint(self.shares.gather(samples_of_share(self.module)))
        return with_changes(weights, self.overrides, self.adapters and f"adapters {self.adapters}")

    @property
    def rotates_by_length(self) -> bool:
        """Whether rotary angles depend on the length of the whole text."""
        return bool(self._rotaries)

    @property
    def _hands_on(self) -> bool:
        """Whether other ranks go on with the hidden states of all tokens."""
        return self.boundary is not None and not self.boundary.is_last

    @property
    def repeats_steps(self) -> bool:
        """Whether decoding steps differ in token ids, position ids and stored keys and values alone."""
        return not self.steps_differ

    @property
    def steps_differ(self) -> str:
        """Why decoding steps differ in more than token ids, position ids and stored keys and values; "" if not."""
        counts_positions = not self._passes_keywords or "position_ids" not in self._optional
        reasons = {
            "counts positions on its own": counts_positions or self.uneven_limit is not None,
            "is shared by ranks": self.num_shards > 1,
            "has some of its layers on other ranks": self.boundary is not None,
            "rotates by angles that depend on the length": bool(self._rotaries),
            "changes attention scores": self._needs_scores,
            "has layers that read the keys and values of others": bool(self.reads_kv_of),
            "marks tokens that it evicts": self.marks is not None,
            "holds states": self.held is not None,
            "has layers with windows": any(rule is not None for rule in self.rules),
        }
        return next((f"model {self.name} {reason}" for reason, holds in reasons.items() if holds), "")

    @property
    def lacks_step_kernel(self) -> str:
        """The keys and values for which the device has no kernel for sequences of any lengths, in words; "" if none."""
        lacking = [
            shape
            for shape in self.kv_shapes
            if not takes_sequences(self.device, shape.dtype, shape.key_dim, shape.value_dim)
        ]
        if not lacking:
            return ""
        return f"{lacking[0].dtype} with {lacking[0].key_dim} dims per head".removeprefix("torch.")

    @property
    def uneven_limit(self) -> int | None:
        """Longest text in tokens that may be batched with texts of other lengths; None is any length.

        Some families count positions from the start of the padded batch, at least beyond some length, whatever position
        ids they are given.
        """
        counts_itself = "position_ids" not in self._optional and self.config.model_type not in ADAPTERS
        if counts_itself and self.kv_shapes:  # a state knows no positions
            return 0
        if self._padding_enters_states:
            return 0
        if self.scales_queries:  # from token number `floor_scale` on, counted from 1
            return math.ceil(self.config.floor_scale) - 1
        return None

    @property
    def scales_queries(self) -> bool:
        """Whether layers scale queries by their tokens' numbers, which they count themselves, as Llama 4's do."""
        return bool(getattr(self.config, "attn_temperature_tuning", False))

    @cached_property
    def _padding_enters_states(self) -> bool:
        """Whether padding leaves something in a state: zeros before a layer's projection, which may add a bias."""
        if self.held is None:
            return False
        inside = [list(each.children()) for each in self.module.modules()]
        mixers = [children for children in inside if any(isinstance(child, nn.Conv1d) for child in children)]
        projections = [child for children in mixers for child in children if isinstance(child, nn.Linear)]
        # Others than those of hidden states come after the convolution, behind which padding is masked once more.
        return any(each.bias is not None for each in projections if each.in_features == self.config.hidden_size)

    def empty_cache(
        self,
        num_tokens: int,
        *,
        batch: int = 1,
        num_slabs: int | None = None,
        rotaries: Sequence[Rotary] | None = None,
    ) -> KVCache:
        """A KV cache with room for `num_tokens` tokens in every layer.

        Args:
            num_slabs: number of slabs, which the layers take in turn; by default each has its own.
            rotaries: of each layer, if keys are stored unrotated.

        Raises:
            ValueError: the memory cannot be allocated.
        """
        spans, num_slabs = [(0, num_tokens)] * self.num_layers, self.num_layers if num_slabs is None else num_slabs
        slabs = Slabs.empty(self.kv_shapes, batch=batch, spans=spans, num_slabs=num_slabs, device=self.device)
        cache = KVCache(slabs, rotaries=rotaries)
        cache.states = self.empty_states()
        return cache

    def empty_states(self) -> States | None:
        """The states of a text without tokens; None if no layer holds any."""
        return None if self.held is None else self.held.nothing()

    @torch.inference_mode()
    def forward(
        self,
        ids_BC: Tensor,
        attention: LayerAttention,
        *,
        start: int,
        pads: list[int],
        length: int | None = None,
        index_C: Tensor | None = None,
        tokens: NewTokens | None = None,
        all_logits: bool = False,
        logits_of: Sequence[int] = (),
        all_hidden: bool = False,
        row_tokens: int | None = None,
        row_multiple: int = 1,
        stores_first: bool = False,
    ) -> Tensor:
        """Run the model on the tokens [start, start + C) of a left-padded batch.

        Args:
            ids_BC: token ids.
            attention: the attention of this forward, called by every layer in order.
            start: index of the first token in the padded batch.
            pads: left padding per row.
            length: length of the whole padded prompt in tokens, for RoPE that depends on it; by default the prompt
                ends with these tokens.
            index_C: ascending indices of the tokens in the padded batch, if they are not contiguous.
            tokens: the tokens that layers still compute, for policies that drop some from layer to layer.
            all_logits: return the logits of all tokens. Those of tokens that a policy dropped are meaningless.
            logits_of: places of some of these tokens, whose logits are returned.
            all_hidden: compute all tokens in all layers, as a `Head` keeps the hidden states.
            row_tokens: most tokens that a layer computes at a time; None is all. Only for a `CausalAttention`.
            row_multiple: these are multiples of it, up to the last ones.
            stores_first: with these layers store all keys and values before any token attends.

        Returns:
            Logits of the last token (B, V), or of all or some tokens (B, C, V), in at least float32.

        Raises:
            ForwardEndsHere: `attention` raised it.
            ValueError: layers give other logits in blocks of rows.
        """
        attention.see_ids(ids_BC)
        if index_C is None:
            index_C = torch.arange(start, start + ids_BC.shape[1], device=ids_BC.device)
        num_new = ids_BC.shape[1]
        if tokens is not None:
            self._let_layers_narrow()
        if self.held is not None and attention.states is None:
            assert start == 0 or isinstance(attention, Recording), "the states of earlier tokens are lost"
            attention.states = self.held.nothing()
        forward = SeamCache(
            attention,
            start,
            num_new=num_new,
            tokens=tokens,
            ends_with_last=not (all_logits or logits_of or all_hidden or self._hands_on) and num_new > 1,
            last_layer=self.last_layer,
            sources=self.reads_kv_of,
            marks=self.marks,
            held=self.held,
            pads=pads,
            one_by_one=self.gives_one_by_one,
            block_ends=self._block_ends(num_new, row_tokens, row_multiple),
            in_place=self._writes_in_place,
            stores_first=stores_first,
        )
        keywords: dict[str, Any] = {self._cache_name: forward, "use_cache": True}
        if self.held is not None and max(pads) > start:  # layers with states leave out padding by this alone
            keywords["attention_mask"] = (index_C >= row_values(pads, ids_BC.device)[:, None]).long()
        if "position_ids" in self._optional:
            position_ids_BC = attention.positions_BC(index_C)
            if position_ids_BC is None:
                position_ids_BC = (index_C - row_values(pads, ids_BC.device)[:, None]).clamp_min(0)
            keywords["position_ids"] = torch.zeros_like(position_ids_BC) if attention.rotates else position_ids_BC
        if "logits_to_keep" in self._optional:
            kept = logits_of or ([num_new - 1] if all_hidden else [])  # with a number Gemma 4 drops the other tokens
            keywords["logits_to_keep"] = row_values(kept, ids_BC.device) if kept else 0 if all_logits else 1
        if self._passes_keywords:
            keywords["runahead"] = forward
        length = start + num_new if length is None else length
        with rotary_length(self._rotaries, [length - pad for pad in pads]):
            logits_BCV = self.in_step(torch.inference_mode()(lambda: self.module(input_ids=ids_BC, **keywords).logits))
        if forward.states is not None:
            forward.states.save_pending()
        if logits_of:
            wanted = logits_BCV if "logits_to_keep" in self._optional else logits_BCV[:, list(logits_of)]
        else:
            wanted = logits_BCV if all_logits else logits_BCV[:, -1]
        return widened(wanted)

    def _block_ends(self, num_new: int, row_tokens: int | None, multiple: int = 1) -> Sequence[int]:
        """Ends of blocks of rows of at most so many tokens, all of about the same length; () if one has room for all.

        From the first time on that there are several, layers are computed in them. A layer that holds keys and values
        and a state, or takes a given state for a single token alone, goes on to compute all at once.
        """
        if row_tokens is None or num_new <= row_tokens:
            return ()
        if why := self.wrong_in_blocks():
            raise ValueError(f"{why}; use prefill.row_tokens=0")
        units = -(-num_new // multiple)
        num_blocks = -(-units // (row_tokens // multiple))
        return [min(num_new, units * block // num_blocks * multiple) for block in range(1, num_blocks + 1)]

    def _let_layers_narrow(self) -> None:
        """Have layers compute the tokens that are left in a forward, from now on."""
        if not self._narrows:
            self._narrows = True
            narrow(self._layers)

    def hidden_states(self, ids_1C: Tensor, attention: LayerAttention) -> Tensor:
        """Last hidden states (1, C, D) of a text, before the output layer. Gradients go through them.

        Args:
            ids_1C: token ids.
            attention: as of `forward`, from the first token on.

        Raises:
            ValueError: layers hold states, which a forward with gradients would change in place, or do not see the
                token itself (LCKV), or the model marks tokens (DMS, DMC).
        """
        if self.held is not None:
            raise ValueError(f"layers of model {self.name} hold states, over which no gradients go; use another model")
        if not self.has_reference:
            why = "marks tokens (DMS, DMC)" if self.marks else "has layers that do not see the token itself (LCKV)"
            raise ValueError(f"model {self.name} {why}, and no gradients; use another model")
        forward = SeamCache(attention, 0)
        parameters = inspect.signature(self.module.base_model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        keywords: dict[str, Any] = {name: forward, "use_cache": True}
        if self._passes_keywords:
            keywords["runahead"] = forward
        with rotary_length(self._rotaries, [ids_1C.shape[1]]):
            hidden_1CD: Tensor = self.module.base_model(input_ids=ids_1C, **keywords).last_hidden_state
        return hidden_1CD


def load_weights(
    options: ModelOptions,
    device: torch.device,
    *,
    progress: bool = False,
    ranks_on_host: int = 1,
    shares: Shares | None = None,
    tokenizer: Any = None,
    keep: Callable[[PreTrainedModel], object] | None = None,
) -> loading.LoadedWeights:
    """The first half of `Model.load`, in which no rank waits for another; with a tokenizer that was read before.

    Args:
        keep: as of `loading.load`.
    """
    register()
    return loading.load(
        options,
        device=device,
        attn_implementation=ATTENTION_NAME,
        progress=progress,
        ranks_on_host=ranks_on_host,
        shares=shares,
        tokenizer=tokenizer,
        keep=keep,
    )
