"""`micro_batch_size="auto"`: the size is found, and nothing shows how.

A layer runs out of memory above a number of rows. In a graph a `MemoryError`
inside `tf.py_function` reaches the caller as `ResourceExhaustedError`.
"""

import re

import helpers
import keras
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

EAGER = {"run_eagerly": True}
MODES = pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])


class Limited(keras.layers.Layer):
    """Runs out of memory above `limit` rows, and notes what was tried.

    Args:
        limit: Rows that fit.
    """

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.tried = []

    def call(self, inputs, training=False):
        if not training:
            return inputs
        if tf.executing_eagerly():
            self._take(inputs, tf.errors.ResourceExhaustedError(None, None, ""))
            return inputs
        take = lambda value: self._take(value, MemoryError())
        with tf.control_dependencies([tf.py_function(take, [inputs], "int64")]):
            return tf.identity(inputs)

    def _take(self, inputs, error):
        num_rows = int(inputs.shape[0])
        self.tried.append(num_rows)
        if num_rows > self.limit:
            raise error
        return num_rows


def model_with(layer):
    """A model with all the kinds of state a step can have."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    hidden = keras.layers.Dropout(0.5, seed=7)(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    # Late in the forward pass: most of the state is to be changed by then.
    return helpers.with_known_weights(
        keras.Model(inputs, layer(keras.layers.Dense(2)(hidden)))
    )


def compiled(model, options):
    model.compile(
        keras.optimizers.Adam(0.125),
        "mse",
        metrics=["mae", keras.metrics.AUC(num_thresholds=5, name="auc")],
        **options,
    )
    return model


def state(model):
    metrics = [v for metric in model.metrics for v in metric.variables]
    return helpers.values(
        [*model.variables, *model.optimizer.variables, *metrics]
    )


def data(num_rows=16):
    x, y = helpers.rows(num_rows)
    return x, (y > 0).astype("float64")


def halvings(tried):
    """The sizes that were tried, without the repetitions of each."""
    return list(dict.fromkeys(tried))


pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization")


@MODES
def test_size_is_halved_from_clean_state(options):
    """https://github.com/mosaicml/composer/pull/1081

    16 rows of which 2 fit: 16, 8, 4, 2. As if 2 had been asked for.
    """
    layer = Limited(2)
    found = AccumModel.wrap(model_with(layer), micro_batch_size="auto")
    asked = AccumModel.wrap(model_with(Limited(2)), micro_batch_size=2)
    for model in (found, asked):
        compiled(model, options)
    for _ in range(2):
        found.reset_metrics()
        asked.reset_metrics()
        logs = [
            model.train_on_batch(*data(), return_dict=True)
            for model in (found, asked)
        ]
        assert logs[0] == logs[1]
        helpers.assert_equal(state(found), state(asked))
    assert halvings(layer.tried) == [16, 8, 4, 2]
    # Nothing is tried again once it is known.
    assert layer.tried.count(16) == layer.tried.count(8) == 1
    assert int(found.optimizer.iterations) == 2
    count = next(v for v in found.metrics[0].variables if "count" in v.path)
    assert int(count) == 16


@MODES
def test_batch_that_fits_is_not_cut(options, capsys):
    layer = Limited(16)
    found = AccumModel.wrap(model_with(layer), micro_batch_size="auto")
    plain = model_with(Limited(16))
    for model in (found, plain):
        compiled(model, options)
        model.fit(*data(), batch_size=16, shuffle=False, verbose=0)
    helpers.assert_close(found, plain)
    assert set(layer.tried) == {16}
    assert capsys.readouterr().out == (
        'micro_batch_size="auto": 16 rows fit (of a batch of 16).\n'
    )


@pytest.mark.parametrize("way", ["wrap", "callback", "callback on AccumModel"])
def test_size_is_printed_once_and_logged(way, capsys):
    layer = Limited(3)
    model, callbacks = model_with(layer), []
    if way != "callback":
        model = AccumModel.wrap(model, micro_batch_size="auto")
    if way == "callback":
        callbacks = [AccumCallback(micro_batch_size="auto")]
    elif way == "callback on AccumModel":
        callbacks = [AccumCallback()]
    compiled(model, EAGER)
    history = model.fit(
        *data(20),
        batch_size=10,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history
    assert history["micro_batch_size"] == [3, 3]
    assert halvings(layer.tried)[:3] == [10, 5, 3]
    out = capsys.readouterr().out
    line = 'micro_batch_size="auto": 3 rows fit (of a batch of 10).'
    assert out.count(line) == out.count("micro_batch_size") == 1
    if callbacks:
        assert out.count("; micro-batches of 3 rows.") == 1


def test_callback_with_verbose_0_is_silent(capsys):
    model = compiled(model_with(Limited(3)), EAGER)
    callback = AccumCallback(micro_batch_size="auto", verbose=0)
    history = model.fit(
        *data(), batch_size=8, verbose=0, callbacks=[callback]
    ).history
    assert history["micro_batch_size"] == [2]
    assert capsys.readouterr().out == ""


@MODES
def test_one_row_that_does_not_fit_is_an_error(options):
    layer = Limited(0)
    model = AccumModel.wrap(model_with(layer), micro_batch_size="auto")
    compiled(model, options)
    before = helpers.weights(model)
    message = re.escape(
        '`micro_batch_size="auto"` found no size that fits the memory. '
        "Received: a batch of 16 rows, which fails even in micro-batches of 1 "
        "row."
    )
    with pytest.raises(tf.errors.ResourceExhaustedError, match=message):
        model.fit(*data(), batch_size=16, verbose=0)
    assert halvings(layer.tried) == [16, 8, 4, 2, 1]
    helpers.assert_equal(helpers.weights(model), before)
    assert int(model.optimizer.iterations) == 0


def test_size_goes_down_again_for_a_batch_that_needs_more():
    """Later, in the middle of an epoch; the batch that fails is not lost."""
    layer = Limited(8)
    found = AccumModel.wrap(model_with(layer), micro_batch_size="auto")
    compiled(found, {})
    x, y = data(24)

    class Shrink(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                layer.limit = 4
                layer.tried.clear()

    history = found.fit(
        x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Shrink()]
    ).history
    assert halvings(layer.tried) == [8, 4]
    assert history["micro_batch_size"] == [4]
    assert int(found.optimizer.iterations) == 3
    asked = AccumModel.wrap(model_with(Limited(8)), micro_batch_size=8)
    compiled(asked, {})
    asked.train_on_batch(x[:8], y[:8])
    asked.micro_batch_size = 4
    asked.train_on_batch(x[8:16], y[8:16])
    asked.train_on_batch(x[16:], y[16:])
    helpers.assert_equal(helpers.weights(found), helpers.weights(asked))


def test_every_batch_of_a_data_set_is_used():
    """Also those of a call that fails, and of the last, short call."""
    x, y = data(26)
    models = []
    for size in ("auto", 3):
        model = AccumModel.wrap(model_with(Limited(3)), micro_batch_size=size)
        num_steps = 3 if size == "auto" else 1
        compiled(model, {"steps_per_execution": num_steps})
        data_set = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
        model.fit(data_set, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    helpers.assert_equal(*map(state, models))
    assert int(models[0].optimizer.iterations) == 10


def test_loss_over_the_batch_finds_its_size():
    """One chunk of a pass fails; the outputs kept so far are thrown away."""
    layers = [Limited(3), Limited(3)]
    models = []
    for layer, size in zip(layers, ("auto", 2), strict=True):
        model = AccumModel.wrap(
            model_with(layer), micro_batch_size=size, loss_scope="batch"
        )
        compiled(model, {})
        model.train_on_batch(*data(8))
        models.append(model)
    assert halvings(layers[0].tried) == [8, 4, 2]
    helpers.assert_equal(*map(state, models))


def test_graph_is_not_made_anew_for_each_batch():
    model, traces = helpers.traced_model()
    model = AccumModel.wrap(model, micro_batch_size="auto")
    model.compile("adam", "mse")
    batches = lambda num_rows: tf.data.Dataset.from_tensor_slices(
        helpers.rows(num_rows)
    ).batch(8)
    model.fit(batches(20), shuffle=False, verbose=0)
    traces.clear()
    model.fit(batches(204), shuffle=False, verbose=0)
    assert not traces


class Greedy(keras.optimizers.SGD):
    """Runs out of memory when it updates."""

    def update_step(self, gradient, variable, learning_rate):
        raise tf.errors.ResourceExhaustedError(None, None, "too many slots")


def test_update_that_does_not_fit_is_not_tried_again():
    model = AccumModel.wrap(helpers.functional(), micro_batch_size="auto")
    model.compile(Greedy(0.125), "mse", **EAGER)
    with pytest.raises(
        tf.errors.ResourceExhaustedError,
        match=r"ran out in the update itself.*a batch of 8 rows",
    ):
        model.train_on_batch(*helpers.rows(8))


def test_other_errors_are_not_caught():
    class Broken(keras.layers.Layer):
        calls = 0

        def call(self, inputs, training=False):
            if training and tf.executing_eagerly():
                Broken.calls += 1
                raise tf.errors.InternalError(None, None, "broken")
            return inputs

    model = AccumModel.wrap(model_with(Broken()), micro_batch_size="auto")
    compiled(model, EAGER)
    with pytest.raises(tf.errors.InternalError, match="broken"):
        model.train_on_batch(*data())
    assert Broken.calls == 1


def test_size_is_looked_for_again_when_it_is_set_again():
    layer = Limited(2)
    model = AccumModel.wrap(model_with(layer), micro_batch_size="auto")
    compiled(model, EAGER)
    model.cutting.verbose = 0
    model.train_on_batch(*data(8))
    layer.limit = 100
    model.micro_batch_size = None
    model.micro_batch_size = "auto"
    model.cutting.verbose = 0
    layer.tried.clear()
    model.train_on_batch(*data(8))
    assert set(layer.tried) == {8}
