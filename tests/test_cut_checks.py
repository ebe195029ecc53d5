"""Bad arguments and data of cut batches: the message, and nothing changed."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel

EAGER = {"run_eagerly": True}
BAD_SIZES = [0, -1, 2.5, "8", True, "Auto", [4]]

TAKERS = {
    "functional": lambda **kw: AccumModel(*helpers.tensors(), **kw),
    "wrap": lambda **kw: AccumModel.wrap(helpers.functional(), **kw),
    "subclass": lambda **kw: helpers.subclass_of(AccumModel)(**kw),
    "callback": lambda **kw: AccumCallback(**kw),
}


@pytest.mark.parametrize("value", BAD_SIZES, ids=repr)
@pytest.mark.parametrize("taker", TAKERS)
def test_micro_batch_size_must_be_rows_or_auto(taker, value):
    with pytest.raises(
        ValueError,
        match='`micro_batch_size` must be None, an int >= 1 or "auto"',
    ) as caught:
        TAKERS[taker](micro_batch_size=value)
    message = str(caught.value)
    assert f"Received: micro_batch_size={value!r}" in message
    assert f"(of type {type(value).__name__})" in message
    assert message.endswith(".")


def test_micro_batch_size_takes_numpy_integers():
    model = TAKERS["wrap"](micro_batch_size=np.int64(4))
    assert type(model.micro_batch_size) is int
    assert model.micro_batch_size == 4


@pytest.mark.parametrize("value", ["rows", "Batch", None, 1, True])
@pytest.mark.parametrize("taker", TAKERS)
def test_loss_scope_must_be_known(taker, value):
    with pytest.raises(
        ValueError, match="`loss_scope` must be one of"
    ) as caught:
        TAKERS[taker](micro_batch_size=2, loss_scope=value)
    assert f"Received: loss_scope={value!r}" in str(caught.value)


@pytest.mark.parametrize("taker", TAKERS)
def test_loss_scope_batch_needs_a_micro_batch_size(taker):
    with pytest.raises(
        ValueError, match="Pass `micro_batch_size` too"
    ) as caught:
        TAKERS[taker](loss_scope="batch")
    message = str(caught.value)
    assert "loss_scope='batch' with micro_batch_size=None" in message


def test_settings_are_checked_when_they_are_set():
    model = AccumModel.wrap(
        helpers.functional(), micro_batch_size=4, loss_scope="batch"
    )
    for value in BAD_SIZES:
        with pytest.raises(ValueError, match="`micro_batch_size` must be None"):
            model.micro_batch_size = value
    with pytest.raises(ValueError, match="Pass `micro_batch_size` too"):
        model.micro_batch_size = None
    with pytest.raises(ValueError, match="`loss_scope` must be one of"):
        model.loss_scope = "rows"
    assert (model.micro_batch_size, model.loss_scope) == (4, "batch")


def test_two_values_are_refused():
    model = AccumModel.wrap(helpers.functional(), micro_batch_size=4)
    model.compile("sgd", "mse", **EAGER)
    before = helpers.weights(model)
    for name, kwargs in (
        ("micro_batch_size", {"micro_batch_size": 2}),
        ("loss_scope", {"micro_batch_size": 4, "loss_scope": "batch"}),
    ):
        with pytest.raises(
            ValueError, match=f"`{name}` must be the same wherever"
        ):
            model.fit(
                *helpers.rows(4), verbose=0, callbacks=[AccumCallback(**kwargs)]
            )
    assert model.micro_batch_size == 4
    helpers.assert_equal(helpers.weights(model), before)


def with_own_train_step(base):
    class Own(helpers.subclass_of(base)):
        def train_step(self, data):
            return super().train_step(data)

    return Own


def test_own_train_step_is_refused_with_the_way_out():
    """The error names `accum_steps`, which does work there."""
    message = "needs Keras's own train_step, because that of Own sees"
    own = with_own_train_step(AccumModel)
    plain = with_own_train_step(keras.Model)()
    plain.compile("sgd", "mse", **EAGER)
    for take in (
        lambda: own(micro_batch_size=4),
        lambda: AccumModel.wrap(plain, micro_batch_size=4),
        lambda: plain.fit(
            *helpers.rows(4),
            verbose=0,
            callbacks=[AccumCallback(micro_batch_size=4)],
        ),
        lambda: setattr(own(), "micro_batch_size", "auto"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            take()
        assert "Pass accum_steps instead" in str(caught.value)
    assert isinstance(plain.optimizer, keras.optimizers.SGD)
    assert own(accum_steps=2).micro_batch_size is None


def test_train_step_set_on_the_object_is_refused():
    model = helpers.functional()
    model.train_step = lambda data: {}
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="needs Keras's own train_step"):
        AccumModel.wrap(model, micro_batch_size=4)


def state(model):
    """All that a step may change."""
    return helpers.values([*model.variables, *model.optimizer.variables])


def trained(size=4, make=helpers.functional, **kwargs):
    """A model after one good step, so that its state is not all zero."""
    model = AccumModel.wrap(make(), micro_batch_size=size)
    options = {"run_eagerly": True, "metrics": ["mae"], **kwargs}
    model.compile(keras.optimizers.Adam(0.125), "mse", **options)
    model.cutting.verbose = 0
    model.train_step(tuple(map(tf.constant, helpers.rows(6))))
    return model


@pytest.mark.parametrize("size", [4, "auto"])
def test_bad_data_is_refused_and_changes_nothing(size):
    model = trained(size)
    before = state(model)
    x, y = map(tf.constant, helpers.rows(10))
    for data, message in (
        ((x, y[:7]), r"must have as many rows .* leading sizes \[10, 7\]"),
        ((x, y, y[:3, 0]), r"leading sizes \[10, 10, 3\]"),
        ((x, tf.constant(1.0)), "must have a batch dimension"),
        ((tf.constant(1.0), y), "must have a batch dimension"),
        ((None, None), "must hold a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            model.train_step(data)
    helpers.assert_equal(state(model), before)


@pytest.mark.parametrize("loss_scope", ["micro_batch", "batch"])
def test_rows_that_differ_only_at_run_time_change_nothing(loss_scope):
    """A graph does not know the rows when it is made."""
    x, y = helpers.rows(10)

    def batches():
        yield x, y
        yield x, y[:9]

    model = AccumModel.wrap(
        helpers.functional(), micro_batch_size=4, loss_scope=loss_scope
    )
    model.compile(keras.optimizers.Adam(0.125), "mse", metrics=["mae"])
    data_set = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec((None, 5), "float64"),
            tf.TensorSpec((None, 2), "float64"),
        ),
    )
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(state(model))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many rows"):
        model.fit(data_set, shuffle=False, verbose=0, callbacks=[record])
    assert len(seen) == 1
    helpers.assert_equal(state(model), seen[0])


class TwiceTheRows(keras.layers.Layer):
    def call(self, inputs):
        return tf.concat([inputs, inputs], 0)


class Total(keras.layers.Layer):
    def call(self, inputs):
        return tf.reduce_sum(inputs)


class Ragged(keras.layers.Layer):
    def call(self, inputs):
        return tf.RaggedTensor.from_tensor(inputs)


def ending_in(layer):
    class Net(helpers.subclass_of(keras.Model)):
        def call(self, inputs):
            return layer(super().call(inputs))

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_sum(y_pred)

    model = Net()
    model.hidden.build((None, 5))
    model.out.build((None, 7))
    return model


@pytest.mark.parametrize(
    "layer, message",
    [
        (TwiceTheRows(), r"one row per row .* shape \(8, 2\) .* 4 rows"),
        (Total(), r"one row per row .* shape \(\)"),
        (Ragged(), "must be dense tensors .* type RaggedTensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outputs_that_cannot_be_put_together_are_refused(layer, message):
    """Where the whole batch of them is needed."""
    data = tuple(map(tf.constant, helpers.rows(10)))
    model = AccumModel.wrap(
        ending_in(layer), micro_batch_size=4, loss_scope="batch"
    )
    model.compile("sgd", **EAGER)
    before = helpers.weights(model)
    with pytest.raises(ValueError, match=message):
        model.train_step(data)
    helpers.assert_equal(helpers.weights(model), before)
    # Only their first size is looked at where losses are added up.
    model.loss_scope = "micro_batch"
    if isinstance(layer, Total):
        with pytest.raises(ValueError, match="one row per row .* to be cut by"):
            model.train_step(data)
        helpers.assert_equal(helpers.weights(model), before)
    else:
        model.train_step(data)
        assert int(model.optimizer.iterations) == 1


def test_error_in_a_micro_batch_changes_nothing():
    """The third of three micro-batches fails, when two have gone through."""

    class Failing(keras.layers.Layer):
        def call(self, inputs):
            with tf.control_dependencies(
                [
                    tf.debugging.assert_less(
                        tf.reduce_max(inputs),
                        tf.constant(100.0, inputs.dtype),
                        "too large",
                    )
                ]
            ):
                return tf.identity(inputs)

    def make():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dropout(0.5, seed=3)(Failing()(inputs))
        return keras.Model(inputs, keras.layers.Dense(2)(hidden))

    x, y = helpers.rows(10)
    for loss_scope, options in (
        ("micro_batch", EAGER),
        ("micro_batch", {}),
        ("batch", {}),
    ):
        model = AccumModel.wrap(
            make(), micro_batch_size=4, loss_scope=loss_scope
        )
        model.compile(
            keras.optimizers.Adam(0.125), "mse", metrics=["mae"], **options
        )
        model.train_on_batch(x, y)
        before = state(model)
        bad = x.copy()
        bad[9] = 1000.0
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            model.train_on_batch(bad, y)
        helpers.assert_equal(state(model), before)
        model.train_on_batch(x, y)
        assert int(model.optimizer.iterations) == 2
