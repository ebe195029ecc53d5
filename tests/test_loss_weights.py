"""Denominators: every reduction, mask and weight against the large batch.

The reference is plain Keras on the large batch. Where plain accumulation (the
mean of means) is known to be wrong, the wrong value is shown to be another.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

REDUCTIONS = [
    "sum_over_batch_size",
    "mean",
    "mean_with_sample_weight",
    "sum",
    "none",
    None,
]


def train(
    make, way, data, batch_size, loss, *, accum_steps=3, epochs=2, **compile_kw
):
    """Trains `make()` plainly or accumulating; `data` are (x, y[, weight])."""
    model, callbacks = make(), []
    if way == "wrap":
        model = AccumModel.wrap(model, accum_steps=accum_steps)
    elif way == "callback":
        callbacks = [AccumCallback(accum_steps, verbose=0)]
    model.compile(keras.optimizers.SGD(0.0625), loss, **compile_kw)
    model.fit(
        *data[:2],
        sample_weight=data[2] if len(data) > 2 else None,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model


def uneven_weights(num_rows):
    """Weights with zeros, and a batch of 4 that has only zeros."""
    weights = np.random.default_rng(4).uniform(0.1, 3.0, num_rows)
    weights[::3] = 0.0
    weights[4:8] = 0.0
    return weights


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("is_weighted", [True, False])
def test_reductions_equal_large_batch(way, reduction, is_weighted):
    data = helpers.rows(22)
    if is_weighted:
        data = (*data, uneven_weights(22))
    loss = lambda: keras.losses.MeanSquaredError(reduction=reduction)
    large = train(helpers.functional, "plain", data, 12, loss())
    helpers.assert_close(train(helpers.functional, way, data, 4, loss()), large)


def token_model():
    inputs = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(3, return_sequences=True)(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(6)(hidden))
    )


def token_data(num_rows=10, length=5, seed=2):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 20, (num_rows, length))
    lengths = rng.integers(0, length + 1, num_rows)
    lengths[:2] = (length, 1)
    ids[np.arange(length) >= lengths[:, None]] = 0
    return ids, rng.integers(0, 6, (num_rows, length))


def token_loss(reduction, **kwargs):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **kwargs
    )


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("reduction", REDUCTIONS[:4])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_model_masks_equal_large_batch(way, reduction, is_weighted):
    """https://github.com/huggingface/transformers/issues/24725"""
    data = token_data()
    if is_weighted:  # A weight per token.
        weights = np.random.default_rng(5).uniform(0, 2, data[0].shape)
        data = (*data, weights)
    large = train(token_model, "plain", data, 10, token_loss(reduction))
    model = train(token_model, way, data, 4, token_loss(reduction))
    helpers.assert_close(model, large, helpers.masked_tolerance())


@pytest.mark.parametrize("reduction", REDUCTIONS[:4])
def test_masks_of_the_loss_equal_large_batch(reduction):
    """`ignore_class`, with and without a mask of the model beside it."""
    ids, targets = token_data()
    targets[:, 0] = 0
    targets[4:8] = 0  # A batch without a valid token.
    loss = lambda: token_loss(reduction, ignore_class=0)
    for data in ((ids, targets), (np.maximum(ids, 1), targets)):
        large = train(token_model, "plain", data, 10, loss())
        helpers.assert_close(
            train(token_model, "wrap", data, 4, loss()),
            large,
            helpers.masked_tolerance(),
        )


def test_masking_layer_equals_large_batch():
    def make():
        inputs = keras.Input((4, 3))
        hidden = keras.layers.Masking(0.0)(inputs)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(hidden))
        )

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 4, 3)), rng.normal(size=(10, 4, 2))
    x[:5, 1:] = 0.0
    large = train(make, "plain", (x, y), 10, "mse")
    helpers.assert_close(
        train(make, "wrap", (x, y), 4, "mse"), large, helpers.masked_tolerance()
    )


def test_token_example_and_its_wrong_twin():
    """https://github.com/huggingface/transformers/pull/34191

    4 + 1 tokens in two micro-batches of one row: the mean of means differs.
    """

    def make():
        inputs = keras.Input((None,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(1)(hidden))
        )

    ids = np.array([[1, 2, 3, 4], [5, 0, 0, 0]])
    y = np.random.default_rng(1).normal(size=(2, 4, 1))
    large = train(make, "plain", (ids, y), 2, "mse", epochs=1)
    ours = train(make, "wrap", (ids, y), 1, "mse", accum_steps=2, epochs=1)
    helpers.assert_close(ours, large, helpers.masked_tolerance())
    wrong = make()
    wrong.compile(AccumOptimizer(keras.optimizers.SGD(0.0625), 2), "mse")
    wrong.fit(ids, y, batch_size=1, shuffle=False, verbose=0)
    distance = max(
        np.abs(a - b).max()
        for a, b in zip(
            helpers.weights(wrong), helpers.weights(large), strict=True
        )
    )
    assert distance > 1e-3


@pytest.mark.parametrize("accum_steps", [2, 4, 8])
def test_sum_is_not_divided(accum_steps):
    """https://github.com/bojone/bert4keras/issues/238

    Ratio of the step to that of the large batch: exactly 1.
    """
    data = helpers.rows(16)
    loss = lambda: keras.losses.MeanSquaredError(reduction="sum")
    start = helpers.functional().get_weights()
    large = train(helpers.functional, "plain", data, 16, loss(), epochs=1)
    ours = train(
        helpers.functional,
        "wrap",
        data,
        16 // accum_steps,
        loss(),
        accum_steps=accum_steps,
        epochs=1,
    )
    for before, one, other in zip(
        start, helpers.weights(ours), helpers.weights(large), strict=True
    ):
        np.testing.assert_allclose(one - before, other - before, rtol=1e-10)


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_class_weight_equals_large_batch(way):
    x, _ = helpers.rows(22)
    y = np.random.default_rng(3).integers(0, 2, 22)
    make = helpers.functional

    def run(way, batch_size, reduction):
        model, callbacks = make(), []
        if way == "wrap":
            model = AccumModel.wrap(model, accum_steps=3)
        elif way == "callback":
            callbacks = [AccumCallback(3, verbose=0)]
        model.compile(keras.optimizers.SGD(0.0625), token_loss(reduction))
        model.fit(
            x,
            y,
            class_weight={0: 0.5, 1: 3.0},
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return model

    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        helpers.assert_close(
            run(way, 4, reduction), run("plain", 12, reduction)
        )


def regularised(kind):
    """The 5-7-2 network with penalties."""

    class Extra(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    def make():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(
            7,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.1)
            if "weights" in kind
            else None,
            activity_regularizer=keras.regularizers.L2(0.1)
            if "activity" in kind
            else None,
        )(inputs)
        if "added" in kind:
            hidden = Extra()(hidden)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(hidden))
        )

    return make


@pytest.mark.parametrize("kind", ["weights", "activity", "added weights"])
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
)
def test_penalties_equal_large_batch(kind, reduction):
    """Penalties on weights once per update, whatever the reduction.

    What is added per batch is a mean over rows and averaged by rows; for sums
    that is exact where batches are of one size.
    """
    if kind == "activity":
        helpers.skip_if_activity_penalties_are_sums()
    num_rows = 24 if reduction == "sum" and kind != "weights" else 22
    data = (*helpers.rows(num_rows), np.linspace(1.0, 1.0, num_rows))
    loss = lambda: keras.losses.MeanSquaredError(reduction=reduction)
    large = train(regularised(kind), "plain", data, 12, loss())
    helpers.assert_close(
        train(regularised(kind), "wrap", data, 4, loss()), large
    )


def two_headed(has_masks=False):
    if has_masks:
        inputs = keras.Input((None,), dtype="int32")
        hidden = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    else:
        inputs = hidden = keras.Input((5,))
    left = keras.layers.Dense(2, name="left")(hidden)
    right = keras.layers.Dense(3, name="right")(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, {"left": left, "right": right})
    )


def test_outputs_with_one_mask_equal_large_batch():
    ids, _ = token_data()
    rng = np.random.default_rng(0)
    targets = {
        "left": rng.normal(size=(*ids.shape, 2)),
        "right": rng.normal(size=(*ids.shape, 3)),
    }
    make = lambda: two_headed(has_masks=True)
    kwargs = {"loss_weights": {"left": 1.0, "right": 0.25}}
    loss = {"left": "mse", "right": "mse"}
    large = train(make, "plain", (ids, targets), 10, loss, **kwargs)
    ours = train(make, "wrap", (ids, targets), 4, loss, **kwargs)
    helpers.assert_close(ours, large, helpers.masked_tolerance())


def test_outputs_with_two_denominators_warn_once():
    x, y = helpers.rows(12, 5, 5)
    targets = {"left": y[:, :2], "right": y[:, 2:]}
    weights = {"left": uneven_weights(12), "right": np.ones(12)}
    loss = {
        name: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        for name in targets
    }
    model = AccumModel.wrap(two_headed(), accum_steps=3)
    model.compile("sgd", loss)
    with pytest.warns(UserWarning, match="divided by different numbers") as got:
        model.fit(
            x, targets, sample_weight=weights, batch_size=4, epochs=2, verbose=0
        )
    assert sum("divided by" in str(w.message) for w in got) == 1
    assert int(model.optimizer.iterations) == 2


def test_own_compute_loss_counts_rows_or_what_the_model_says():
    def definition(base, has_weight):
        class Net(helpers.subclass_of(base)):
            def compute_loss(self, x, y, y_pred, sample_weight, training=True):
                error = tf.reduce_sum(tf.square(y - y_pred) * y[:, :1] ** 2)
                if has_weight:
                    return error / tf.reduce_sum(y[:, 0] ** 2)
                return error / tf.cast(tf.shape(y)[0], error.dtype)

        if has_weight:
            Net.micro_batch_weight = lambda self, x, y, y_pred, sample_weight: (
                tf.reduce_sum(y[:, 0] ** 2)
            )
        return Net

    data = helpers.rows(22)
    for has_weight in (False, True):

        def make(base, has_weight=has_weight, **kwargs):
            model = definition(base, has_weight)(**kwargs)
            model(np.zeros((1, 5)))
            return helpers.with_known_weights(model)

        plain = lambda: make(keras.Model)
        large = train(plain, "plain", data, 12, "mse")
        for way in ("wrap", "callback"):
            helpers.assert_close(train(plain, way, data, 4, "mse"), large)
        model = make(AccumModel, accum_steps=3)
        model.compile(keras.optimizers.SGD(0.0625), "mse")
        model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
        helpers.assert_close(model, large)


def test_own_train_step_that_uses_compute_loss_takes_its_denominator():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = token_model()

        def call(self, inputs):
            return self.inner(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    data = token_data()
    loss = lambda: token_loss("sum_over_batch_size")
    large = train(Net, "plain", data, 10, loss())
    for way in ("wrap", "callback"):
        helpers.assert_close(
            train(Net, way, data, 4, loss()), large, helpers.masked_tolerance()
        )


@pytest.mark.parametrize("value", [-1.0, float("nan"), [1.0, 2.0]])
def test_micro_batch_weight_must_be_a_scalar_not_below_zero(value):
    class Net(helpers.subclass_of(AccumModel)):
        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return value

    model = Net(accum_steps=2)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`micro_batch_weight` must return"):
        model.fit(*helpers.rows(4), batch_size=2, verbose=0)


def test_micro_batch_weight_known_only_in_the_graph_is_checked_too():
    class Net(helpers.subclass_of(AccumModel)):
        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return tf.reduce_sum(y)

    x, y = helpers.rows(4)
    model = Net(accum_steps=2)
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="must return a"):
        model.fit(x, -np.abs(y), batch_size=2, verbose=0)


def test_cycle_without_a_valid_element_changes_nothing():
    ids, targets = token_data(8)
    ids[:4] = 0
    model = AccumModel.wrap(token_model(), accum_steps=2)
    model.compile(keras.optimizers.SGD(0.5), token_loss("mean"))
    start = helpers.weights(model)
    model.fit(ids[:4], targets[:4], batch_size=2, shuffle=False, verbose=0)
    helpers.assert_equal(helpers.weights(model), start)
    assert int(model.optimizer.iterations) == 0
    model.fit(ids, targets, batch_size=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 1
    reference = token_model()
    reference.compile(keras.optimizers.SGD(0.5), token_loss("mean"))
    reference.train_on_batch(ids[4:], targets[4:])
    helpers.assert_close(model, reference, helpers.masked_tolerance())


def test_changing_lengths_equal_large_batch():
    """Rows of another length in each batch; unmasked, so elements count."""

    def make():
        inputs = keras.Input((None, 3))
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(inputs))
        )

    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=(2, t, 3)), rng.normal(size=(2, t, 2)))
        for t in (1, 4, 2)
    ]
    flat = [
        np.concatenate([part[i].reshape(1, -1, 3 - i) for part in parts], 1)
        for i in range(2)
    ]
    model = AccumModel.wrap(make(), accum_steps=3)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit((part for part in parts), shuffle=False, verbose=0)
    reference = make()
    reference.compile(keras.optimizers.SGD(0.5), "mse")
    reference.train_on_batch(*flat)
    helpers.assert_close(model, reference)


def test_losses_are_watched_in_one_thread_and_only_for_the_step():
    import threading

    from accum_model import loss_terms

    before = keras.losses.Loss.__call__
    loss = keras.losses.MeanSquaredError()
    y = np.ones((2, 3))
    with loss_terms.recorded() as outer:
        other = threading.Thread(target=loss, args=(y, y))
        other.start()
        other.join()
        assert outer == []
        loss(y, y)
        with loss_terms.recorded() as inner:
            loss(y, y)
        loss(y, y)
    assert (len(outer), len(inner)) == (2, 1)
    assert keras.losses.Loss.__call__ is before
    loss(y, y)
    assert (len(outer), len(inner)) == (2, 1)


def test_rows_and_weights_examples_and_their_wrong_twins():
    """Rows 4 + 2, and weights 1, 1, .1, .1: the mean of means differs."""
    x, y = helpers.rows(6)
    weighted = keras.losses.MeanSquaredError(
        reduction="mean_with_sample_weight"
    )
    weights = np.array([1.0, 1.0, 0.1, 0.1])
    for data, batch_size, loss in (
        ((x, y), 4, "mse"),
        ((x[:4], y[:4], weights), 2, weighted),
    ):
        kwargs = {"accum_steps": 2, "epochs": 1}
        large = train(helpers.functional, "plain", data, 6, loss, **kwargs)
        ours = train(
            helpers.functional, "wrap", data, batch_size, loss, **kwargs
        )
        helpers.assert_close(ours, large)
        wrong = helpers.functional()
        wrong.compile(AccumOptimizer(keras.optimizers.SGD(0.0625), 2), loss)
        wrong.fit(
            *data[:2],
            sample_weight=data[2] if len(data) > 2 else None,
            batch_size=batch_size,
            shuffle=False,
            verbose=0,
        )
        distance = max(
            np.abs(a - b).max()
            for a, b in zip(
                helpers.weights(wrong), helpers.weights(large), strict=True
            )
        )
        assert distance > 1e-3


def squared_error(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def scalar_error(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


@pytest.mark.parametrize("loss", [squared_error, scalar_error, "mae"])
def test_loss_functions_equal_large_batch(loss):
    data = helpers.rows(22)
    large = train(helpers.functional, "plain", data, 12, loss)
    helpers.assert_close(
        train(helpers.functional, "wrap", data, 4, loss), large
    )


def test_nested_outputs_equal_large_batch():
    def make():
        inputs = keras.Input((5,))
        heads = [keras.layers.Dense(2, name=f"head_{j}")(inputs) for j in "abc"]
        outputs = {"left": [heads[0], heads[1]], "right": heads[2]}
        return helpers.with_known_weights(keras.Model(inputs, outputs))

    x, y = helpers.rows(22)
    targets = {"left": [y, 2 * y], "right": -y}
    loss = {"left": ["mse", "mae"], "right": "mse"}
    large = train(make, "plain", (x, targets), 12, loss)
    helpers.assert_close(train(make, "wrap", (x, targets), 4, loss), large)


def test_sum_stays_a_sum_when_an_early_file_is_loaded(tmp_path):
    data = helpers.rows(16)
    model = AccumModel.wrap(helpers.functional(), 2)
    model.compile(
        keras.optimizers.SGD(0.0625), keras.losses.MeanSquaredError("sum")
    )
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "start.weights.h5")
    results = []
    for _ in range(2):
        model.load_weights(tmp_path / "start.weights.h5")
        model.fit(*data, batch_size=4, shuffle=False, verbose=0)
        results.append(helpers.weights(model))
    helpers.assert_equal(*results)


def test_sum_with_penalties_flushed_after_loading(tmp_path):
    data = helpers.rows(8)
    whole = AccumModel.wrap(regularised("weights")(), 3, "carry")
    whole.compile(
        keras.optimizers.SGD(0.0625), keras.losses.MeanSquaredError("sum")
    )
    whole.fit(*data, batch_size=4, shuffle=False, verbose=0)
    whole.save(tmp_path / "mid.keras")
    loaded = keras.models.load_model(tmp_path / "mid.keras")
    for model in (whole, loaded):
        model.flush()
    helpers.assert_equal(helpers.weights(loaded), helpers.weights(whole))
    large = train(
        regularised("weights"),
        "plain",
        data,
        8,
        keras.losses.MeanSquaredError("sum"),
        epochs=1,
    )
    helpers.assert_close(whole, large)


@pytest.mark.parametrize("scales", [True, False])
def test_sum_with_penalties_in_own_train_step(scales):
    class Net(helpers.subclass_of(keras.Model)):
        def __init__(self):
            super().__init__()
            self.hidden.kernel_regularizer = keras.regularizers.L2(0.1)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
                if scales:
                    loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def make():
        model = Net()
        model(np.zeros((1, 5)))
        return helpers.with_known_weights(model)

    data = helpers.rows(22)
    loss = lambda: keras.losses.MeanSquaredError("sum")
    large = train(make, "plain", data, 12, loss())
    for way in ("wrap", "callback"):
        helpers.assert_close(train(make, way, data, 4, loss()), large)


class Sum(keras.losses.Loss):
    """A loss made of two others, which reduce for themselves."""

    def __init__(self):
        super().__init__()
        self.first = keras.losses.MeanSquaredError()
        self.second = keras.losses.MeanAbsoluteError()

    def call(self, y_true, y_pred):
        return self.first(y_true, y_pred) + self.second(y_true, y_pred)


def test_loss_made_of_losses_takes_their_denominator():
    def make():
        inputs = keras.Input((None,), dtype="int32")
        hidden = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(hidden))
        )

    ids, _ = token_data()
    y = np.random.default_rng(0).normal(size=(*ids.shape, 2))
    large = train(make, "plain", (ids, y), 10, Sum())
    ours = train(make, "wrap", (ids, y), 4, Sum())
    helpers.assert_close(ours, large, helpers.masked_tolerance())


def test_one_loss_object_in_two_threads_is_left_as_it_was():
    import threading

    loss = keras.losses.MeanSquaredError()
    data = helpers.rows(24)
    results = {}

    def run(name):
        results[name] = train(helpers.functional, "wrap", data, 4, loss)

    threads = [threading.Thread(target=run, args=(j,)) for j in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "call" not in vars(loss)
    large = train(helpers.functional, "plain", data, 12, loss)
    for model in results.values():
        helpers.assert_close(model, large)
