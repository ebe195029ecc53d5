"""AccumModel: the ways to make one, what it takes, what it leaves alone."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumModel
from accum_model import AccumOptimizer

MAKERS = {
    "functional": helpers.functional,
    "sequential": helpers.sequential,
    "subclassed": helpers.subclassed,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_wrap_shares_layers_and_keeps_shape(kind, is_compiled):
    plain = MAKERS[kind]()
    if is_compiled:
        plain.compile(keras.optimizers.Adam(0.5), "mae", metrics=["mse"])
    model = AccumModel.wrap(plain, accum_steps=2)
    assert isinstance(model, AccumModel)
    assert isinstance(model, type(plain))
    assert [
        layer is other
        for layer, other in zip(model.layers, plain.layers, strict=True)
    ] == [True] * len(plain.layers)
    assert [w.path for w in model.weights] == [w.path for w in plain.weights]
    assert model.count_params() == plain.count_params()
    assert model.name == plain.name
    assert model.compiled == is_compiled
    if is_compiled:
        assert model.optimizer.inner_optimizer is plain.optimizer
        assert model.loss == "mae"
        assert type(plain.optimizer) is keras.optimizers.Adam
        x, y = helpers.rows(4)
        model.fit(x, y, verbose=0)
        np.testing.assert_array_equal(
            model.predict(x, verbose=0), plain.predict(x, verbose=0)
        )
        assert set(model.evaluate(x, y, verbose=0, return_dict=True)) == {
            "loss",
            "mse",
        }
    assert not isinstance(plain, AccumModel)


def test_wrap_prints_the_summary_of_the_plain_model():
    plain = helpers.sequential()
    lines, ours = [], []
    plain.summary(print_fn=lambda text, **_: lines.append(text))
    AccumModel.wrap(plain, 2).summary(
        print_fn=lambda text, **_: ours.append(text)
    )
    assert ours == lines


@pytest.mark.parametrize("kind", ["sequential", "subclassed"])
def test_wrap_of_unbuilt_model_equals_large_batch(kind):
    """https://github.com/andreped/GradientAccumulator/issues/23"""

    def make():
        keras.utils.set_random_seed(5)
        if kind == "sequential":
            return keras.Sequential(
                [
                    keras.layers.Dense(7, activation="tanh"),
                    keras.layers.Dense(2),
                ]
            )
        return helpers.subclass_of(keras.Model)()

    data = helpers.rows(12)
    large = helpers.fit_large_batch("adam", 12, data, make=make)
    plain = make()
    plain.compile("adam", "mse")
    model = AccumModel.wrap(plain, accum_steps=3)
    model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(model, large)


def test_variables_added_by_the_first_call_equal_large_batch():
    """https://github.com/andreped/GradientAccumulator/issues/33"""

    def definition(base):
        class Late(base):
            def build(self, input_shape):
                self.kernel = self.add_weight(
                    shape=(input_shape[-1], 2), initializer="ones"
                )

            def call(self, inputs):
                if not hasattr(self, "late"):
                    self._tracker.unlock()
                    self.late = self.add_weight(shape=(2,), initializer="ones")
                    self._tracker.lock()
                return inputs @ self.kernel.value + self.late.value

        return Late

    data = helpers.rows(12)
    large = definition(keras.Model)()
    large.compile("adam", "mse")
    large.fit(*data, batch_size=12, epochs=2, shuffle=False, verbose=0)
    model = definition(AccumModel)(accum_steps=3)
    model.compile("adam", "mse")
    model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(model, large)


def test_model_from_tensors_equals_large_batch():
    data = helpers.rows(22)
    large = helpers.fit_large_batch("adam", 12, data)
    model = AccumModel(*helpers.tensors(), accum_steps=3)
    helpers.with_known_weights(model)
    model.compile("adam", "mse")
    model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
    helpers.assert_close(model, large)


def test_functional_use_leaves_subclassing_alone():
    """Keras rewrites the bases of a class that is called with tensors."""
    AccumModel(*helpers.tensors(), accum_steps=2)
    assert AccumModel.__bases__ == (keras.Model,)
    model = helpers.subclass_of(AccumModel)(accum_steps=3)
    assert model(np.zeros((1, 5))).shape == (1, 2)


def test_functional_subclass_with_own_train_step():
    class Net(AccumModel):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "extra": 1.0}

    model = Net(*helpers.tensors(), accum_steps=2)
    assert type(model).__name__ == "Net"
    assert isinstance(model, Net)
    assert model.accum_steps == 2
    model.compile("sgd", "mse")
    history = model.fit(*helpers.rows(8), batch_size=2, verbose=0).history
    assert history["extra"] == [1.0]
    assert int(model.optimizer.iterations) == 2
    # The class still serves as a base and in its other form.
    assert Net.__bases__ == (AccumModel,)


def test_subclass_that_builds_its_graph_in_init():
    class Net(AccumModel):
        def __init__(self, units, **kwargs):
            inputs = keras.Input((5,))
            outputs = keras.layers.Dense(units)(inputs)
            super().__init__(inputs, outputs, **kwargs)

    model = Net(2, accum_steps=3)
    assert model.accum_steps == 3
    model.compile("sgd", "mse")
    model.fit(*helpers.rows(6), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 1


def data_cases():
    x, y = helpers.rows(10)
    return {
        "x": (x,),
        "x_y": (x, y),
        "x_y_weight": (x, y, np.linspace(1.0, 1.0, 10)),
    }


class OwnLoss(keras.layers.Layer):
    """Adds the mean square of its input to the loss."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@pytest.mark.parametrize("case", data_cases())
def test_data_structures_equal_large_batch(case):
    """x; (x,); (x, y); (x, y, sample_weight); and y of None with add_loss."""
    data = data_cases()[case]

    def train(wrap, batch_size, *, as_bare_x=False):
        inputs, outputs = helpers.tensors()
        if case == "x":
            outputs = OwnLoss()(outputs)
        model = helpers.with_known_weights(keras.Model(inputs, outputs))
        if wrap:
            model = AccumModel.wrap(model, accum_steps=3)
        model.compile("adam", None if case == "x" else "mse")
        content = data[0] if as_bare_x else data
        dataset = tf.data.Dataset.from_tensor_slices(content)
        model.fit(dataset.batch(batch_size), epochs=2, shuffle=False, verbose=0)
        return model

    large = train(False, 10)
    helpers.assert_close(train(True, 4), large)
    if case == "x":
        helpers.assert_close(train(True, 4, as_bare_x=True), large)


@pytest.mark.parametrize("structure", ["dict", "list"])
def test_several_inputs_and_outputs_equal_large_batch(structure):
    def make():
        a = keras.Input((3,), name="a")
        b = keras.Input((2,), name="b")
        hidden = keras.layers.Concatenate()([a, b])
        left = keras.layers.Dense(2, name="left")(hidden)
        right = keras.layers.Dense(1, name="right")(hidden)
        if structure == "dict":
            outputs = {"left": left, "right": right}
            return helpers.with_known_weights(
                keras.Model({"a": a, "b": b}, outputs)
            )
        return helpers.with_known_weights(keras.Model([a, b], [left, right]))

    x, y = helpers.rows(10, 5, 3)
    if structure == "dict":
        inputs = {"a": x[:, :3], "b": x[:, 3:]}
        targets = {"left": y[:, :2], "right": y[:, 2:]}
        loss = {"left": "mse", "right": "mae"}
        loss_weights = {"left": 1.0, "right": 0.5}
    else:
        inputs, targets = [x[:, :3], x[:, 3:]], [y[:, :2], y[:, 2:]]
        loss, loss_weights = ["mse", "mae"], [1.0, 0.5]

    def train(model, batch_size):
        model.compile("adam", loss, loss_weights=loss_weights)
        history = model.fit(
            inputs,
            targets,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
        )
        return model, history

    large, _ = train(make(), 10)
    model, history = train(AccumModel.wrap(make(), accum_steps=3), 4)
    helpers.assert_close(model, large)
    assert {"loss", "left_loss", "right_loss"} <= set(history.history)


@pytest.mark.parametrize("way", ["subclass", "wrap"])
@pytest.mark.parametrize("num_rows", [12, 10])
def test_own_train_step_equals_large_batch(way, num_rows):
    """https://github.com/huggingface/notebooks/issues/173"""

    def definition(base):
        class Net(helpers.subclass_of(base)):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(
                    zip(gradients, variables, strict=True)
                )
                return {"my_loss": loss}

        return Net

    def make(base, **kwargs):
        model = definition(base)(**kwargs)
        model(np.zeros((1, 5)))
        return helpers.with_known_weights(model)

    data = helpers.rows(num_rows)
    large = helpers.fit_large_batch(
        "adam", num_rows, data, make=lambda: make(keras.Model)
    )
    if way == "wrap":
        model = AccumModel.wrap(make(keras.Model), accum_steps=3)
    else:
        model = make(AccumModel, accum_steps=3)
    model.compile("adam", "mse")
    history = model.fit(
        *data, batch_size=4, epochs=2, shuffle=False, verbose=0
    ).history
    helpers.assert_close(model, large)
    assert list(history) == ["my_loss"]


def test_gan_optimizers_do_not_mix():
    """https://github.com/coqui-ai/Trainer/issues/60"""

    class GAN(keras.Model):
        def __init__(self, accum_steps):
            super().__init__()
            self.generator = keras.layers.Dense(2)
            self.discriminator = keras.layers.Dense(1)
            self.g_optimizer = AccumOptimizer("adam", accum_steps)
            self.d_optimizer = AccumOptimizer("sgd", accum_steps)
            for layer, width in ((self.generator, 3), (self.discriminator, 2)):
                layer.build((None, width))
            helpers.with_known_weights(self)

        def buffers(self, optimizer):
            return [
                v.numpy()
                for v in optimizer.variables
                if "gradient_sum" in v.name
            ]

        def train_step(self, data):
            noise, real = data
            generator = self.generator.trainable_variables
            discriminator = self.discriminator.trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                fake = self.discriminator(self.generator(noise))
                g_loss = tf.reduce_mean(tf.square(fake - 1))
                d_loss = tf.reduce_mean(tf.square(fake)) + tf.reduce_mean(
                    tf.square(self.discriminator(real) - 1)
                )
            d_gradients = tape.gradient(d_loss, discriminator)
            g_gradients = tape.gradient(g_loss, generator)
            before = self.buffers(self.g_optimizer)
            self.d_optimizer.apply(d_gradients, discriminator)
            helpers.assert_equal(self.buffers(self.g_optimizer), before)
            before = self.buffers(self.d_optimizer)
            self.g_optimizer.apply(g_gradients, generator)
            helpers.assert_equal(self.buffers(self.d_optimizer), before)
            return {"loss": g_loss}

    def train(accum_steps, batch_size):
        model = GAN(accum_steps)
        for part in ("generator", "discriminator"):
            optimizer = getattr(model, part[0] + "_optimizer")
            optimizer.build(getattr(model, part).trainable_variables)
        model.compile(run_eagerly=True)
        noise, _ = helpers.rows(12, 3)
        real, _ = helpers.rows(12, 2, seed=9)
        model.fit(
            noise,
            real,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
        )
        return model

    large, model = train(1, 12), train(3, 4)
    for part in ("generator", "discriminator"):
        helpers.assert_close(
            helpers.values(getattr(model, part).variables),
            helpers.values(getattr(large, part).variables),
        )
    assert int(model.g_optimizer.iterations) == 2


def test_dropout_layers_train_and_differ_between_micro_batches():
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.5)(inputs))
    model = AccumModel(inputs, outputs, accum_steps=2)
    model.compile("sgd", "mse")
    model.fit(*helpers.rows(8, 4, 1), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_train_on_batch_accumulates_and_fit_starts_clean():
    x, y = helpers.rows(12)
    model = AccumModel.wrap(helpers.functional(), accum_steps=3)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    start = helpers.weights(model)
    model.train_on_batch(x[:4], y[:4])
    model.train_on_batch(x[4:8], y[4:8])
    helpers.assert_equal(helpers.weights(model), start)
    assert model.optimizer.cycle_position == 2
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    large = helpers.fit_large_batch(
        keras.optimizers.SGD(0.1), 12, (x, y), epochs=1
    )
    helpers.assert_close(model, large)


def test_flush_and_reset_accumulation():
    x, y = helpers.rows(4)
    model = AccumModel.wrap(helpers.functional(), accum_steps=3)
    model.flush()  # Not compiled: nothing to do.
    model.compile("sgd", "mse")
    model.train_on_batch(x, y)
    model.reset_accumulation()
    assert model.optimizer.cycle_position == 0
    model.train_on_batch(x, y)
    model.flush()
    assert int(model.optimizer.iterations) == 1


def test_accum_steps_can_be_set_between_fits():
    data = helpers.rows(8)
    model = AccumModel.wrap(helpers.functional())
    model.compile("sgd", "mse")
    model.fit(*data, batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 4
    model.accum_steps = 4
    model.fit(*data, batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 5
    assert model.optimizer.num_micro_batches == 8
    model.accum_steps = 2
    model.fit(*data, batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 7
    assert model.accum_steps == 2


def test_accum_steps_can_be_raised_from_one_by_a_callback():
    class Schedule(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.accum_steps = (1, 4)[epoch]

    model = AccumModel.wrap(helpers.functional())
    model.compile("sgd", "mse")
    recorder = helpers.UpdateRecorder()
    model.fit(
        *helpers.rows(16),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[Schedule(), recorder],
    )
    assert recorder.updates == [*range(1, 9), 12, 16]


def test_compile_uses_a_given_accum_optimizer():
    optimizer = AccumOptimizer("adam", 4)
    model = AccumModel.wrap(helpers.functional())
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert model.accum_steps == 4


@pytest.mark.parametrize("is_inside", [True, False])
def test_mixed_precision_puts_accumulation_outside_loss_scaling(is_inside):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = AccumModel(*helpers.tensors(), accum_steps=2)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = keras.optimizers.Adam(0.01)
    if is_inside:
        optimizer = keras.optimizers.LossScaleOptimizer(
            AccumOptimizer(optimizer, 2)
        )
    model.compile(optimizer, "mse")
    assert type(model.optimizer) is AccumOptimizer
    scaling = model.optimizer.inner_optimizer
    assert type(scaling) is keras.optimizers.LossScaleOptimizer
    assert type(scaling.inner_optimizer) is keras.optimizers.Adam
    history = model.fit(
        *helpers.rows(64), batch_size=4, epochs=2, verbose=0
    ).history
    assert int(model.optimizer.iterations) == 16
    assert history["loss"][1] < history["loss"][0]


def test_failed_fit_discards_the_partial_cycle():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    data = helpers.rows(12)
    model = AccumModel.wrap(helpers.functional(), accum_steps=3)
    model.compile("sgd", "mse")
    start = helpers.weights(model)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, batch_size=4, verbose=0, callbacks=[Stop()])
    helpers.assert_equal(helpers.weights(model), start)
    assert model.optimizer.cycle_position == 0


def test_fit_takes_a_callback_list_and_leaves_it_as_it_was():
    model = AccumModel.wrap(helpers.functional(), accum_steps=3)
    model.compile("sgd", "mse")
    recorder = helpers.UpdateRecorder()
    callbacks = keras.callbacks.CallbackList(
        [recorder], add_history=True, model=model, epochs=1, steps=4, verbose=0
    )
    before = list(callbacks.callbacks)
    model.fit(*helpers.rows(8), batch_size=2, verbose=0, callbacks=callbacks)
    assert recorder.updates == [3, 4]
    assert callbacks.callbacks == before


def test_custom_loop_step_of_the_train_step_method():
    model = AccumModel.wrap(helpers.functional(), accum_steps=2)
    model.compile("sgd", "mse")
    for _ in range(4):
        model.train_step(tuple(map(tf.constant, helpers.rows(4))))
    assert int(model.optimizer.iterations) == 2


def test_model_without_trainable_weights_warns_as_keras():
    model = helpers.functional()
    model.trainable = False
    model = AccumModel.wrap(model, accum_steps=2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="does not have any trainable"):
        model.fit(*helpers.rows(8), batch_size=2, verbose=0)
