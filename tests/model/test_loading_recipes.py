"""Random weights made one by one are those that are made together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from runahead.model.loading import recipes
from runahead.model.loading.recipes import NotRepeatable, Recorder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recipes, "LEAST_BYTES", 1024)
    with torch.random.fork_rng(devices=[]):
        yield


def normal(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.5)


def normal_with_a_zero_row(weight: Tensor) -> None:
    nn.init.normal_(weight)
    with torch.no_grad():
        weight[3].zero_()


def twice(weight: Tensor) -> None:
    nn.init.kaiming_uniform_(weight)
    with torch.no_grad():
        weight.normal_().mul_(0.1).add_(1.0)


def left_as_it_is(weight: Tensor) -> None:
    """The constructor's values stay."""


@pytest.mark.parametrize("initialise", [normal, normal_with_a_zero_row, twice, left_as_it_is])
def test_each_weight_is_made_by_itself(initialise: Callable[[Tensor], None]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 32, bias=False), nn.Linear(4, 4))
        for child in module:
            initialise(child.weight)
        return module

    expected, after = build(), torch.rand(1)
    recorder = Recorder(CPU)
    with recorder:
        module = build()
    assert torch.equal(torch.rand(1), after)  # the generator went on as always
    made = {name: recorder.recipe(weight) for name, weight in module.named_parameters()}
    assert [name for name, recipe in made.items() if recipe is None] == ["1.bias", "3.weight", "3.bias"]
    for name in reversed(made):  # in whatever order
        weight, recipe = expected.get_parameter(name), made[name]
        if recipe is None:
            assert torch.equal(module.get_parameter(name), weight)
        else:
            assert recipe.get_shape() == list(weight.shape)
            assert torch.equal(recipe[...], weight)
            assert torch.equal(recipe[3:9, 1::2], weight[3:9, 1::2])


def test_weights_made_from_other_values_are_told() -> None:
    with Recorder(CPU), pytest.raises(NotRepeatable):
        one, other = torch.empty(40, 40), torch.empty(40, 40)
        one.copy_(other.normal_())
    for initialise in (nn.init.trunc_normal_, nn.init.orthogonal_, lambda weight: weight.normal_() + 1):
        with Recorder(CPU), pytest.raises(NotRepeatable):
            initialise(torch.empty(40, 40))
