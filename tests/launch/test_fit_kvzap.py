"""python -m policies.fit_kvzap: from texts to a file that its own model takes."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

import pytest
import torch

from launch.fit_kvzap import SINKS, fitted, fitted_on, main, scored
from policies.kvzap import KVzap
from policies.kvzip import KVzip
from policies.ridge import Ridge, explained
from policies.score_maps import ScoreMaps
from runahead import Model
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.replay import score_prompt
from tests.exit_status import exit_status
from tests.families import build, prompt, throughout
from tests.launch.learning import ended
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model


def samples(inputs: int, targets: int, count: int = 50, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x_TD = torch.randn(count, inputs, generator=draw) * torch.linspace(0.2, 3, inputs) + 1.5
    weight_DK = torch.randn(inputs, targets, generator=draw)
    return x_TD, x_TD @ weight_DK - 4 + noise * torch.randn(count, targets, generator=draw)


@pytest.mark.parametrize("penalty", [1e-3, 0.5])
def test_maps_minimise_the_penalised_error(penalty: float) -> None:
    """The least squares with rows added for the penalty, of inputs and targets without their means."""
    x_TD, y_TK = samples(6, 2)
    ridge = Ridge(6, 2, torch.device("cpu"))
    for part in (slice(0, 7), slice(7, 50)):
        ridge.add(x_TD[part], y_TK[part])
    weight_KD, bias_K = ridge.solved(penalty)
    x, y = x_TD.double() - x_TD.double().mean(dim=0), y_TK.double() - y_TK.double().mean(dim=0)
    root = (50 * penalty * x.var(dim=0, correction=0).mean()).sqrt()
    rows = torch.cat([x, root * torch.eye(6, dtype=torch.float64)]), torch.cat([y, y.new_zeros(6, 2)])
    expected_DK = torch.linalg.lstsq(*rows).solution
    torch.testing.assert_close(weight_KD.double(), expected_DK.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        bias_K.double(), y_TK.double().mean(0) - x_TD.double().mean(0) @ expected_DK, atol=1e-3, rtol=0
    )


def test_what_is_explained() -> None:
    x_TD, y_TK = samples(6, 2, count=4000)
    ridge = Ridge(6, 2, torch.device("cpu"))
    ridge.add(x_TD, y_TK)
    weight_KD, bias_K = ridge.solved(1e-9)
    noise = 2 * 0.3**2 / float(y_TK.var(dim=0).sum())
    assert explained(y_TK, x_TD @ weight_KD.T + bias_K) == pytest.approx(1 - noise, abs=2e-3)
    assert explained(y_TK, y_TK.mean(dim=0).expand_as(y_TK)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_token_comes_with_the_logarithm_of_its_kvzip_plus_score(family: str) -> None:
    """Without the first tokens, and layers with windows."""
    model, ids = tiny_model(family), prompt(30)
    with throughout(torch.float64):
        found = scored(model, ids)
        run = Run(model, [], [ids])
        run.prefill()
        expected = score_prompt(model, KVzip(plus=True), run.kept, run.ids_BS, run.pads)
    assert [*found] == [layer for layer, scores_BKn in enumerate(expected) if scores_BKn is not None]
    for layer, (x_TD, y_TK) in found.items():
        assert x_TD.shape == (30 - SINKS, 32)
        of_layer = expected[layer]
        assert of_layer is not None
        torch.testing.assert_close(y_TK.exp(), of_layer[0, :, SINKS:].T, atol=1e-8, rtol=1e-5)


def test_one_context_in_eight_is_not_fitted_on() -> None:
    assert fitted_on(2) == [0] and fitted_on(3) == [0, 1] and fitted_on(16) == [*range(7), *range(8, 15)]


def test_maps_are_fitted_on_some_contexts_and_judged_on_others() -> None:
    model, contexts, done = tiny_model("llama"), [prompt(40, seed) for seed in range(4)], list[int]()
    with throughout(torch.float64):
        fit = fitted(model, contexts, ridge=0.01, done=lambda: done.append(1))
        data = [scored(model, ids) for ids in contexts]
    assert len(done) == 4
    for layer in range(3):
        x_TD, y_TK = (torch.cat([each[layer][part] for each in data[:3]]) for part in (0, 1))
        ridge = Ridge(32, 2, torch.device("cpu"))
        ridge.add(x_TD, y_TK)
        weight_KD, bias_K = ridge.solved(0.01)
        torch.testing.assert_close(fit.maps.weights[layer].double(), weight_KD.double(), atol=1e-4, rtol=1e-3)
        x_TD, y_TK = data[3][layer]
        predicted_TK = x_TD @ fit.maps.weights[layer].T.double() + fit.maps.biases[layer].double()
        assert fit.explained[layer] == pytest.approx(explained(y_TK, predicted_TK), abs=1e-6)
    assert len(fit.predicted) == 3 * 2 * (40 - SINKS)
    for share in (0.5, 0.125):
        assert float((fit.predicted >= fit.threshold(share)).double().mean()) == pytest.approx(share, abs=0.01)


def test_the_file_is_taken_by_its_own_model_alone(
    folder: Path, own: Model, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kvzap=1, of a model.safetensors"
    assert ended("fit_kvzap", folder, sample, out, "contexts=3") == 0
    said = capsys.readouterr().out
    assert f"{out}: maps of 3 layers from 3 contexts of 96 tokens" in said and "R² in the 1 that" in said
    assert said.count("policy.threshold=") == 4
    assert [*ScoreMaps.load(out, own.fingerprint).weights] == [0, 1, 2]
    RankPolicies.everywhere([KVzap(predictor=str(out), threshold=-3.0)]).check(own)
    with pytest.raises(ValueError, match="was made for another model"):
        ScoreMaps.load(out, tiny_model("llama").fingerprint)


def test_a_model_with_random_weights_and_no_tokenizer_reads_random_tokens(folder: Path, tmp_path: Path) -> None:
    config, out = copy(folder / "config.json", tmp_path), tmp_path / "x"
    given = ["model=random", f"model.config={config}", f"out={out}", "random_tokens=true"]
    assert exit_status(main, [*given, "context=40", "contexts=2", "ranks.device=cpu"]) == 0
    assert [*ScoreMaps.load(out).weights] == [0, 1, 2]


def test_a_hybrid_is_refused_before_its_weights_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its states would take the repetition of a prompt in."""
    build("qwen3_next").config.save_pretrained(tmp_path)
    given = ["model=random", f"model.config={tmp_path / 'config.json'}", f"out={tmp_path / 'x'}", "random_tokens=true"]
    assert exit_status(main, [*given, "ranks.device=cpu"]) == 2
    assert "hold states that would take it in twice" in capsys.readouterr().err
