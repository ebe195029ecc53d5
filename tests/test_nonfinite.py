"""Gradients that are not finite, in float32 and under loss scaling."""

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

BAD = (np.nan, np.inf, -np.inf)


def one_cycle(policy, gradients, *, how="eager", inner=None, weights=None):
    """Feeds scripted gradients of one variable; returns all there is."""
    variable = keras.Variable(np.ones(2))
    optimizer = AccumOptimizer(
        inner or keras.optimizers.Adam(0.125), 3, nonfinite=policy
    )
    optimizer.build([variable])

    def apply(gradient, weight):
        optimizer.apply([gradient], [variable], weight=weight)

    if how != "eager":
        apply = tf.function(apply, jit_compile=how == "xla")
    for index, gradient in enumerate(gradients):
        weight = 1.0 if weights is None else weights[index]
        apply(
            tf.constant(gradient, "float64", shape=(2,)),
            tf.constant(weight, "float64"),
        )
        assert all(
            np.isfinite(v.numpy()).all()
            for v in (variable, *optimizer.variables)
        )
    return variable, optimizer


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_skip_micro_batch_leaves_out_numerator_and_denominator(how, bad, place):
    """https://github.com/espnet/espnet/pull/3283"""
    gradients, weights = [1.0, 2.0, 5.0], [1.0, 2.0, 4.0]
    kept = [j for j in range(3) if j != place]
    expected = keras.Variable(np.ones(2))
    mean = sum(weights[j] * gradients[j] for j in kept) / sum(
        weights[j] for j in kept
    )
    keras.optimizers.Adam(0.125).apply([np.full(2, mean)], [expected])
    gradients[place] = [bad, 1.0]
    variable, optimizer = one_cycle(
        "skip_micro_batch", gradients, how=how, weights=weights
    )
    helpers.assert_close([variable.numpy()], [expected.numpy()])
    assert int(optimizer.iterations) == 1
    assert optimizer.num_skipped_micro_batches == 1
    assert optimizer.num_skipped_updates == 0


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_skip_update_discards_the_cycle_at_its_end(how, place):
    """https://github.com/NVIDIA-NeMo/Speech/issues/11272"""
    gradients = [1.0, 2.0, 5.0]
    gradients[place] = np.nan
    variable, optimizer = one_cycle("skip_update", gradients, how=how)
    helpers.assert_equal([variable.numpy()], [np.ones(2)])
    assert int(optimizer.iterations) == 0
    assert optimizer.cycle_position == 0
    assert optimizer.num_skipped_micro_batches == 1
    assert optimizer.num_skipped_updates == 1
    # The next cycle is clean.
    variable, optimizer = one_cycle(
        "skip_update", [*gradients, 1.0, 2.0, 3.0], how=how
    )
    expected = keras.Variable(np.ones(2))
    keras.optimizers.Adam(0.125).apply([np.full(2, 2.0)], [expected])
    helpers.assert_close([variable.numpy()], [expected.numpy()])


@pytest.mark.parametrize("policy", ["skip_micro_batch", "skip_update"])
def test_cycle_of_bad_micro_batches_makes_no_update(policy):
    variable, optimizer = one_cycle(policy, [np.nan, np.inf, np.nan])
    helpers.assert_equal([variable.numpy()], [np.ones(2)])
    assert int(optimizer.iterations) == 0
    assert optimizer.num_skipped_micro_batches == 3
    assert optimizer.num_skipped_updates == 1


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_raise_names_the_micro_batch(how):
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite in"):
        one_cycle("raise", [1.0, np.nan], how=how)


def test_raise_inside_xla_discards_the_cycle():
    variable, optimizer = one_cycle("raise", [1.0, np.nan, 1.0], how="xla")
    helpers.assert_equal([variable.numpy()], [np.ones(2)])
    assert optimizer.num_skipped_updates == 1


def test_nothing_is_looked_at_by_default():
    variable = keras.Variable(np.ones(2))
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.build([variable])
    assert not any("skipped" in v.name for v in optimizer.variables)


def bad_rows(num_rows=24, at=5):
    x, y = helpers.rows(num_rows)
    x[at] = np.inf
    return x, y


@pytest.mark.parametrize("way", ["wrap", "callback"])
def test_fit_skips_and_logs(way):
    x, y = bad_rows()
    model, callbacks = helpers.functional(), []
    if way == "wrap":
        model = AccumModel.wrap(model, 3, nonfinite="skip_micro_batch")
        callbacks = [AccumCallback(verbose=0)]
    else:
        callbacks = [AccumCallback(3, nonfinite="skip_micro_batch", verbose=0)]
    model.compile(keras.optimizers.SGD(0.125), "mse")
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history
    assert history["skipped_micro_batches"] == [1, 1]
    assert "skipped_updates" not in history
    keep = np.r_[0:4, 8:24]
    large = helpers.functional()
    large.compile(keras.optimizers.SGD(0.125), "mse")
    for _ in range(2):
        for part in (keep[:8], keep[8:]):
            large.train_on_batch(x[part], y[part])
    helpers.assert_close(model, large)


def ids_and_numbers():
    """An embedding, whose gradient is sparse, and a layer whose is not."""
    ids = keras.Input((3,), dtype="int32", name="ids")
    numbers = keras.Input((5,), name="numbers")
    looked_up = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(ids))
    hidden = keras.layers.Concatenate()([looked_up, numbers])
    return helpers.with_known_weights(
        keras.Model(
            {"ids": ids, "numbers": numbers}, keras.layers.Dense(2)(hidden)
        )
    )


@pytest.mark.parametrize(
    "mode",
    [
        {"run_eagerly": True},
        {},
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=["eager", "graph", "xla"],
)
def test_skip_micro_batch_inside_a_step_leaves_its_rows_out(mode):
    """https://github.com/espnet/espnet/pull/3283, in batches of 4, 4 and 2"""
    x, y = bad_rows(10, at=5)
    ids = np.random.default_rng(0).integers(0, 7, (10, 3))
    keep = np.r_[0:4, 8:10]
    plain, ours = ids_and_numbers(), ids_and_numbers()
    ours = AccumModel.wrap(
        ours, micro_batch_size=4, nonfinite="skip_micro_batch"
    )
    for model, rows in ((plain, keep), (ours, np.arange(10))):
        model.compile(cutting.sgd(), "mse", **mode)
        data = ({"ids": ids[rows], "numbers": x[rows]}, y[rows])
        cutting.fit(model, data, epochs=2)
    helpers.assert_close(ours, plain)
    assert ours.optimizer.num_skipped_micro_batches == 2
    assert int(ours.optimizer.iterations) == 2


@pytest.mark.parametrize("nesting", ["outside", "inside"])
@pytest.mark.parametrize("policy", [None, "skip_update", "skip_micro_batch"])
def test_loss_scale_comes_down_and_nothing_is_spoiled(nesting, policy):
    """https://github.com/espnet/espnet/pull/3283, under LossScaleOptimizer"""
    inner = keras.optimizers.SGD(0.125)
    if nesting == "outside":
        optimizer = AccumOptimizer(
            keras.optimizers.LossScaleOptimizer(inner), 3, nonfinite=policy
        )
        scaling = optimizer.inner_optimizer
    else:
        optimizer = scaling = keras.optimizers.LossScaleOptimizer(
            AccumOptimizer(inner, 3, nonfinite=policy)
        )
    model = AccumModel.wrap(helpers.functional())
    model.compile(optimizer, "mse")
    x, y = bad_rows(at=5)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert float(scaling.dynamic_scale) == 2.0**14
    updates = 2 if policy == "skip_micro_batch" else 1
    assert int(inner.iterations) == updates
    large = helpers.functional()
    large.compile(keras.optimizers.SGD(0.125), "mse")
    if policy == "skip_micro_batch":
        keep = np.r_[0:4, 8:12]
        large.train_on_batch(x[keep], y[keep])
    large.train_on_batch(x[12:], y[12:])
    helpers.assert_close(model, large)


def test_loss_scale_may_change_within_a_cycle():
    """https://github.com/andreped/GradientAccumulator/issues/113"""
    inner = keras.optimizers.SGD(1.0)
    scaling = keras.optimizers.LossScaleOptimizer(inner)
    optimizer = AccumOptimizer(scaling, 2)
    variable = keras.Variable(np.zeros(2))
    optimizer.build([variable])
    for scale, gradient in ((2.0**15, 1.0), (2.0**14, 3.0)):
        scaling.dynamic_scale.assign(scale)
        scaled = optimizer.scale_loss(tf.constant(gradient, "float64"))
        assert float(scaled) == scale * gradient
        optimizer.apply([tf.fill((2,), scaled)], [variable])
        sums = [v for v in optimizer.variables if "gradient_sum" in v.name]
        if gradient == 1.0:
            np.testing.assert_array_equal(sums[0].numpy(), 1.0)
    np.testing.assert_allclose(variable.numpy(), -2.0)


def test_loss_scale_grows_per_update():
    inner = keras.optimizers.SGD(1.0)
    scaling = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=3)
    optimizer = AccumOptimizer(scaling, 4)
    variable = keras.Variable(np.zeros(2))
    optimizer.build([variable])
    for index in range(12):
        assert float(scaling.dynamic_scale) == 2.0**15, index
        optimizer.apply([np.ones(2)], [variable])
    assert float(scaling.dynamic_scale) == 2.0**16


def test_state_of_the_guard_is_saved():
    variable, optimizer = one_cycle("skip_update", [1.0, np.nan])
    store = {}
    optimizer.cycle_state.save_own_variables(store)
    _, copy = one_cycle("skip_update", [])
    copy.cycle_state.load_own_variables(store)
    assert copy.num_skipped_micro_batches == 1
    copy.apply([np.ones(2)])
    assert copy.num_skipped_updates == 1


@pytest.mark.parametrize("value", ["skip", 1, True, "Raise"])
def test_nonfinite_must_be_known(value):
    for take in (
        lambda: AccumOptimizer("sgd", 2, nonfinite=value),
        lambda: AccumModel(*helpers.tensors(), nonfinite=value),
        lambda: AccumModel.wrap(helpers.functional(), nonfinite=value),
        lambda: AccumCallback(2, nonfinite=value),
    ):
        with pytest.raises(ValueError, match="`nonfinite` must be one of"):
            take()


def test_cycles_of_two_lists_are_spoiled_apart():
    a, b = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = AccumOptimizer(
        keras.optimizers.SGD(1.0), 2, nonfinite="skip_update"
    )
    optimizer.build([a, b])
    for gradient in (np.nan, 1.0):
        optimizer.apply([np.array([1.0])], [a])
        optimizer.apply([np.array([gradient])], [b])
    helpers.assert_equal(helpers.values([a, b]), [[0.0], [1.0]])
    assert optimizer.num_skipped_updates == 1


def test_logged_rows_leave_out_what_was_skipped():
    model = helpers.functional()
    model.compile("sgd", "mse")
    x, y = bad_rows(6, at=3)
    history = model.fit(
        x,
        y,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[AccumCallback(3, nonfinite="skip_micro_batch", verbose=0)],
    ).history
    assert history["effective_batch_size"] == [4.0]
