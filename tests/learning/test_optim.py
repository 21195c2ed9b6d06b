"""The optimizers against torch's, and against loops written from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from veldt.learning import optim
from veldt.records.tree import Array

SIZE = 37


def gradients(steps: int = 60) -> list[Array]:
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-4, 2, SIZE)  # parameters of very different scale
    return [(rng.normal(size=SIZE) * scales).astype(np.float32) for _ in range(steps)]


def lr_at(step: int) -> float:
    return 1e-2 * (1 - step / 100)  # a rate that changes: it must not be baked in


def run(make: Callable[[torch.Tensor, torch.Tensor], optim.Optimizer], steps: int = 60) -> torch.Tensor:
    weights, gradient = torch.linspace(-1, 1, SIZE), torch.zeros(SIZE)
    optimizer = make(weights, gradient)
    for step, g in enumerate(gradients(steps)):
        gradient.copy_(torch.from_numpy(g))
        optimizer.step(lr_at(step))
    return weights


@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-2])
def test_adam_is_torchs_adam(eps: float) -> None:
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    adam = torch.optim.Adam([theirs], lr=1.0, eps=eps)
    for step, g in enumerate(gradients()):
        theirs.grad = torch.from_numpy(g.copy())
        adam.param_groups[0]["lr"] = lr_at(step)
        adam.step()
    ours = run(lambda w, g: optim.Adam(w, g, eps))
    torch.testing.assert_close(ours, theirs.detach(), rtol=2e-5, atol=2e-6)


def test_adam_on_slices_of_a_vector_leaves_the_rest_alone() -> None:
    vector, gradient = torch.ones(10), torch.ones(10)
    optim.Adam(vector[2:5], gradient[2:5], 1e-8).step(0.5)
    assert vector.tolist() == pytest.approx([1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 1, 1], rel=1e-5)
    assert vector[:2].tolist() == [1, 1] and vector[5:].tolist() == [1] * 5


class Elsewhere(torch.Tensor):
    """Says that it lies on an accelerator, for the operations that are used there."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_rmsprop_is_the_formula(start: float, centered: bool, kind: type[torch.Tensor]) -> None:
    """Graves 2013, equations 38 to 41, with DQN's constants: epsilon lies inside the root. Not centred it is A3C's."""
    decay, eps = 0.95, 0.01
    w = np.linspace(-1, 1, SIZE).astype(np.float32).astype(np.float64)
    square, mean = np.full(SIZE, start), np.zeros(SIZE)
    for step, g in enumerate(gradients()):
        for i in range(SIZE):
            gi = float(g[i])
            square[i] = decay * square[i] + (1 - decay) * gi * gi
            mean[i] = decay * mean[i] + (1 - decay) * gi
            spread = square[i] - (mean[i] ** 2 if centered else 0.0)
            w[i] -= lr_at(step) * gi / math.sqrt(spread + eps)
    ours = run(lambda weights, g: optim.RMSProp(weights.as_subclass(kind), g, eps, decay, centered, start))
    np.testing.assert_allclose(ours.numpy(), w, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("start", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_adagrad_is_torchs(start: float, kind: type[torch.Tensor]) -> None:
    reference = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    torchs = torch.optim.Adagrad([reference], lr=1.0, eps=1e-6, initial_accumulator_value=start)
    for step, g in enumerate(gradients()):
        reference.grad = torch.from_numpy(g)
        torchs.param_groups[0]["lr"] = lr_at(step)
        torchs.step()
    ours = run(lambda weights, g: optim.AdaGrad(weights.as_subclass(kind), g, 1e-6, start))
    torch.testing.assert_close(ours.as_subclass(torch.Tensor), reference.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_adagrad_without_epsilon_leaves_what_has_no_gradient(kind: type[torch.Tensor]) -> None:
    weights, gradient = torch.ones(3), torch.tensor([0.0, 2.0, -1e-6])
    optimizer = optim.AdaGrad(weights.as_subclass(kind), gradient, eps=0.0)
    optimizer.step(0.5)  # a first step is as long as the rate
    assert weights.tolist() == pytest.approx([1.0, 0.5, 1.5])


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_the_variance_of_a_constant_gradient_is_not_negative(kind: type[torch.Tensor]) -> None:
    """It tends to 0, so that a step tends to lr * g / sqrt(eps); in float32 the averages' difference falls below 0."""
    gradient = torch.cat((torch.linspace(0.5, 5.0, 400), torch.linspace(-1_000.0, -1.0, 400)))
    weights = torch.zeros(800)
    optimizer = optim.RMSProp(weights.as_subclass(kind), gradient, eps=1.5e-7, decay=0.95)
    constant = gradient.clone()
    for step in range(2_000):  # the averages approach it from above, where rounding leaves that of the squares too small
        gradient.copy_(constant * (2 if step < 100 else 1))
        before = weights.clone()
        optimizer.step(1e-3)
    assert weights.isfinite().all()
    assert ((weights - before).sign() == -gradient.sign()).all()
    assert ((weights - before).abs() <= 1.01e-3 * gradient.abs() / math.sqrt(1.5e-7)).all()


def test_uncentered_rmsprop_by_hand() -> None:
    """One step from zero: the mean of squares is (1 - decay) g^2, and nothing is subtracted from it."""
    weights, gradient = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, -4.0, 0.0])
    optimizer = optim.RMSProp(weights, gradient, eps=0.0625, decay=0.75, centered=False)
    optimizer.step(0.5)
    # sqrt(4/4 + 1/16) and sqrt(16/4 + 1/16); a gradient of 0 moves nothing
    assert weights.tolist() == pytest.approx([1 - 1 / math.sqrt(1.0625), 2 + 2 / math.sqrt(4.0625), 3], abs=1e-6)
    assert not optimizer.state()["mean"].any()


def test_sgd_is_the_formula() -> None:
    w = np.linspace(-1, 1, SIZE)
    for step, g in enumerate(gradients(10)):
        w -= lr_at(step) * g
    np.testing.assert_allclose(run(optim.SGD, 10).numpy(), w, rtol=1e-4, atol=1e-5)


MAKERS: dict[str, Callable[[torch.Tensor, torch.Tensor], optim.Optimizer]] = {
    "adam": lambda w, g: optim.Adam(w, g, 1e-5),
    "rmsprop": lambda w, g: optim.RMSProp(w, g, 0.01, 0.95),
    "uncentered": lambda w, g: optim.RMSProp(w, g, 0.01, 0.99, centered=False, square_start=1.0),
    "adagrad": lambda w, g: optim.AdaGrad(w, g, 1e-6, 0.1),
    "sgd": optim.SGD,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(name: str) -> None:
    weights, gradient = torch.linspace(-1, 1, SIZE), torch.zeros(SIZE)
    optimizer = MAKERS[name](weights, gradient)
    for step, g in enumerate(gradients(60)):
        if step == 25:
            saved = {key: np.array(value) for key, value in optimizer.state().items()}
            weights = weights.clone()
            optimizer = MAKERS[name](weights, gradient)
            optimizer.load_state(saved)
        gradient.copy_(torch.from_numpy(g))
        optimizer.step(lr_at(step))
    assert torch.equal(weights, run(MAKERS[name]))


@pytest.mark.parametrize("name", MAKERS)
def test_what_an_optimizer_loads_is_a_copy(name: str) -> None:
    one, other = (MAKERS[name](torch.ones(3), torch.ones(3)) for _ in range(2))
    one.step(0.1)
    other.load_state(one.state())
    before = {key: np.array(value) for key, value in other.state().items()}
    one.step(0.1)
    for key, value in other.state().items():
        np.testing.assert_array_equal(value, before[key])


def test_adam_survives_gradients_of_zero() -> None:
    weights, gradient = torch.ones(3), torch.zeros(3)
    optimizer = optim.Adam(weights, gradient, 1e-8)
    for _ in range(5):
        optimizer.step(0.1)
    assert weights.tolist() == [1, 1, 1]
