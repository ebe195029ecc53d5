"""Several replicas against plain Keras on one device, same global batches."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import SAM
from accum_model import AccumBatchNormalization
from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import Heun
from accum_model import Lookahead
from accum_model import Ranger
from tests import helpers
from tests import replicas

# The last global batch of 4 has 2 rows: of 4 replicas, two have none.
X, Y = helpers.rows(22)
TOKENS = np.random.default_rng(2).integers(1, 20, (22, 6))
TOKENS[np.arange(22)[:, None] % 6 < np.arange(6)] = 0
LABELS = np.random.default_rng(3).normal(size=(22, 6, 2))
WEIGHTS = np.random.default_rng(4).random(22)


def clipped_sgd():
    return keras.optimizers.SGD(0.125, global_clipnorm=0.5)


def sgd():
    return keras.optimizers.SGD(0.125)


def adam():
    return keras.optimizers.Adam(0.125, clipvalue=0.25)


def adamw():
    return keras.optimizers.AdamW(0.125, clipnorm=0.25)


def net():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh")(inputs)
    penalty = keras.regularizers.L2(0.0625)
    return keras.Model(
        inputs, keras.layers.Dense(2, kernel_regularizer=penalty)(hidden)
    )


def tagger():
    """A masked model: rows have different numbers of valid elements."""
    inputs = keras.Input((6,))
    embedded = keras.layers.Embedding(20, 3, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(3, return_sequences=True)(embedded)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def bag():
    """A model with a sparse gradient."""
    inputs = keras.Input((6,))
    embedded = keras.layers.Embedding(20, 3)(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    return keras.Model(inputs, keras.layers.Dense(2)(pooled))


def wrapped(make, **kwargs):
    return lambda: AccumModel.wrap(make(), **kwargs)


def assert_equal(one, other, tolerance=helpers.EXACT):
    for ours, theirs in zip(
        one.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("num_replicas", "accum_steps", "optimizer"),
    [
        (2, 1, clipped_sgd),
        (2, 3, adam),
        (4, 3, clipped_sgd),
        pytest.param(4, 1, adam, marks=pytest.mark.slow),
        pytest.param(2, 3, adamw, marks=pytest.mark.slow),
        pytest.param(4, 1, adamw, marks=pytest.mark.slow),
    ],
)
def test_weights_and_logs_are_those_of_one_device(
    num_replicas, accum_steps, optimizer
):
    """keras-team/keras#20582, andreped/GradientAccumulator#5."""
    strategy = replicas.mirrored(num_replicas)
    metrics = {"compile_kwargs": {"metrics": ["mae"]}}
    large = replicas.fitted(net, optimizer, (X, Y), 4 * accum_steps, **metrics)
    make = wrapped(net, accum_steps=accum_steps)
    model = replicas.fitted(make, optimizer, (X, Y), 4, strategy, **metrics)
    assert_equal(model, large)
    replicas.assert_copies_are_equal(model, strategy)
    if shows_sums_over_replicas():
        for name, values in large.history.history.items():
            np.testing.assert_allclose(
                model.history.history[name], values, rtol=0, atol=1e-10
            )


def shows_sums_over_replicas():
    """False for Keras before 3.10, whose metrics forget other replicas."""
    with replicas.mirrored(2).scope():
        metric = keras.metrics.Mean()
    synchronization = metric.total.value.synchronization
    return synchronization == tf.VariableSynchronization.ON_READ


CASES = {
    # What differs from `net`, 4 rows per batch, accum_steps=3 and clipped SGD.
    "cut": {"ours": {"micro_batch_size": 1}, "optimizer": adam},
    "cut and accumulated": {
        "ours": {"accum_steps": 3, "micro_batch_size": 1},
        "optimizer": adam,
    },
    "loss over the batch": {
        "ours": {"micro_batch_size": 1, "loss_scope": "batch"}
    },
    "masks": {"make": tagger, "data": (TOKENS, LABELS), "optimizer": sgd},
    "sparse": {"make": bag, "data": (TOKENS, Y), "optimizer": sgd},
    "sample weights": {
        "loss": lambda: keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        ),
        "sample_weight": WEIGHTS,
    },
    "sum": {"loss": lambda: keras.losses.MeanSquaredError(reduction="sum")},
    "sums at once": {
        "ours": {},
        "loss": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    },
    "loss scaling": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(sgd())
    },
    "several steps per execution": {
        "compile_kwargs": {"steps_per_execution": 3}
    },
    "moving average": {
        "optimizer": lambda: keras.optimizers.SGD(
            0.125, use_ema=True, ema_momentum=0.5
        )
    },
    "constraint": {
        "make": lambda: keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(
                    2, kernel_constraint=keras.constraints.MaxNorm(0.25)
                ),
            ]
        )
    },
    "Lookahead": {"optimizer": lambda: Lookahead(sgd(), sync_period=2)},
    "Ranger": {"optimizer": lambda: Ranger(0.125, sync_period=2)},
    "eager": {"compile_kwargs": {"run_eagerly": True}},
    "masks, cut": {
        "make": tagger,
        "data": (TOKENS, LABELS),
        "optimizer": sgd,
        "ours": {"micro_batch_size": 1},
    },
    "sparse, cut": {
        "make": bag,
        "data": (TOKENS, Y),
        "optimizer": sgd,
        "ours": {"micro_batch_size": 1},
    },
    "sparse at once": {
        "make": bag,
        "data": (TOKENS, Y),
        "optimizer": sgd,
        "ours": {},
    },
    "nonfinite": {"ours": {"accum_steps": 3, "nonfinite": "skip_update"}},
}
QUICK = ("cut", "masks", "sparse", "sum", "loss scaling", "Lookahead")


@pytest.mark.parametrize(
    "case",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_two_replicas_are_one_device(case):
    case = {
        "make": net,
        "data": (X, Y),
        "optimizer": clipped_sgd,
        "ours": {"accum_steps": 3},
        **CASES[case],
    }
    make, optimizer, data, ours = (
        case.pop(name) for name in ("make", "optimizer", "data", "ours")
    )
    strategy = replicas.mirrored(2)
    model = replicas.fitted(
        wrapped(make, **ours), optimizer, data, 4, strategy, **case
    )
    case.pop("compile_kwargs", None)
    num_rows = 4 * ours.get("accum_steps", 1)
    large = replicas.fitted(make, optimizer, data, num_rows, **case)
    tolerance = helpers.EXACT
    if make is tagger:
        tolerance = helpers.masked_tolerance()
    assert_equal(model, large, tolerance)
    replicas.assert_copies_are_equal(model, strategy)


@pytest.mark.parametrize(
    "optimizer", [lambda: Heun(0.125), lambda: SAM(sgd(), rho=0.5)]
)
def test_second_point_is_that_of_the_large_batch(optimizer):
    make = wrapped(net)
    one = replicas.fitted(make, optimizer, (X, Y), 4)
    two = replicas.fitted(make, optimizer, (X, Y), 4, replicas.mirrored(2))
    assert_equal(two, one)


class Penalty(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


def test_added_loss_beside_a_sum_counts_once():
    def make():
        inputs = keras.Input((5,))
        outputs = Penalty()(keras.layers.Dense(2)(inputs))
        return keras.Model(inputs, outputs)

    def loss():
        return keras.losses.MeanSquaredError(reduction="sum")

    def small_sgd():
        return keras.optimizers.SGD(2.0**-10)

    data = helpers.rows(24)
    model = replicas.fitted(
        wrapped(make, accum_steps=3),
        small_sgd,
        data,
        8,
        replicas.mirrored(2),
        loss=loss,
    )
    assert_equal(model, replicas.fitted(make, small_sgd, data, 24, loss=loss))


def test_first_batch_may_be_uneven():
    """Keras itself fails: it adds up the replicas' first batches."""
    data = X[:7], Y[:7]
    make = wrapped(net, accum_steps=1)
    model = replicas.fitted(make, sgd, data, 7, replicas.mirrored(2))
    assert_equal(model, replicas.fitted(net, sgd, data, 7))


@pytest.mark.slow
def test_scalar_loss_is_a_mean_over_replicas():
    """Keras does not divide a loss that is one number by the replicas."""

    def loss():
        return lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2)

    data = X[:20], Y[:20]
    large = replicas.fitted(net, sgd, data, 20, loss=loss)
    model = replicas.fitted(
        wrapped(net, accum_steps=5),
        sgd,
        data,
        4,
        replicas.mirrored(2),
        loss=loss,
    )
    assert_equal(model, large)


@pytest.mark.parametrize("begins_eagerly", [True, False])
def test_sparse_sums_pass_between_eager_and_graph(begins_eagerly):
    """horovod/horovod#2806: both branches have one structure."""
    data = TOKENS[:16], Y[:16]
    strategy = replicas.mirrored(2)
    model = replicas.fitted(
        wrapped(bag, accum_steps=2),
        sgd,
        data,
        4,
        strategy,
        compile_kwargs={"run_eagerly": begins_eagerly},
    )
    large = replicas.fitted(bag, sgd, data, 8)
    model.run_eagerly = not begins_eagerly
    model.make_train_function(force=True)
    for each, batch_size in ((model, 4), (large, 8)):
        each.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
    assert_equal(model, large)
    replicas.assert_copies_are_equal(model, strategy)


def test_callback_on_a_plain_model():
    """keras-team/keras#17429."""
    callbacks = [AccumCallback(accum_steps=3)]
    model = replicas.fitted(
        net, clipped_sgd, (X, Y), 4, replicas.mirrored(2), callbacks=callbacks
    )
    large = replicas.fitted(net, clipped_sgd, (X, Y), 12)
    assert_equal(model, large)
    logs = model.history.history
    # 22 rows in two updates of 12 and 10.
    assert logs["effective_batch_size"] == [11.0, 11.0]
    assert logs["updates"] == [2, 2]


def test_first_line_counts_replicas(capsys):
    """Lightning-AI/litgpt#1947."""
    callbacks = [AccumCallback(accum_steps=3)]
    replicas.fitted(
        net, clipped_sgd, (X, Y), 4, replicas.mirrored(2), callbacks=callbacks
    )
    line = capsys.readouterr().out
    assert "2 rows per batch x 3 accum_steps x 2 replicas = 12 rows" in line


class OwnStep(keras.Model):
    """A training step that calls its optimizer itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = net()

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def test_optimizer_in_a_train_step_of_ones_own():
    """keras-team/keras#17429, on equal batches: nothing tells their rows."""

    def make():
        model = OwnStep()
        model(X[:1])
        return model

    data = X[:16], Y[:16]
    model = replicas.fitted(
        make,
        lambda: AccumOptimizer(clipped_sgd(), 2),
        data,
        4,
        replicas.mirrored(2),
    )
    assert_equal(model, replicas.fitted(make, clipped_sgd, data, 8))


def test_optimizer_in_a_loop_of_ones_own():
    """Built by its first call, on replicas; a loss divided by all rows."""
    strategy = replicas.mirrored(2)

    def trained(scope, num_replicas, optimizer):
        with scope:
            variable = keras.Variable(np.ones((5, 2)), aggregation="mean")

        def step(x, y):
            with tf.GradientTape() as tape:
                error = tf.matmul(x, tf.convert_to_tensor(variable)) - y
                loss = tf.reduce_mean(error**2) / num_replicas
            gradients = tape.gradient(loss, [variable.value])
            optimizer.apply(gradients, [variable])

        return variable, step

    variable, step = trained(
        strategy.scope(), 2, AccumOptimizer(clipped_sgd(), 2)
    )
    run = tf.function(lambda batch: strategy.run(step, args=batch))
    batches = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(4)
    for batch in strategy.experimental_distribute_dataset(batches):
        run(batch)
    large, step = trained(contextlib.nullcontext(), 1, clipped_sgd())
    for rows in (slice(0, 8), slice(8, 16)):
        step(X[rows], Y[rows])
    np.testing.assert_allclose(
        variable.numpy(), large.numpy(), rtol=0, atol=helpers.EXACT
    )


def test_sums_stay_on_their_replica():
    """huggingface/transformers#2794."""
    strategy = replicas.mirrored(2)
    make = wrapped(net, accum_steps=3, remainder="carry")
    data = X[:8], Y[:8]
    one = replicas.fitted(make, sgd, data, 4)
    two = replicas.fitted(make, sgd, data, 4, strategy)
    # Two epochs of two batches: one micro-batch is left of each.
    assert one.optimizer.cycle_position == two.optimizer.cycle_position == 1
    (cycle,) = one.optimizer._buffers.all_cycles()
    (cycles,) = two.optimizer._buffers.all_cycles()
    for whole, parts in zip(cycle.sums, cycles.sums, strict=True):
        first, second = strategy.experimental_local_results(parts.value)
        assert np.abs(first.numpy() - second.numpy()).max() > 1e-3
        np.testing.assert_allclose(
            first.numpy() + second.numpy(), whole.numpy(), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize(("accum_steps", "num_exchanges"), [(4, 2), (1, 8)])
def test_one_exchange_of_gradients_per_update(accum_steps, num_exchanges):
    """karpathy/nanochat#33, counted where they run, for 8 batches."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = AccumModel.wrap(net(), accum_steps=accum_steps)
        model.compile(clipped_sgd(), "mse")
    sizes = strategy.extended._cross_device_ops.sizes
    sizes.clear()
    x, y = helpers.rows(32)
    model.fit(x, y, batch_size=4, verbose=0)
    num_parameters = model.count_params()
    assert sizes.count(num_parameters) == num_exchanges
    # Beside them only counts: the weight of the cycle.
    assert all(size <= 2 for size in sizes if size != num_parameters)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_fifty_steps_without_a_deadlock(num_replicas):
    """tensorflow/tensorflow#27716: one condition, for all replicas."""
    strategy = replicas.mirrored(num_replicas)
    with strategy.scope():
        model = AccumModel.wrap(net(), accum_steps=3)
        model.compile(sgd(), "mse")
    model.fit(*helpers.rows(200), batch_size=4, verbose=0)
    assert model.optimizer.num_micro_batches == 50
    assert model.optimizer.iterations.numpy() == 17
    replicas.assert_copies_are_equal(model, strategy)


def test_bad_micro_batch_of_one_replica_is_left_out():
    strategy = replicas.mirrored(2)
    x = X[:12].copy()
    x[5] = np.inf  # Second batch, first replica: rows 4 and 5.
    make = wrapped(net, accum_steps=3, nonfinite="skip_micro_batch")
    model = replicas.fitted(make, sgd, (x, Y[:12]), 4, strategy)
    rest = np.delete(np.arange(12), [4, 5])
    large = replicas.fitted(net, sgd, (X[rest], Y[rest]), 10)
    assert_equal(model, large)
    assert model.optimizer.num_skipped_micro_batches == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, None])
def test_resumes_in_mid_cycle(tmp_path, num_replicas):
    """Written under 2 replicas, read under 2 and on one device."""
    path = tmp_path / "model.weights.h5"
    make = wrapped(net, accum_steps=4, remainder="carry")
    strategy = replicas.mirrored(2)
    model = replicas.fitted(make, adam, (X[:12], Y[:12]), 4, strategy)
    assert model.optimizer.cycle_position == 2
    model.save_weights(path)
    scope = replicas.mirrored(num_replicas) if num_replicas else strategy
    with (scope if num_replicas else tf.distribute.get_strategy()).scope():
        resumed = make()
        resumed.compile(adam(), "mse")
        resumed.optimizer.build(resumed.trainable_variables)
    resumed.load_weights(path)
    assert resumed.optimizer.cycle_position == 2
    if num_replicas:
        replicas.assert_copies_are_equal(resumed, strategy)
    for each in (model, resumed):
        each.fit(X[12:], Y[12:], batch_size=4, shuffle=False, verbose=0)
    assert_equal(resumed, model)


@pytest.mark.slow
def test_mixed_precision():
    """keras-team/keras#14829."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    large = replicas.fitted(net, sgd, (X, Y), 12)
    keras.config.set_dtype_policy("mixed_float16")
    make = wrapped(net, accum_steps=3)
    model = replicas.fitted(make, sgd, (X, Y), 4, replicas.mirrored(2))
    assert_equal(model, large, 2e-3)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_noise_scale_takes_replicas_for_micro_batches(accum_steps):
    """The halves of a batch of 8, on two replicas or one after the other."""
    data = helpers.rows(32)

    def logs(batch_size, accum_steps, strategy=None):
        callbacks = [AccumCallback(accum_steps, noise_scale=True, verbose=0)]
        model = replicas.fitted(
            net, sgd, data, batch_size, strategy, callbacks=callbacks
        )
        return model.history.history

    one = logs(4, 2 * accum_steps)
    two = logs(8, accum_steps, replicas.mirrored(2))
    for name in ("gradient_noise_scale", "gradient_norm"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-10)


@pytest.mark.parametrize("accum_steps", [1, 3])
def test_moving_statistics_are_of_the_rows_of_all(accum_steps):
    def make(layer):
        inputs = keras.Input((5,))
        return keras.Model(inputs, keras.layers.Dense(2)(layer()(inputs)))

    # 10 rows in batches of 4: the last one has a row on each replica.
    data = X[:10] + 1000.0, Y[:10]
    num_rows = 10 if accum_steps == 3 else 4
    plain = replicas.fitted(
        lambda: make(keras.layers.BatchNormalization),
        lambda: keras.optimizers.SGD(0.0),
        data,
        num_rows,
    )
    strategy = replicas.mirrored(2)
    model = replicas.fitted(
        lambda: AccumModel.wrap(
            make(AccumBatchNormalization), accum_steps=accum_steps
        ),
        lambda: keras.optimizers.SGD(0.0),
        data,
        4,
        strategy,
    )
    assert_equal(model, plain, 1e-9)


def test_a_search_for_a_size_is_refused():
    with pytest.raises(ValueError, match='"auto".*MirroredStrategy.*one dev'):
        replicas.fitted(
            wrapped(net, micro_batch_size="auto"),
            sgd,
            (X, Y),
            4,
            replicas.mirrored(2),
        )


def central_storage(monkeypatch):
    devices = ["CPU:0", "CPU:1"]
    return tf.distribute.experimental.CentralStorageStrategy(
        devices, devices[0]
    )


def parameter_server(monkeypatch):
    """A stand-in: the real one needs a cluster before it can be made."""

    class ParameterServerStrategy(tf.distribute.OneDeviceStrategy):
        pass

    monkeypatch.setattr(
        tf.distribute, "ParameterServerStrategy", ParameterServerStrategy
    )
    return ParameterServerStrategy("CPU:0")


@pytest.mark.parametrize("make", [central_storage, parameter_server])
def test_other_strategies_are_refused_by_name(make, monkeypatch):
    """keras-team/keras#17429: the error names the strategy."""
    strategy = make(monkeypatch)
    expected = f"{type(strategy).__name__}.*MirroredStrategy"
    with strategy.scope():
        model = AccumModel.wrap(net(), accum_steps=3)
        with pytest.raises(ValueError, match=expected):
            model.compile("sgd", "mse")
        model = net()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=expected):
        model.fit(X, Y, verbose=0, callbacks=[AccumCallback(accum_steps=3)])


def test_one_device_strategy():
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    make = wrapped(net, accum_steps=3)
    model = replicas.fitted(make, clipped_sgd, (X, Y), 4, strategy)
    assert_equal(model, replicas.fitted(net, clipped_sgd, (X, Y), 12))
