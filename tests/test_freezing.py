"""Layers that are frozen and unfrozen, with a new `compile` and without."""

import warnings

import helpers
import keras
import numpy as np
import pytest

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

WAYS = ("wrap", "subclass", "callback", "optimizer")


def start(way, accum_steps=3, remainder="flush"):
    """A model, the callbacks of its fits, and a function that compiles it."""
    callbacks = []
    if way == "wrap":
        model = AccumModel.wrap(helpers.functional(), accum_steps, remainder)
    elif way == "subclass":
        model = helpers.subclassed(
            AccumModel, accum_steps=accum_steps, remainder=remainder
        )
    else:
        model = helpers.functional()
    if way == "callback":
        callbacks = [AccumCallback(accum_steps, remainder, verbose=0)]

    def compile_anew():
        optimizer = keras.optimizers.Adam(0.125)
        if way == "optimizer":
            optimizer = AccumOptimizer(optimizer, accum_steps)
        model.compile(optimizer, "mse")

    return model, callbacks, compile_anew


def hidden_layer(model):
    return next(x for x in model.layers if isinstance(x, keras.layers.Dense))


def fit(model, data, callbacks=(), batch_size=4):
    model.fit(
        *data,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("way", WAYS)
def test_frozen_and_unfrozen_between_compiles_equals_large_batch(way):
    data = helpers.rows(12)
    large = helpers.functional()
    model, callbacks, compile_model = start(way)
    for is_trainable in (True, False, True):
        hidden_layer(large).trainable = is_trainable
        large.compile(keras.optimizers.Adam(0.125), "mse")
        fit(large, data, batch_size=12)
        hidden_layer(model).trainable = is_trainable
        compile_model()
        before = helpers.values(hidden_layer(model).weights)
        fit(model, data, callbacks)
        if not is_trainable:
            after = helpers.values(hidden_layer(model).weights)
            helpers.assert_equal(after, before)
        if way != "callback":
            sums = [
                each.path
                for each in model.optimizer.variables
                if "gradient_sum" in each.path
            ]
            assert len(sums) == len(model.trainable_weights)
        helpers.assert_close(model, large)


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("was_trainable", [True, False])
def test_without_a_new_compile_it_warns_and_does_as_keras(way, was_trainable):
    data = helpers.rows(12)
    model, callbacks, compile_model = start(way)
    plain = helpers.functional()
    hidden_layer(plain).trainable = was_trainable
    hidden_layer(model).trainable = was_trainable
    compile_model()
    plain.compile(keras.optimizers.Adam(0.125), "mse")
    fit(plain, data, batch_size=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, data, callbacks)
        fit(model, data, callbacks)  # Nothing has changed.
    fit(plain, data, batch_size=12)
    hidden_layer(plain).trainable = not was_trainable
    hidden_layer(model).trainable = not was_trainable
    if way == "callback":
        # It compiles the step anew, and so does plain Keras here.
        plain.make_train_function(force=True)
    if way == "callback" and not was_trainable:
        # In a graph, Keras 3.8 fails where it words that error.
        with pytest.raises(
            (ValueError, NotImplementedError),
            match=r"Unknown variable|numpy\(\)",
        ) as of_keras:
            fit(plain, data, batch_size=12)
        error = pytest.raises(
            of_keras.type, match=r"nknown variable|must be among|numpy\(\)"
        )
    else:
        fit(plain, data, batch_size=12)
        error = warnings.catch_warnings()
    with pytest.warns(UserWarning, match="`trainable` has changed for"), error:
        fit(model, data, callbacks)
    helpers.assert_close(model, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_model()
        fit(model, data, callbacks)


def test_partial_cycle_is_not_applied_to_weights_frozen_since():
    x, y = helpers.rows(16)
    model, _, _ = start("wrap", 3, "carry")
    model.compile(keras.optimizers.SGD(0.125), "mse")
    fit(model, (x, y))
    assert model.optimizer.cycle_position == 1
    hidden_layer(model).trainable = False
    model.compile(model.optimizer, "mse")
    before = helpers.values(hidden_layer(model).weights)
    fit(model, (x[:12], y[:12]))
    model.flush()
    np.testing.assert_equal(helpers.values(hidden_layer(model).weights), before)
    assert int(model.optimizer.iterations) == 2
