"""Batches that are cut inside the step, against plain Keras on whole ones."""

import gc
import time

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

SIZES = (1, 2, 3, 4, 7, 10, 16)
EAGER = {"run_eagerly": True}


@pytest.mark.parametrize("name", cutting.CASES)
def test_every_size_equals_the_uncut_batch(name):
    """https://github.com/mosaicml/composer/pull/1771

    10 rows: sizes that divide them, that do not, and that exceed them. One
    size after the other, the two models side by side.
    """
    case = cutting.CASES[name]
    plain = case.make()
    ours = AccumModel.wrap(case.make(), micro_batch_size=1)
    for model in (plain, ours):
        model.compile(**case.compile_kwargs(), **EAGER)
    data = case.data(10)
    sizes = (3, 7) if "sum" in name else SIZES
    for size in sizes:
        ours.micro_batch_size = size
        logs = [cutting.fit(each, data) for each in (ours, plain)]
        cutting.assert_same_logs(*logs, case.tolerance)
        helpers.assert_close(ours, plain, case.tolerance)
    assert cutting.distance(plain, case.make()) > 1e-3
    assert int(ours.optimizer.iterations) == len(sizes)
    helpers.assert_close(
        helpers.values(ours.optimizer.variables),
        helpers.values(plain.optimizer.variables),
        case.tolerance,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode_name", ["graph", "xla"])
@pytest.mark.parametrize("name", cutting.CASES)
def test_sizes_equal_the_uncut_batch_when_compiled(name, mode_name):
    case = cutting.CASES[name]
    mode = {"jit_compile": mode_name == "xla"}
    plain = cutting.fit_plain(case)
    for size in (3, 16):
        ours = cutting.fit_cut(case, size, mode=mode, way="callback")
        cutting.assert_same(ours, plain, case.tolerance)


# Ways in, modes and sources of data.


@pytest.mark.parametrize("way", ["functional", "subclass", "callback"])
def test_every_way_in_equals_the_uncut_batch(way):
    """`wrap` is what the other tests use."""
    data = helpers.rows(17)
    plain = helpers.functional()
    callbacks = []
    if way == "functional":
        model = helpers.with_known_weights(
            AccumModel(*helpers.tensors(), micro_batch_size=3)
        )
    elif way == "subclass":
        model = helpers.subclassed(AccumModel, micro_batch_size=3)
    else:
        model = helpers.functional()
        callbacks = [AccumCallback(micro_batch_size=3, verbose=0)]
    for each in (plain, model):
        each.compile(
            keras.optimizers.Adam(0.0625), "mse", metrics=["mae"], **EAGER
        )
    ours = model, cutting.fit(model, data, callbacks=callbacks)
    cutting.assert_same(ours, (plain, cutting.fit(plain, data)))
    if way == "callback":
        assert ours[1]["micro_batch_size"] == [3]
        assert ours[1]["updates"] == [2]
        assert ours[1]["effective_batch_size"] == [8.5]


def test_callback_cuts_for_the_time_of_fit_only():
    plain, model = helpers.functional(), helpers.functional()
    given = AccumModel.wrap(helpers.functional(), micro_batch_size=5)
    for each in (plain, model, given):
        each.compile(keras.optimizers.SGD(0.125), "mse", **EAGER)
    data = helpers.rows(6)
    cut = lambda size: AccumCallback(micro_batch_size=size, verbose=0)
    for callbacks, size in (([cut(4)], 4), ([cut(2)], 2)):
        logs = cutting.fit(model, data, epochs=1, callbacks=callbacks)
        assert logs["micro_batch_size"] == [size]
        cutting.fit(plain, data, epochs=1)
    logs = cutting.fit(model, data, epochs=1)
    assert "micro_batch_size" not in logs
    # One that cuts anyway only receives the logs.
    for _ in range(2):
        logs = cutting.fit(
            given, data, epochs=1, callbacks=[AccumCallback(verbose=0)]
        )
        assert logs["micro_batch_size"] == [5]
    assert given.micro_batch_size == 5
    cutting.fit(plain, data, epochs=1)
    cutting.fit(given, data, epochs=1)
    for each in (model, given):
        helpers.assert_close(each, plain)
    # On one that does not, the callback's size goes with the callback.
    given.micro_batch_size = None
    logs = cutting.fit(given, data, callbacks=[cut(2)])
    assert logs["micro_batch_size"] == [2]
    assert given.micro_batch_size is None
    assert "micro_batch_size" not in cutting.fit(given, data)


def test_modes_and_steps_per_execution_equal_the_uncut_batch(mode):
    """From a data set whose last batch is short."""
    x, y = helpers.rows(25)
    plain = helpers.functional()
    ours = AccumModel.wrap(helpers.functional(), micro_batch_size=4)
    histories = []
    for model, options in ((ours, mode), (plain, {})):
        model.compile(
            keras.optimizers.Adam(0.0625),
            "mse",
            metrics=["mae", cutting.largest_error],
            steps_per_execution=2,
            **options,
        )
        data_set = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        histories.append(
            model.fit(data_set, epochs=2, shuffle=False, verbose=0).history
        )
    cutting.assert_same((ours, histories[0]), (plain, histories[1]))
    assert int(ours.optimizer.iterations) == 6


def test_masks_and_weights_in_a_graph_equal_the_uncut_batch():
    """https://github.com/huggingface/transformers/issues/24725"""
    case = cutting.CASES["two heads"]
    plain = cutting.fit_plain(case)
    ours = cutting.fit_cut(case, 4)
    cutting.assert_same(ours, plain, case.tolerance)


def test_generator_of_uneven_batches_equals_the_uncut_batch():
    """https://github.com/facebookresearch/vggt/issues/340

    Batches of 1 to 8 rows in micro-batches of 4, none of them empty.
    """
    batches = [helpers.rows(size, seed=size) for size in (8, 2, 7, 1, 4)]
    ours = AccumModel.wrap(helpers.functional(), micro_batch_size=4)
    plain = helpers.functional()
    for model in (ours, plain):
        model.compile(keras.optimizers.Adam(0.0625), "mse", **EAGER)
        model.fit((batch for batch in batches), shuffle=False, verbose=0)
    helpers.assert_close(ours, plain)
    assert int(ours.optimizer.iterations) == 5


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_train_on_batch_equals_the_uncut_batch(options):
    x, y = helpers.rows(20)
    weights = np.random.default_rng(1).uniform(0.0, 2.0, 20)
    ours = AccumModel.wrap(helpers.functional(), micro_batch_size=3)
    plain = helpers.functional()
    logs = []
    for model in (ours, plain):
        model.compile(
            keras.optimizers.Adam(0.0625), "mse", metrics=["mae"], **options
        )
        logs.append(
            [
                model.train_on_batch(
                    x[part], y[part], weights[part], return_dict=True
                )
                for part in (slice(0, 10), slice(10, 14), slice(14, 20))
            ]
        )
    for one, other in zip(*logs, strict=True):
        cutting.assert_same_logs(one, other)
    helpers.assert_close(ours, plain)


def test_predict_and_evaluate_are_not_cut():
    data = helpers.rows(10)
    plain = helpers.functional()
    ours = AccumModel.wrap(helpers.functional(), micro_batch_size=3)
    for model in (plain, ours):
        model.compile("sgd", "mse", metrics=[cutting.largest_error])
    results = [
        (
            model.evaluate(*data, batch_size=10, verbose=0),
            model.predict(data[0], batch_size=10, verbose=0),
        )
        for model in (ours, plain)
    ]
    for one, other in zip(*results, strict=True):
        helpers.assert_equal(np.atleast_1d(one), np.atleast_1d(other))


# Structures of data.


def steps_of(ours, plain, *batches):
    """Trains both, step by step, and compares logs and weights."""
    for batch in batches:
        tensors = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf),
            batch,
        )
        cutting.assert_same_logs(
            ours.train_step(tensors), plain.train_step(tensors)
        )
    helpers.assert_close(ours, plain)


def test_none_in_the_data_is_passed_over():
    def make():
        inputs = keras.Input((5,))
        left = keras.layers.Dense(2, name="left")(inputs)
        right = keras.layers.Dense(2, name="right")(left)
        outputs = {"left": left, "right": right}
        return helpers.with_known_weights(keras.Model(inputs, outputs))

    x, y = helpers.rows(10)
    weights = np.linspace(0.0, 2.0, 10)
    ours, plain = AccumModel.wrap(make(), micro_batch_size=4), make()
    for model in (ours, plain):
        model.compile("sgd", {"left": None, "right": "mse"}, **EAGER)
    steps_of(
        ours,
        plain,
        (x, {"left": None, "right": y}),
        (x, {"left": y, "right": y}, {"left": None, "right": weights}),
        (x, {"left": y, "right": y}, None),
    )


def test_inputs_that_are_none_reach_the_model():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, inputs):
            main, extra = inputs["main"], inputs["extra"]
            return self.out(main if extra is None else main + extra)

    x, y = helpers.rows(10)

    def make():
        model = Net()
        model({"main": x, "extra": None})
        return helpers.with_known_weights(model)

    try:
        make()
    except AttributeError:
        pytest.skip("this Keras takes no None among the inputs")

    ours, plain = AccumModel.wrap(make(), micro_batch_size=3), make()
    for model in (ours, plain):
        model.compile("sgd", "mse", **EAGER)
    steps_of(
        ours,
        plain,
        ({"main": x, "extra": None}, y),
        ({"main": x, "extra": 2 * x}, y),
    )


def test_tuples_and_lists_and_no_targets_equal_the_uncut_batch():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, inputs):
            first, (second, third) = inputs
            return self.out(first * second + third)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return keras.ops.mean(keras.ops.square(y_pred))

    x = helpers.rows(10)[0]
    inputs = (x, [x**2, x + 1])

    def make():
        model = Net()
        model(inputs)
        return helpers.with_known_weights(model)

    ours, plain = AccumModel.wrap(make(), micro_batch_size=4), make()
    for model in (ours, plain):
        model.compile("sgd", **EAGER)
    steps_of(ours, plain, (inputs,), (inputs, None), (inputs, None, None))


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_ragged_inputs_equal_the_uncut_batch(options):
    class Mean(keras.layers.Layer):
        def call(self, inputs):
            return tf.reduce_mean(inputs, axis=1)

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.mean = Mean()
            self.out = keras.layers.Dense(2)

        def call(self, inputs):
            return self.out(self.mean(inputs))

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 5, 13)
    x = tf.RaggedTensor.from_row_lengths(
        rng.normal(size=(lengths.sum(), 5)), lengths
    )
    y = rng.normal(size=(13, 2))

    def make():
        model = Net()
        model.out.build((None, 5))
        return helpers.with_known_weights(model)

    ours, plain = AccumModel.wrap(make(), micro_batch_size=4), make()
    for model in (ours, plain):
        model.compile(keras.optimizers.SGD(0.125), "mse", **options)
        data_set = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        model.fit(data_set, epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(ours, plain)
    assert cutting.distance(plain, make()) > 1e-2


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_sparse_inputs_equal_the_uncut_batch(options):
    def make():
        inputs = keras.Input((6,), sparse=True)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(inputs))
        )

    rng = np.random.default_rng(0)
    x = rng.normal(size=(13, 6)) * (rng.random((13, 6)) > 0.6)
    y = rng.normal(size=(13, 2))
    ours, plain = AccumModel.wrap(make(), micro_batch_size=4), make()
    for model in (ours, plain):
        model.compile(keras.optimizers.SGD(0.125), "mse", **options)
        data_set = tf.data.Dataset.from_tensor_slices(
            (tf.sparse.from_dense(x), y)
        )
        model.fit(data_set.batch(10), epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(ours, plain)
    assert cutting.distance(plain, make()) > 1e-2


# Weights, metrics and losses.


def probabilities():
    inputs = keras.Input((5,))
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2, "softmax")(inputs))
    )


def test_class_weight_and_stateful_metrics_equal_the_uncut_batch():
    """AUC, precision and a custom class see each row once."""
    x, _ = helpers.rows(23)
    classes = np.random.default_rng(2).integers(0, 2, 23)
    y = np.eye(2)[classes]
    ours = AccumModel.wrap(probabilities(), micro_batch_size=4)
    plain = probabilities()
    histories = []
    for model in (ours, plain):
        model.compile(
            keras.optimizers.SGD(0.125),
            keras.losses.CategoricalCrossentropy(),
            metrics=[
                "accuracy",
                keras.metrics.AUC(num_thresholds=20, name="auc"),
            ],
            weighted_metrics=[keras.metrics.Precision(name="precision")],
            **EAGER,
        )
        histories.append(
            cutting.fit(model, (x, y), class_weight={0: 0.25, 1: 3.0})
        )
    cutting.assert_same((ours, histories[0]), (plain, histories[1]))


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize(
    "metric",
    [cutting.largest_error, cutting.LargestOutput],
    ids=["function", "class"],
)
def test_metrics_that_are_no_sums_see_the_whole_batch(metric, micro_batch_size):
    """A maximum over the batch, in a graph; the values are NumPy's."""
    x, y = helpers.rows(10)
    model = AccumModel.wrap(
        helpers.functional(), micro_batch_size=micro_batch_size
    )
    outputs = model.predict(x, verbose=0)
    is_class = isinstance(metric, type)
    model.compile("sgd", "mse", metrics=[metric() if is_class else metric])
    logs = model.train_on_batch(x, y, return_dict=True)
    expected = outputs.max() if is_class else np.abs(outputs - y).max()
    name = "largest_output" if is_class else "largest_error"
    np.testing.assert_allclose(logs[name], expected, atol=helpers.EXACT)


def test_own_compute_metrics_sees_the_whole_batch():
    seen = []

    class Net(helpers.subclass_of(AccumModel)):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            seen.append([tuple(each.shape) for each in (x, y, y_pred)])
            return super().compute_metrics(x, y, y_pred, sample_weight)

    model = Net(micro_batch_size=4)
    model.compile("sgd", "mse", metrics=["mae"], **EAGER)
    model.fit(*helpers.rows(10), batch_size=10, verbose=0)
    seen.clear()
    model.fit(*helpers.rows(10), batch_size=10, verbose=0)
    assert seen == [[(10, 5), (10, 2), (10, 2)]]


def test_logged_loss_does_not_depend_on_the_size():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/2569"""
    data = helpers.rows(12)
    histories = []
    for model, batch_size in (
        (helpers.functional(), 12),
        (AccumModel.wrap(helpers.functional(), 3), 4),
        (AccumModel.wrap(helpers.functional(), micro_batch_size=4), 12),
        (AccumModel.wrap(helpers.functional(), micro_batch_size=5), 12),
    ):
        model.compile(
            keras.optimizers.SGD(0.0), "mse", metrics=["mae"], **EAGER
        )
        histories.append(cutting.fit(model, data, batch_size=batch_size))
    for history in histories[1:]:
        cutting.assert_same_logs(history, histories[0])


def penalised(kind):
    """A network with penalties on weights, on activities, and added ones."""

    class Extra(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    inputs = keras.Input((5,))
    l2 = lambda name: keras.regularizers.L2(0.1) if name in kind else None
    hidden = keras.layers.Dense(
        7,
        activation="tanh",
        kernel_regularizer=l2("weights"),
        bias_regularizer=l2("weights"),
        activity_regularizer=l2("activity"),
    )(inputs)
    if "added" in kind:
        hidden = Extra()(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


@pytest.mark.parametrize(
    "kind, reduction",
    [
        ("weights", "sum"),
        ("activity", "mean_with_sample_weight"),
        ("added weights", "sum"),
        pytest.param("weights", "mean", marks=pytest.mark.slow),
        pytest.param("activity", "sum", marks=pytest.mark.slow),
        pytest.param("added weights", "mean", marks=pytest.mark.slow),
    ],
)
def test_penalties_equal_the_uncut_batch(kind, reduction):
    if kind == "activity":
        helpers.skip_if_activity_penalties_are_sums()
    data = (*helpers.rows(17), np.linspace(0.0, 2.0, 17))
    ours = AccumModel.wrap(penalised(kind), micro_batch_size=4)
    plain = penalised(kind)
    histories = []
    for model in (ours, plain):
        model.compile(
            keras.optimizers.SGD(0.0625),
            keras.losses.MeanSquaredError(reduction=reduction),
            **EAGER,
        )
        histories.append(cutting.fit(model, data))
    cutting.assert_same((ours, histories[0]), (plain, histories[1]))


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

    data = helpers.rows(17)
    for has_weight, options in ((False, EAGER), (True, EAGER), (True, {})):
        results = []
        for base, kwargs in (
            (AccumModel, {"micro_batch_size": 4}),
            (keras.Model, {}),
        ):
            model = definition(base, has_weight)(**kwargs)
            model(np.zeros((1, 5)))
            helpers.with_known_weights(model)
            model.compile(keras.optimizers.SGD(0.0625), "mse", **options)
            results.append((model, cutting.fit(model, data)))
        cutting.assert_same(*results)


def test_loss_that_ignores_a_class_equals_the_uncut_batch():
    """Valid elements that only the loss knows, none in some micro-batches."""
    ids, targets, weights = cutting.token_data(13)
    targets[2:6] = 0
    case = cutting.Case(
        lambda: cutting.token_model("embedding"),
        lambda num_rows: (ids, targets, weights),
        lambda: {
            "optimizer": cutting.sgd(),
            "loss": cutting.token_loss(ignore_class=0),
        },
        has_masks=True,
    )
    plain = cutting.fit_plain(case, mode=EAGER)
    ours = cutting.fit_cut(case, 2, mode=EAGER)
    cutting.assert_same(ours, plain, case.tolerance)


def test_masks_in_both_directions_equal_the_uncut_batch():
    """A masked recurrent layer, forward and backward, with its last state."""

    def make():
        inputs = keras.Input((4, 3))
        hidden = keras.layers.Masking(0.0)(inputs)
        hidden = keras.layers.Bidirectional(keras.layers.GRU(2))(hidden)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(hidden))
        )

    def data(num_rows):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(num_rows, 4, 3))
        lengths = rng.integers(1, 5, num_rows)
        x[np.arange(4) >= lengths[:, None]] = 0.0
        return x, rng.normal(size=(num_rows, 2))

    case = cutting.Case(
        make, data, lambda: {"optimizer": cutting.sgd(), "loss": "mse"}
    )
    plain = cutting.fit_plain(case, mode=EAGER)
    cutting.assert_same(cutting.fit_cut(case, 4), plain)


def test_code_that_runs_only_eagerly_equals_the_uncut_batch():
    """`run_eagerly` is how losses are debugged."""

    def loss(y_true, y_pred):
        assert np.isfinite(y_pred.numpy()).all()
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    results = []
    for kwargs in ({"micro_batch_size": 4}, {}):
        model = helpers.functional()
        if kwargs:
            model = AccumModel.wrap(model, **kwargs)
        model.compile(keras.optimizers.SGD(0.125), loss, **EAGER)
        results.append((model, cutting.fit(model, helpers.rows(10))))
    cutting.assert_same(*results)


# Together with accumulation over batches, and what counts updates.


@pytest.mark.parametrize("remainder", ["flush", "drop", "carry"])
def test_accum_steps_and_micro_batch_size_equal_the_large_batch(remainder):
    """5 batches of 4 rows, two per update, in micro-batches of 3."""
    x, y = helpers.rows(20)
    weights = np.linspace(0.0, 2.0, 20)
    loss = lambda: keras.losses.MeanSquaredError("mean_with_sample_weight")
    ours = AccumModel.wrap(helpers.functional(), 2, remainder)
    ours.micro_batch_size = 3
    ours.compile(keras.optimizers.Adam(0.0625), loss(), **EAGER)
    cutting.fit(ours, (x, y, weights), batch_size=4, epochs=2)
    plain = helpers.functional()
    plain.compile(keras.optimizers.Adam(0.0625), loss(), **EAGER)
    order = np.arange(20)
    epochs = {
        "flush": [order, order],
        "drop": [order[:16], order[:16]],
        "carry": [np.concatenate([order, order])],
    }[remainder]
    for rows in epochs:
        data = (x[rows], y[rows], weights[rows])
        cutting.fit(plain, data, batch_size=8)
    helpers.assert_close(ours, plain)
    assert int(ours.optimizer.iterations) == int(plain.optimizer.iterations)


def test_callback_with_both_settings_equals_the_large_batch():
    case = cutting.CASES["embedding"]
    kwargs = lambda: {**case.compile_kwargs(), "metrics": None}
    plain, ours = case.make(), case.make()
    for model in (plain, ours):
        model.compile(**kwargs(), **EAGER)
    data = case.data(20)
    callback = AccumCallback(2, micro_batch_size=2, verbose=0)
    logs = cutting.fit(ours, data, batch_size=5, callbacks=[callback])
    cutting.fit(plain, data, batch_size=10)
    helpers.assert_close(ours, plain, case.tolerance)
    assert logs["updates"] == [2]
    assert logs["effective_batch_size"] == [10]


class RecordRate(keras.callbacks.Callback):
    """Notes the learning rate before each batch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def test_schedules_and_callbacks_see_steps_of_the_whole_batch(tmp_path):
    """https://github.com/huggingface/accelerate/issues/963"""
    data = helpers.rows(24)

    def run(model, name):
        folder = tmp_path / name
        model.compile(
            keras.optimizers.SGD(
                keras.optimizers.schedules.PiecewiseConstantDecay(
                    [1, 3], [0.5, 0.25, 0.0]
                )
            ),
            "mse",
            **EAGER,
        )
        record = RecordRate()
        save = keras.callbacks.ModelCheckpoint(
            folder / "{epoch}-{batch}.weights.h5",
            save_freq=2,
            save_weights_only=True,
        )
        cutting.fit(
            model, data, batch_size=8, epochs=2, callbacks=[record, save]
        )
        # A loss that stays the same: the rate is halved, which 0 survives.
        model.compile(keras.optimizers.SGD(0.0), "mse", **EAGER)
        model.optimizer.learning_rate = 0.0
        plateau = keras.callbacks.ReduceLROnPlateau(
            "loss", factor=0.5, patience=1, min_delta=0.0
        )
        history = cutting.fit(
            model, data, batch_size=8, epochs=3, callbacks=[plateau]
        )
        assert int(model.optimizer.iterations) == 9
        files = sorted(path.name for path in folder.iterdir())
        return model, history, record.rates, files

    plain = run(helpers.functional(), "plain")
    ours = run(AccumModel.wrap(helpers.functional(), micro_batch_size=3), "cut")
    cutting.assert_same(ours[:2], plain[:2])
    assert ours[2] == plain[2] == [0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    assert ours[3] == plain[3]
    assert len(ours[3]) == 3


# Rows, noise, traces and memory.


class CountRows(keras.layers.Layer):
    """Counts how often each row, known by its first number, is seen."""

    def __init__(self, num_rows):
        super().__init__()
        self.num_rows = num_rows
        self.counts = self.add_weight(
            shape=(num_rows,), initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            ids = tf.cast(inputs[:, 0], "int32")
            seen = tf.math.bincount(ids, minlength=self.num_rows)
            self.counts.assign_add(tf.cast(seen, self.counts.dtype))
        return inputs


@pytest.mark.parametrize("loss_scope", ["micro_batch", "batch"])
@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_every_row_is_used_once_per_step(options, loss_scope):
    """https://github.com/NVlabs/stylegan2/pull/9"""
    x, y = helpers.rows(10)
    x[:, 0] = np.arange(10)
    inputs = keras.Input((5,))
    count = CountRows(10)
    outputs = keras.layers.Dense(2)(count(inputs))
    model = AccumModel(
        inputs, outputs, micro_batch_size=4, loss_scope=loss_scope
    )
    # A sum of weights is a denominator that takes another look at the data.
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    model.compile("sgd", loss, **options)
    for step in (1, 2):
        model.train_on_batch(x, y, np.linspace(0.0, 1.0, 10))
        np.testing.assert_array_equal(count.counts.numpy(), [step] * 10)


class Record(keras.layers.Layer):
    """Keeps what it sees, in eager mode."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, inputs):
        if tf.executing_eagerly():
            self.seen.append(inputs.numpy())
        return inputs


def noisy(rate, record=None):
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh")(inputs)
    hidden = keras.layers.Dropout(rate, seed=11)(hidden)
    if record is not None:
        hidden = record(hidden)
    return helpers.with_known_weights(
        keras.Model(inputs, keras.layers.Dense(2)(hidden))
    )


def test_dropout_draws_new_noise_for_each_micro_batch():
    """https://github.com/alpa-projects/alpa/issues/592"""
    record = Record()
    model = AccumModel.wrap(noisy(0.5, record), micro_batch_size=4)
    model.compile("sgd", "mse", **EAGER)
    data = np.ones((8, 5)), np.ones((8, 2))
    for _ in range(3):
        record.seen.clear()
        model.train_on_batch(*data)
        first, second = [seen != 0 for seen in record.seen[-2:]]
        assert (first != second).any()
        assert 0.1 < np.mean([first, second]) < 0.9


@pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
def test_dropout_is_the_same_for_the_same_seed(options):
    """https://github.com/pytorch/pytorch/issues/2649"""
    data = helpers.rows(13)
    runs = {}
    for rate, size in ((0.5, 4), (0.5, 4), (0.0, 4), (0.0, None)):
        model = noisy(rate)
        if size is not None:
            model = AccumModel.wrap(model, micro_batch_size=size)
        model.compile(keras.optimizers.SGD(0.125), "mse", **options)
        cutting.fit(model, data)
        runs.setdefault((rate, size), []).append(model)
    one, other = runs[0.5, 4]
    helpers.assert_equal(helpers.weights(one), helpers.weights(other))
    (cut,), (uncut,) = runs[0.0, 4], runs[0.0, None]
    helpers.assert_close(cut, uncut)
    assert cutting.distance(one, cut) > 1e-3


@pytest.mark.parametrize(
    "mode_name", ["graph", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_a_signature_is_traced_when_plain_keras_traces_it(mode_name):
    """https://github.com/andreped/GradientAccumulator/issues/102"""
    grew = []
    for cuts in (True, False):
        model, traces = helpers.traced_model()
        if cuts:
            model = AccumModel.wrap(model, micro_batch_size=3)
        model.compile("adam", "mse", jit_compile=mode_name == "xla")
        grew.append([])
        for num_rows, batch_size in ((8, 8), (204, 8), (13, 5), (8, 4)):
            # The loop may be built more than once in one trace.
            traces.clear()
            data = helpers.rows(num_rows)
            model.fit(*data, batch_size=batch_size, verbose=0)
            grew[-1].append(bool(traces))
    ours, plain = grew
    assert ours == plain
    assert plain[0] and not all(plain)


def test_no_variables_are_made():
    """https://github.com/keras-team/tf-keras/issues/301"""
    plain = helpers.functional()
    ours = AccumModel.wrap(helpers.functional(), micro_batch_size=3)
    for model in (plain, ours):
        model.compile("adam", "mse", metrics=["mae"])
        cutting.fit(model, helpers.rows(8), epochs=1)
    assert len(ours.variables) == len(plain.variables)
    assert len(ours.optimizer.variables) == len(plain.optimizer.variables)

    def count():
        gc.collect()
        return sum(isinstance(each, tf.Variable) for each in gc.get_objects())

    before = count()
    cutting.fit(ours, helpers.rows(80), epochs=6)
    assert count() == before


# Precision.


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_equals_the_uncut_batch(policy):
    """Small whole numbers, of which neither precision loses a bit."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (16, 4)).astype("float32")
    y = rng.integers(-2, 3, (16, 2)).astype("float32")

    def make():
        inputs = keras.Input((4,), dtype="float32")
        outputs = keras.layers.Dense(2, dtype=policy)(inputs)
        model = keras.Model(inputs, outputs)
        for weight in model.weights:
            weight.assign(rng.integers(-2, 3, weight.shape) / 2)
        return model

    start = make()
    models = keras.models.clone_model(start), keras.models.clone_model(start)
    for model in models:
        model.set_weights(start.get_weights())
    plain, ours = models[0], AccumModel.wrap(models[1], micro_batch_size=4)
    for model in (plain, ours):
        optimizer = keras.optimizers.SGD(0.125)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=16.0
            )
        model.compile(optimizer, "mse", **EAGER)
        model.train_on_batch(x, y)
    assert cutting.distance(plain, start) > 1e-3
    helpers.assert_equal(helpers.weights(ours), helpers.weights(plain))
    if policy == "mixed_float16":
        assert float(ours.optimizer.inner_optimizer.dynamic_scale) == 16.0


def test_overflow_under_a_loss_scale_discards_the_whole_batch():
    x, y = (part.astype("float32") for part in helpers.rows(10))
    x[7] = 1e30
    inputs = keras.Input((5,), dtype="float32")
    outputs = keras.layers.Dense(2, dtype="mixed_float16")(inputs)
    model = AccumModel(inputs, outputs, micro_batch_size=4)
    model.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.125), initial_scale=16.0
        ),
        "mse",
    )
    before = helpers.weights(model)
    model.train_on_batch(x, y)
    helpers.assert_equal(helpers.weights(model), before)
    scale = model.optimizer.inner_optimizer.dynamic_scale
    assert float(scale) == 8.0


# Files.


@pytest.mark.parametrize("kind", ["wrap", "functional", "subclass"])
@pytest.mark.parametrize("size", [3, "auto"])
def test_files_keep_both_settings(kind, size, tmp_path):
    cut = {"micro_batch_size": size, "loss_scope": "batch"}
    net = helpers.subclass_of(AccumModel)
    if kind == "wrap":
        model = AccumModel.wrap(helpers.functional(), **cut)
    elif kind == "functional":
        model = AccumModel(*helpers.tensors(), **cut)
    else:
        model = net(**cut)
        model(np.zeros((1, 5)))
    model.compile(keras.optimizers.SGD(0.125), "mse", **EAGER)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"Net": net}
    )
    assert loaded.micro_batch_size == size
    assert loaded.loss_scope == "batch"
    logs = []
    for each in (loaded, model):
        each.cutting.verbose = 0
        each.run_eagerly = True
        logs.append(cutting.fit(each, helpers.rows(10)))
    cutting.assert_same((loaded, logs[0]), (model, logs[1]))


def test_uncompiled_model_keeps_both_settings(tmp_path):
    model = AccumModel(
        *helpers.tensors(), micro_batch_size=3, loss_scope="batch"
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.micro_batch_size == 3
    assert loaded.loss_scope == "batch"


def test_big_table_is_not_copied_for_each_micro_batch():
    """https://github.com/tensorflow/tensorflow/issues/31637

    A micro-batch adds the rows it has looked up to a sum in place. A sum of
    13 MB is copied in the time of the whole update.
    """
    seconds = {}
    for size in (64, 1):
        inputs = keras.Input((1,), dtype="int32")
        hidden = keras.layers.Embedding(100_000, 16)(inputs)
        model = AccumModel.wrap(
            keras.Model(inputs, keras.layers.Flatten()(hidden)),
            micro_batch_size=size,
        )
        model.compile(cutting.sgd(), "mse")
        data = np.arange(64)[:, None], np.ones((64, 16))
        times = []
        for _ in range(5):
            begin = time.process_time()
            model.train_on_batch(*data)
            times.append(time.process_time() - begin)
        seconds[size] = min(times)
    assert seconds[1] < 4 * seconds[64], seconds
