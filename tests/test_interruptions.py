"""`fit` that ends early or is entered twice: the model stays usable.

What becomes of the partial cycle is what `remainder` says: only `"carry"` goes
on with it in the next `fit`.
"""

import gc

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

WAYS = ("wrap", "callback")
X, Y = helpers.rows(16)  # 8 batches of 2.


def start(way, remainder="flush"):
    model, callbacks = helpers.functional(), []
    if way == "wrap":
        model = AccumModel.wrap(model, 3, remainder)
    else:
        callbacks = [AccumCallback(3, remainder, verbose=0)]
    model.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
    return model, callbacks


def fit(model, callbacks, x=X, y=Y, **kwargs):
    model.fit(
        x,
        y,
        batch_size=None if y is None else 2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **kwargs,
    )


def large(cycles):
    """Plain Keras on the rows of each cycle."""
    model = helpers.functional()
    model.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
    for first, last in cycles:
        model.train_on_batch(X[first:last], Y[first:last])
    return model


class After(keras.callbacks.Callback):
    """Does something once, after a batch."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.action is not None:
            action, self.action = self.action, None
            action(self.model)


class Holder(keras.callbacks.Callback):
    """Keeps the list it is in alive, as a held traceback of `fit` would."""

    def on_train_begin(self, logs=None):
        self.held = [
            each
            for each in gc.get_objects()
            if isinstance(each, keras.callbacks.CallbackList)
            and self in each.callbacks
        ]


def raising(error):
    def action(model):
        raise error

    return action


class Bad(keras.losses.Loss):
    """Fails at the fifth batch."""

    calls = 0

    def call(self, y_true, y_pred):
        self.calls += 1
        if self.calls == 5:
            raise ArithmeticError("loss")
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def interrupt(cause, model, callbacks):
    """Ends `fit` after 4 of 8 batches: one update, and one batch more."""
    if cause == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            fit(model, [*callbacks, After(3, raising(KeyboardInterrupt()))])
    elif cause == "callback":
        with pytest.raises(ZeroDivisionError):
            fit(model, [After(3, raising(ZeroDivisionError())), *callbacks])
    elif cause == "data":

        def batches():
            for first in range(0, 8, 2):
                yield X[first : first + 2], Y[first : first + 2]
            raise LookupError("data")

        with pytest.raises(tf.errors.UnknownError, match="LookupError"):
            fit(model, callbacks, batches(), None)
    else:
        optimizer = model.optimizer
        model.compile(optimizer, Bad(), run_eagerly=True)
        with pytest.raises(ArithmeticError):
            fit(model, callbacks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cause", ["interrupt", "callback", "data", "loss"])
@pytest.mark.parametrize("remainder", ["flush", "carry"])
def test_fit_after_an_interruption(way, cause, remainder):
    model, callbacks = start(way, remainder)
    optimizer, attributes = model.optimizer, set(vars(model))
    interrupt(cause, model, callbacks)
    helpers.assert_close(model, large([(0, 6)]))
    assert model.optimizer is optimizer
    assert "train_step" not in vars(model)
    assert set(vars(model)) - attributes <= {"history", "_eval_epoch_iterator"}
    x, y = X[8:], Y[8:]
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    fit(model, callbacks, x, y)
    # The fourth batch is gone, or goes on with two of the next four.
    cycles = {"flush": [(0, 6), (8, 14), (14, 16)], "carry": [(0, 6), (6, 12)]}
    helpers.assert_close(model, large(cycles[remainder]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remainder", ["flush", "carry", "drop"])
def test_training_that_is_told_to_stop_in_mid_cycle(way, remainder):
    model, callbacks = start(way, remainder)

    def stop(model):
        model.stop_training = True

    fit(model, [After(3, stop), *callbacks], epochs=3)
    cycles = [(0, 6)] + [(6, 8)] * (remainder == "flush")
    helpers.assert_close(model, large(cycles))
    fit(model, callbacks, X[8:], Y[8:])
    rest = {
        "flush": [(8, 14), (14, 16)],
        "carry": [(6, 12)],
        "drop": [(8, 14)],
    }[remainder]
    helpers.assert_close(model, large(cycles + rest))


@pytest.mark.parametrize("way", WAYS)
def test_evaluate_and_predict_in_mid_cycle_change_nothing(way):
    def look(model):
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        model.test_on_batch(X[:2], Y[:2])

    model, callbacks = start(way)
    fit(model, [After(1, look), *callbacks])
    helpers.assert_close(model, large([(0, 6), (6, 12), (12, 16)]))


@pytest.mark.parametrize("way", WAYS)
def test_train_on_batch_inside_fit_is_one_more_batch(way):
    """Batches 1, 2 and once more 2; then 3 to 5 and 6 to 8."""
    model, callbacks = start(way)
    fit(
        model,
        [After(1, lambda m: m.train_on_batch(X[2:4], Y[2:4])), *callbacks],
    )
    expected = helpers.functional()
    expected.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
    order = [0, 1, 2, 3, 2, 3]
    expected.train_on_batch(X[order], Y[order])
    for first, last in [(4, 10), (10, 16)]:
        expected.train_on_batch(X[first:last], Y[first:last])
    helpers.assert_close(model, expected)


@pytest.mark.parametrize("way", WAYS)
def test_fit_inside_fit_trains_on_all_batches(way):
    """The inner one goes on with the cycle of the outer one."""
    model, callbacks = start(way, "carry")
    fit(model, [After(1, lambda m: fit(m, [], X[4:8], Y[4:8])), *callbacks])
    expected = helpers.functional()
    expected.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
    order = [*range(4), *range(4, 8), *range(4, 16)]  # 10 batches of 2.
    for first in (0, 6, 12):
        rows = order[first : first + 6]
        expected.train_on_batch(X[rows], Y[rows])
    helpers.assert_close(model, expected)


def test_callback_that_is_in_use_is_refused():
    model, callbacks = start("callback")
    optimizer = model.optimizer
    for use in (
        lambda m: fit(m, callbacks),
        lambda m: m.evaluate(X, Y, verbose=0, callbacks=callbacks),
    ):
        with pytest.raises(RuntimeError, match="must serve one fit at a time"):
            fit(model, [After(1, use), *callbacks])
        assert model.optimizer is optimizer
    fit(model, callbacks)
    helpers.assert_close(model, large([(0, 6), (6, 12), (12, 16)]))


def test_same_callback_carries_nothing_from_one_model_to_another():
    first, callbacks = start("callback", "carry")
    second, _ = start("callback", "carry")
    fit(first, callbacks, X[:8], Y[:8])
    fit(second, callbacks)
    for model, cycles in ((first, [(0, 6)]), (second, [(0, 6), (6, 12)])):
        helpers.assert_close(model, large(cycles))
        assert type(model.optimizer) is keras.optimizers.SGD
    fit(first, [], X[8:12], Y[8:12])
    helpers.assert_close(first, large([(0, 6), (8, 10), (10, 12)]))


@pytest.mark.parametrize("way", WAYS)
def test_two_fits_in_a_row_start_clean(way):
    model, callbacks = start(way)
    for _ in range(2):
        fit(model, callbacks)
    cycles = [(0, 6), (6, 12), (12, 16)]
    helpers.assert_close(model, large(cycles * 2))
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize("cause", [None, "callback"])
def test_end_of_a_former_list_of_callbacks_leaves_the_next_fit_alone(cause):
    """Python may free the frames of a `fit` long after it, in the next one."""
    model, callbacks = start("callback")
    holder = Holder()
    if cause is None:
        fit(model, [*callbacks, holder])
        cycles = [(0, 6), (6, 12), (12, 16)]
    else:
        interrupt(cause, model, [*callbacks, holder])
        cycles = [(0, 6)]
    assert len(holder.held) == 1

    def free(model):
        holder.held.clear()
        gc.collect()

    fit(model, [After(3, free), *callbacks])
    helpers.assert_close(model, large(cycles + [(0, 6), (6, 12), (12, 16)]))
