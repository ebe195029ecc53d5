"""What becomes of a partial cycle: flush, carry, drop; and when."""

import itertools
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

EXPECTED = {
    "carry": [3, 6, 9, 12, 15, 18],
    "flush": [3, 5, 8, 10, 13, 15, 18, 20],
    "drop": [3, 8, 13, 18],
}


def start(way, remainder, accum_steps=3, optimizer=None, **compile_kwargs):
    """A compiled model and the callbacks that make it accumulate."""
    model, callbacks = helpers.functional(), []
    if way == "callback":
        callbacks = [AccumCallback(accum_steps, remainder, verbose=0)]
    else:
        model = AccumModel.wrap(model, accum_steps, remainder)
    model.compile(
        optimizer or keras.optimizers.SGD(0.125), "mse", **compile_kwargs
    )
    return model, callbacks


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("remainder", EXPECTED)
def test_updates_of_each_remainder(way, remainder):
    model, callbacks = start(way, remainder)
    recorder = helpers.UpdateRecorder()
    model.fit(
        *helpers.rows(10),
        batch_size=2,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[recorder, *callbacks],
    )
    assert recorder.updates == EXPECTED[remainder]


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("remainder", EXPECTED)
def test_remainder_weights_equal_plain_keras_on_the_cycles(way, remainder):
    """https://github.com/timoschick/pet/issues/36

    7 batches of 2, accum_steps=4: batches 1-4, then 5-7 if at all.
    """
    x, y = helpers.rows(14)
    model, callbacks = start(way, remainder, accum_steps=4)
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)
    reference = helpers.functional()
    reference.compile(keras.optimizers.SGD(0.125), "mse")
    reference.train_on_batch(x[:8], y[:8])
    if remainder == "flush":
        reference.train_on_batch(x[8:], y[8:])
    helpers.assert_close(model, reference)
    if way == "wrap":
        left = {"flush": 0, "drop": 0, "carry": 3}[remainder]
        assert model.optimizer.cycle_position == left


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_carry_goes_on_in_the_next_fit(way):
    x, y = helpers.rows(20)
    model, callbacks = start(way, "carry")
    recorder = helpers.UpdateRecorder()
    for _ in range(2):
        model.fit(
            x[:10],
            y[:10],
            batch_size=2,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, recorder],
        )
    assert recorder.updates == [3, 6, 9]
    reference = helpers.functional()
    reference.compile(keras.optimizers.SGD(0.125), "mse")
    order = [0, 1, 2, 3, 4, 0, 1, 2, 3]
    for cycle in (order[:3], order[3:6], order[6:]):
        chosen = np.concatenate([[2 * b, 2 * b + 1] for b in cycle])
        reference.train_on_batch(x[chosen], y[chosen])
    helpers.assert_close(model, reference)


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("remainder, updates", [("carry", 1), ("flush", 2)])
def test_accum_steps_beyond_the_epoch_warns_once(way, remainder, updates):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/21808"""
    x, y = helpers.rows(6)
    model, callbacks = start(way, remainder, accum_steps=6)
    with pytest.warns(UserWarning, match="exceeds the 3 batches") as caught:
        model.fit(
            x,
            y,
            batch_size=2,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    assert sum("exceeds the" in str(w.message) for w in caught) == 1
    assert int(model.optimizer.iterations) == updates
    reference = helpers.functional()
    reference.compile(keras.optimizers.SGD(0.125), "mse")
    if remainder == "carry":
        reference.train_on_batch(np.tile(x, (2, 1)), np.tile(y, (2, 1)))
    else:
        reference.train_on_batch(x, y)
        reference.train_on_batch(x, y)
    helpers.assert_close(model, reference)


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("source", ["generator", "dataset", "sequence"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_unknown_number_of_batches_is_flushed(way, source, steps_per_execution):
    x, y = helpers.rows(10)

    def batches():
        for begin in range(0, 10, 2):
            yield x[begin : begin + 2], y[begin : begin + 2]

    class Batches(keras.utils.PyDataset):
        def __getitem__(self, index):
            return next(itertools.islice(batches(), index, None))

        @property
        def num_batches(self):
            return 5

    signature = (
        tf.TensorSpec((None, 5), "float64"),
        tf.TensorSpec((None, 2), "float64"),
    )
    data = {
        "generator": batches,
        "dataset": lambda: tf.data.Dataset.from_generator(
            batches, output_signature=signature
        ),
        "sequence": Batches,
    }[source]()
    model, callbacks = start(
        way, "flush", steps_per_execution=steps_per_execution
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: the data ran out.
        model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 2
    reference = helpers.functional()
    reference.compile(keras.optimizers.SGD(0.125), "mse")
    reference.train_on_batch(x[:6], y[:6])
    reference.train_on_batch(x[6:], y[6:])
    helpers.assert_close(model, reference)


class Snapshots(keras.callbacks.Callback):
    """The weights that other callbacks and the validation see."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_test_begin(self, logs=None):
        self.seen.setdefault("test_begin", helpers.weights(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.setdefault("epoch_end", helpers.weights(self.model))
        self.seen.setdefault("logs", dict(logs))


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("has_validation", [True, False])
def test_flush_comes_before_validation_and_other_callbacks(
    way, place, has_validation
):
    x, y = helpers.rows(10)
    model, ours = start(way, "flush")
    snapshots = [Snapshots(), Snapshots()]
    callbacks = list(snapshots)
    callbacks[place:place] = ours
    history = model.fit(
        x,
        y,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        validation_data=(x, y) if has_validation else None,
    ).history
    final = helpers.weights(model)
    for snapshot in snapshots:
        helpers.assert_equal(snapshot.seen["epoch_end"], final)
        if has_validation:
            helpers.assert_equal(snapshot.seen["test_begin"], final)
        if way == "callback":
            assert snapshot.seen["logs"]["updates"] == 2
    if has_validation:
        loss = model.evaluate(x, y, verbose=0)
        np.testing.assert_allclose(history["val_loss"], [loss])


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_stop_training_in_mid_cycle_flushes(way):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.stop_training = True

    x, y = helpers.rows(20)
    model, callbacks = start(way, "flush")
    model.fit(
        x,
        y,
        batch_size=2,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[Stop(), *callbacks],
    )
    reference = helpers.functional()
    reference.compile(keras.optimizers.SGD(0.125), "mse")
    reference.train_on_batch(x[:6], y[:6])
    reference.train_on_batch(x[6:8], y[6:8])
    helpers.assert_close(model, reference)


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_evaluate_inside_an_epoch_does_not_flush(way):
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(*helpers.rows(4), verbose=0)

    recorder = helpers.UpdateRecorder()
    model, callbacks = start(way, "flush")
    model.fit(
        *helpers.rows(12),
        batch_size=2,
        verbose=0,
        callbacks=[Evaluate(), recorder, *callbacks],
    )
    assert recorder.updates == [3, 6]


def test_remainder_of_the_model_can_be_set():
    model, _ = start("wrap", "flush")
    model.remainder = "drop"
    model.fit(*helpers.rows(10), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 1
    with pytest.raises(ValueError, match="`remainder`"):
        model.remainder = "keep"
    assert model.remainder == "drop"
