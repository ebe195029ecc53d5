"""LookaheadSwap: what is looked at during `fit` are the slow weights."""

import helpers
import keras
import numpy as np
import pytest

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import Lookahead
from accum_model import LookaheadSwap

DATA = helpers.rows(16)


def make_model(way="plain"):
    model = helpers.functional()
    if way == "model":
        model = AccumModel.wrap(model, 2)
    model.compile(
        Lookahead(keras.optimizers.SGD(0.125), 3), "mse", run_eagerly=True
    )
    return model


def lookahead_of(model):
    optimizer = model.optimizer
    while not isinstance(optimizer, Lookahead):
        optimizer = optimizer.inner_optimizer
    return optimizer


class Notes(keras.callbacks.Callback):
    """Slow weights and weights, at the ends of epochs and of batches."""

    def __init__(self):
        super().__init__()
        self.epochs, self.batches, self.tests = [], [], []

    def _both(self):
        slow = helpers.values(lookahead_of(self.model).slow_weights)
        return slow, helpers.weights(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self._both())

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(self._both())

    def on_test_batch_end(self, batch, logs=None):
        self.tests.append(self._both())


def fit(model, callbacks, epochs=2, **kwargs):
    return model.fit(
        *DATA,
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=DATA,
        **kwargs,
    ).history


def callbacks_for(way):
    return [AccumCallback(2, verbose=0)] if way == "callback" else []


@pytest.mark.parametrize("way", ["plain", "model", "callback"])
def test_looked_at_are_slow_weights_and_trained_are_fast_ones(way):
    plain, without = make_model(way), Notes()
    fit(plain, [without, *callbacks_for(way)])
    model, notes = make_model(way), Notes()
    # Last in the list, where Keras would call it last.
    history = fit(model, [notes, *callbacks_for(way), LookaheadSwap()])
    for seen in (notes.epochs, notes.tests):
        for slow, weights in seen:
            helpers.assert_equal(weights, slow)
    # Without the callback they are not the same, so that says something.
    assert not np.array_equal(without.epochs[0][0][0], without.epochs[0][1][0])
    for one, other in zip(notes.batches, without.batches, strict=True):
        helpers.assert_equal(one[1], other[1])
    helpers.assert_equal(helpers.weights(model), helpers.weights(plain))
    other = helpers.functional()
    other.compile("sgd", "mse")
    for (slow, _), loss in zip(notes.epochs, history["val_loss"], strict=True):
        other.set_weights(slow)
        expected = other.evaluate(*DATA, batch_size=4, verbose=0)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)


def test_checkpoints_hold_slow_weights_wherever_the_callback_stands(tmp_path):
    path = str(tmp_path / "{epoch}.keras")
    model, notes = make_model(), Notes()
    fit(model, [keras.callbacks.ModelCheckpoint(path), LookaheadSwap(), notes])
    for epoch, (slow, _) in enumerate(notes.epochs, 1):
        loaded = keras.models.load_model(path.format(epoch=epoch))
        helpers.assert_equal(helpers.weights(loaded), slow)
        helpers.assert_equal(
            helpers.values(loaded.optimizer.slow_weights), slow
        )


def test_best_weights_are_slow_ones():
    model, notes = make_model(), Notes()
    stopping = keras.callbacks.EarlyStopping(
        "val_loss",
        mode="max",
        patience=9,
        restore_best_weights=True,
        start_from_epoch=0,
    )
    fit(model, [stopping, notes, LookaheadSwap()])
    # The loss falls, so that the first epoch has the largest.
    helpers.assert_equal(helpers.weights(model), notes.epochs[0][0])


def test_a_fit_that_failed_leaves_nothing_behind():
    class Failing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    model, swap = make_model(), LookaheadSwap()
    with pytest.raises(KeyboardInterrupt):
        fit(model, [Failing(), swap])
    slow = helpers.values(lookahead_of(model).slow_weights)
    helpers.assert_equal(helpers.weights(model), slow)
    # Weights set by hand are not overwritten by what was kept.
    known = [0 * each for each in slow]
    model.set_weights(known)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(
            helpers.weights(model)
        )
    )
    fit(model, [swap, watch], epochs=1)
    helpers.assert_equal(seen[0], known)


def test_swap_works_in_evaluate_alone_and_before_the_first_step():
    model = make_model()
    model.evaluate(*DATA, verbose=0, callbacks=[LookaheadSwap()])
    model.train_on_batch(*DATA)
    fast = helpers.weights(model)
    loss = model.evaluate(*DATA, verbose=0, callbacks=[LookaheadSwap()])
    helpers.assert_equal(helpers.weights(model), fast)
    assert loss != model.evaluate(*DATA, verbose=0)
    model.optimizer.assign_slow_weights()
    assert loss == model.evaluate(*DATA, verbose=0)


def test_swap_needs_a_lookahead():
    model = helpers.functional()
    model.compile("adam", "mse")
    with pytest.raises(
        ValueError, match="needs a model that is compiled with a Lookahead"
    ):
        fit(model, [LookaheadSwap()])
