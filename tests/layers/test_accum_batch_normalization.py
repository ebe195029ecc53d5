"""AccumBatchNormalization against NumPy on the large batch.

The layer comes first in most models here, so that what it sees does not depend
on weights.
"""

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumBatchNormalization
from accum_model import AccumCallback
from accum_model import AccumModel

MOMENTUM = 0.75


def net(
    norm=AccumBatchNormalization, shape=(3,), before=(), after=(), **kwargs
):
    kwargs = {"momentum": MOMENTUM, **kwargs}
    model = keras.Sequential(
        [
            keras.Input(shape),
            *before,
            norm(**kwargs),
            *after,
            keras.layers.Dense(2),
        ]
    )
    return helpers.with_known_state(model)


def norm_of(model):
    kind = keras.layers.BatchNormalization
    return next(layer for layer in model.layers if isinstance(layer, kind))


def statistics(model):
    norm = norm_of(model)
    return norm.moving_mean.numpy(), norm.moving_variance.numpy()


def moved(before, *batches):
    """Moving statistics after one move per batch, channels last."""
    mean, variance = before
    for x in batches:
        axes = tuple(range(x.ndim - 1))
        mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean(axes)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * x.var(axes)
    return mean, variance


def rows(num_rows, shape=(3,)):
    """Rows whose mean drifts, so that micro-batches differ."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, *shape))
    drift = np.arange(num_rows).reshape(-1, *(1 for _ in shape))
    return x + drift, rng.normal(size=(num_rows, 2))


def fit(model, data, batch_size, mode=None, sample_weight=None, **options):
    model.compile(keras.optimizers.SGD(2**-4), "mse", **(mode or {}))
    callback = AccumCallback(**options, verbose=0)
    data = (*data, sample_weight)
    cutting.fit(model, data, batch_size=batch_size, callbacks=[callback])
    return model


def test_batches_move_statistics_once_per_update(mode):
    """https://github.com/andreped/GradientAccumulator/issues/6

    https://github.com/andreped/GradientAccumulator/issues/47
    """
    x, y = rows(22)
    model = net()
    expected = moved(statistics(model), x[:12], x[12:])
    fit(model, (x, y), 4, mode, accum_steps=3)
    helpers.assert_close(statistics(model), expected)


@pytest.mark.parametrize(
    "options, mode",
    [
        ({"micro_batch_size": 5}, "graph"),
        ({"micro_batch_size": 5, "loss_scope": "batch"}, "graph"),
        ({"micro_batch_size": 4, "accum_steps": 2, "batch_size": 6}, "eager"),
        ({"micro_batch_size": 4, "accum_steps": 2, "batch_size": 6}, "xla"),
    ],
)
def test_cut_batches_move_statistics_once_per_update(options, mode):
    """https://github.com/run-ai/runai/issues/14"""
    mode = {"eager": {"run_eagerly": True}, "xla": {"jit_compile": True}}.get(
        mode
    )
    options = {"batch_size": 12, **options}
    x, y = rows(24)
    model = net()
    expected = moved(statistics(model), x[:12], x[12:])
    fit(model, (x, y), mode=mode, **options)
    helpers.assert_close(statistics(model), expected)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_variance_between_micro_batches_counts(offset):
    """https://github.com/giotto-ai/giotto-deep/issues/75

    The known counter-example: four micro-batches with different means, 32 rows
    each, of NumPy's seed 0, around 0, 10, 20 and 30: together they have a
    variance of 127.263, while each has one of 0.963 on average. At a mean of a
    million, sums of squares would lose digits.
    """
    normal = np.random.RandomState(0).normal(size=(4, 32))
    micro_batches = normal + 10.0 * np.arange(4)[:, None]
    assert round(micro_batches.var(1).mean(), 3) == 0.963
    x = micro_batches.reshape(128, 1) + offset
    model = net(shape=(1,), momentum=0.0)
    fit(model, (x, np.zeros((128, 2))), 32, accum_steps=4)
    _, variance = statistics(model)
    assert round(float(variance[0]), 3) == 127.263
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-10)
    model = net(keras.layers.BatchNormalization, (1,), momentum=0.0)
    with pytest.warns(UserWarning, match="With AccumBatchNormalization"):
        fit(model, (x, np.zeros((128, 2))), 32, accum_steps=4)
    assert statistics(model)[1] < 3


@pytest.mark.parametrize("shape, axis", [((4, 3), -1), ((3, 2, 4), 1)])
def test_any_rank_and_axis(shape, axis):
    x, y = rows(12, shape)
    model = net(shape=shape, axis=axis, after=[keras.layers.Flatten()])
    expected = moved(statistics(model), np.moveaxis(x, axis, -1))
    fit(model, (x, y), 4, accum_steps=3)
    helpers.assert_close(statistics(model), expected)


def test_masked_elements_do_not_count():
    x, y = rows(12, (4, 3))
    x += 1.0
    # A micro-batch with more of them than others, and one without any other.
    x[:3, 1:] = 0.0
    x[8:] = 0.0
    model = net(
        shape=(4, 3),
        before=[keras.layers.Masking()],
        after=[keras.layers.LSTM(2)],
    )
    valid = x[x.any(-1)]
    assert len(valid) == 23
    expected = moved(statistics(model), valid)
    fit(model, (x, y), 4, accum_steps=3)
    helpers.assert_close(statistics(model), expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float32")
    x, y = rows(12)
    x = tf.cast(tf.cast(x, policy.split("_")[1]), "float32").numpy()
    model = net()
    before = statistics(model)
    assert before[0].dtype == "float32"
    expected = moved(before, x)
    fit(model, (x, y), 4, accum_steps=3)
    # Rounding of float32 in sums of 12 numbers below 12.
    helpers.assert_close(statistics(model), expected, atol=1e-5)
    assert norm_of(model).compute_dtype in policy


@pytest.mark.filterwarnings("ignore:BatchNormalization")
@pytest.mark.parametrize("options", [{}, {"center": False, "scale": False}])
def test_micro_batches_are_normalised_as_in_keras(options):
    """The update is that of plain BatchNormalization."""
    ours, plain = (
        net(norm, epsilon=0.5, **options)
        for norm in (AccumBatchNormalization, keras.layers.BatchNormalization)
    )
    for model in (ours, plain):
        fit(model, rows(24), 4, accum_steps=3)
    helpers.assert_close(
        helpers.values(ours.trainable_variables),
        helpers.values(plain.trainable_variables),
    )


@pytest.mark.parametrize(
    "remainder, num_used", [("flush", 20), ("drop", 12), ("carry", 12)]
)
def test_partial_cycle(remainder, num_used):
    x, y = rows(20)
    model = net()
    parts = [x[:12], x[12:num_used]]
    expected = moved(statistics(model), *(each for each in parts if len(each)))
    fit(model, (x, y), 4, accum_steps=3, remainder=remainder)
    helpers.assert_close(statistics(model), expected)


@pytest.mark.parametrize(
    "options, batch_size",
    [({"accum_steps": 3}, 4), ({"micro_batch_size": 4}, 12)],
)
def test_micro_batch_that_is_not_finite_is_left_out(options, batch_size):
    x, y = rows(12)
    x[5, 1] = np.inf
    model = net()
    expected = moved(statistics(model), np.delete(x, slice(4, 8), 0))
    fit(model, (x, y), batch_size, nonfinite="skip_micro_batch", **options)
    helpers.assert_close(statistics(model), expected)


def test_discarded_cycle_moves_nothing():
    x, y = rows(24)
    y[5] = np.nan
    model = net()
    expected = moved(statistics(model), x[12:])
    fit(model, (x, y), 4, nonfinite="skip_update", accum_steps=3)
    helpers.assert_close(statistics(model), expected)


def test_cycle_without_weight_leaves_nothing_behind():
    x, y = rows(24)
    model = net()
    expected = moved(statistics(model), x[12:])
    sample_weight = np.repeat([0.0, 1.0], 12)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile("sgd", loss)
    cutting.fit(
        model,
        (x, y, sample_weight),
        batch_size=4,
        callbacks=[AccumCallback(accum_steps=3, verbose=0)],
    )
    helpers.assert_close(statistics(model), expected)


def test_layer_that_is_called_twice_pools_both():
    x, y = rows(8)
    norm = AccumBatchNormalization(momentum=MOMENTUM)
    inputs = keras.Input((3,))
    both = norm(inputs) + norm(inputs + 5.0)
    model = keras.Model(inputs, keras.layers.Dense(2)(both))
    expected = moved(statistics(model), np.concatenate([x, x + 5.0]))
    fit(model, (x, y), 4, accum_steps=2)
    helpers.assert_close(statistics(model), expected)


def test_elsewhere_it_is_plain():
    """Frozen, at accum_steps=1, called by hand: bit for bit."""
    x, y = rows(12)
    ours, plain = net(), net(keras.layers.BatchNormalization)
    for model in (ours, plain):
        model.compile("sgd", "mse")
        cutting.fit(model, (x, y), batch_size=4)
        norm_of(model)(x, training=True)
    helpers.assert_equal(helpers.weights(ours), helpers.weights(plain))
    model = AccumModel.wrap(ours)
    model.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    for each in (model, plain):
        cutting.fit(each, (x, y), batch_size=4)
    helpers.assert_equal(helpers.weights(ours), helpers.weights(plain))
    norm_of(ours).trainable = False
    before = statistics(ours)
    fit(ours, (x, y), 4, accum_steps=3)
    helpers.assert_equal(statistics(ours), before)


def test_validation_and_evaluation_in_mid_cycle_leave_no_moments():
    x, y = rows(24)
    model = AccumModel.wrap(net(), 3, "carry")
    model.compile("sgd", "mse")
    expected = moved(statistics(model), x[:12])
    cutting.fit(model, (x[:8], y[:8]), batch_size=4, validation_data=(x, y))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    cutting.fit(model, (x[8:12], y[8:12]), batch_size=4)
    helpers.assert_close(statistics(model), expected)


def test_layer_that_is_built_in_the_first_step():
    class Net(AccumModel):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.norm = AccumBatchNormalization(momentum=MOMENTUM)
            self.out = keras.layers.Dense(2)

        def call(self, inputs, training=None):
            return self.out(self.norm(inputs, training=training))

    x, y = rows(12)
    model = Net(accum_steps=3)
    model.compile("sgd", "mse")
    cutting.fit(model, (x, y), batch_size=4)
    start = np.zeros(3), np.ones(3)
    helpers.assert_close(statistics(model), moved(start, x))


# Files.


def test_weights_names_and_config_are_those_of_keras():
    ours = AccumBatchNormalization(axis=1, momentum=0.5, name="norm")
    plain = keras.layers.BatchNormalization(axis=1, momentum=0.5, name="norm")
    for layer in (ours, plain):
        layer.build((None, 3, 4))
    assert [w.path for w in ours.weights] == [w.path for w in plain.weights]
    assert ours.get_config() == plain.get_config()
    config = keras.saving.serialize_keras_object(ours)
    assert config["registered_name"] == "accum_model>AccumBatchNormalization"
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is AccumBatchNormalization
    assert again.get_config() == ours.get_config()
    assert keras.layers.BatchNormalization.__name__ == "BatchNormalization"


def half_trained():
    """In the middle of a cycle: one batch of three is in."""
    x, y = rows(24)
    model = AccumModel.wrap(net(), 3, "carry")
    model.compile(keras.optimizers.Adam(0.125), "mse")
    cutting.fit(model, (x[:16], y[:16]), batch_size=4)
    return model


@pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint"])
def test_resume_in_mid_cycle_is_bit_equal(kind, tmp_path):
    whole = half_trained()
    if kind == "keras":
        whole.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
        assert type(norm_of(resumed)) is AccumBatchNormalization
    else:
        resumed = AccumModel.wrap(net(), 3, "carry")
        resumed.compile(keras.optimizers.Adam(0.125), "mse")
        resumed.optimizer.build(resumed.trainable_variables)
        if kind == "weights":
            whole.save_weights(tmp_path / "model.weights.h5")
            resumed.load_weights(tmp_path / "model.weights.h5")
        else:
            path = tf.train.Checkpoint(
                model=whole, optimizer=whole.optimizer
            ).save(tmp_path / "checkpoint")
            tf.train.Checkpoint(
                model=resumed, optimizer=resumed.optimizer
            ).restore(path).assert_consumed()
    x, y = rows(24)
    expected = moved(statistics(whole), x[12:])
    for model in (whole, resumed):
        cutting.fit(model, (x[16:], y[16:]), batch_size=4)
    helpers.assert_close(statistics(whole), expected)
    helpers.assert_equal(helpers.weights(resumed), helpers.weights(whole))


def test_sums_of_a_file_wait_for_the_layer(tmp_path):
    """A plain model, saved in mid-cycle, and saved again before it trains."""
    path = tmp_path / "model.keras"

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.save(path)

    x, y = rows(24)
    model = net()
    expected = moved(statistics(model), x[:12], x[12:])
    model.compile("sgd", "mse")
    callbacks = [Save(), AccumCallback(3, "carry", verbose=0)]
    cutting.fit(model, (x[:16], y[:16]), batch_size=4, callbacks=callbacks)
    keras.models.load_model(path).save(path)
    model = keras.models.load_model(path)
    callbacks = [AccumCallback(remainder="carry", verbose=0)]
    cutting.fit(model, (x[16:], y[16:]), batch_size=4, callbacks=callbacks)
    helpers.assert_close(statistics(model), expected)


def test_weight_files_go_both_ways_with_keras(tmp_path):
    whole = half_trained()
    plain = net(keras.layers.BatchNormalization)
    path = tmp_path / "ours.weights.h5"
    whole.save_weights(path)
    plain.load_weights(path)
    helpers.assert_equal(helpers.weights(plain), helpers.weights(whole))
    other = net(keras.layers.BatchNormalization)
    for weight in other.weights:
        weight.assign(weight + 1.0)
    path = tmp_path / "plain.weights.h5"
    other.save_weights(path)
    ours = AccumModel.wrap(net())
    ours.load_weights(path)
    helpers.assert_equal(helpers.weights(ours), helpers.weights(other))


def swapped(layer):
    kind = type(layer)
    if kind is keras.layers.BatchNormalization:
        kind = AccumBatchNormalization
    return kind.from_config(layer.get_config())


@pytest.mark.slow
def test_network_of_keras_applications_is_swapped():
    keras.config.set_dtype_policy("float32")
    plain = keras.applications.MobileNet(
        (32, 32, 3), weights=None, classes=2, alpha=0.25
    )
    model = keras.models.clone_model(plain, clone_function=swapped)
    model.set_weights(plain.get_weights())
    norms = [
        layer
        for layer in model.layers
        if isinstance(layer, AccumBatchNormalization)
    ]
    assert len(norms) > 20
    x = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    x += np.arange(8).reshape(8, 1, 1, 1)
    helpers.assert_equal([model(x).numpy()], [plain(x).numpy()])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    first = model.layers[1](x).numpy()  # What the first norm sees.
    start = [w.numpy() for w in norms[0].non_trainable_weights]
    cutting.fit(
        model,
        (x, np.arange(8) % 2),
        batch_size=2,
        callbacks=[AccumCallback(accum_steps=4, verbose=0)],
    )
    mean, variance = start
    momentum = norms[0].momentum
    expected = [
        momentum * mean + (1 - momentum) * first.mean((0, 1, 2)),
        momentum * variance + (1 - momentum) * first.var((0, 1, 2)),
    ]
    # float32 means of 2,048 numbers below 10.
    helpers.assert_close(
        [w.numpy() for w in norms[0].non_trainable_weights],
        expected,
        atol=1e-5,
    )


def test_renorm_is_refused():
    with pytest.raises(ValueError, match="`renorm` must be False because"):
        AccumBatchNormalization(renorm=True)
