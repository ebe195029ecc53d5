"""The promise: the update is that of the large batch.

The reference is plain Keras on the large batch, or NumPy.
"""

import itertools

import helpers
import keras
import numpy as np
import pytest

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.1, **kw),
    "nesterov": lambda **kw: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, **kw
    ),
    "adam": lambda **kw: keras.optimizers.Adam(0.01, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(0.01, weight_decay=0.1, **kw),
    "rmsprop": lambda **kw: keras.optimizers.RMSprop(0.01, **kw),
    "adagrad": lambda **kw: keras.optimizers.Adagrad(0.1, **kw),
    "lion": lambda **kw: keras.optimizers.Lion(0.01, **kw),
}


def check_every_way(name, clip, accum_steps):
    data = helpers.rows(24)
    make = OPTIMIZERS[name]
    large = helpers.fit_large_batch(make(**clip), 12, data)
    start = helpers.functional()
    assert np.abs(start.weights[0] - large.weights[0]).max() > 1e-3
    for way in ("wrap", "subclass", "callback", "optimizer"):
        model = helpers.fit_way(
            way, make(**clip), accum_steps, 12 // accum_steps, data
        )
        helpers.assert_close(model, large)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_way_equals_large_batch(name):
    """https://github.com/keras-team/keras/issues/19990"""
    check_every_way(name, {"global_clipnorm": 0.1}, accum_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("accum_steps", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_way_and_every_accum_steps_equals_large_batch(name, accum_steps):
    """https://github.com/keras-team/keras/issues/19990"""
    check_every_way(name, {}, accum_steps)


@pytest.mark.parametrize(
    "way, steps_per_execution",
    [
        ("wrap", 1),
        ("wrap", 5),
        ("subclass", 5),
        ("callback", 5),
        ("optimizer", 1),
    ],
)
def test_modes_and_steps_per_execution_agree(way, mode, steps_per_execution):
    """https://github.com/keras-team/keras/issues/17589"""
    data = helpers.rows(40)  # 10 batches of 4, the last cycle has one.
    large = helpers.fit_large_batch(
        keras.optimizers.Adam(0.01),
        12,
        # Alone the optimizer has no epochs, and keeps the last batch.
        [part[:36] for part in data] if way == "optimizer" else data,
        epochs=1,
    )
    model = helpers.fit_way(
        way,
        keras.optimizers.Adam(0.01),
        3,
        4,
        data,
        epochs=1,
        steps_per_execution=steps_per_execution,
        **mode,
    )
    helpers.assert_close(model, large)
    updates = 3 if way == "optimizer" else 4
    assert int(model.optimizer.iterations) == updates


@pytest.mark.parametrize("way", ["wrap", "subclass", "callback"])
def test_uneven_rows_equal_large_batch(way):
    """https://github.com/keras-team/keras/issues/20241"""
    data = helpers.rows(10)
    large = helpers.fit_large_batch(
        keras.optimizers.SGD(0.05), 10, data, epochs=1
    )
    model = helpers.fit_way(
        way, keras.optimizers.SGD(0.05), 3, 4, data, epochs=1
    )
    helpers.assert_close(model, large)


def test_uneven_rows_optimizer_alone_averages_micro_batches():
    """https://github.com/keras-team/keras/issues/20241

    Without a weight each micro-batch has an equal share: (g1 + g2 + g3) / 3.
    """
    x, y = helpers.rows(10)
    model = helpers.functional()
    gradients = []
    for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
        gradients.append(gradients_of(model, x[part], y[part]))
    start = helpers.weights(model)
    model.compile(AccumOptimizer(keras.optimizers.SGD(0.05), 3), "mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for before, after, parts in zip(
        start, helpers.weights(model), zip(*gradients, strict=True), strict=True
    ):
        np.testing.assert_allclose(
            after, before - 0.05 * sum(parts) / 3, atol=helpers.EXACT
        )


def gradients_of(model, x, y):
    """Gradients of the mean squared error of the 5-7-2 network, by hand."""
    (kernel_1, bias_1, kernel_2, bias_2) = helpers.weights(model)
    hidden = np.tanh(x @ kernel_1 + bias_1)
    error = 2 * (hidden @ kernel_2 + bias_2 - y) / y.size
    back = (error @ kernel_2.T) * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


@pytest.mark.parametrize("accum_steps", [1, 2, 5])
def test_same_batch_again_gives_the_same_update(accum_steps):
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3829"""
    x, y = helpers.rows(4)
    model = helpers.functional()
    expected = [
        before - gradient
        for before, gradient in zip(
            helpers.weights(model), gradients_of(model, x, y), strict=True
        )
    ]
    model = AccumModel.wrap(model, accum_steps=accum_steps)
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    data = [np.tile(part, (accum_steps, 1)) for part in (x, y)]
    model.fit(*data, batch_size=4, shuffle=False, verbose=0)
    helpers.assert_close(helpers.weights(model), expected)


ALL_OPTIMIZERS = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if isinstance(cls, type)
    and issubclass(cls, keras.optimizers.Optimizer)
    and cls.update_step is not keras.optimizers.Optimizer.update_step
)


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_one_accum_step_is_bit_equal_to_plain_keras(name):
    """https://github.com/andreped/GradientAccumulator/issues/2"""
    data = helpers.rows(20)
    cls = getattr(keras.optimizers, name)

    def run(make, optimizer, callbacks=()):
        model = make()
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
        history = model.fit(
            *data,
            batch_size=8,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        ).history
        return helpers.weights(model), history, model

    plain, plain_history, _ = run(helpers.functional, cls())
    for make, optimizer, callbacks in [
        (lambda: AccumModel.wrap(helpers.functional()), cls(), ()),
        (helpers.functional, AccumOptimizer(cls()), ()),
        (helpers.functional, cls(), [AccumCallback(1, verbose=0)]),
    ]:
        ours, history, model = run(make, optimizer, callbacks)
        helpers.assert_equal(ours, plain)
        for key, logged in plain_history.items():
            assert history[key] == logged
        kept = model.optimizer
        num_plain = len(getattr(kept, "inner_optimizer", kept).variables)
        assert len(kept.variables) == num_plain


def check_optimizer(name, **options):
    data = helpers.rows(20)
    make = lambda: getattr(keras.optimizers, name)(**options)
    large = helpers.fit_large_batch(make(), 12, data, run_eagerly=True)
    model = helpers.fit_way("wrap", make(), 3, 4, data, run_eagerly=True)
    helpers.assert_close(model, large)


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_every_optimizer_of_keras_equals_large_batch(name):
    check_optimizer(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clip"),
    # Each in turn: clipping is the same code in all of them.
    list(
        zip(
            ALL_OPTIMIZERS,
            itertools.cycle(["clipnorm", "clipvalue", "global_clipnorm"]),
            strict=False,
        )
    ),
)
def test_every_optimizer_and_clipping_equals_large_batch(name, clip):
    check_optimizer(name, **{clip: 0.05})


def test_one_accum_step_makes_the_plain_graph():
    """https://github.com/OpenNMT/OpenNMT-tf/pull/686"""

    def count_operations(model):
        model.compile("adam", "mse")
        model.fit(*helpers.rows(8), batch_size=4, verbose=0)
        import tensorflow as tf

        @tf.function
        def step(x, y):
            return model.train_step((x, y))

        graph = step.get_concrete_function(*helpers.rows(4)).graph
        return sorted(operation.type for operation in graph.get_operations())

    plain = count_operations(helpers.functional())
    assert count_operations(AccumModel.wrap(helpers.functional())) == plain


@pytest.mark.parametrize("way", ["wrap", "subclass", "callback"])
@pytest.mark.parametrize("mode_name", ["graph", "xla"])
def test_train_function_has_one_trace_in_100_steps(way, mode_name):
    """https://github.com/andreped/GradientAccumulator/issues/102"""
    model, traces = helpers.traced_model()
    callbacks = []
    if way == "callback":
        callbacks = [AccumCallback(3, verbose=0)]
    else:
        model = AccumModel.wrap(model, accum_steps=3)
    model.compile("adam", "mse", jit_compile=mode_name == "xla")
    traces.clear()
    model.fit(*helpers.rows(200), batch_size=2, verbose=0, callbacks=callbacks)
    assert len(traces) == 1
    if way == "wrap":
        model.accum_steps = 5
        model.fit(*helpers.rows(20), batch_size=2, verbose=0)
        assert len(traces) == 1
        assert int(model.optimizer.iterations) == 34 + 2


def test_accum_steps_from_one_to_more_costs_one_trace():
    model, traces = helpers.traced_model()
    model = AccumModel.wrap(model)
    model.compile("adam", "mse")
    traces.clear()
    for accum_steps, num_traces in ((1, 1), (2, 2), (4, 2), (1, 2), (3, 2)):
        model.accum_steps = accum_steps
        model.fit(*helpers.rows(24), batch_size=2, verbose=0)
        assert len(traces) == num_traces


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_logged_loss_does_not_depend_on_accum_steps(way):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/2569"""
    data = helpers.rows(12)

    def history(model, batch_size, callbacks=()):
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
        return model.fit(
            *data,
            batch_size=batch_size,
            verbose=0,
            callbacks=list(callbacks),
        ).history

    plain = history(helpers.functional(), 12)
    if way == "wrap":
        ours = history(AccumModel.wrap(helpers.functional(), 3), 4)
    else:
        ours = history(helpers.functional(), 4, [AccumCallback(3, verbose=0)])
    for key in ("loss", "mae"):
        np.testing.assert_allclose(ours[key], plain[key], atol=helpers.EXACT)


def test_learning_rate_schedule_counts_updates():
    """https://github.com/huggingface/accelerate/issues/963"""
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 100, 0.0)
    optimizer = AccumOptimizer(keras.optimizers.SGD(decay), 4)
    variable = keras.Variable(np.zeros(2))
    for _ in range(8):
        optimizer.apply([np.ones(2)], [variable])
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.98, 1e-6)

    data = helpers.rows(48)

    def piecewise():
        return keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay(
                [1, 2, 3], [0.5, 0.25, 0.125, 0.0625]
            )
        )

    large = helpers.fit_large_batch(piecewise(), 12, data, run_eagerly=True)
    model = helpers.fit_way("wrap", piecewise(), 3, 4, data, run_eagerly=True)
    helpers.assert_close(model, large)


def test_global_clipnorm_clips_the_average_once():
    """https://github.com/huggingface/accelerate/issues/641"""
    inner = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    optimizer = AccumOptimizer(inner, 2)
    variable = keras.Variable(np.zeros(1))
    optimizer.apply([np.array([10.0])], [variable])
    optimizer.apply([np.array([-9.9])], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.05], atol=helpers.EXACT)
