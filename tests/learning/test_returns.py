"""n-step returns against the definition, one step at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples, tensors
from oracles import n_step as definition

from veldt.learning.returns import n_step


@st.composite
def columns(draw):
    """Rewards, discounts and ends [B, T]. An end may be terminal or a truncation; a life lost is terminal without end."""
    n, batch = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    steps = n + draw(st.integers(1, 6))
    kinds = draw(
        st.lists(
            st.sampled_from(["on", "on", "on", "life", "end", "limit"]), min_size=batch * steps, max_size=batch * steps
        )
    )
    reward = draw(st.lists(st.integers(-9, 9), min_size=batch * steps, max_size=batch * steps))
    shape = (batch, steps)
    discount = np.array([kind not in ("life", "end") for kind in kinds], np.float32).reshape(shape)
    last = np.array([kind in ("end", "limit") for kind in kinds]).reshape(shape)
    return np.array(reward, np.float32).reshape(shape), discount, last, n


@settings(max_examples=examples(150), deadline=None)
@given(columns(), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_n_step_is_the_sum_of_the_definition(case, gamma):
    reward, discount, last, n = case
    out = n_step(reward, discount, last, n, gamma)
    for b in range(len(reward)):
        for t in range(reward.shape[1] - n):
            total, product, m = definition(reward[b], discount[b], last[b], t, n, gamma)
            assert out.m[b, t] == m
            if gamma == 0.99:
                assert out.reward[b, t] == pytest.approx(total, rel=1e-5, abs=1e-5)
                assert out.discount[b, t] == pytest.approx(product, rel=1e-6)
            else:  # dyadic: no rounding at all
                assert (out.reward[b, t], out.discount[b, t]) == (total, product)


@settings(max_examples=examples(80), deadline=None)
@given(columns(), st.sampled_from([0.5, 0.9, 0.997]))
def test_numpy_and_torch_agree_to_the_bit(case, gamma):
    *arrays, n = case
    for x, y in zip(n_step(*arrays, n, gamma), n_step(*tensors(*arrays), n, gamma), strict=True):
        assert y.numpy().dtype == x.dtype and (y.numpy() == x).all()


def test_n_step_needs_n_rows_more_than_it_returns():
    row = np.zeros((1, 3), np.float32)
    assert n_step(row, row, row > 0, 2, 0.9).reward.shape == (1, 1)
    with pytest.raises(AssertionError):
        n_step(row, row, row > 0, 3, 0.9)
