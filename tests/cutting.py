"""Models, data and comparisons of the tests of cut batches.

The reference is plain Keras on batches that are not cut.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import helpers
import keras
import numpy as np

from accum_model import AccumCallback
from accum_model import AccumModel

LENGTH = 3
NUM_TOKENS = 9


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, data for it, and how it is compiled and fitted.

    `compile_kwargs` is a function: losses, metrics and optimizers belong to
    one model each.
    """

    make: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, ...]]
    compile_kwargs: Callable[[], dict[str, Any]]
    has_masks: bool = False

    @property
    def tolerance(self):
        return helpers.masked_tolerance() if self.has_masks else helpers.EXACT


def sgd():
    """The optimizer that plain Keras itself gets right for repeated ids."""
    return keras.optimizers.SGD(0.125)


def fit(model, data, *, batch_size=10, epochs=1, callbacks=(), **kwargs):
    """Fits on (x, y[, sample weights]) in their order; returns the history."""
    x, y, sample_weight = (*data, None)[:3]
    return model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        sample_weight=sample_weight,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    ).history


def fit_plain(case, num_rows=17, mode=None, **kwargs):
    """Plain Keras, the reference: the model and its history."""
    model = case.make()
    model.compile(**case.compile_kwargs(), **(mode or {}))
    return model, fit(model, case.data(num_rows), **kwargs)


def fit_cut(
    case,
    micro_batch_size,
    loss_scope="micro_batch",
    num_rows=17,
    mode=None,
    way="wrap",
    **kwargs,
):
    """The same with batches that are cut."""
    cut = {"micro_batch_size": micro_batch_size, "loss_scope": loss_scope}
    model, callbacks = case.make(), []
    if way == "wrap":
        model = AccumModel.wrap(model, **cut)
    else:
        callbacks = [AccumCallback(**cut, verbose=0)]
    model.compile(**case.compile_kwargs(), **(mode or {}))
    data = case.data(num_rows)
    return model, fit(model, data, callbacks=callbacks, **kwargs)


def assert_same_logs(history, expected, atol=helpers.EXACT):
    """Every entry that plain Keras logs, in any form of logs."""
    for name, values in expected.items():
        np.testing.assert_allclose(
            history[name], values, rtol=0, atol=atol, err_msg=name
        )


def assert_same(ours, plain, atol=helpers.EXACT):
    """Compares pairs of a model and its history."""
    helpers.assert_close(ours[0], plain[0], atol)
    assert_same_logs(ours[1], plain[1], atol)


def distance(left, right):
    """The largest difference of two models' weights."""
    return max(
        np.abs(one - other).max()
        for one, other in zip(
            helpers.weights(left), helpers.weights(right), strict=True
        )
    )


# Metrics that are no sums over rows.


def largest_error(y_true, y_pred):
    """A maximum over the batch, as a scalar."""
    return keras.ops.max(keras.ops.abs(y_true - y_pred))


class LargestOutput(keras.metrics.Metric):
    """The mean over batches of the largest output of each."""

    def __init__(self, name="largest_output"):
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = keras.ops.cast(keras.ops.max(y_pred), self.total.dtype)
        self.total.assign_add(largest)
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


# Models and their data.


def conv_model():
    inputs = keras.Input((5, 5, 1))
    hidden = keras.layers.Conv2D(2, 3, activation="tanh")(inputs)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


def conv_data(num_rows):
    rng = np.random.default_rng(3)
    return (
        rng.normal(size=(num_rows, 5, 5, 1)),
        rng.normal(size=(num_rows, 2)),
    )


def token_model(kind):
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(NUM_TOKENS, 3, mask_zero=True)(inputs)
    if kind == "lstm":
        hidden = keras.layers.LSTM(3, return_sequences=True)(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(3)(hidden))
    )


def tokens(num_rows, seed=4):
    """Ids with padding at the end, whole rows of padding among them."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, NUM_TOKENS, (num_rows, LENGTH))
    lengths = rng.integers(0, LENGTH + 1, num_rows)
    ids[np.arange(LENGTH) >= lengths[:, None]] = 0
    ids[0] = 1
    return ids


def token_data(num_rows):
    """Classes and weights per token; the weights have zeros."""
    rng = np.random.default_rng(5)
    shape = (num_rows, LENGTH)
    weights = rng.uniform(0.5, 2.0, shape) * (rng.random(shape) > 0.3)
    return tokens(num_rows), rng.integers(0, 3, shape), weights


def token_loss(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **kwargs
    )


def two_headed_model():
    """Two inputs, two outputs; one output has a mask, the other none."""
    ids = keras.Input((LENGTH,), dtype="int32", name="ids")
    numbers = keras.Input((5,), name="numbers")
    hidden = keras.layers.Embedding(NUM_TOKENS, 3, mask_zero=True)(ids)
    left = keras.layers.Dense(2, name="left")(hidden)
    mean = keras.ops.mean(hidden, axis=1)
    both = keras.layers.Concatenate()([mean, numbers])
    right = keras.layers.Dense(3, name="right")(both)
    return helpers.with_known_weights(
        keras.Model(
            {"ids": ids, "numbers": numbers}, {"left": left, "right": right}
        )
    )


def two_headed_data(num_rows):
    rng = np.random.default_rng(6)
    weights = rng.uniform(0.5, 2.0, (2, num_rows)) * (
        rng.random((2, num_rows)) > 0.3
    )
    return (
        {"ids": tokens(num_rows), "numbers": rng.normal(size=(num_rows, 5))},
        {
            "left": rng.normal(size=(num_rows, LENGTH, 2)),
            "right": rng.normal(size=(num_rows, 3)),
        },
        {
            "left": np.repeat(weights[0][:, None], LENGTH, 1),
            "right": weights[1],
        },
    )


def two_headed_kwargs(left="sum_over_batch_size", right="sum_over_batch_size"):
    return {
        "optimizer": sgd(),
        "loss": {
            "left": keras.losses.MeanSquaredError(reduction=left),
            "right": keras.losses.MeanAbsoluteError(reduction=right),
        },
        "loss_weights": {"left": 0.5, "right": 2.0},
        "metrics": {"left": ["mae"], "right": ["mse"]},
        "weighted_metrics": {"left": ["mse"], "right": ["mae"]},
    }


CASES = {
    "dense": Case(
        helpers.functional,
        helpers.rows,
        lambda: {
            "optimizer": keras.optimizers.Adam(0.0625),
            "loss": "mse",
            "metrics": ["mae", largest_error, LargestOutput()],
        },
    ),
    "conv": Case(
        conv_model,
        conv_data,
        lambda: {
            "optimizer": keras.optimizers.SGD(
                0.125, momentum=0.5, global_clipnorm=0.25
            ),
            "loss": "mae",
            "metrics": ["mse"],
        },
    ),
    "embedding": Case(
        lambda: token_model("embedding"),
        token_data,
        lambda: {
            "optimizer": sgd(),
            "loss": token_loss(),
            "metrics": ["accuracy"],
            "weighted_metrics": [keras.metrics.SparseCategoricalAccuracy()],
        },
        has_masks=True,
    ),
    "lstm": Case(
        lambda: token_model("lstm"),
        token_data,
        lambda: {
            "optimizer": sgd(),
            "loss": token_loss(reduction="mean_with_sample_weight"),
            "metrics": ["accuracy"],
        },
        has_masks=True,
    ),
    "two heads": Case(
        two_headed_model,
        two_headed_data,
        lambda: two_headed_kwargs(right="mean_with_sample_weight"),
        has_masks=True,
    ),
    "two heads, one a sum": Case(
        two_headed_model,
        two_headed_data,
        lambda: two_headed_kwargs("mean_with_sample_weight", "sum"),
        has_masks=True,
    ),
}
