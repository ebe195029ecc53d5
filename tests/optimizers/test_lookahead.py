"""Lookahead: the rule, nestings, slow weights, variance, published cases."""

import gc
import time

import contract
import helpers
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import Lookahead
from accum_model import Ranger


def sgd(**kwargs):
    return keras.optimizers.SGD(0.125, momentum=0.5, **kwargs)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "sync_period, slow_step_size", [(1, 0.25), (5, 0.5), (7, 0.875), (3, 1)]
)
def test_lookahead_matches_reference(sync_period, slow_step_size, sparse):
    start, _ = contract.scripted(1)
    contract.assert_matches_reference(
        Lookahead(sgd(weight_decay=0.25), sync_period, slow_step_size),
        reference.lookahead(
            reference.sgd(0.125, 0.5, 0.25), start, sync_period, slow_step_size
        ),
        sparse=sparse,
    )


def test_lookahead_single_update_and_sync():
    values = contract.apply_all(
        Lookahead(keras.optimizers.SGD(1.0), 2, 0.25),
        np.array([8.0]),
        [np.array([2.0]), np.array([2.0]), np.array([4.0])],
    )
    np.testing.assert_array_equal(values, [[6.0], [7.0], [3.0]])


def test_lookahead_with_the_whole_step_is_the_inner_optimizer():
    start, gradients = contract.scripted(9)
    helpers.assert_equal(
        contract.apply_all(Lookahead(sgd(), 2, 1.0), start, gradients),
        contract.apply_all(sgd(), start, gradients),
    )


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("alpha", [0.3, 0.7])
@pytest.mark.parametrize("k", [5, 10, 100])
def test_lookahead_goes_its_share_of_the_way_of_adam(k, alpha, sparse):
    """The cases of tensorflow/addons, optimizers/tests/lookahead_test.py.

    They compare with Adam itself after k updates with a constant gradient, to
    1e-6.
    """
    start, (gradient,) = contract.scripted(1)
    given = contract.as_slices(gradient)[0] if sparse else gradient
    dense = contract.as_slices(gradient)[1] if sparse else gradient
    quick = contract.apply_all(keras.optimizers.Adam(), start, [dense] * k)
    slow = contract.apply_all(Lookahead("adam", k, alpha), start, [given] * k)
    expected = start + (quick[-1] - start) * alpha
    np.testing.assert_allclose(slow[-1], expected, rtol=0, atol=helpers.EXACT)
    if k > 1 and not sparse:
        helpers.assert_equal(slow[:-1], quick[:-1])


def test_lookahead_copies_slow_weights_when_it_is_built():
    """https://github.com/tensorflow/addons/issues/2094"""
    variable = keras.Variable(np.array([3.0]))
    optimizer = Lookahead(keras.optimizers.SGD(1.0), 2)
    assert optimizer.slow_weights == []
    optimizer.build([variable])
    np.testing.assert_array_equal(optimizer.slow_weights[0].numpy(), [3.0])


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("way", ["plain", "wrap", "callback", "nested"])
def test_lookahead_copies_weights_that_the_first_step_makes(way, jit_compile):
    """They have no values yet when Keras builds the optimizer."""

    def make(is_built):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
        if is_built:
            model.build((None, 5))
        optimizer = Lookahead(sgd(), 2)
        if way == "wrap":
            model = AccumModel.wrap(model, 2)
        elif way == "nested":
            optimizer = Lookahead(AccumOptimizer(sgd(), 2), 2)
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        callbacks = []
        if way == "callback":
            callbacks = [AccumCallback(2, verbose=0)]
        before = helpers.weights(model)
        model.fit(
            *helpers.rows(12),
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return helpers.weights(model), before, model

    expected, before, model = make(True)
    after, nothing, other = make(False)
    assert before and not nothing
    helpers.assert_close(after, expected)
    helpers.assert_close(
        helpers.values(other.optimizer.variables),
        helpers.values(model.optimizer.variables),
    )


def test_lookahead_copies_weights_that_depend_on_the_first_batch():
    """TensorFlow has to run the trace in which they are made."""
    variables, seen = [], []
    optimizer = Lookahead(keras.optimizers.SGD(1.0), 2)

    @tf.function
    def step(x):
        if not variables:
            variables.append(tf.Variable(2 * x))
        optimizer.apply([tf.ones(1, "float64")], variables)

    for _ in range(4):
        step(tf.constant([5.0], "float64"))
        seen.append(float(variables[0].numpy()[0]))
    assert seen == [9.0, 9.0, 8.0, 8.0]


def test_lookahead_restart_takes_the_weights_as_they_are():
    variable = keras.Variable(np.array([0.0]))
    optimizer = Lookahead(keras.optimizers.SGD(1.0), 2)
    optimizer.apply([np.ones(1)], [variable])
    variable.assign([10.0])
    optimizer.restart()
    optimizer.apply([np.ones(1)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [9.0])
    optimizer.apply([np.ones(1)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [9.0])


NESTINGS = {
    "accumulation outside": lambda: AccumOptimizer(Lookahead(sgd(), 2), 3),
    "accumulation inside": lambda: Lookahead(AccumOptimizer(sgd(), 3), 2),
}


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("name", NESTINGS)
def test_lookahead_syncs_after_updates_not_micro_batches(name, num_before):
    """https://github.com/CyberZHG/keras-gradient-accumulation/issues/5"""
    optimizer = NESTINGS[name]()
    # Of an inner optimizer that has made updates before.
    optimizer.iterations.assign(num_before)
    is_outside = isinstance(optimizer, AccumOptimizer)
    lookahead = optimizer.inner_optimizer if is_outside else optimizer
    start, gradients = contract.scripted(12)
    variable = keras.Variable(start)
    optimizer.build([variable])
    slow, changes = start, []
    for number, gradient in enumerate(gradients, 1):
        before = variable.numpy()
        optimizer.apply([gradient], [variable])
        now = lookahead.slow_weights[0].numpy()
        if not np.array_equal(now, slow):
            changes.append(number)
            helpers.assert_equal([now], [variable.numpy()])
        if number % 3:
            helpers.assert_equal([variable.numpy()], [before])
        slow = now
    assert changes == [6, 12]
    large = contract.apply_all(
        Lookahead(sgd(), 2), start, gradients.reshape(4, 3, 4, 2).mean(axis=1)
    )
    helpers.assert_close([variable.numpy()], [large[-1]])


def test_lookahead_does_not_count_updates_that_loss_scaling_skips():
    variable = keras.Variable(np.array([0.0]))
    scaling = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=4.0
    )
    optimizer = Lookahead(scaling, 2)
    for gradient in (-4.0, np.inf, np.nan, -2.0, -1.0):
        optimizer.apply([np.array([gradient], "float64")], [variable])
    # -1, two skipped, -2 at a quarter of the scale, half of the way; -1 alone.
    np.testing.assert_array_equal(variable.numpy(), [2.5])
    assert int(optimizer.iterations) == 3


SCALED = {
    "inside": lambda inner: Lookahead(
        keras.optimizers.LossScaleOptimizer(inner, 8.0), 2
    ),
    "outside": lambda inner: keras.optimizers.LossScaleOptimizer(
        Lookahead(inner, 2), 8.0
    ),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_lookahead_in_either_nesting_with_loss_scaling(name, accum_steps):
    """https://github.com/tensorflow/addons/issues/1920"""
    start, gradients = contract.scripted(8)
    plain = AccumOptimizer(Lookahead(sgd(), 2), accum_steps)
    expected = contract.apply_all(plain, start, gradients)
    optimizer = AccumOptimizer(SCALED[name](sgd()), accum_steps)
    variable = keras.Variable(start)
    optimizer.build([variable])
    for gradient, value in zip(gradients, expected, strict=True):
        scale = float(optimizer.scale_loss(tf.constant(1.0)))
        assert scale == 8.0
        optimizer.apply([gradient * scale], [variable])
        helpers.assert_close([variable.numpy()], [value])
    optimizer.learning_rate = 0.5
    assert float(plain.learning_rate) == 0.125
    assert float(optimizer.learning_rate) == 0.5


@pytest.mark.parametrize("name", SCALED)
def test_accumulation_sees_loss_scaling_inside_lookahead(name):
    """An overflow in a cycle discards it and halves the scale."""
    variable = keras.Variable(np.array([0.0]))
    optimizer = AccumOptimizer(SCALED[name](keras.optimizers.SGD(1.0)), 2)
    optimizer.build([variable])
    for gradient in (np.inf, 8.0):
        optimizer.apply([np.array([gradient])], [variable])
    assert optimizer.num_skipped_updates == 1
    assert float(optimizer.scale_loss(tf.constant(1.0))) == 4.0
    np.testing.assert_array_equal(variable.numpy(), [0.0])
    for gradient in (-4.0, -4.0):
        optimizer.apply([np.array([gradient])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [1.0])


def test_lookahead_passes_a_fixed_loss_scale_on():
    optimizer = Lookahead(keras.optimizers.SGD(1.0, loss_scale_factor=8.0), 5)
    assert float(optimizer.scale_loss(2.0)) == 16.0
    assert optimizer.loss_scale_factor == 8.0
    variable = keras.Variable(np.array([0.0]))
    accumulating = AccumOptimizer(optimizer, 2)
    for _ in range(2):
        accumulating.apply([np.array([-8.0])], [variable])
    np.testing.assert_array_equal(variable.numpy(), [1.0])


def test_lookahead_counts_updates_of_keras_own_accumulation():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    values = contract.apply_all(
        Lookahead(inner, 2), np.array([0.0]), [np.array([-1.0])] * 5
    )
    np.testing.assert_array_equal(values[:, 0], [0, 1, 1, 1, 1])


@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_lookahead_on_an_embedding_equals_one_hot_dense(inner):
    """https://github.com/tensorflow/tensorflow/issues/31603"""
    ids = np.array([[1, 1, 4], [0, 4, 4], [2, 2, 2], [5, 1, 0]])
    table = np.random.default_rng(0).normal(size=(6, 2))
    weights = []
    for one_hot in (False, True):
        inputs = keras.Input((3, 6) if one_hot else (3,), dtype="float64")
        if one_hot:
            layer = keras.layers.Dense(2, use_bias=False)
        else:
            layer = keras.layers.Embedding(6, 2)
        outputs = keras.layers.GlobalAveragePooling1D()(layer(inputs) ** 2)
        model = keras.Model(inputs, outputs)
        model.set_weights([table])
        model.compile(
            Lookahead(inner, 2, clipnorm=0.5), "mse", run_eagerly=True
        )
        x = np.eye(6)[ids] if one_hot else ids
        for _ in range(4):
            model.train_on_batch(x, np.ones((4, 2)))
        weights += helpers.weights(model)
    helpers.assert_close(weights[:1], weights[1:])


def test_lookahead_hands_its_other_arguments_to_the_inner_optimizer():
    inner = sgd()
    optimizer = Lookahead(inner, weight_decay=0.5, use_ema=True)
    assert inner.weight_decay == 0.5
    assert inner.use_ema
    contract.assert_config_round_trip(optimizer)
    same = Lookahead(sgd(clipnorm=2.0), clipnorm=2.0)
    assert same.inner_optimizer.clipnorm == 2.0


@pytest.mark.parametrize("use_ema", [False, True])
def test_fit_ends_with_the_slow_weights_or_the_moving_average(use_ema):
    data = helpers.rows(28)
    model = helpers.functional()
    optimizer = Lookahead(
        keras.optimizers.SGD(0.125, use_ema=use_ema, ema_momentum=0.5), 5
    )
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(*data, batch_size=4, epochs=1, shuffle=False, verbose=0)
    stepwise = helpers.functional()
    stepwise.compile(
        Lookahead(
            keras.optimizers.SGD(0.125, use_ema=use_ema, ema_momentum=0.5), 5
        ),
        "mse",
        run_eagerly=True,
    )
    for part in range(0, 28, 4):
        stepwise.train_on_batch(*(each[part : part + 4] for each in data))
    slow = helpers.values(optimizer.slow_weights)
    helpers.assert_equal(slow, helpers.values(stepwise.optimizer.slow_weights))
    assert not np.array_equal(slow[0], helpers.weights(stepwise)[0])
    final = helpers.weights(model)
    if use_ema:
        stepwise.optimizer.finalize_variable_values(
            stepwise.trainable_variables
        )
        helpers.assert_equal(final, helpers.weights(stepwise))
        assert not np.array_equal(final[0], slow[0])
    else:
        helpers.assert_equal(final, slow)


def test_lookahead_leaves_alone_what_the_list_does_not_name():
    one, other = (keras.Variable(np.array([1.0])) for _ in range(2))
    optimizer = Lookahead(keras.optimizers.SGD(1.0), 5)
    optimizer.build([one, other])
    optimizer.apply([np.ones(1), np.ones(1)])
    stranger = keras.Variable(np.array([7.0]))
    optimizer.finalize_variable_values([one, stranger])
    assert [float(each.numpy()[0]) for each in (one, other, stranger)] == [
        1.0,
        0.0,
        7.0,
    ]


def test_lookahead_leaves_out_what_keras_overwrites_with_gradients():
    variable = keras.Variable(np.array([1.0]))
    scale = keras.Variable(np.array([1.0]))
    scale.overwrite_with_gradient = True
    optimizer = Lookahead(keras.optimizers.SGD(1.0), 1)
    optimizer.build([variable, scale])
    assert optimizer.slow_weights[1] is None
    optimizer.apply([np.array([1.0]), np.array([5.0])], [variable, scale])
    np.testing.assert_array_equal(scale.numpy(), [5.0])
    np.testing.assert_array_equal(variable.numpy(), [0.5])


def graph_of_step(optimizer, num_variables):
    variables = [keras.Variable(np.zeros(2)) for _ in range(num_variables)]
    optimizer.build(variables)

    @tf.function
    def step():
        optimizer.apply([tf.ones(2, "float64")] * num_variables, variables)

    return step.get_concrete_function().graph


def conditionals(graph):
    return sum(
        op.type in ("If", "StatelessIf") for op in graph.get_operations()
    )


@pytest.mark.parametrize("make", [Ranger, lambda: Lookahead("adam")])
@pytest.mark.parametrize("num_variables", [1, 7])
def test_lookahead_has_one_conditional_per_step(make, num_variables):
    assert conditionals(graph_of_step(make(), num_variables)) == 1
    assert conditionals(graph_of_step(sgd(), num_variables)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.SGD])
def test_lookahead_traces_in_less_than_twice_the_time(make):
    """https://github.com/tensorflow/addons/issues/2735

    Of a training step of a model with 300 variables. No optimizer's own update
    is shorter than that of SGD.
    """

    def trace_time(wrap):
        inputs = hidden = keras.Input((2,))
        for _ in range(150):
            hidden = keras.layers.Dense(2)(hidden)
        model = keras.Model(inputs, hidden)
        assert len(model.trainable_variables) == 300
        optimizer = wrap(make())
        optimizer.build(model.trainable_variables)
        x = tf.ones((1, 2), "float64")

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        gc.collect()
        gc.disable()  # It would look through what earlier tests have left.
        try:
            start = time.process_time()
            graph = step.get_concrete_function().graph
            seconds = time.process_time() - start
        finally:
            gc.enable()
        return seconds, conditionals(graph)

    # The least of several, because other work only ever adds.
    times = [
        [trace_time(wrap) for _ in range(2)]
        for wrap in (lambda inner: inner, lambda inner: Lookahead(inner, 5))
    ]
    assert {number for _, number in times[0]} == {0}
    assert {number for _, number in times[1]} == {1}
    assert min(times[1])[0] < 2 * min(times[0])[0], times


@pytest.mark.slow
def test_lookahead_variance_is_that_of_the_paper():
    """Proposition 2 of arXiv:1907.08610, on their noisy quadratic.

    The loss a (x - c)^2 / 2 with a new c of variance 1 at each update; each
    element of the vector is a run of its own. The standard error of the
    variance of 2^17 runs is 0.4%.
    """
    rate, a, k, alpha, num_runs = 0.25, 1.0, 5, 0.5, 2**17
    rng = np.random.default_rng(0)
    variances = []
    for wrap in (lambda inner: inner, lambda inner: Lookahead(inner, k, alpha)):
        variable = keras.Variable(np.zeros(num_runs))
        optimizer = wrap(keras.optimizers.SGD(rate))
        for _ in range(30 * k):  # From 0; what is missing is below 1e-6.
            noise = rng.normal(size=num_runs)
            optimizer.apply([a * (variable.numpy() - noise)], [variable])
        variances.append(np.var(variable.numpy()))
    contraction = 1 - rate * a
    np.testing.assert_allclose(
        variances[0], (rate * a) ** 2 / (1 - contraction**2), rtol=0.02
    )
    top = alpha**2 * (1 - contraction ** (2 * k))
    bottom = top + 2 * alpha * (1 - alpha) * (1 - contraction**k)
    np.testing.assert_allclose(
        variances[1] / variances[0], top / bottom, rtol=0.02
    )


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"sync_period": 0}, ValueError, "`sync_period` must be an int >= 1"),
        ({"sync_period": 1.5}, ValueError, "`sync_period` must be an int >= 1"),
        ({"sync_period": True}, ValueError, "`sync_period` must be an int >="),
        ({"slow_step_size": 0}, ValueError, r"`slow_step_size` .* in \(0, 1\]"),
        ({"slow_step_size": 1.1}, ValueError, r"`slow_step_size` must be"),
        ({"slow_step_size": -0.5}, ValueError, r"`slow_step_size` must be"),
        ({"slow_step_size": "0.5"}, ValueError, r"`slow_step_size` must be"),
        (
            {"inner_optimizer": 3},
            TypeError,
            "`inner_optimizer` must be a Keras",
        ),
        ({"inner_optimizer": "sdg"}, ValueError, "`inner_optimizer` must name"),
        ({"momentum": 0.5}, ValueError, "options of every Keras optimizer"),
        (
            {"inner_optimizer": sgd(clipnorm=1.0), "clipnorm": 2.0},
            ValueError,
            "`clipnorm` must be the same wherever it is given",
        ),
    ],
)
def test_lookahead_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=f"{message}.*Received: "):
        Lookahead(**{"inner_optimizer": "sgd", **arguments})


def test_lookahead_lets_keras_check_what_is_keras_own():
    with pytest.raises(ValueError, match="Only one of `clipnorm`"):
        Lookahead(sgd(clipnorm=1.0), clipvalue=1.0)
    built = sgd()
    built.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="before the inner optimizer is built"):
        Lookahead(built, clipnorm=1.0)


def test_lookahead_refuses_the_wrong_order_of_calls():
    with pytest.raises(ValueError, match="`trainable_variables` must be given"):
        Lookahead("sgd").apply([np.ones(1)])
    optimizer = Lookahead("sgd")
    optimizer.apply([])
    assert not optimizer.built


def test_loss_scaling_outside_lookahead_switches_a_fixed_scale_off():
    inner = sgd(loss_scale_factor=8.0)
    optimizer = Lookahead(inner)
    optimizer.loss_scale_factor = None
    assert inner.loss_scale_factor is None


def test_accum_model_puts_accumulation_outside_lookahead():
    model = AccumModel.wrap(helpers.functional())
    model.compile(NESTINGS["accumulation inside"](), "mse")
    assert isinstance(model.optimizer, AccumOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, Lookahead)
    innermost = model.optimizer.inner_optimizer.inner_optimizer
    assert type(innermost) is keras.optimizers.SGD
    assert model.accum_steps == 3


def test_loss_is_scaled_once_with_the_scale_inside():
    """https://github.com/tensorflow/addons/issues/2403

    Keras itself sees the outermost optimizer only, and adds a second scale.
    """
    keras.config.set_dtype_policy("mixed_float16")

    def make():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        return Lookahead(scaled, sync_period=1, slow_step_size=1.0)

    data = helpers.rows(10)
    expected = helpers.functional()
    expected.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
    expected.fit(*data, batch_size=10, verbose=0)
    model = AccumModel.wrap(helpers.functional())
    model.compile(make(), "mse", run_eagerly=True)
    model.fit(*data, batch_size=10, verbose=0)
    helpers.assert_close(model, expected, atol=2e-3)  # float16 has 11 bits.
    assert not np.allclose(
        helpers.weights(model)[0], helpers.weights(helpers.functional())[0]
    )

    plain = helpers.functional()
    plain.compile(make(), "mse", run_eagerly=True)
    for use in (
        lambda: AccumModel.wrap(plain),
        lambda: plain.fit(
            *data, verbose=0, callbacks=[AccumCallback(verbose=0)]
        ),
    ):
        with pytest.raises(ValueError, match="must scale the loss once"):
            use()
