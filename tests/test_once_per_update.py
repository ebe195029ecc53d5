"""What happens once per update: EMA, constraints, decay, transforms, clipping.

The reference is plain Keras on the large batch, or NumPy.
"""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import AdaptiveGradientClipping

ONCE = {
    "weight decay": {"weight_decay": 0.25},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema overwrite": {
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
    },
    "loss scale": {"loss_scale_factor": 8.0},
}


@pytest.mark.parametrize("name", ONCE)
def test_optimizer_options_act_once_per_update(name):
    data = helpers.rows(72)
    make = lambda: keras.optimizers.SGD(0.125, momentum=0.5, **ONCE[name])
    large = helpers.fit_large_batch(make(), 12, data, epochs=1)
    for way in ("wrap", "callback"):
        model = helpers.fit_way(way, make(), 3, 4, data, epochs=1)
        helpers.assert_close(model, large)


def test_moving_average_with_eight_steps_equals_large_batch():
    """After updates 3 and 4, momentum 0.9 is 0.9 and not 0.9 ** 8."""
    data = helpers.rows(64)
    make = lambda: keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.875)
    for updates in (3, 4):
        part = [each[: 16 * updates] for each in data]
        averages = []
        for batch_size, accum_steps in ((16, 1), (2, 8)):
            optimizer = make()
            model = AccumModel.wrap(helpers.functional(), accum_steps)
            model.compile(optimizer, "mse")
            model.fit(*part, batch_size=batch_size, shuffle=False, verbose=0)
            # fit ends with the average in the model.
            averages.append(helpers.weights(model))
        helpers.assert_close(averages[1], averages[0])


def test_swap_ema_weights_works():
    data = helpers.rows(24)
    histories = []
    for accumulate in (False, True):
        model = helpers.functional()
        callbacks = [keras.callbacks.SwapEMAWeights()]
        if accumulate:
            model = AccumModel.wrap(model, 3)
        model.compile(
            keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5), "mse"
        )
        histories.append(
            model.fit(
                *data,
                batch_size=4 if accumulate else 12,
                epochs=2,
                shuffle=False,
                verbose=0,
                validation_data=data,
                callbacks=callbacks,
            ).history["val_loss"]
        )
    np.testing.assert_allclose(*histories, atol=helpers.EXACT)


class Halve(keras.constraints.Constraint):
    """Not idempotent: twice is not once."""

    def __call__(self, w):
        return 0.5 * w


def test_constraint_acts_once_per_update():
    def make():
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(2, kernel_constraint=Halve())(inputs)
        return helpers.with_known_weights(keras.Model(inputs, outputs))

    data = helpers.rows(24)
    large = helpers.fit_large_batch(
        keras.optimizers.SGD(0.125), 12, data, make=make
    )
    model = AccumModel.wrap(make(), 3)
    model.compile(keras.optimizers.SGD(0.125), "mse")
    model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(model, large)


@pytest.mark.parametrize("num_steps", [512, 1024, 4096])
def test_bfloat16_weights_move_by_exactly_one(num_steps):
    """https://github.com/deepspeedai/DeepSpeed/issues/1800

    A bfloat16 sum of ones stalls at 256.
    """
    variable = keras.Variable(np.zeros(3), dtype="bfloat16")
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), num_steps)
    optimizer.build([variable])
    ones = tf.ones(3, "bfloat16")

    @tf.function
    def cycle():
        for _ in tf.range(num_steps):
            optimizer.apply([ones], [variable])

    cycle()
    np.testing.assert_array_equal(variable.numpy().astype("float32"), -1.0)
    assert int(optimizer.iterations) == 1


def test_small_gradients_are_not_lost_in_bfloat16():
    """https://github.com/deepspeedai/DeepSpeed/issues/1800"""
    variable = keras.Variable(np.zeros(1), dtype="bfloat16")
    optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 64)
    optimizer.apply([tf.ones(1, "bfloat16")], [variable])
    for _ in range(62):
        optimizer.apply([tf.fill((1,), tf.cast(1 / 512, "bfloat16"))])
    (total,) = [v for v in optimizer.variables if "gradient_sum" in v.name]
    np.testing.assert_array_equal(total.numpy(), 1 + 62 / 512)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float64"]
)
@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_dtype_policies_follow_the_large_batch(policy, way):
    """https://github.com/keras-team/keras/issues/14829"""
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    data = [part.astype(keras.config.floatx()) for part in helpers.rows(48)]
    large = helpers.fit_large_batch(keras.optimizers.SGD(0.125), 12, data)
    model = helpers.fit_way(way, keras.optimizers.SGD(0.125), 3, 4, data)
    # Eight roundings of weights near 1 to 8 bits (bfloat16), and of
    # activations to 8 or 11 bits; float64 is exact.
    coarse = {"float64": 1e-10, "bfloat16": 2e-2}.get(policy, 5e-3)
    for one, other in zip(
        helpers.weights(model), helpers.weights(large), strict=True
    ):
        np.testing.assert_allclose(
            one.astype("float64"), other.astype("float64"), atol=coarse
        )
    innermost = model.optimizer
    while hasattr(innermost, "inner_optimizer"):
        innermost = innermost.inner_optimizer
    assert int(innermost.iterations) == 8


def test_logged_loss_is_not_scaled():
    """https://github.com/fastai/fastai/issues/3048"""
    keras.config.set_floatx("float32")
    data = [part.astype("float32") for part in helpers.rows(64)]
    losses = []
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = AccumModel.wrap(helpers.functional(), 8)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        losses += model.fit(
            *data, batch_size=4, shuffle=False, verbose=0
        ).history["loss"]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)


def test_models_that_mix_dtypes():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, dtype="bfloat16")(inputs)
    hidden = keras.layers.Dense(4, dtype="float32")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, dtype="float64")(hidden))
    model = AccumModel.wrap(model, 2)
    model.compile("adam", "mse")
    model.fit(*helpers.rows(16), batch_size=4, verbose=0)
    sums = [v for v in model.optimizer.variables if "gradient_sum" in v.name]
    assert [v.dtype for v in sums] == ["float32"] * 4 + ["float64"] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_accum_dtype_is_that_of_the_buffers(dtype):
    variable = keras.Variable(np.zeros(2), dtype="float32")
    optimizer = AccumOptimizer("sgd", 2, accum_dtype=dtype)
    optimizer.apply([np.ones(2, "float32")], [variable])
    optimizer.apply([np.ones(2, "float32")], [variable])
    sums = [v for v in optimizer.variables if "gradient_sum" in v.name]
    assert [v.dtype for v in sums] == [dtype]
    np.testing.assert_allclose(variable.numpy(), -0.01, rtol=1e-6)


@pytest.mark.parametrize("value", ["int32", "float", 3, True, "half"])
def test_accum_dtype_must_be_a_float(value):
    with pytest.raises(ValueError, match="`accum_dtype` must be None or a"):
        AccumOptimizer("sgd", 2, accum_dtype=value)


# Embeddings.


def id_model():
    inputs = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(9, 4)
    # Two uses of one table.
    hidden = keras.layers.Add()([table(inputs), table(8 - inputs)])
    hidden = keras.layers.Flatten()(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


def one_hot_model():
    """The same, with the table as the kernel of a dense layer."""
    inputs = keras.Input((3, 9))
    mirrored = keras.layers.Lambda(lambda t: t[..., ::-1])(inputs)
    table = keras.layers.Dense(4, use_bias=False)
    hidden = keras.layers.Add()([table(inputs), table(mirrored)])
    hidden = keras.layers.Flatten()(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "clipped"])
@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_embeddings_equal_their_one_hot_twin(name, way):
    """https://github.com/bojone/accum_optimizer_for_keras/issues/8

    Plain Keras on ids is no reference: it is off where ids repeat.
    https://github.com/keras-team/keras/issues/19992
    """
    make = {
        "sgd": lambda: keras.optimizers.SGD(0.125),
        "momentum": lambda: keras.optimizers.SGD(0.125, momentum=0.5),
        "adam": lambda: keras.optimizers.Adam(0.125),
        "clipped": lambda: keras.optimizers.SGD(0.125, clipnorm=0.1),
    }[name]
    rng = np.random.default_rng(6)
    ids = rng.integers(0, 9, (12, 3))
    ids[:, 1] = ids[:, 0]
    y = rng.normal(size=(12, 2))
    large = one_hot_model()
    large.compile(make(), "mse")
    large.fit(
        np.eye(9)[ids], y, batch_size=12, epochs=3, shuffle=False, verbose=0
    )
    model, callbacks = id_model(), []
    if way == "wrap":
        model = AccumModel.wrap(model, 3)
    else:
        callbacks = [AccumCallback(3, verbose=0)]
    model.compile(make(), "mse")
    model.fit(
        ids,
        y,
        batch_size=5,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    helpers.assert_close(model, large)


# Transforms.


@keras.saving.register_keras_serializable(package="tests")
def double(gradients, variables):
    return [2.0 * gradient for gradient in gradients]


@pytest.mark.parametrize("way", ["optimizer", "wrap", "callback"])
def test_transform_sees_the_average_before_clipping(way):
    seen = []

    def transform(gradients, variables):
        seen.append((len(gradients), [v.path for v in variables]))
        return [2.0 * gradient for gradient in gradients]

    data = helpers.rows(24)
    # Doubling before clipping to a norm: the step does not change where the
    # gradient is clipped anyway.
    make = lambda: keras.optimizers.SGD(0.125, clipnorm=1e-3)
    large = helpers.fit_large_batch(make(), 12, data)
    model, callbacks, optimizer = helpers.functional(), [], make()
    if way == "wrap":
        model = AccumModel.wrap(model, 3, gradient_transform=transform)
    elif way == "callback":
        callbacks = [AccumCallback(3, gradient_transform=transform, verbose=0)]
    else:
        optimizer = AccumOptimizer(optimizer, 3, gradient_transform=transform)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(
        *data,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    helpers.assert_close(model, large)
    assert seen == [(4, [w.path for w in model.weights])] * 4


def test_transform_is_saved_with_the_optimizer(tmp_path):
    optimizer = AccumOptimizer("sgd", 2, gradient_transform=double)
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert copy.gradient_transform is double
    optimizer = AccumOptimizer(
        "sgd", 2, gradient_transform=AdaptiveGradientClipping(0.5, 0.25)
    )
    model = AccumModel.wrap(helpers.functional())
    model.compile(optimizer, "mse")
    model.fit(*helpers.rows(8), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    transform = loaded.optimizer.gradient_transform
    assert transform.get_config() == {"clip_factor": 0.5, "eps": 0.25}


@pytest.mark.parametrize(
    "transform, error, message",
    [
        (lambda g, v: g[:1], ValueError, "one gradient per variable"),
        (lambda g, v: None, ValueError, "one gradient per variable"),
        (lambda g, v: g[::-1], ValueError, "keep the shape"),
        ("clip", TypeError, "`gradient_transform` must be None or a callable"),
        (AdaptiveGradientClipping, TypeError, "`gradient_transform` must be"),
    ],
)
def test_transform_must_fit(transform, error, message):
    variables = [keras.Variable(np.ones(2)), keras.Variable(np.ones(3))]
    with pytest.raises(error, match=message):
        optimizer = AccumOptimizer("sgd", 2, gradient_transform=transform)
        for _ in range(2):
            optimizer.apply([np.ones(2), np.ones(3)], variables)
    helpers.assert_equal(helpers.values(variables), [np.ones(2), np.ones(3)])


def test_options_are_given_in_one_place():
    model = AccumModel.wrap(helpers.functional(), nonfinite="raise")
    with pytest.raises(ValueError, match="Options of AccumModel must not"):
        model.compile(AccumOptimizer("sgd", 2), "mse")
    model.compile("sgd", "mse")
    assert model.optimizer.nonfinite == "raise"
    with pytest.raises(ValueError, match="Options of AccumCallback must not"):
        model.fit(
            *helpers.rows(4),
            verbose=0,
            callbacks=[AccumCallback(accum_dtype="float64")],
        )


def clip_by_numpy(gradient, weights, clip_factor, eps):
    """Brock et al., equation 3, unit by unit."""
    result = gradient.copy()
    if gradient.ndim <= 1:
        units = [slice(None)]
    else:
        units = [(..., i) for i in range(gradient.shape[-1])]
    for unit in units:
        norm = np.sqrt((gradient[unit] ** 2).sum())
        most = clip_factor * max(np.sqrt((weights[unit] ** 2).sum()), eps)
        if norm > most:
            result[unit] = gradient[unit] * most / norm
    return result


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3, 5), (6,)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_adaptive_gradient_clipping_matches_the_paper(shape, scale):
    rng = np.random.default_rng(0)
    weights, gradient = rng.normal(size=shape), scale * rng.normal(size=shape)
    weights[..., 0] = 0.0
    variable = keras.Variable(weights)
    (clipped,) = AdaptiveGradientClipping(0.01, 1e-3)(
        [tf.constant(gradient)], [variable]
    )
    expected = clip_by_numpy(gradient, weights, 0.01, 1e-3)
    np.testing.assert_allclose(clipped.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["clip_factor", "eps"])
@pytest.mark.parametrize("value", [0, -1.0, "1", True, None, float("nan")])
def test_adaptive_gradient_clipping_takes_positive_numbers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number"):
        AdaptiveGradientClipping(**{name: value})


@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("accum_steps", [1, 4])
@pytest.mark.parametrize(
    "options", [{"clipnorm": 0.1}, {"loss_scale_factor": 8.0}]
)
def test_gradient_norm_is_that_of_the_large_batch(way, accum_steps, options):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/1923"""
    x, y = helpers.rows(32)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            norm = self.model.optimizer.gradient_norm
            if (batch + 1) % accum_steps == 0:
                seen.append(norm)

    # A rate of zero: each update sees the same weights.
    optimizer = keras.optimizers.SGD(0.0, **options)
    model, callbacks = helpers.functional(), [Look()]
    if way == "wrap":
        model = AccumModel.wrap(model, accum_steps)
        callbacks.append(AccumCallback(verbose=0))
    else:
        callbacks.append(AccumCallback(accum_steps, verbose=0))
    model.compile(optimizer, "mse")
    history = model.fit(
        x,
        y,
        batch_size=16 // accum_steps,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history
    expected = []
    for part in (slice(0, 16), slice(16, 32)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[part]) - y[part]))
        gradients = tape.gradient(loss, model.trainable_variables)
        expected.append(float(tf.linalg.global_norm(gradients)))
    np.testing.assert_allclose(seen, expected, rtol=1e-10)
    np.testing.assert_allclose(
        history["gradient_norm"], [np.mean(expected)], rtol=1e-10
    )


def test_transform_sees_gradients_without_the_loss_scale():
    seen = []

    def transform(gradients, variables):
        seen.append(float(gradients[0][0]))
        return gradients

    for inner in (
        keras.optimizers.SGD(1.0, loss_scale_factor=8.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
    ):
        variable = keras.Variable(np.zeros(2))
        optimizer = AccumOptimizer(inner, 2, gradient_transform=transform)
        optimizer.build([variable])
        for _ in range(2):
            scaled = optimizer.scale_loss(tf.constant(3.0, "float64"))
            optimizer.apply([tf.fill((2,), scaled)], [variable])
        np.testing.assert_allclose(variable.numpy(), -3.0)
    assert seen == [3.0, 3.0]
