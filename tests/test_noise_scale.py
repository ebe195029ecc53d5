"""The gradient noise scale: against its formula, and against a known truth.

McCandlish et al., arXiv:1812.06162, appendix A.1. The twin below takes the
gradients of micro-batches from plain Keras, at weights that stand still.
"""

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import SAM
from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import noise_scale

NAME = "gradient_noise_scale"


def slope(model, loss, x, y, sample_weight=None):
    """Gradient of the loss of some rows, as one vector."""
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True), sample_weight)
    gradients = tape.gradient(value, model.trainable_variables)
    return np.concatenate(
        [np.ravel(tf.convert_to_tensor(each)) for each in gradients]
    )


def twin(updates):
    """From lists of (gradient of the mean, rows, weight), one per update."""
    noise, signal = [], []
    for parts in updates:
        gradients, rows, weights = map(np.array, zip(*parts, strict=True))
        shares = weights / weights.sum()
        s = np.mean(np.sum(gradients**2, 1))
        t = np.sum((shares @ gradients) ** 2)
        b, large = 1 / np.mean(1 / rows), 1 / np.sum(shares**2 / rows)
        signal.append((large * t - b * s) / (large - b))
        noise.append((s - t) / (1 / b - 1 / large))
    return np.mean(noise) / np.mean(signal)


def data(num_rows):
    """Targets far off, so that the gradient stands out."""
    x, y = helpers.rows(num_rows)
    return x, y + 4.0


def expected(cuts, loss=None, sample_weight=None, is_sum=False):
    """The twin for updates given as lists of (begin, end) of micro-batches."""
    loss = loss or keras.losses.MeanSquaredError()
    model = helpers.functional()
    x, y = data(max(end for update in cuts for _, end in update))
    updates = []
    for update in cuts:
        parts = []
        for begin, end in update:
            rows, weight = end - begin, end - begin
            own = None
            if sample_weight is not None:
                own = sample_weight[begin:end]
                weight = own.sum()
            gradient = slope(model, loss, x[begin:end], y[begin:end], own)
            if is_sum:
                gradient = gradient / rows
            parts.append((gradient, rows, weight))
        updates.append(parts)
    return twin(updates)


def logged(num_rows, batch_size, *, optimizer=None, loss=None, mode=None, **kw):
    """What `fit` logs for one epoch at weights that stand still."""
    sample_weight = kw.pop("sample_weight", None)
    x, y = kw.pop("data", None) or data(num_rows)
    model = helpers.functional()
    model.compile(
        optimizer or keras.optimizers.SGD(0.0),
        loss or keras.losses.MeanSquaredError(),
        **(mode or {}),
    )
    history = cutting.fit(
        model,
        (x, y, sample_weight),
        batch_size=batch_size,
        callbacks=[AccumCallback(**kw, noise_scale=True, verbose=0)],
    )
    return history[NAME]


def assert_is(values, value):
    np.testing.assert_allclose(values, [value], rtol=1e-10)


STEPS = [[(0, 4), (4, 8), (8, 12)], [(12, 16), (16, 20), (20, 22)]]


def test_batches_equal_the_twin():
    assert_is(logged(22, 4, accum_steps=3), expected(STEPS))


def test_cut_batches_equal_the_twin(mode):
    """https://github.com/RadarML/nrdk/issues/38"""
    value = expected(
        [[(0, 4), (4, 8), (8, 11)], [(11, 15), (15, 19), (19, 22)]]
    )
    assert_is(logged(22, 11, micro_batch_size=4, mode=mode), value)


def test_batches_that_are_cut_and_accumulate_equal_the_twin():
    value = expected([[(0, 4), (4, 6), (6, 10), (10, 12)]])
    assert_is(logged(12, 6, micro_batch_size=4, accum_steps=2), value)


@pytest.mark.parametrize("batch_size, way", [(4, "steps"), (22, "cut")])
@pytest.mark.parametrize("kind", ["weights", "sum", "scaled"])
def test_weights_sums_and_loss_scales_equal_the_twin(kind, batch_size, way):
    options = {"accum_steps": 6}
    if way == "cut":
        options = {"micro_batch_size": 4}
    cuts = [[*STEPS[0], *STEPS[1]]]
    if kind == "weights":
        rows = np.random.default_rng(5).uniform(0.5, 1.5, size=22)
        loss = lambda: keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        )
        value = expected(cuts, loss(), sample_weight=rows)
        options |= {"loss": loss(), "sample_weight": rows}
    elif kind == "sum":
        loss = lambda: keras.losses.MeanSquaredError(reduction="sum")
        value = expected(cuts, loss(), is_sum=True)
        options["loss"] = loss()
    else:
        value = expected(cuts)
        options["optimizer"] = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.0), initial_scale=8.0
        )
    assert_is(logged(22, batch_size, **options), value)


@pytest.mark.parametrize("batch_size, way", [(4, "steps"), (22, "cut")])
def test_micro_batches_that_are_not_finite_are_left_out(batch_size, way):
    """https://github.com/Lightning-AI/pytorch-lightning/issues/1923"""
    x, y = data(22)
    bad = y.copy()
    bad[5] = np.nan
    options = {"accum_steps": 6, "nonfinite": "skip_micro_batch"}
    if way == "cut":
        options |= {"micro_batch_size": 4, "accum_steps": 1}
    value = expected([[STEPS[0][0], STEPS[0][2], *STEPS[1]]])
    assert_is(logged(22, batch_size, data=(x, bad), **options), value)


def test_two_points_take_the_first():
    options = {"micro_batch_size": 4}
    optimizer = SAM(keras.optimizers.SGD(0.0), rho=0.5)
    assert_is(
        logged(22, 22, optimizer=optimizer, **options),
        expected([[*STEPS[0], *STEPS[1]]]),
    )


def test_repeated_ids_count_together():
    values = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float64")
    slices = tf.IndexedSlices(values, tf.constant([3, 1, 3]), (9, 2))
    dense = tf.constant([[7.0]], "float64")
    compute = lambda: noise_scale.square_norm([slices, None, dense])
    for each in (compute, tf.function(compute, jit_compile=True)):
        # (6, 8) in row 3, (3, 4) in row 1.
        np.testing.assert_allclose(each(), 36 + 64 + 9 + 16 + 49)
    empty = tf.IndexedSlices(values[:0], tf.constant([], "int32"), (9, 2))
    np.testing.assert_allclose(noise_scale.square_norm([empty]), 0)


def test_numerator_and_denominator_are_without_bias():
    """Micro-batches of any rows and shares: true values 25 and 0.25."""
    rng = np.random.default_rng(0)
    num_updates, dim = 20_000, 25
    rows, weights = np.array([2, 3, 8]), np.array([1.0, 4.0, 5.0])
    mean = np.zeros(dim)
    mean[0] = 0.5
    shape = (num_updates, 3, dim)
    gradients = mean + rng.normal(size=shape) / np.sqrt(rows)[:, None]
    shares = weights / weights.sum()
    s = np.mean(np.sum(gradients**2, 2), 1)
    t = np.sum(np.einsum("i,uid->ud", shares, gradients) ** 2, 1)
    signal, noise = noise_scale.signal_and_noise(
        s, t, np.mean(1 / rows), np.sum(shares**2 / rows)
    )
    for values, truth in ((signal, 0.25), (noise, 25.0)):
        error = values.std() / np.sqrt(num_updates)
        assert abs(values.mean() - truth) < 4 * error
        assert error < truth / 20


class Slope(keras.layers.Layer):
    """Whose gradient is the mean of the inputs."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, inputs):
        return keras.ops.sum(inputs * self.w, -1)


def gaussian_fit(num_rows, rows_per_update, seed=0, verbose=0, dim=25):
    """A run whose noise scale is 100, as long as `dim` is 25."""
    x = np.random.default_rng(seed).normal(size=(num_rows, dim))
    x[:, 0] += 0.5
    model = keras.Sequential([keras.Input((dim,)), Slope()])
    model.compile(
        keras.optimizers.SGD(0.0),
        lambda y, y_pred: y_pred,
        steps_per_execution=20,
    )
    return model.fit(
        x,
        np.zeros(num_rows),
        batch_size=rows_per_update,
        verbose=0,
        callbacks=[
            AccumCallback(
                micro_batch_size=rows_per_update // 4,
                noise_scale=True,
                verbose=verbose,
            )
        ],
    ).history[NAME]


def test_known_truth_is_met(capsys):
    """Within a tenth after 2,000 updates, and said so."""
    (value,) = gaussian_fit(64_000, 32, verbose=1)
    assert 90 < value < 110
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("Gradient noise scale: about 1")
    assert "from 2000 updates of 32 rows" in line
    assert "effective batch size of up to about 1" in line
    assert "fewer" not in line


def test_advice_of_a_few_updates_is_that_they_do_not_tell(capsys):
    gaussian_fit(160, 32, verbose=1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "too uncertain to say" in last
    gaussian_fit(160, 32, verbose=0)
    assert capsys.readouterr().out == ""


def estimate_of(noise, signal):
    rows = zip(noise, signal, strict=True)
    products = [(1, n, s, n * n, s * s, n * s) for n, s in rows]
    return noise_scale.Estimate(np.sum(products, 0))


def test_error_of_a_ratio():
    """Against the spread of ratios of many independent runs."""
    rng = np.random.default_rng(0)
    noise = rng.normal(25, 10, size=(2000, 400))
    signal = 0.25 + 0.02 * (25 - noise) / 10 + rng.normal(size=(2000, 400)) / 9
    estimates = [estimate_of(*run) for run in zip(noise, signal, strict=True)]
    spread = np.std([estimate.scale for estimate in estimates])
    errors = np.mean([estimate.standard_error for estimate in estimates])
    np.testing.assert_allclose(errors, spread, rtol=0.1)


def test_more_rows_than_are_of_use_are_said_to_be():
    estimate = estimate_of([24.0, 26.0] * 20, [0.25, 0.26] * 20)
    assert "fewer than it had" in noise_scale.advice(estimate, 400)
    assert "fewer" not in noise_scale.advice(estimate, 150)
    hidden = estimate_of([24.0, 26.0] * 20, [-0.2, 0.1] * 20)
    assert np.isnan(hidden.scale)
    assert "too uncertain" in noise_scale.advice(hidden, 400)


@pytest.mark.parametrize(
    "options, batch_size",
    [
        ({"accum_steps": 1}, 4),
        ({"micro_batch_size": 4, "loss_scope": "batch"}, 8),
    ],
)
def test_nothing_to_estimate_from_is_one_warning(options, batch_size, capsys):
    model = helpers.functional()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="nothing to estimate from") as caught:
        history = model.fit(
            *data(8),
            batch_size=batch_size,
            epochs=2,
            verbose=0,
            callbacks=[AccumCallback(**options, noise_scale=True)],
        ).history
    assert len(caught) == 1
    assert NAME not in history
    assert "Gradient noise" not in capsys.readouterr().out


def test_off_is_without_variables_and_goes_off_again():
    model = AccumModel.wrap(helpers.functional(), accum_steps=2)
    model.compile("sgd", "mse")
    ledger = model.optimizer.count_rows()
    for is_on in (False, True, False):
        callback = AccumCallback(noise_scale=is_on, verbose=0)
        history = cutting.fit(
            model, data(16), batch_size=4, callbacks=[callback]
        )
        assert (NAME in history) == is_on
        assert (ledger.noise is not None) == is_on


def test_cycle_from_a_file_is_left_out(tmp_path):
    """Of its first micro-batches nobody knows the norms any more."""
    model = AccumModel.wrap(helpers.functional(), 3, "carry")
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = data(20)
    cutting.fit(model, (x[:4], y[:4]), batch_size=4)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    callback = AccumCallback(noise_scale=True, verbose=0)
    with pytest.warns(UserWarning, match="nothing to estimate from"):
        history = cutting.fit(
            model, (x[4:], y[4:]), batch_size=4, callbacks=[callback]
        )
    assert history["updates"] == [1]
    assert NAME not in history


@pytest.mark.parametrize("value", [None, 1, "True"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="`noise_scale` must be True or"):
        AccumCallback(noise_scale=value)
