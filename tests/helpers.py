"""Small models, data and comparisons that the tests share."""

import keras
import numpy as np
import pytest

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

# One float64 rounding per addition, amplified by a few updates of a tiny
# model, stays far below this.
EXACT = 1e-10


def skip_if_activity_penalties_are_sums():
    """Old Keras does not divide them by the rows."""
    layer = keras.layers.Dense(1, activity_regularizer="l2")
    layer(np.ones((1, 1)))
    (one,) = layer.losses
    layer(np.ones((2, 1)))
    if float(layer.losses[0]) != float(one):
        pytest.skip("this Keras sums activity penalties over the rows")


def masked_tolerance():
    """The tolerance for means over a mask.

    Keras 3.8 divides them by the number of valid elements plus 1e-7, in each
    batch: a relative error of 1e-7 per valid element, in the reference and in
    each micro-batch. Newer Keras divides exactly.
    """
    mask = keras.ops.convert_to_tensor([[True], [False]])
    outputs = keras.ops.ones((2, 1))
    outputs._keras_mask = keras.ops.squeeze(mask, -1)
    mean = keras.losses.MeanSquaredError()(keras.ops.zeros((2, 1)), outputs)
    return EXACT if float(mean) == 1.0 else 1e-7


def rows(num_rows, num_inputs=5, num_outputs=2, seed=0):
    """Inputs and targets, standard normal."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(num_rows, num_inputs)),
        rng.normal(size=(num_rows, num_outputs)),
    )


def tensors():
    """Inputs and outputs of the 5-7-2 network."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh")(inputs)
    return inputs, keras.layers.Dense(2)(hidden)


def functional():
    return with_known_weights(keras.Model(*tensors()))


def sequential():
    layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh")]
    return with_known_weights(
        keras.Sequential([*layers, keras.layers.Dense(2)])
    )


def traced_model():
    """A model, and a list that grows by one with each trace of it."""
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    inputs = keras.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(2)(Counting()(inputs)))
    traces.clear()
    return model, traces


def subclass_of(base):
    """The same network as a class definition on `base`."""

    class Net(base):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.hidden = keras.layers.Dense(7, activation="tanh")
            self.out = keras.layers.Dense(2)

        def call(self, inputs):
            return self.out(self.hidden(inputs))

    return Net


def subclassed(base=keras.Model, **kwargs):
    model = subclass_of(base)(**kwargs)
    model(np.zeros((1, 5)))
    return with_known_weights(model)


def with_known_weights(model, seed=1):
    """Sets weights that do not depend on how Keras draws initial ones."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(0.5 * rng.normal(size=weight.shape))
    return model


def with_known_state(model):
    """The same where weights are counters and variances too."""
    with_known_weights(model)
    for weight in model.non_trainable_weights:
        if "variance" in weight.path:
            weight.assign(np.linspace(0.5, 2.0, weight.shape[0]))
        elif len(weight.shape) == 0:
            weight.assign(0.0)
    return model


def weights(model):
    return [weight.numpy() for weight in model.weights]


def values(variables):
    return [variable.numpy() for variable in variables]


def assert_close(left, right, atol=EXACT):
    """Compares two models, or two lists of arrays."""
    if isinstance(left, keras.Model):
        left, right = weights(left), weights(right)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def assert_equal(left, right):
    """Bit by bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


def fit_large_batch(
    optimizer, batch_size, data, epochs=2, make=functional, loss="mse", **kwargs
):
    """Plain Keras, the reference of every equality."""
    model = make()
    model.compile(optimizer, loss, **kwargs)
    model.fit(
        *data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0
    )
    return model


def fit_way(way, optimizer, accum_steps, batch_size, data, epochs=2, **kwargs):
    """Trains the same network, accumulating, by one of the ways in."""
    callbacks = []
    if way == "wrap":
        model = AccumModel.wrap(functional(), accum_steps=accum_steps)
    elif way == "subclass":
        model = subclassed(AccumModel, accum_steps=accum_steps)
    elif way == "callback":
        model = functional()
        callbacks = [AccumCallback(accum_steps=accum_steps, verbose=0)]
    else:
        model = functional()
        optimizer = AccumOptimizer(optimizer, accum_steps=accum_steps)
    kwargs.setdefault("loss", "mse")
    model.compile(optimizer, **kwargs)
    model.fit(
        *data,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model


class UpdateRecorder(keras.callbacks.Callback):
    """Notes after which micro-batches, from 1, updates were made."""

    def __init__(self):
        super().__init__()
        self.updates = []
        self.num_batches = 0
        self._seen = 0

    def _note(self):
        made = int(self.model.optimizer.iterations)
        self.updates += [self.num_batches] * (made - self._seen)
        self._seen = made

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1
        self._note()

    def on_epoch_end(self, epoch, logs=None):
        self._note()
