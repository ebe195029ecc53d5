"""Heun and SAM, and the interface that serves them."""

import helpers
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

from accum_model import SAM
from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import Heun
from accum_model import Lookahead
from accum_model.two_point import TwoPointOptimizer

EAGER = {"run_eagerly": True}
MAKE = {
    "Heun": lambda **kw: Heun(0.125, **kw),
    "SAM": lambda **kw: SAM(keras.optimizers.SGD(0.125, **kw), rho=0.25),
}
TWINS = {
    "Heun": lambda gradient: reference.heun(0.125, gradient),
    "SAM": lambda gradient: reference.sam(reference.sgd(0.125), 0.25, gradient),
}
every_optimizer = pytest.mark.parametrize("name", MAKE)


def linear():
    inputs = keras.Input((5,))
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(inputs))
    )


def gradient_of_linear(x, y):
    """Of the mean squared error, at weights flattened into one vector."""

    def gradient(w):
        kernel, bias = w[:10].reshape(5, 2), w[10:]
        error = 2 * (x @ kernel + bias - y) / y.size
        return np.concatenate([(x.T @ error).ravel(), error.sum(0)])

    return gradient


def flat(model):
    return np.concatenate([each.ravel() for each in helpers.weights(model)])


def fitted(model, optimizer, data, cut=None, callbacks=(), **kwargs):
    """Fits for two epochs in batches of 10, wrapped unless with callbacks."""
    if not callbacks:
        model = AccumModel.wrap(model, **(cut or {}))
    model.compile(optimizer, "mse", **kwargs)
    history = model.fit(
        *data,
        batch_size=10,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model, history.history


@every_optimizer
@pytest.mark.parametrize("way", ["wrap", "callback"])
@pytest.mark.parametrize("cut", [None, 4])
def test_matches_reference(name, way, cut):
    x, y = helpers.rows(20)
    callbacks = []
    if way == "callback":
        callbacks = [AccumCallback(micro_batch_size=cut, verbose=0)]
    model, _ = fitted(
        linear(),
        MAKE[name](),
        (x, y),
        {"micro_batch_size": cut},
        callbacks,
        **EAGER,
    )
    w = flat(linear())
    for _ in range(2):
        for rows in (slice(10), slice(10, 20)):
            w = TWINS[name](gradient_of_linear(x[rows], y[rows]))(w)
    np.testing.assert_allclose(flat(model), w, rtol=0, atol=helpers.EXACT)
    assert int(model.optimizer.iterations) == 4


@every_optimizer
def test_modes_and_scopes_agree(name, mode):
    data = helpers.rows(20)
    expected, _ = fitted(helpers.functional(), MAKE[name](), data, **EAGER)
    for loss_scope in ("micro_batch", "batch"):
        cut = {"micro_batch_size": 4, "loss_scope": loss_scope}
        model, _ = fitted(helpers.functional(), MAKE[name](), data, cut, **mode)
        helpers.assert_close(model, expected)


def decay(learning_rate, num_updates):
    """From 1, along the slope of the loss w^2 / 2."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
    )
    model.set_weights([np.ones((1, 1))])
    model = AccumModel.wrap(model)
    model.compile(Heun(learning_rate), "mse", **EAGER)
    x, y = np.full((1, 1), np.sqrt(0.5)), np.zeros((1, 1))
    for _ in range(num_updates):
        model.train_on_batch(x, y)
    return model.get_weights()[0].item()


def test_heun_multiplies_a_quadratic_by_its_polynomial():
    for z in (0.125, 0.5, 1.5):
        expected = 1 - z + z**2 / 2
        np.testing.assert_allclose(decay(z, 1), expected, atol=helpers.EXACT)


def test_heun_is_of_order_two():
    errors = [
        abs(decay(1 / num_updates, num_updates) - np.exp(-1))
        for num_updates in (16, 32)
    ]
    # The next term of the expansion is a third of a step smaller or so.
    assert 3.7 < errors[0] / errors[1] < 4.3


def test_sam_goes_as_far_as_rho_along_the_gradient():
    gradients = [np.array([[3.0, 0.0]]), np.array([4.0])]
    steps = SAM("sgd", rho=0.5).second_point(gradients, None)
    np.testing.assert_allclose(steps[0], [[0.3, 0.0]], atol=helpers.EXACT)
    np.testing.assert_allclose(steps[1], [0.4], atol=helpers.EXACT)
    (nowhere,) = SAM("sgd").second_point([np.zeros(2)], None)
    np.testing.assert_array_equal(nowhere, np.zeros(2))


def noisy():
    inputs = keras.Input((5,))
    x = keras.layers.Dense(7)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = keras.layers.Dropout(0.5, seed=1)(x)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(x))
    )


def test_both_points_see_the_same_noise_and_statistics_move_once():
    """The twin takes both gradients by hand, with the seed put back."""
    x, y = helpers.rows(10)
    model = AccumModel.wrap(noisy())
    model.compile(SAM(keras.optimizers.SGD(0.125), rho=0.25), "mse", **EAGER)
    model.train_on_batch(x, y)

    twin = noisy()
    trained = twin.trainable_variables
    state = [v for v in twin.non_trainable_variables]
    before = helpers.values(state)

    def gradient():
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((twin(x, training=True) - y) ** 2)
        return [g.numpy() for g in tape.gradient(loss, trained)]

    first = gradient()
    after = helpers.values(state)
    for variable, value in zip(state, before, strict=True):
        variable.assign(value)
    norm = np.sqrt(sum(np.sum(g**2) for g in first))
    start = helpers.values(trained)
    for variable, g in zip(trained, first, strict=True):
        variable.assign_add(0.25 * g / norm)
    second = gradient()
    for variable, w, g in zip(trained, start, second, strict=True):
        variable.assign(w - 0.125 * g)
    helpers.assert_close(
        helpers.values(model.trainable_variables), helpers.values(trained)
    )
    helpers.assert_close(helpers.values(model.non_trainable_variables), after)


@pytest.mark.parametrize("metric", ["mae", lambda y, p: abs(y - p)])
def test_metrics_are_those_of_the_first_point(metric):
    data = helpers.rows(20)
    plain = helpers.functional()
    plain.compile(keras.optimizers.SGD(0.0), "mse", metrics=[metric], **EAGER)
    expected = plain.fit(
        *data, batch_size=10, epochs=2, shuffle=False, verbose=0
    ).history
    _, history = fitted(
        helpers.functional(),
        SAM(keras.optimizers.SGD(0.0), rho=0.5),
        data,
        {"micro_batch_size": 4},
        metrics=[metric],
        **EAGER,
    )
    for key, value in expected.items():
        np.testing.assert_allclose(history[key], value, atol=helpers.EXACT)


@every_optimizer
@pytest.mark.parametrize(
    "option", [{"weight_decay": 0.25}, {"global_clipnorm": 0.0625}]
)
def test_arguments_of_every_keras_optimizer(name, option):
    data = helpers.rows(20)
    make = MAKE[name]
    plain, _ = fitted(helpers.functional(), make(), data, **EAGER)
    other, _ = fitted(helpers.functional(), make(**option), data, **EAGER)
    assert np.abs(flat(plain) - flat(other)).max() > 1e-3
    cut, _ = fitted(
        helpers.functional(),
        make(**option),
        data,
        {"micro_batch_size": 3},
        **EAGER,
    )
    helpers.assert_close(cut, other)


def test_embeddings_equal_the_dense_layer_they_stand_for():
    ids = np.random.default_rng(0).integers(0, 6, (10, 4))
    y = helpers.rows(10)[1]
    one_hot = np.eye(6)[ids]

    def make(is_dense):
        if is_dense:
            inputs = keras.Input((4, 6))
            x = keras.layers.Dense(3, use_bias=False)(inputs)
        else:
            inputs = keras.Input((4,), dtype="int32")
            x = keras.layers.Embedding(6, 3)(inputs)
        x = keras.layers.GlobalAveragePooling1D()(x)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(x))
        )

    sparse, _ = fitted(make(False), MAKE["SAM"](), (ids, y), **EAGER)
    dense, _ = fitted(make(True), MAKE["SAM"](), (one_hot, y), **EAGER)
    helpers.assert_close(sparse, dense)


def test_variables_without_a_gradient_stay_as_they_are():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(2)
            self.unused = self.add_weight(shape=(3,), initializer="ones")

        def call(self, inputs):
            return self.used(inputs)

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model, _ = fitted(Unused(), MAKE["SAM"](), helpers.rows(10), **EAGER)
    np.testing.assert_array_equal(model.unused.numpy(), np.ones(3))


def test_loss_scale_is_taken_out_of_the_way_to_the_second_point():
    data = helpers.rows(20)
    scaled = keras.optimizers.LossScaleOptimizer(Heun(0.125), 8.0)
    model, _ = fitted(helpers.functional(), scaled, data, **EAGER)
    plain, _ = fitted(helpers.functional(), Heun(0.125), data, **EAGER)
    helpers.assert_close(model, plain)


def test_mixed_float16_trains():
    keras.config.set_dtype_policy("mixed_float16")
    model, history = fitted(
        helpers.functional(), SAM("sgd"), helpers.rows(20), **EAGER
    )
    assert np.isfinite(history["loss"]).all()
    assert int(model.optimizer.iterations) == 4


def test_lookahead_around_sam_moves_its_slow_weights():
    optimizer = Lookahead(MAKE["SAM"](), sync_period=2, slow_step_size=0.5)
    x, y = helpers.rows(10)
    model = AccumModel.wrap(linear())
    model.compile(optimizer, "mse", **EAGER)
    w = start = flat(linear())
    for _ in range(2):
        model.train_on_batch(x, y)
        w = TWINS["SAM"](gradient_of_linear(x, y))(w)
    np.testing.assert_allclose(
        flat(model), start + 0.5 * (w - start), rtol=0, atol=helpers.EXACT
    )


@every_optimizer
def test_config_round_trip(name):
    optimizer = MAKE[name]()
    config = keras.optimizers.serialize(optimizer)
    made = keras.optimizers.deserialize(config)
    assert type(made) is type(optimizer)
    assert keras.optimizers.serialize(made) == config


@every_optimizer
def test_resumed_equals_uninterrupted(name, tmp_path):
    data = helpers.rows(20)
    whole, _ = fitted(helpers.functional(), MAKE[name](), data, **EAGER)
    whole.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    for model in (whole, resumed):
        model.fit(*data, batch_size=10, shuffle=False, verbose=0)
    helpers.assert_equal(helpers.weights(resumed), helpers.weights(whole))
    assert int(resumed.optimizer.iterations) == 6


@every_optimizer
def test_plain_training_step_is_refused(name):
    model = helpers.functional()
    model.compile(MAKE[name](), "mse", **EAGER)
    before = helpers.weights(model)
    with pytest.raises(RuntimeError, match="gradient at two points"):
        model.fit(*helpers.rows(10), verbose=0)
    helpers.assert_equal(helpers.weights(model), before)


def test_own_train_step_is_refused():
    class Own(AccumModel):
        def train_step(self, data):
            return super().train_step(data)

    inputs, outputs = helpers.tensors()
    model = Own(inputs, outputs)
    model.compile(MAKE["SAM"](), "mse", **EAGER)
    with pytest.raises(RuntimeError, match="Keras's own train_step"):
        model.fit(*helpers.rows(10), verbose=0)


def test_accumulation_over_steps_is_refused():
    match = "`accum_steps` must be 1 with SAM.*accum_steps=2"
    plain = helpers.functional()
    plain.compile(MAKE["SAM"](), "mse", **EAGER)
    with pytest.raises(ValueError, match=match):
        AccumModel.wrap(plain, accum_steps=2)
    with pytest.raises(ValueError, match=match):
        AccumModel.wrap(helpers.functional(), accum_steps=2).compile(
            MAKE["SAM"](), "mse"
        )
    for steps in (2, {0: 1, 3: 2}):
        with pytest.raises(ValueError, match=match):
            plain.fit(
                *helpers.rows(10), verbose=0, callbacks=[AccumCallback(steps)]
            )
    model = AccumModel.wrap(plain)
    model.accum_steps = 2
    with pytest.raises(ValueError, match=match):
        model.fit(*helpers.rows(10), verbose=0)


@pytest.mark.parametrize("rho", [0, -1.0, float("nan"), "0.05", True, None])
def test_rho_out_of_range_is_refused(rho):
    with pytest.raises(ValueError, match="`rho` must be a finite number > 0"):
        SAM("sgd", rho=rho)


class Extragradient(TwoPointOptimizer):
    """An optimizer of somebody else's."""

    def second_point(self, gradients, variables):
        return [-0.25 * gradient for gradient in gradients]

    def update_step(self, gradient, variable, learning_rate):
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient)


def test_interface_serves_optimizers_of_others():
    x, y = helpers.rows(10)
    model = AccumModel.wrap(linear(), micro_batch_size=3)
    model.compile(Extragradient(0.125), "mse", **EAGER)
    model.train_on_batch(x, y)
    gradient, w = gradient_of_linear(x, y), flat(linear())
    expected = w - 0.125 * gradient(w - 0.25 * gradient(w))
    np.testing.assert_allclose(
        flat(model), expected, rtol=0, atol=helpers.EXACT
    )


def test_wrong_shapes_of_a_second_point_are_refused():
    class Wrong(Extragradient):
        def second_point(self, gradients, variables):
            return gradients[:1]

    model = AccumModel.wrap(linear())
    model.compile(Wrong(0.125), "mse", **EAGER)
    with pytest.raises(ValueError, match="`second_point` must return one"):
        model.train_on_batch(*helpers.rows(10))
