"""What cannot be cut is refused or said; what can, though odd, is exact."""

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumBatchNormalization
from accum_model import AccumCallback
from accum_model import AccumModel

EAGER = {"run_eagerly": True}
both_scopes = pytest.mark.parametrize("loss_scope", ["micro_batch", "batch"])


def one_number_per_row():
    """Outputs of shape (rows,)."""
    inputs = keras.Input((5,))
    outputs = keras.layers.Reshape(())(keras.layers.Dense(1)(inputs))
    return helpers.with_known_weights(keras.Model(inputs, outputs))


def assert_equals_the_uncut_batch(make, loss, data, metrics, cut, options):
    results = []
    for wrap in (lambda m: m, lambda m: AccumModel.wrap(m, **cut)):
        model = wrap(make())
        model.compile(
            keras.optimizers.SGD(0.125), loss, metrics=metrics, **options
        )
        results.append((model, cutting.fit(model, data)))
    (plain, expected), (model, history) = results
    helpers.assert_close(model, plain)
    for key, values in expected.items():
        np.testing.assert_allclose(
            history[key], values, rtol=0, atol=helpers.EXACT
        )


@both_scopes
@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_loss_that_is_not_reduced_equals_the_uncut_batch(options, loss_scope):
    assert_equals_the_uncut_batch(
        helpers.functional,
        keras.losses.MeanSquaredError(reduction="none"),
        helpers.rows(17),
        ["mae"],
        {"micro_batch_size": 3, "loss_scope": loss_scope},
        options,
    )


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_outputs_of_one_number_per_row_equal_the_uncut_batch(
    options, reduction
):
    """Keras's metrics then return one number per batch."""
    x, y = helpers.rows(17)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    assert_equals_the_uncut_batch(
        one_number_per_row,
        loss,
        (x, y[:, 0]),
        ["mae", "accuracy"],
        {"micro_batch_size": 3},
        options,
    )


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
@both_scopes
def test_batch_without_rows_is_survived(options, loss_scope):
    x, y = helpers.rows(4)
    model = AccumModel.wrap(
        helpers.functional(), micro_batch_size=3, loss_scope=loss_scope
    )
    model.compile("sgd", "mse", metrics=["mae"], **options)
    before = helpers.weights(model)
    empty = tf.data.Dataset.from_tensors((x[:0], y[:0]))
    history = model.fit(empty, shuffle=False, verbose=0).history
    assert history["loss"] == [0.0]
    helpers.assert_equal(helpers.weights(model), before)


def test_one_number_per_batch_with_sample_weights_warns():
    x, y = helpers.rows(10)
    model = AccumModel.wrap(helpers.functional(), micro_batch_size=4)
    model.compile(
        "sgd", lambda a, b: keras.ops.mean(keras.ops.square(a - b)), **EAGER
    )
    with pytest.warns(UserWarning, match="returns one number per batch"):
        cutting.fit(model, (x, y, np.linspace(0, 1, 10)))


def test_scalar_output_is_refused():
    inputs = keras.Input((5,))
    outputs = keras.ops.mean(keras.layers.Dense(1)(inputs))
    model = AccumModel.wrap(keras.Model(inputs, outputs), micro_batch_size=4)
    model.compile("sgd", "mse", **EAGER)
    with pytest.raises(ValueError, match="must have one row per row of data"):
        model.train_on_batch(np.ones((8, 5)), np.ones((8,)))


class TensorFlowNoise(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


def test_noise_that_cannot_be_drawn_again_is_refused():
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(2)(TensorFlowNoise()(inputs))
    for loss_scope in ("micro_batch", "batch"):
        model = AccumModel.wrap(
            keras.Model(inputs, outputs),
            micro_batch_size=4,
            loss_scope=loss_scope,
        )
        model.compile("sgd", "mse")
        if loss_scope == "micro_batch":
            cutting.fit(model, helpers.rows(10))
            continue
        before = helpers.weights(model)
        with pytest.raises(ValueError, match="RandomStandardNormal"):
            cutting.fit(model, helpers.rows(10))
        helpers.assert_equal(helpers.weights(model), before)


class Remembers(AccumModel):
    """Its loss is not one of its outputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        self.seen = self.dense(inputs)
        return self.seen

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return keras.ops.mean(keras.ops.square(self.seen))


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_tensors_stored_for_a_loss_over_the_batch_are_refused(options):
    model = Remembers(micro_batch_size=4, loss_scope="batch")
    model.compile("sgd", **options)
    with pytest.raises(ValueError, match=r"stored in \['remembers[^']*\.seen"):
        cutting.fit(model, helpers.rows(10))
    model = Remembers(micro_batch_size=4)
    model.compile("sgd", **options)
    cutting.fit(model, helpers.rows(10))


def test_stateful_layers_are_refused():
    inputs = keras.Input(batch_shape=(4, 3, 2))
    outputs = keras.layers.LSTM(2, stateful=True, name="memory")(inputs)
    model = AccumModel.wrap(keras.Model(inputs, outputs), micro_batch_size=2)
    model.compile("sgd", "mse", **EAGER)
    with pytest.raises(ValueError, match=r"stateful layers \['memory'\]"):
        model.train_on_batch(np.ones((4, 3, 2)), np.ones((4, 2)))


def test_size_set_during_fit_stays():
    model = AccumModel.wrap(helpers.functional(), micro_batch_size=4)
    model.compile("sgd", "mse", **EAGER)

    class Set(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.micro_batch_size = 2

    cutting.fit(
        model, helpers.rows(10), callbacks=[AccumCallback(verbose=0), Set()]
    )
    assert model.micro_batch_size == 2


@pytest.mark.parametrize(
    ("layer", "warns"),
    [
        (lambda: keras.layers.BatchNormalization(name="bn"), True),
        (lambda: keras.layers.BatchNormalization(trainable=False), False),
        (lambda: keras.layers.GroupNormalization(1), False),
        (lambda: AccumBatchNormalization(), False),
    ],
    ids=["training", "frozen", "group", "accumulating"],
)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batch_size": 4}, "micro_batch_size=4"),
        ({"accum_steps": 3}, "accum_steps=3"),
    ],
    ids=["cut", "accumulated"],
)
def test_batch_normalisation_warns_once(layer, warns, options, text, recwarn):
    """https://github.com/open-mmlab/mmcv/issues/1869

    https://github.com/mosaicml/composer/pull/1207
    """
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(2)(layer()(inputs))
    model = AccumModel.wrap(keras.Model(inputs, outputs), **options)
    model.compile("sgd", "mse", **EAGER)
    if not warns:
        cutting.fit(model, helpers.rows(12), batch_size=4)
        return
    with pytest.warns(UserWarning, match="BatchNormalization") as caught:
        history = cutting.fit(
            model,
            helpers.rows(12),
            batch_size=4,
            epochs=2,
            callbacks=[AccumCallback(verbose=0)],
        )
    (warning,) = caught
    assert text in str(warning.message)
    assert "['bn']" in str(warning.message)
    assert "With AccumBatchNormalization instead" in str(warning.message)
    if "micro_batch_size" in options:
        assert history["micro_batch_size"] == [4, 4]
