"""`loss_scope="batch"`: losses that are no sums over rows.

The reference is plain Keras on batches that are not cut, for which such a loss
sees all rows. Where micro-batches draw noise or normalise by themselves there
is no such batch: the reference then runs them one by one under one tape, which
holds all their activations, and takes the loss over all of their outputs.
"""

import cutting
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

EAGER = {"run_eagerly": True}
MODES = pytest.mark.parametrize("options", [EAGER, {}], ids=["eager", "graph"])
SIZES = (1, 3, 4, 10, 16)


# Losses over a batch. They return one number per row, or one number.


def info_nce(y_true, y_pred):
    """Two views of a row in `y_pred`: each finds its other among all rows.

    Source: van den Oord et al., arXiv:1807.03748, equation 4.
    """
    left, right = tf.split(y_pred, 2, axis=-1)
    scores = tf.matmul(
        tf.math.l2_normalize(left, -1),
        tf.math.l2_normalize(right, -1),
        transpose_b=True,
    )
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(scores)[0]), scores / 0.5
    )


def nt_xent(y_true, y_pred):
    """All other rows of both views are negatives: arXiv:2002.05709, eq. 1."""
    views = tf.concat(tf.split(y_pred, 2, axis=-1), 0)
    views = tf.math.l2_normalize(views, -1)
    scores = tf.matmul(views, views, transpose_b=True) / 0.5
    num_rows = tf.shape(y_pred)[0]
    is_self = tf.eye(2 * num_rows, dtype=scores.dtype)
    others = tf.concat([tf.range(num_rows) + num_rows, tf.range(num_rows)], 0)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            others, scores - 1e9 * is_self
        )
    )


def triplet(y_true, y_pred):
    """The hardest positive and negative of each row: arXiv:1703.07737."""
    classes = y_true[:, 0] > 0
    squares = tf.reduce_sum(tf.square(y_pred[:, None] - y_pred[None]), axis=-1)
    is_same = classes[:, None] == classes[None]
    is_same = tf.cast(is_same, squares.dtype)
    far = tf.reduce_max(squares * is_same, 1)
    near = tf.reduce_min(squares + 1e6 * is_same, 1)
    return tf.nn.softplus(far - near)


def ranking(y_true, y_pred):
    """Pairs in the wrong order, logistic: RankNet."""
    wanted = y_true[:, None, 0] - y_true[None, :, 0]
    found = y_pred[:, None, 0] - y_pred[None, :, 0]
    return tf.reduce_mean(tf.nn.softplus(-tf.sign(wanted) * found))


def moments(y_true, y_pred):
    """Outputs normalised by the mean and variance of the batch."""
    mean, variance = tf.nn.moments(y_pred, axes=[0])
    normal = (y_pred - mean) * tf.math.rsqrt(variance + 0.125)
    return tf.reduce_mean(tf.square(normal - y_true), axis=-1)


LOSSES = [info_nce, nt_xent, triplet, ranking, moments]


def case_of(loss, optimizer=lambda: keras.optimizers.Adam(0.0625)):
    def make():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(6, activation="tanh")(inputs)
        return helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(4)(hidden))
        )

    return cutting.Case(
        make,
        lambda num_rows: helpers.rows(num_rows, 5, 4),
        lambda: {
            "optimizer": optimizer(),
            "loss": loss,
            "metrics": ["mae", cutting.largest_error],
        },
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_over_the_batch_equal_the_uncut_batch(loss):
    """https://github.com/huggingface/sentence-transformers/issues/1752"""
    case = case_of(loss)
    plain = case.make()
    ours = AccumModel.wrap(case.make(), micro_batch_size=1, loss_scope="batch")
    for model in (plain, ours):
        model.compile(**case.compile_kwargs(), **EAGER)
    data = case.data(10)
    for size in SIZES:
        ours.micro_batch_size = size
        logs = [cutting.fit(each, data) for each in (ours, plain)]
        cutting.assert_same_logs(*logs)
        helpers.assert_close(ours, plain)
    # The same, but for the sum over micro-batches: another model.
    naive = AccumModel.wrap(case.make(), micro_batch_size=4)
    naive.compile(**case.compile_kwargs(), **EAGER)
    cutting.fit(naive, data, epochs=len(SIZES))
    assert cutting.distance(naive, plain) > 1e-3


def test_modes_equal_the_uncut_batch_over_the_batch(mode):
    """https://github.com/google-research/simclr/issues/203

    The last batch is short, and so is its last micro-batch.
    """
    case = case_of(nt_xent)
    plain = cutting.fit_plain(case, num_rows=16)
    ours = cutting.fit_cut(case, 4, "batch", num_rows=16, mode=mode)
    cutting.assert_same(ours, plain)
    assert int(ours[0].optimizer.iterations) == 2


def gradients_of(make, loss, x, y, **kwargs):
    """Gradients, as the step that SGD makes at a rate of 1."""
    model = make()
    before = helpers.weights(model)
    if kwargs:
        model = AccumModel.wrap(model, **kwargs)
    model.compile(keras.optimizers.SGD(1.0), loss, **EAGER)
    model.train_on_batch(x, y)
    return [
        start - end
        for start, end in zip(before, helpers.weights(model), strict=True)
    ]


def test_negatives_of_other_micro_batches_are_there():
    """https://github.com/luyug/GradCache/issues/7

    8 rows in micro-batches of 4: one loss over each is the mean of two small
    losses, whose negatives are 4 rows; one over the batch is the large loss.
    """
    make = case_of(info_nce).make
    x, y = helpers.rows(8, 5, 4)
    whole = gradients_of(make, info_nce, x, y)
    halves = [
        gradients_of(make, info_nce, x[p], y[p])
        for p in (slice(4), slice(4, 8))
    ]
    mean = [sum(pair) / 2 for pair in zip(*halves, strict=True)]
    naive = gradients_of(make, info_nce, x, y, micro_batch_size=4)
    exact = gradients_of(
        make, info_nce, x, y, micro_batch_size=4, loss_scope="batch"
    )
    helpers.assert_close(exact, whole)
    helpers.assert_close(naive, mean)
    difference = max(
        np.abs(one - other).max()
        for one, other in zip(naive, whole, strict=True)
    )
    assert difference > 1e-3


@pytest.mark.parametrize("name", ["lstm", "two heads, one a sum"])
def test_ordinary_losses_equal_the_uncut_batch_too(name):
    """Masks and weights of several outputs, each divided by its own."""
    case = cutting.CASES[name]
    plain = cutting.fit_plain(case, mode=EAGER)
    ours = cutting.fit_cut(case, 4, "batch", mode=EAGER)
    cutting.assert_same(ours, plain, case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mode_name", ["graph", "xla"])
@pytest.mark.parametrize("name", cutting.CASES)
def test_ordinary_losses_equal_the_uncut_batch_when_compiled(name, mode_name):
    case = cutting.CASES[name]
    plain = cutting.fit_plain(case)
    ours = cutting.fit_cut(
        case, 3, "batch", mode={"jit_compile": mode_name == "xla"}
    )
    cutting.assert_same(ours, plain, case.tolerance)


@MODES
def test_weights_divided_by_their_sum_equal_the_uncut_batch(options):
    """`mean_with_sample_weight`, and the metrics that are weighted."""
    weights = np.linspace(0.0, 2.0, 13)[::-1]
    results = []
    for kwargs in ({"micro_batch_size": 4, "loss_scope": "batch"}, {}):
        model = helpers.functional()
        if kwargs:
            model = AccumModel.wrap(model, **kwargs)
        model.compile(
            keras.optimizers.SGD(0.125),
            keras.losses.MeanSquaredError("mean_with_sample_weight"),
            metrics=[keras.metrics.AUC(num_thresholds=5, name="auc")],
            weighted_metrics=["mae"],
            **options,
        )
        x, y = helpers.rows(13)
        data = (x, (y > 0).astype("float64"), weights)
        results.append((model, cutting.fit(model, data)))
    cutting.assert_same(*results)


def temperature_model(base):
    """A contrastive model whose temperature is trained by the loss alone."""

    class Contrastive(base):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.out = keras.layers.Dense(4)
            self.log_scale = self.add_weight(
                shape=(), initializer="ones", name="log_scale"
            )

        def call(self, inputs):
            return self.out(inputs)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            left, right = tf.split(y_pred, 2, axis=-1)
            scores = tf.matmul(left, right, transpose_b=True)
            scores *= tf.exp(tf.convert_to_tensor(self.log_scale))
            # A term of the inputs too, which the whole batch is needed for.
            scores += tf.reduce_max(x)
            labels = tf.range(tf.shape(scores)[0])
            return tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            )

    return Contrastive


@MODES
def test_trainable_weights_of_the_loss_equal_the_uncut_batch(options):
    """https://github.com/mdiephuis/SimCLR/issues/13"""
    results = []
    x = helpers.rows(13)[0]
    for base, kwargs in (
        (AccumModel, {"micro_batch_size": 4, "loss_scope": "batch"}),
        (keras.Model, {}),
    ):
        model = temperature_model(base)(**kwargs)
        model(x)
        helpers.with_known_weights(model)
        start = float(model.log_scale)
        model.compile(keras.optimizers.Adam(0.125), **options)
        results.append((model, cutting.fit(model, (x, None))))
        assert abs(float(model.log_scale) - start) > 1e-3
    cutting.assert_same(*results)


def test_callback_takes_a_compute_loss_of_the_models_own():
    x = helpers.rows(13)[0]
    results = []
    for callbacks in (
        [AccumCallback(micro_batch_size=3, loss_scope="batch", verbose=0)],
        [],
    ):
        model = temperature_model(keras.Model)()
        model(x)
        helpers.with_known_weights(model)
        model.compile(keras.optimizers.SGD(0.125), **EAGER)
        logs = cutting.fit(model, (x, None), callbacks=callbacks)
        results.append((model, logs))
    cutting.assert_same(*results)


class Extra(keras.layers.Layer):
    """Adds the mean square of its inputs over rows to the loss."""

    def call(self, inputs):
        self.add_loss(0.25 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("kind", ["weights", "added", "added weights"])
def test_penalties_equal_the_uncut_batch(kind):
    def make():
        regulariser = keras.regularizers.L2(0.1) if "weights" in kind else None
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(
            6, activation="tanh", kernel_regularizer=regulariser
        )(inputs)
        if "added" in kind:
            hidden = Extra()(hidden)
        outputs = keras.layers.Dense(4, bias_regularizer=regulariser)(hidden)
        if "added" in kind:
            outputs = Extra()(outputs)
        return helpers.with_known_weights(keras.Model(inputs, outputs))

    case = cutting.Case(
        make,
        lambda num_rows: helpers.rows(num_rows, 5, 4),
        lambda: {"optimizer": keras.optimizers.SGD(0.125), "loss": moments},
    )
    plain = cutting.fit_plain(case, mode=EAGER)
    ours = cutting.fit_cut(case, 4, "batch", mode=EAGER)
    cutting.assert_same(ours, plain)
    without = cutting.fit_plain(case_of(moments, cutting.sgd), mode=EAGER)
    assert cutting.distance(plain[0], without[0]) > 1e-3


def test_penalties_without_any_other_loss_equal_the_uncut_batch():
    """No gradient comes by way of the outputs."""

    class Net(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.out = keras.layers.Dense(4, kernel_regularizer="l2")

        def call(self, inputs):
            return self.out(inputs)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.add_n(self.losses)

    results = []
    for kwargs in ({"micro_batch_size": 4, "loss_scope": "batch"}, {}):
        model = Net()
        model(np.zeros((1, 5)))
        helpers.with_known_weights(model)
        model.out.bias.trainable = False
        if kwargs:
            model = AccumModel.wrap(model, **kwargs)
        model.compile(keras.optimizers.SGD(0.125), **EAGER)
        results.append((model, cutting.fit(model, helpers.rows(13))))
    cutting.assert_same(*results)


# State of the forward pass.


class Count(keras.layers.Layer):
    """Counts its training calls and the rows in them."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(initializer="zeros", trainable=False)
        self.rows = self.add_weight(initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
            num_rows = tf.shape(inputs)[0]
            self.rows.assign_add(tf.cast(num_rows, self.rows.dtype))
        return inputs


def stateful_model():
    """Noise from two generators, moving statistics, and a counter."""
    inputs = keras.Input((5,))
    hidden = keras.layers.GaussianNoise(0.25, seed=1)(inputs)
    hidden = keras.layers.Dense(6, use_bias=False)(hidden)
    hidden = keras.layers.BatchNormalization(momentum=0.75)(hidden)
    hidden = keras.layers.Dropout(0.5, seed=2)(hidden)
    hidden = Count()(hidden)
    return helpers.with_known_state(
        keras.Model(inputs, keras.layers.Dense(4)(hidden))
    )


def step_by_hand(model, x, y, loss, size, rate):
    """One step of gradient descent, its micro-batches under one tape."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        outputs = [
            model(x[begin : begin + size], training=True)
            for begin in range(0, len(x), size)
        ]
        value = tf.reduce_mean(loss(y, tf.concat(outputs, 0)))
    gradients = tape.gradient(value, variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(rate * gradient)
    return float(value)


@pytest.mark.filterwarnings("ignore:BatchNormalization")
@MODES
def test_second_pass_sees_the_noise_of_the_first(options):
    """https://github.com/luyug/GradCache/issues/7

    Afterwards seeds, moving statistics and counters are those of one pass.
    """
    x, y = map(tf.constant, helpers.rows(10, 5, 4))
    reference = stateful_model()
    ours = AccumModel.wrap(
        stateful_model(), micro_batch_size=4, loss_scope="batch"
    )
    ours.compile(keras.optimizers.SGD(0.25), nt_xent, **options)
    start = helpers.weights(reference)
    for step in (1, 2):
        expected = step_by_hand(reference, x, y, nt_xent, 4, 0.25)
        ours.reset_metrics()
        logs = ours.train_on_batch(x, y, return_dict=True)
        np.testing.assert_allclose(logs["loss"], expected, atol=helpers.EXACT)
        seeds = [
            [v.numpy() for v in model.variables if "seed" in v.path]
            for model in (ours, reference)
        ]
        assert len(seeds[0]) == 2
        helpers.assert_equal(*seeds)
        helpers.assert_close(
            helpers.values(ours.variables), helpers.values(reference.variables)
        )
        count = next(layer for layer in ours.layers if isinstance(layer, Count))
        assert float(count.calls) == 3 * step
        assert float(count.rows) == 10 * step
    moved = [
        np.abs(one - other).max()
        for one, other in zip(start, helpers.weights(ours), strict=True)
    ]
    assert min(moved) > 1e-3


def test_other_noise_in_the_second_pass_would_be_seen():
    """The check above can fail: a gradient of other noise is another one."""
    x, y = map(tf.constant, helpers.rows(10, 5, 4))
    ends = []
    for draws_before in (False, True):
        model = stateful_model()
        if draws_before:
            model(x, training=True)
        step_by_hand(model, x, y, nt_xent, 4, 0.25)
        ends.append(helpers.values(model.trainable_variables))
    differences = [
        np.abs(one - other).max() for one, other in zip(*ends, strict=True)
    ]
    assert max(differences) > 1e-3


@MODES
def test_noise_free_layers_equal_the_uncut_batch(options):
    """A rate of 0, and normalisation that is frozen."""

    def make():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dropout(0.0)(keras.layers.Dense(6)(inputs))
        norm = keras.layers.BatchNormalization(trainable=False)
        return helpers.with_known_state(
            keras.Model(inputs, keras.layers.Dense(4)(norm(hidden)))
        )

    case = cutting.Case(
        make,
        lambda num_rows: helpers.rows(num_rows, 5, 4),
        lambda: {"optimizer": keras.optimizers.SGD(0.125), "loss": info_nce},
    )
    plain = cutting.fit_plain(case, mode=options)
    ours = cutting.fit_cut(case, 4, "batch", mode=options)
    cutting.assert_same(ours, plain)


class Spectral(keras.layers.Layer):
    """Assigns its trainable weight in the forward pass."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 4), name="kernel")

    def call(self, inputs, training=False):
        if training:
            kernel = tf.convert_to_tensor(self.kernel)
            norm = tf.sqrt(tf.reduce_sum(tf.square(kernel)))
            self.kernel.assign(kernel / norm)
        return tf.matmul(inputs, tf.convert_to_tensor(self.kernel))


@pytest.mark.parametrize("loss_scope", ["micro_batch", "batch"])
def test_weights_assigned_in_the_forward_pass_equal_the_uncut_batch(
    loss_scope,
):
    """Normalising twice is normalising once."""

    def make():
        inputs = keras.Input((5,))
        return helpers.with_known_weights(
            keras.Model(inputs, Spectral()(inputs))
        )

    case = cutting.Case(
        make,
        lambda num_rows: helpers.rows(num_rows, 5, 4),
        lambda: {"optimizer": keras.optimizers.SGD(0.125), "loss": "mse"},
    )
    plain = cutting.fit_plain(case, mode=EAGER)
    ours = cutting.fit_cut(case, 4, loss_scope, mode=EAGER)
    cutting.assert_same(ours, plain)


# Together with the rest.


def test_accum_steps_sum_losses_of_whole_batches():
    """Two batches per update: the mean of two losses over 8 rows each."""
    x, y = helpers.rows(16, 5, 4)
    make = case_of(info_nce).make
    halves = [
        gradients_of(make, info_nce, x[p], y[p])
        for p in (slice(8), slice(8, 16))
    ]
    model = AccumModel.wrap(make(), 2, micro_batch_size=3, loss_scope="batch")
    before = helpers.weights(model)
    model.compile(keras.optimizers.SGD(1.0), info_nce, **EAGER)
    cutting.fit(model, (x, y), batch_size=8)
    assert int(model.optimizer.iterations) == 1
    expected = [
        start - sum(pair) / 2
        for start, *pair in zip(before, *halves, strict=True)
    ]
    helpers.assert_close(helpers.weights(model), expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_equals_the_uncut_batch(policy):
    """Small whole numbers, of which neither precision loses a bit."""
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (16, 4)).astype("float32")
    y = rng.integers(-2, 3, (16, 2)).astype("float32")
    kernel = rng.integers(-2, 3, (4, 2)) / 2

    def centred(y_true, y_pred):
        y_pred = tf.cast(y_pred, y_true.dtype)
        return tf.square(y_pred - tf.reduce_mean(y_pred, 0) - y_true)

    models = []
    for kwargs in ({"micro_batch_size": 4, "loss_scope": "batch"}, {}):
        inputs = keras.Input((4,), dtype="float32")
        model = keras.Model(inputs, keras.layers.Dense(2, dtype=policy)(inputs))
        model.layers[-1].kernel.assign(kernel)
        if kwargs:
            model = AccumModel.wrap(model, **kwargs)
        optimizer = keras.optimizers.SGD(0.125)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=16.0
            )
        model.compile(optimizer, centred, **EAGER)
        model.train_on_batch(x, y)
        models.append(model)
    assert np.abs(helpers.weights(models[1])[0] - kernel).max() > 1e-3
    helpers.assert_close(*models, atol=2**-9)


def test_inputs_of_any_structure_equal_the_uncut_batch():
    """Dictionaries, lists and a sparse tensor."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(4)
            self.second = keras.layers.Dense(4)

        def call(self, inputs):
            both = self.first(inputs["dense"]) + self.second(inputs["sparse"])
            return {"pair": [both, both[:, :2]], "one": both[:, :1]}

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            left, right = y_pred["pair"]
            return (
                tf.reduce_mean(info_nce(None, left))
                + tf.math.reduce_std(right)
                + tf.reduce_max(y_pred["one"])
            )

    x = helpers.rows(10)[0]
    inputs = {
        "dense": tf.constant(x),
        "sparse": tf.sparse.from_dense(x * (x > 0)),
    }
    models = []
    for kwargs in ({"micro_batch_size": 4, "loss_scope": "batch"}, {}):
        model = Net()
        model(inputs)
        helpers.with_known_weights(model)
        if kwargs:
            model = AccumModel.wrap(model, **kwargs)
        model.compile(keras.optimizers.SGD(0.125), **EAGER)
        for _ in range(2):
            model.train_step((inputs,))
        models.append(model)
    helpers.assert_close(*models)
    assert models[0].layers[0].kernel.shape == (5, 4)


@pytest.mark.parametrize(
    "options", [EAGER, {}, {"jit_compile": True}], ids=["eager", "graph", "xla"]
)
@pytest.mark.parametrize("loss_scope", ["micro_batch", "batch"])
def test_batches_of_other_lengths_equal_the_uncut_batch(options, loss_scope):
    """Kept outputs have another shape then, and a step that was traced anew."""

    def largest(y_true, y_pred):
        return keras.ops.max(keras.ops.abs(y_true - y_pred))

    def logs(cut):
        inputs = keras.Input((None, 3))
        model = helpers.with_known_weights(
            keras.Model(inputs, keras.layers.Dense(2)(inputs))
        )
        if cut:
            model = AccumModel.wrap(
                model, micro_batch_size=3, loss_scope=loss_scope
            )
        model.compile(
            keras.optimizers.SGD(0.125), "mse", metrics=[largest], **options
        )
        rng = np.random.default_rng(0)
        return [
            model.train_on_batch(
                rng.normal(size=(8, length, 3)), rng.normal(size=(8, length, 2))
            )
            for length in (4, 6, 5)
        ], helpers.weights(model)

    (found, left), (expected, right) = logs(True), logs(False)
    np.testing.assert_allclose(found, expected, rtol=0, atol=helpers.EXACT)
    helpers.assert_close(left, right)
