"""Windows, which of their steps can be learned from, and what a network sees of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples, tensors
from oracles import stack_history as seen_by_definition
from oracles import trainable as trainable_by_definition

from veldt.records.block import Window, trainable, window_items
from veldt.records.history import observation, observations, stack_history, stack_windows


@st.composite
def windows(draw):
    length = draw(st.integers(1, 4))
    return Window(
        history=draw(st.integers(1, 4)),
        burn_in=draw(st.integers(0, 3)),
        length=length,
        lookahead=draw(st.integers(0, 5)),
        stride=draw(st.integers(1, length)),
    )


def flags(rows, columns, bias=0.5):
    """bool [rows, columns], True with about this probability."""
    bits = st.lists(st.floats(0, 1), min_size=rows * columns, max_size=rows * columns)
    return bits.map(lambda x: np.array(x).reshape(rows, columns) < bias)


@settings(max_examples=examples(50), deadline=None)
@given(windows(), st.integers(1, 6))
def test_every_window_of_a_block_lies_within_it(window, strides):
    fresh = strides * window.stride
    starts = range(0, fresh, window.stride)
    assert window.starts(fresh) == len(starts)
    assert max(starts) + window.rows == window.block_rows(fresh), "and the last one reaches its end"


@pytest.mark.parametrize(
    "bad",
    [
        {"history": 0},
        {"burn_in": -1},
        {"lookahead": -1},
        {"stride": 0},
        {"length": 2, "stride": 3},
        {"length": 0, "stride": 0},
    ],
)
def test_impossible_windows_are_refused(bad):
    with pytest.raises(AssertionError):
        Window(**bad)
    with pytest.raises(AssertionError):
        Window(length=4, stride=4).block_rows(6)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.integers(0, 5), st.integers(1, 8))
def test_trainable_is_its_definition(data, lookahead, size):
    valid, last = data.draw(flags(2, size + lookahead, 0.85)), data.draw(flags(2, size + lookahead, 0.3))
    truth = [[trainable_by_definition(v, e, t, lookahead) for t in range(size)] for v, e in zip(valid, last, strict=True)]
    assert trainable(valid, last, lookahead).tolist() == truth
    assert trainable(*tensors(valid, last), lookahead).tolist() == truth


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), windows(), st.integers(1, 4))
def test_an_item_is_a_window_with_something_to_learn(data, window, strides):
    fresh = strides * window.stride
    rows = window.block_rows(fresh)
    valid, last = data.draw(flags(1, rows, 0.6)), data.draw(flags(1, rows, 0.4))
    truth = [
        any(
            trainable_by_definition(valid[0], last[0], window.before + o + j, window.lookahead)
            for j in range(window.length)
        )
        for o in range(0, fresh, window.stride)
    ]
    assert window_items(valid, last, window, fresh).tolist() == [truth]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([(), (2,), (2, 3)]),
    st.sampled_from([np.uint8, np.float32]),
)
def test_stacked_history_ends_at_the_episode_and_at_gaps(data, history, extra, shape, dtype):
    rows = history + extra
    at = data.draw(st.integers(history - 1, rows - 1))
    first, valid = data.draw(flags(3, rows, 0.2)), data.draw(flags(3, rows, 0.85))
    valid[:, at] = True
    x = np.arange(1, 1 + 3 * rows * int(np.prod(shape))).reshape(3, rows, *shape).astype(dtype)
    truth = np.stack([seen_by_definition(*columns, at, history) for columns in zip(x, first, valid, strict=True)])
    before = x.copy()
    out = stack_history(x, first, valid, at, history)
    assert out.dtype == dtype and (out == truth).all()
    assert (stack_history(*tensors(x, first, valid), at, history).numpy() == truth).all()
    assert (x == before).all(), "the rows themselves stay as they are"


def test_an_observation_is_stacked_by_key():
    rows = {"obs/image": torch.ones(2, 3, 4), "obs/pose": torch.ones(2, 3, 5), "reward": torch.zeros(2, 3)}
    rows |= {"first": torch.zeros(2, 3, dtype=torch.bool), "valid": torch.ones(2, 3, dtype=torch.bool)}

    def shapes(*args):
        return {key: tuple(x.shape) for key, x in observation(rows, *args).items()}

    assert shapes(2, 1) == {"image": (2, 4), "pose": (2, 5)}
    assert shapes(2, 3) == {"image": (2, 3, 4), "pose": (2, 3, 5)}
    assert shapes(2, 3, ("image",)) == {"image": (2, 3, 4), "pose": (2, 5)}
    assert observation({**rows, "obs": torch.ones(2, 3)}, 2, 2).shape == (2, 2)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.data(),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from([(), (2,), (2, 3)]),
    st.sampled_from([np.uint8, np.float32, np.bool_]),
)
def test_the_stacks_of_all_rows_are_those_of_each(data, history, extra, shape, dtype):
    rows = history + extra
    first, valid = data.draw(flags(2, rows, 0.2)), data.draw(flags(2, rows, 0.85))
    x = np.arange(1, 1 + 2 * rows * int(np.prod(shape))).reshape(2, rows, *shape).astype(dtype)
    before = x.copy()
    out = stack_windows(*tensors(x, first, valid), history).numpy()
    assert out.shape == (2, extra + 1, history, *shape) and out.dtype == dtype
    for t in range(history - 1, rows):
        truth = np.stack([seen_by_definition(*columns, t, history) for columns in zip(x, first, valid, strict=True)])
        assert (out[:, t - history + 1] == truth).all(), t
        alone = stack_history(*tensors(x, first, valid), t, history).numpy()
        assert (out[:, t - history + 1].reshape(alone.shape) == alone).all(), t
    assert (x == before).all()


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("stacked", [(), ("image",)])
def test_what_is_seen_in_every_row_is_what_is_seen_in_each(history, stacked):
    rng = np.random.default_rng(0)
    rows = {
        "obs/image": rng.random((2, 6, 4), np.float32),
        "obs/pose": rng.random((2, 6, 5), np.float32),
        "reward": rng.random((2, 6), np.float32),
        "first": rng.random((2, 6)) < 0.3,
        "valid": rng.random((2, 6)) < 0.8,
    }
    rows = {name: torch.from_numpy(x) for name, x in rows.items()}
    out = observations(rows, history, stacked)
    assert set(out) == {"image", "pose"}
    for t in range(history - 1, 6):
        for key, alone in observation(rows, t, history, stacked).items():
            assert torch.equal(out[key][:, t - history + 1], alone), (key, t)
    plain = {**rows, "obs": rows["obs/image"]}
    assert torch.equal(observations(plain, history), observations(rows, history)["image"]), "obs alone is no Dict"
