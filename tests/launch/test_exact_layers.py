"""python -m launch.exact_layers: the search on losses made up, the loss against transformers' own, what it prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import exact_layers, infer
from launch.exact.copies import MOST_BYTES, Copies, copy_nll
from launch.exact.search import Estimate, Exact, Loss, Losses, ranges, search
from launch.exact_layers import EXACT, ExactRun, options_text, summary
from launch.inputs.sample_text import runs_of
from runahead import PrefillOptions, Ranks, RanksOptions
from runahead.config import Attention
from runahead.model.layers.resuming import beginning_at, num_bytes
from runahead.model.model import Model
from tests.exit_status import exit_status, one_line_error
from tests.families import build

NUM_LAYERS = 12
WORTH = {2: 0.05, 5: 0.04, 6: 0.02, 9: 0.001}
"""Nats that are lost less with a layer exact; others are worth nothing."""
NOISE = (-1.0, 0.0, 1.0)


def losses(worth: dict[int, float] = WORTH, *, noise: float = 0.0, noisy: Iterable[int] = range(NUM_LAYERS)) -> Losses:
    """Losses of 12 layers on three prompts whose own losses differ much; with noise in what some layers are worth."""
    noisy = frozenset(noisy)

    def measured(prompt: int, sets: Sequence[Exact], _: Sequence[Exact]) -> Iterator[Loss]:
        for exact in sets:
            density = (len(exact) + 0.3 * (NUM_LAYERS - len(exact))) / NUM_LAYERS
            lost = sum(nats for layer, nats in worth.items() if layer not in exact)
            is_prefill = len(exact) == NUM_LAYERS
            noisy_part = 0.0 if is_prefill else noise * NOISE[prompt] * len(noisy.intersection(exact))
            yield Loss(3.0 + prompt + lost + noisy_part, density)

    return Losses(range(3), range(NUM_LAYERS), measured, {})


def found(
    losses: Losses, *, given: Iterable[int] = (), group: int = 3, most_loss: float = 0.02
) -> tuple[list[int], list[str]]:
    told = list(search(losses, range(NUM_LAYERS), given, group=group, most_loss=most_loss))
    return sorted(told[-1][1]), [line for line, _ in told]


def test_groups_come_first_and_layers_that_are_worth_nothing_are_left_out_again() -> None:
    """Of 0-2, 3-5, 6-8 and 9-11 the first is taken (0.05), then 3-5 (0.04); 0.021 are left, so 6-8, too."""
    exact, told = found(losses())
    assert exact == [2, 5, 6]
    assert told[0] == "all layers sparse: +0.111 ± 0.000 nats, density 30%"
    assert told[1] == "  layers       0-2 exact: +0.050 ± 0.000 nats less, density 47%"
    assert "layers 0-2 exact: +0.061 ± 0.000 nats, density 47%" in told
    assert "  without layer   6: +0.020 ± 0.000 nats more" in told
    assert told[-1] == "layers 2, 5-6 exact: +0.001 ± 0.000 nats, density 47%"


@pytest.mark.parametrize(
    ("most_loss", "given", "exact"),
    [
        (0.2, [], []),  # nothing is needed
        (0.07, [], [2]),
        (0.03, [], [2, 5]),
        (0.0, [], [2, 5, 6, 9]),
        (0.0711, [0, 5], [0, 5]),  # these stay, and 2 is not needed
        (0.03, [0], [0, 2, 5]),
    ],
)
def test_as_few_layers_as_the_loss_allows(most_loss: float, given: list[int], exact: list[int]) -> None:
    assert found(losses(), given=given, most_loss=most_loss)[0] == exact


def test_what_noise_could_be_is_not_taken() -> None:
    """Three layers differ by 0.03 in opposite directions in two prompts: 0.02 of error each."""
    exact, told = found(losses({2: 0.03}, noise=0.01))
    assert exact == [] and told[-1] == "no other layers are worth more than 2 standard errors"
    assert found(losses({2: 0.09}, noise=0.01))[0] == [2]


def test_what_noise_could_be_does_not_hide_what_is_worth_less_for_certain() -> None:
    """The first group is worth most, 0.045 ± 0.023, which may be noise."""
    exact, told = found(losses({0: 0.045, 3: 0.043}, noise=0.04, noisy=[0]))
    assert told[1].startswith("  layers       0-2 exact: +0.045 ± 0.023 nats less")
    assert "no other layers are worth more than 2 standard errors" in told and exact == [3]


@pytest.mark.parametrize(
    ("given", "options", "named", "rule"),
    [
        ([], [], "all layers sparse +0.111", "threshold"),
        ([6, 7], [], "layers 6-7 exact +0.091", "threshold"),
        ([], ["prefill.density=0.3"], "all layers sparse +0.111", "density"),
    ],
)
def test_what_was_found_is_told_beside_what_was_given(
    given: list[int], options: list[str], named: str, rule: str
) -> None:
    run = EXACT.compose([f"prefill.exact_layers={given}", *options])
    [told, more] = summary(run, frozenset({2, *given}), losses(), losses())
    assert told.endswith(f", {named} ± 0.000") and more.endswith(f"; a higher prefill.{rule} loses less")
    assert len([*summary(run, frozenset({2, 5, 6}), losses(), losses())]) == 1


def test_an_estimate_is_of_differences_in_the_same_prompts() -> None:
    estimate = losses({2: 0.5}).more(frozenset(), frozenset({2}))
    assert estimate.mean == pytest.approx(0.5) and estimate.error == pytest.approx(0, abs=1e-12)
    given = Estimate.of([1.0, 2.0, 4.0])
    assert given.mean == pytest.approx(7 / 3) and given.error == pytest.approx(math.sqrt(7 / 3 / 3))
    assert not given.is_noise and Estimate(1.0, 0.5).is_noise


@pytest.mark.parametrize(
    ("layers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), ([3, 4], "3-4")]
)
def test_ranges(layers: list[int], text: str) -> None:
    assert ranges(layers) == text


def test_the_loss_is_that_of_transformers_over_the_text_and_its_copy() -> None:
    """With the exact prefill, and where the choice has all blocks, or all layers are exact; fewer blocks change it."""
    from tests.ranks.tasks import tiny_model

    ids, passage = torch.randint(3, 90, (400,), generator=torch.Generator().manual_seed(1)).tolist(), 37
    with Ranks.start(RanksOptions(threads=1, device="cpu")) as ranks:  # type: ignore[arg-type]
        model = tiny_model("llama", torch.float64)
        with torch.no_grad():
            logits = build("llama", dtype=torch.float64)(torch.tensor([ids + ids[:passage]])).logits[0].double()
        wanted = torch.nn.functional.cross_entropy(logits[399:-1], torch.tensor(ids[:passage])).item()
        sparse = PrefillOptions(attention=Attention.xattention, density=0.01)
        nll, report = copy_nll(model, ranks, ids, passage, PrefillOptions())
        assert report is None and nll == pytest.approx(wanted, abs=1e-6)
        sparse.exact_layers = [0, 1, 2]
        nll, report = copy_nll(model, ranks, ids, passage, sparse)
        assert report is not None and report.mean_density == 1 and nll == pytest.approx(wanted, abs=1e-6)
        sparse.exact_layers = []
        assert abs(copy_nll(model, ranks, ids, passage, sparse)[0] - wanted) > 1e-5


@pytest.mark.parametrize(
    ("family", "most_bytes"),
    [
        *(("llama_deep", most_bytes) for most_bytes in (MOST_BYTES, 200_000, 0)),
        *((family, MOST_BYTES) for family in ("gemma3n_text", "gemma2", "cla", "qwen3_next", "falcon_h1")),
    ],
)
def test_losses_are_those_of_forwards_from_the_first_layer_on(family: str, most_bytes: int) -> None:
    """Bit by bit: also where later layers read keys of earlier ones, or hold states, and after what had no room."""
    types = ["full_attention", "sliding_attention"] * 3  # of Gemma: layer 3 reads layer 1, which begins before layer 2
    config: dict[str, Any] = {"layer_types": types} if family == "gemma3n_text" else {}
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (260,), generator=draw).tolist() for _ in range(2)]
    sparse = PrefillOptions(attention=Attention.xattention, density=0.01)
    with Ranks.start(RanksOptions(threads=1, device="cpu")) as ranks:  # type: ignore[arg-type]
        model = Model(build(family, dtype=torch.float32, **config), name=family)
        layers = [layer for number, layer in enumerate(model.kv_layers) if model.rules[number] is None]
        pairs = [frozenset(pair) for pair in combinations(layers[-3:], 2)]
        sets = list(dict.fromkeys([frozenset[int](), frozenset(layers), *pairs, frozenset(layers[1:])]))
        copies = Copies(model, ranks, prompts, 37, sparse, most_bytes=most_bytes)
        for number, ids in enumerate(prompts):
            found = [*copies.losses(number, sets[:2], sets[2:]), *copies.losses(number, sets[2:])]
            for exact, loss in zip(sets, found, strict=True):
                nll, report = copy_nll(model, ranks, ids, 37, replace(sparse, exact_layers=sorted(exact)))
                assert report is not None and loss == (nll, report.mean_density)
        assert len({loss.nll for loss in found}) > 1


def test_layers_before_the_first_that_differs_are_computed_once() -> None:
    """Of 12: all of them without exact layers, 7 with layer 5 exact, 6 with layers 5 and 6, for prompt and copy."""
    from tests.ranks.tasks import tiny_model

    ids, sparse = list(range(3, 83)) * 5, PrefillOptions(attention=Attention.xattention, density=0.01)
    with Ranks.start(RanksOptions(threads=1, device="cpu")) as ranks:  # type: ignore[arg-type]
        model, computed = tiny_model("llama_deep"), list[int]()
        hooks = [
            layer.get_submodule("mlp").register_forward_hook(lambda *_, number=number: computed.append(number))
            for number, layer in enumerate(model.decoder_layers)
        ]
        sets, copies = [frozenset[int](), frozenset({5}), frozenset({5, 6})], Copies(model, ranks, [ids], 37, sparse)
        computed.clear()
        assert len([*copies.losses(0, sets)]) == len(sets)
        for hook in hooks:
            hook.remove()
        assert computed == [*range(12), *range(12), *range(5, 12), *range(5, 12), *range(6, 12), *range(6, 12)]


@pytest.mark.parametrize("num_states", [0, 1, 3])
def test_no_more_bytes_are_held_than_allowed_while_a_forward_runs(
    monkeypatch: pytest.MonkeyPatch, num_states: int
) -> None:
    """With room for fewer states than layers from which others go on, of which those of the next set are kept."""
    from tests.ranks.tasks import tiny_model

    ids, sparse = list(range(3, 83)) * 5, PrefillOptions(attention=Attention.xattention, density=0.01)
    held, given = list[int](), beginning_at
    with Ranks.start(RanksOptions(threads=1, device="cpu")) as ranks:  # type: ignore[arg-type]
        model = tiny_model("llama_deep", torch.float32)
        state = (len(ids) + 37) * model.config.hidden_size * 4
        copies = Copies(model, ranks, [ids], 37, sparse, most_bytes=num_states * state + 100)
        opened: list[tuple[Any, dict[int, Any]]] = []

        @contextmanager
        def noted(layers: Any, first: int, begin: Any, kept: dict[int, Any]) -> Iterator[None]:
            opened.append((begin, kept))
            with given(layers, first, begin, kept):
                yield
            states = [each for state in copies._kept.values() for each in (state.prompt, state.copy)]
            states += [each for begin, kept in opened[-2:] for each in (begin, *kept.values())]
            held.append(sum({id(each): num_bytes(each) for each in states}.values()))

        monkeypatch.setattr("launch.exact.copies.beginning_at", noted)
        sets = [frozenset[int](), *(frozenset({layer}) for layer in (9, 7, 5, 3, 1)), frozenset({3, 4})]
        assert len([*copies.losses(0, sets)]) == len(sets)
    assert max(held) == num_states * state
    if num_states:
        assert next(iter(opened[0][1])) == 9


@pytest.mark.parametrize("layers", [[0, 1], [0, 1, 2]])
def test_a_run_tells_that_no_layer_is_left_to_choose_keys(
    folder: Path, capsys: pytest.CaptureFixture[str], layers: list[int]
) -> None:
    given = ["model=hf", f"model.path={folder}", "ranks.threads=1", "ranks.device=cpu", "generation.max_new_tokens=1"]
    given += ["prompt.random_tokens=20", "prefill.attention=xattention", f"prefill.exact_layers={layers}"]
    assert exit_status(infer.main, given) == 0
    told = "slower: prefill.attention=xattention chooses keys in no layer: prefill.exact_layers names all layers of"
    assert (told in capsys.readouterr().err) is (layers == [0, 1, 2])


def test_it_prints_options_that_it_reads_itself(folder: Path, sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample.write_text(sample.read_text(encoding="utf-8") * 3, encoding="utf-8")
    given = ["model=hf", f"model.path={folder}", f"samples=[{sample}]", "ranks.threads=1", "ranks.device=cpu"]
    given += ["tokens=450", "passage=20", "prompts=2", "prefill.density=0.3", "prefill.exact_layers=[1]"]
    assert exit_status(exact_layers.main, given) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("450 tokens, of which 20 come again; 2 prompts to choose by.")
    assert out[1].startswith("layers 1 exact: ")
    assert "found: " in out[-2] or "found: " in out[-3]
    options = out[-1].split()
    assert EXACT.compose(options).prefill.exact_layers[-1:] in ([1], [2])


def test_a_run_goes_on_from_its_lines(
    folder: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a line has is not measured again; a line that was cut off, and those of another passage, are."""
    sample.write_text(sample.read_text(encoding="utf-8") * 3, encoding="utf-8")
    lines, told = tmp_path / "lines.jsonl", list[str]()
    given = ["model=hf", f"model.path={folder}", f"samples=[{sample}]", "ranks.threads=1", "ranks.device=cpu"]
    given += ["tokens=450", "prompts=2", "prefill.density=0.3", f"lines={lines}"]

    def run(passage: int) -> list[str]:
        assert exit_status(exact_layers.main, [*given, f"passage={passage}"]) == 0
        told.append(capsys.readouterr().out)
        return lines.read_text(encoding="utf-8").splitlines()

    first = run(20)
    lines.write_text("\n".join([*first[:3], first[3][:-9]]), encoding="utf-8")
    again = run(20)
    assert "3 losses of prompts are known from lines=" in told[1] and "are known" not in told[0]
    assert told[1].splitlines()[2:] == told[0].splitlines()[1:]
    assert [*again[:3], *again[4:]] == first
    assert run(20) == again and len(run(30)) > len(again) and "are known" not in told[3]


def test_options_are_told_as_they_are_read() -> None:
    prefill = PrefillOptions(attention=Attention.xattention, threshold=0.95, exact_layers=[7, 5])
    told = options_text(prefill)
    assert told == "prefill.attention=xattention prefill.stride=16 prefill.threshold=0.95 prefill.exact_layers=[5,7]"
    assert EXACT.compose(told.split()).prefill == prefill


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("prompts=1", "prompts=1 must be at least 2"),
        ("passage=300", "tokens=450 must be at least twice passage=300"),
        ("most_loss=-1", "most_loss=-1.0 must be nats of at least 0"),
        ("group=0", "group=0 must be at least 1"),
        ("prefill.attention=causal", "prefill.attention=causal must be xattention"),
        ("prefill.exact_layers=[5]", "prefill.exact_layers=[5] names 5, and the layers of model"),
        ("tokens=1000", "tokens=1000 is more than the model's 512 positions"),
        ("samples=[missing.txt]", "samples=missing.txt does not exist"),
        ("prompts=400", "runs of 430 tokens, and prompts=400 needs 800"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, sample: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    sample.write_text(sample.read_text(encoding="utf-8") * 3, encoding="utf-8")
    given = ["model=hf", f"model.path={folder}", f"samples=[{sample}]", "ranks.threads=1", "ranks.device=cpu"]
    assert exit_status(exact_layers.main, [*given, "tokens=450", "passage=20", "prompts=2", option]) != 0
    assert message in one_line_error(capsys)


def test_runs_of_texts_have_one_length() -> None:
    class Letters:
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    assert runs_of(["abcde", "x", "fghi"], Letters(), 2) == [[97, 98], [99, 100], [102, 103], [104, 105]]


def test_defaults_of_the_file_are_those_of_the_options() -> None:
    assert EXACT.compose([]) == ExactRun()
