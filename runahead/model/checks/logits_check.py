"""Comparison of a model's logits through our attention with those of transformers' own, on a short text.

In few bits the logits of a model of experts may be others though it is right: where two experts are nearly tied,
rounding chooses. So the attention of each layer is compared there, given the same hidden states.
"""

# Legend: B batch, C new tokens, S tokens, D model dim, V vocabulary.

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from runahead.attention.base import LayerAttention
from runahead.attention.states import States
from runahead.cache.attention import CausalAttention, LayerHook
from runahead.cache.base import KVStore
from runahead.cache.kv_cache import KVCache
from runahead.model.adapters import ADAPTERS
from runahead.model.held import AsksInModules, Held
from runahead.model.layer_kinds import decoder_config
from runahead.model.layers.attention_input import attention_modules, hidden_states
from runahead.model.layers.fusing import apart
from runahead.model.layers.int8 import wrong_product
from runahead.model.loading.sharing import Shares
from runahead.model.parts import local_part
from runahead.model.seam import ATTENTION_NAME, set_attention

CHECK_TOKENS = (5, 2)
"""Lengths of the two chunks with which a model is compared with transformers' own attention when it is loaded."""

STATE_TOKENS = (*CHECK_TOKENS, 3, 2, 2, 2)
"""Lengths of the first chunks where layers hold states: several that begin from a given one."""

RULE_TOKENS = 64
"""Tokens that rules of linear attention compute at a time, where a config names no other number."""

FIRST_TOKENS = 8
"""Tokens after the beginning of a chunk in which a wrong state shows; it is forgotten later. As many are compared at
its end, where a rule computes what is left after its own chunks."""

LEAST_KERNEL = 2
"""Tokens in which a lost convolution state shows, whose kernel has at least as many."""

ROUNDING_OF_RULES = 1e-2
"""Part of the logits' spread by which chunks may be off in any dtype: rules of linear attention compute in float32, in
other steps with other chunks, and deep models enlarge what they round. Seen: 0.007 of 12 layers with random weights."""

ROUNDING_IN_CHUNKS = 8
"""Factor by which chunks may be further off than one forward, where rounding exchanges experts."""

MOST_ROUNDING = 0.4
"""Logits that are further off than this part of their spread are wrong in any model."""


class StatesLost(ValueError):
    """Layers do not begin from a given state where several tokens are given."""


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Comparison of one model's logits on the short text.

    Attributes:
        module: the model, whose attention is ours.
        name: for messages.
        shares: the ranks that hold the model together, if `module` is this rank's share.
        forward, empty_cache: of `runahead.model.Model`.
        run_one_token: runs a token through the model, with this attention.
    """

    module: PreTrainedModel
    name: str
    shares: Shares | None
    forward: Callable[..., Tensor]
    empty_cache: Callable[[int], KVCache]
    run_one_token: Callable[[LayerAttention], None]

    @property
    def _config(self) -> Any:
        return decoder_config(self.module.config)

    @property
    def _ids_1S(self) -> Tensor:  # noqa: N802
        return check_text(int(self._config.vocab_size), self.module.device)

    @property
    def _is_precise(self) -> bool:
        return self.module.dtype in (torch.float32, torch.float64)

    def expected(self) -> tuple[Tensor, list[LayerIO]]:
        """Logits (B, V) after the short text by transformers' own attention, and each layer's attention.

        The second is empty unless rounding exchanges experts.
        """
        in_step = (lambda call: call()) if self.shares is None else self.shares.run
        with recorded_layers(self._modules_to_compare(), self._config.hidden_size) as layers:
            return transformers_logits(self.module, self._ids_1S, in_step), layers

    def require(self, theirs_BV: Tensor, layers: Sequence[LayerIO], whose: str) -> None:
        """Compute the short text in two chunks with our attention, and compare the logits with the expected ones.

        Args:
            theirs_BV: expected logits of the last token.
            layers: expected attention of each layer, by which other logits are found to be rounding; may be empty.
            whose: where they come from, for the message.

        Raises:
            ValueError: the logits differ by more than rounding.
        """
        require_numbers(theirs_BV, self.module, self.name)
        dtype = self.module.dtype
        off = differ(self._ours(), theirs_BV, dtype)
        if self.shares is not None:  # all of them go on to the same forwards
            off = next(filter(None, self.shares.gather(off)), "")
        if not off:
            return
        what = "other logits"
        modules = self._modules_to_compare() if layers else []
        if len(modules) == len(layers) and modules:
            found: dict[int, str] = {}
            self._ours(lambda end: given_equal_inputs(modules, layers, end, dtype, found))
            if not found:
                return
            layer, off = min(found.items())
            what = "other embeddings" if layer < 0 else f"another output of the attention of layer {layer}"
        raise ValueError(
            f"model {self.name} ({self._config.model_type}) is not computed right: it gives {what} through our "
            f"attention than through {whose} ({off}); use {'' if self._is_precise else 'model.dtype=float32, or '}"
            "another model"
        )

    def require_products(self) -> None:
        """Compare the products of layers in 8 bits with those of the same numbers in float64, on the short text.

        Raises:
            ValueError: a layer gives others.
        """
        if layer := wrong_product(self.module, self._ours):
            raise ValueError(
                f"model {self.name} ({self._config.model_type}) is not computed right: the kernel for 8-bit weights "
                f"gives other products than PyTorch for {layer}; leave model.weights out"
            )

    def require_states(self, held: Held) -> None:
        """Compute a longer text at once and in chunks, and compare the logits of all tokens with transformers' own.

        This takes the place of `require` for models with states. Each layer with a state begins from a given one
        with a few tokens, and with more than its rule computes at a time; once more where the layers with states alone
        are given the text in these pieces. A single token is another branch of the families' code, that of
        transformers' own decoding. Only the logits at the ends of chunks are computed.

        Args:
            held: what the layers hold.

        Raises:
            StatesLost: chunks after the first do not begin from the states before them.
            ValueError: the logits of one chunk differ by more than rounding.
        """
        values = self._config.to_dict()
        longest = values.get("max_position_embeddings") or math.inf
        rule = max([RULE_TOKENS, *(value for name, value in values.items() if name.endswith("chunk_size") and value)])
        rule = max(1, int(min(rule, longest / 2 - sum(STATE_TOKENS))))
        chunks = [*STATE_TOKENS, rule + 2, rule + 1]
        places = [_ends_of(num_tokens) for num_tokens in chunks]
        starts = [end - num_tokens for end, num_tokens in zip(accumulate(chunks), chunks, strict=True)]
        all_places = [start + place for start, some in zip(starts, places, strict=True) for place in some]
        ids_1S = check_text(int(self._config.vocab_size), self.module.device, sum(chunks))
        theirs_SV = transformers_logits(self.module, ids_1S, lambda call: call(), wanted=all_places)[0]
        require_numbers(theirs_SV, self.module, self.name)
        family = f"model {self.name} ({self._config.model_type})"
        kinds = " and ".join(held.kinds_with_states)
        bound, what = bound_of(self.module.dtype), "of their spread"
        at_once = self._off(ids_1S, theirs_SV, [sum(chunks)], [all_places])
        if not at_once <= bound:  # nor where it is no number
            raise ValueError(
                f"{family} is not computed right: its {kinds} layers give other logits (off by {at_once:.2g} {what})"
            )
        most = max(bound, ROUNDING_OF_RULES, min(ROUNDING_IN_CHUNKS * at_once, MOST_ROUNDING))
        off = self._off(ids_1S, theirs_SV, chunks, places)
        if off <= most:
            try:
                off = max(off, self._off(ids_1S, theirs_SV, chunks, places, at_once=True))
            except AsksInModules as error:
                raise ValueError(f"{family} {error}") from error
        found = f"off by {off:.2g} {what}"
        if off <= most:
            # In few bits rounding hides a state that counts for little, but not that it makes no difference at all.
            lost = self._unused(ids_1S, sum(STATE_TOKENS), rule + 2)
            if lost is None:
                return
            found = f"with other {lost} they give the same logits"
        raise StatesLost(
            f"{family} has {kinds} layers that do not begin from a given state with several tokens (transformers "
            f"{transformers.__version__}; {found}), as each chunk of a prompt but the first does; use another model"
        )

    def require_last_alone(self) -> None:
        """Check that a text whose last layers compute the last token alone has the logits that it has in all layers.

        Raises:
            ValueError: they are others. The message has no remedy.
        """
        if not self._is_precise and routes_to_experts(self.module):  # rounding may exchange the experts of the token
            return
        num_tokens = sum(CHECK_TOKENS)
        ids_1S = check_text(int(self._config.vocab_size), self.module.device, num_tokens)
        whole_1V = self._logits(ids_1S, self.empty_cache(num_tokens), 0, num_tokens, [num_tokens - 1])
        attention = CausalAttention(self.empty_cache(num_tokens), start=0, pads=[0])
        alone_1V = self.forward(ids_1S, attention, start=0, pads=[0])
        if off := differ(alone_1V, whole_1V, self.module.dtype):
            raise ValueError(f"its last layer gives other logits for the last token alone ({off})")

    def reads_late(self) -> bool:
        """Whether layers that are given several tokens read a given state only after they have updated a part of it.

        Then they give the same logits if it is no number before.
        """
        num_tokens = sum(CHECK_TOKENS)
        ids_1S = check_text(int(self._config.vocab_size), self.module.device, 2 * num_tokens)
        cache, logits = self.empty_cache(ids_1S.shape[1]), list[Tensor]()
        self._logits(ids_1S, cache, 0, num_tokens, [0])
        given = cache.states
        assert given is not None
        for is_late in (False, True):
            cache.states = given.fork()
            hooks = [_Arriving(cache.states)] if is_late else []
            logits.append(self._logits(ids_1S, cache, num_tokens, num_tokens, _ends_of(num_tokens), hooks=hooks))
        return torch.equal(*logits)

    def _off(
        self,
        ids_1S: Tensor,
        theirs_SV: Tensor,
        chunks: Sequence[int],
        places: Sequence[Sequence[int]],
        *,
        at_once: bool = False,
    ) -> float:
        """How far the logits of a text in chunks are off, in their spread.

        Args:
            theirs_SV: expected logits, one chunk after another.
            places: of each chunk, which tokens are compared.
            at_once: only the layers with states are given the text in these chunks.
        """
        cache, counts = self.empty_cache(ids_1S.shape[1]), [len(some) for some in places]
        starts = [0, *accumulate(chunks)]
        if at_once:
            all_places = [start + place for start, some in zip(starts, places, strict=False) for place in some]
            ours = self._logits(ids_1S, cache, 0, starts[-1], all_places, stops=starts[1:-1]).split(counts)
        else:
            given = zip(starts, chunks, places, strict=False)
            ours = tuple(self._logits(ids_1S, cache, *each) for each in given)
        of_chunks = list[Tensor]()
        for ours_CV, theirs_CV in zip(ours, theirs_SV.double().split(counts), strict=True):
            of_chunks.append((ours_CV.double() - theirs_CV).square().mean(dim=1).sqrt() / theirs_CV.std(dim=1))
        if self._is_precise and not routes_to_experts(self.module):
            return torch.cat(of_chunks).max().item()
        # Rounding may exchange the experts of a token here and there: most tokens of a chunk tell, or most chunks.
        tokens = [off_C[:FIRST_TOKENS].median() for off_C in of_chunks]
        begun = of_chunks[1:] or of_chunks
        first = [torch.stack([off_C[place] for off_C in begun]).median() for place in range(LEAST_KERNEL)]
        return torch.stack(tokens + first).max().item()

    def _logits(
        self,
        ids_1S: Tensor,
        cache: KVStore,
        start: int,
        num_tokens: int,
        places: Sequence[int],
        stops: Sequence[int] = (),
        hooks: Sequence[LayerHook] = (),
    ) -> Tensor:
        """Logits (C, V) of some tokens of a chunk of a text, after what the cache holds."""
        attention = CausalAttention(cache, start=start, pads=[0], stops=stops, hooks=hooks)
        ids_1C = ids_1S[:, start : start + num_tokens]
        return self.forward(ids_1C, attention, start=start, pads=[0], logits_of=places)[0]

    def _unused(self, ids_1S: Tensor, start: int, num_tokens: int) -> str | None:
        """The states that several tokens do not begin from, by their name in transformers; None if there are none.

        They make no difference to the logits of a chunk, while they do to those of a single token. Weights may also be
        such that a state counts for nothing anywhere.

        Args:
            start: of the chunk, whose first tokens are also computed as a chunk.
        """
        cache = self.empty_cache(ids_1S.shape[1])
        self._logits(ids_1S, cache, 0, start, [0])
        given = cache.states
        assert given is not None

        def counts(name: str, length: int) -> bool:
            logits = list[Tensor]()
            for factor in (1, 0):
                cache.states = given.fork()
                for layer in cache.states.layers:
                    for kind, _, state in layer.tensors():
                        state.mul_(factor if kind == name else 1)
                logits.append(self._logits(ids_1S, cache, start, length, _ends_of(length)))
            return not torch.equal(*logits)

        for name in sorted({name for layer in given.layers for name, *_ in layer.tensors()}):
            if counts(name, 1) and not all(counts(name, length) for length in (LEAST_KERNEL, num_tokens)):
                return name
        return None

    def _modules_to_compare(self) -> list[nn.Module]:
        """The attention module of each layer; none where logits tell by themselves, or if one is not found."""
        if self._is_precise or not routes_to_experts(self.module):
            return []
        modules = attention_modules(self.module, self.run_one_token, self._config.hidden_size)
        found = [module for module in modules if module is not None]
        return found if len(set(found)) == len(modules) else []

    def _ours(self, within: Callable[[int], AbstractContextManager[None]] = lambda end: nullcontext()) -> Tensor:
        """Logits (B, V) after the short text by our attention.

        Args:
            within: context of the forward of each chunk, by the number of tokens up to its end.
        """
        ids_1S, start = self._ids_1S, 0
        cache = self.empty_cache(ids_1S.shape[1])
        for num_tokens in CHECK_TOKENS:
            end = start + num_tokens
            attention = CausalAttention(cache, start=start, pads=[0])
            with within(end):
                logits_BV = self.forward(ids_1S[:, start:end], attention, start=start, pads=[0], length=ids_1S.shape[1])
            start = end
        return logits_BV


class _Arriving(LayerHook):
    """Lets states be no numbers until they are loaded, as those that come from another rank."""

    def __init__(self, states: States) -> None:
        self._states, self._arrived = states, states.fork()
        for layer in states.layers:
            for *_, state in layer.tensors():
                state.fill_(math.nan)

    def load_state(self, number: int) -> None:
        arrived = States(self._arrived.layers[number : number + 1])
        States(self._states.layers[number : number + 1]).copy_from(arrived)


def check_text(vocab_size: int, device: torch.device, num_tokens: int = sum(CHECK_TOKENS)) -> Tensor:
    """Token ids (1, S) of the short text, or of a longer one."""
    return (torch.arange(num_tokens, device=device) * 7 + 3)[None] % vocab_size


def _ends_of(num_tokens: int) -> list[int]:
    """The first and last tokens of a chunk, by their places in it."""
    return [place for place in range(num_tokens) if min(place, num_tokens - 1 - place) < FIRST_TOKENS]


@torch.inference_mode()
def transformers_logits(
    module: PreTrainedModel,
    ids_1S: Tensor,
    in_step: Callable[[Callable[[], Tensor]], Tensor],
    *,
    wanted: Sequence[int] | None = None,
) -> Tensor:
    """Logits (B, V) of the last token, or (B, C, V) of some tokens, computed with transformers' own attention.

    Args:
        in_step: runs a forward, in which the ranks that share the model wait for each other.
        wanted: places of these tokens.
    """
    keywords: dict[str, Any] = {"use_cache": False}
    keeps = wanted is not None and "logits_to_keep" in inspect.signature(module.forward).parameters
    if keeps:
        keywords["logits_to_keep"] = torch.tensor(wanted, device=ids_1S.device)
    places: Any = slice(None) if keeps else -1 if wanted is None else list(wanted)
    with transformers_attention(module):
        return in_step(torch.inference_mode()(lambda: module(input_ids=ids_1S, **keywords).logits[:, places]))


@contextmanager
def transformers_attention(module: PreTrainedModel) -> Iterator[None]:
    """Context manager in which a model computes with transformers' own attention and code."""
    model_type = decoder_config(module.config).model_type
    modules = module.modules() if model_type in ADAPTERS else []
    adapted = {child: vars(child).pop("forward") for child in modules if "forward" in vars(child)}
    # Eager attention supports all terms, but Falcon's adds its ALiBi twice (as of transformers 5.23).
    set_attention(module, "sdpa" if model_type == "falcon" else "eager")
    try:
        with apart(module):
            yield
    finally:
        set_attention(module, ATTENTION_NAME)
        for child, forward in adapted.items():
            child.forward = forward


def differ(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    """How far values are off if they differ by more than rounding; empty if they do not.

    Args:
        ours, theirs: through our attention and expected.
        dtype: of the weights.
    """
    theirs = theirs.double()
    scale, off = theirs.std().item(), (ours.double() - theirs).abs().max().item()
    return "" if off <= bound_of(dtype) * max(scale, 1e-6) else f"off by {off:.2g}, spread {scale:.2g}"


def bound_of(dtype: torch.dtype) -> float:
    """Rounding in the weights' dtype, relative to the spread of the values.

    The error of a wrong mask, position, scale or state is far larger. transformers' eager attention computes softmax in
    float32 even for float64.
    """
    return {torch.float64: 1e-4, torch.float32: 1e-3}.get(dtype, 0.2)


def routes_to_experts(module: nn.Module) -> bool:
    """Whether a model chooses experts for each token, by names of modules: configs count experts under many names."""
    return any(name.rpartition(".")[2] in ("experts", "router") for name, _ in module.named_modules())


@dataclass(kw_only=True)
class LayerIO:
    """Input and output (B, S, D) of the attention of one layer, in a forward of the short text."""

    x_BSD: Tensor
    out_BSD: Tensor


@contextmanager
def recorded_layers(modules: Sequence[nn.Module], model_dim: int) -> Iterator[list[LayerIO]]:
    """Context manager that notes what attention modules are given and return, in the order of their calls."""
    found: list[LayerIO] = []

    def note(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        x_BSD = hidden_states(args, keywords, model_dim)
        assert x_BSD is not None, "as when the module was found"
        found.append(LayerIO(x_BSD=x_BSD, out_BSD=output[0] if isinstance(output, tuple) else output))

    with _hooks([module.register_forward_hook(note, with_kwargs=True) for module in modules]):
        yield found


@contextmanager
def given_equal_inputs(
    modules: Sequence[nn.Module], layers: Sequence[LayerIO], end: int, dtype: torch.dtype, found: dict[int, str]
) -> Iterator[None]:
    """Context manager in which attention modules are given recorded hidden states, and their outputs are compared.

    Args:
        modules: of each layer.
        layers: what was recorded of them.
        end: behind the last token of the forward. A layer may compute fewer of its tokens, the last ones.
        dtype: of the weights.
        found: gets how far a layer's output is off, where it differs by more than rounding; -1 stands for the input of
            the first layer.
    """

    def compare(layer: int, ours_BCD: Tensor, theirs_BSD: Tensor) -> None:
        if off := differ(ours_BCD, theirs_BSD[:, end - ours_BCD.shape[1] : end], dtype):
            found[layer] = off

    def replaced(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            x_BSD = layers[layer].x_BSD
            x_BCD = hidden_states(args, keywords, x_BSD.shape[2])
            assert x_BCD is not None, "as when the module was found"
            if layer == 0:
                compare(-1, x_BCD, x_BSD)
            x_BCD = x_BSD[:, end - x_BCD.shape[1] : end]
            return ((x_BCD, *args[1:]), keywords) if args else (args, {**keywords, "hidden_states": x_BCD})

        return hook

    def compared(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            compare(layer, output[0] if isinstance(output, tuple) else output, layers[layer].out_BSD)

        return hook

    hooks = [module.register_forward_pre_hook(replaced(n), with_kwargs=True) for n, module in enumerate(modules)]
    with _hooks(hooks + [module.register_forward_hook(compared(n)) for n, module in enumerate(modules)]):
        yield


@contextmanager
def _hooks(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_numbers(logits: Tensor, module: nn.Module, name: str) -> None:
    """Check that no logit is NaN or plus infinity, as damaged weights give; minus infinity is allowed.

    Args:
        logits: of any shape.
        module: the model that computed them.
        name: of the model, for the message.

    Raises:
        ValueError: a logit is NaN or infinite; the message names a weight that is, if there is one.
    """
    if logits.isnan().any() or logits.isposinf().any():
        named = ((weight, local_part(values)) for weight, values in module.named_parameters())
        found = next((weight for weight, values in named if not values.isfinite().all()), None)
        cause = "its weights are finite, so a layer overflows; use model.dtype=float32 or bfloat16"
        if found is not None:
            cause = f"its weight {found} holds NaN or infinity; restore or download the checkpoint again"
        raise ValueError(f"model {name} gives logits that are not numbers: {cause}")
