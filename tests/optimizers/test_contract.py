"""What holds for every optimizer of the package; see `contract`."""

import subprocess
import sys

import contract
import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import MODES

import accum_model
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import Lookahead

SLOW = pytest.mark.slow
every_optimizer = pytest.mark.parametrize("name", contract.OPTIMIZERS)
# Ranger stands for all where many steps are traced.
slow_but_ranger = pytest.mark.parametrize(
    "name",
    [
        name if name == "Ranger" else pytest.param(name, marks=SLOW)
        for name in contract.OPTIMIZERS
    ],
)


def test_contract_covers_every_optimizer():
    made = {type(make()) for make in contract.OPTIMIZERS.values()}
    public = {
        value
        for value in vars(accum_model).values()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and value.__module__.startswith("accum_model.optimizers.")
    }
    # Those of two points cannot be applied by themselves; see their own tests.
    assert made == public - {accum_model.Heun, accum_model.SAM}


@every_optimizer
def test_config_round_trip(name):
    contract.assert_config_round_trip(contract.OPTIMIZERS[name]())


@every_optimizer
@pytest.mark.parametrize("option", contract.OPTIONS)
def test_arguments_of_every_keras_optimizer(name, option):
    """https://github.com/michaelrzhang/lookahead/issues/7"""
    make, options = contract.OPTIMIZERS[name], contract.OPTIONS[option]
    start, gradients = contract.scripted(6)
    expected = contract.apply_all(make(), start, gradients)
    values = contract.apply_all(make(**options), start, gradients)
    if option == "loss_scale_factor":
        scaled = contract.apply_all(make(**options), start, 8 * gradients)
        helpers.assert_close(scaled, expected)
    else:
        assert not np.allclose(values[-1], expected[-1])
    contract.assert_config_round_trip(make(**options))


@every_optimizer
@pytest.mark.parametrize("option", [None, *contract.OPTIONS])
def test_sparse_gradients_equal_dense_ones(name, option):
    """Also with clipping, and where a row is named twice."""
    make = contract.OPTIMIZERS[name]
    options = contract.OPTIONS.get(option, {})
    start, gradients = contract.scripted(6)
    sparse, dense = zip(*map(contract.as_slices, gradients), strict=True)
    helpers.assert_close(
        contract.apply_all(make(**options), start, sparse),
        contract.apply_all(make(**options), start, dense),
    )


@every_optimizer
def test_schedules_count_updates(name):
    schedule = keras.optimizers.schedules.InverseTimeDecay(2**-4, 1, 0.5)
    values = []
    for rate, accum_steps in ((schedule, 2), (2**-4, 1)):
        contract.assert_config_round_trip(with_rate(name, rate))
        optimizer = with_rate(name, rate)
        if accum_steps > 1:
            if isinstance(optimizer, AccumOptimizer):
                optimizer.accum_steps = accum_steps
            else:
                optimizer = AccumOptimizer(optimizer, accum_steps)
        start, gradients = contract.scripted(6)
        variable = keras.Variable(start)
        for update, gradient in enumerate(gradients):
            if accum_steps == 1:
                optimizer.learning_rate = 2**-4 / (1 + 0.5 * update)
            for _ in range(accum_steps):
                optimizer.apply([gradient], [variable])
        values.append(variable.numpy())
    # Keras computes schedules in float32.
    np.testing.assert_allclose(*values, rtol=0, atol=1e-6)


def with_rate(name, rate):
    """The optimizer with another rate, without having made an update."""
    config = contract.OPTIMIZERS[name]().get_config()
    if "inner_optimizer" in config:
        return Lookahead(keras.optimizers.SGD(rate, momentum=0.5), 2)
    config["learning_rate"] = rate
    return type(contract.OPTIMIZERS[name]()).from_config(config)


@every_optimizer
@pytest.mark.parametrize("accum_steps", [1, 2, 3])
def test_accumulated_equals_large_batch(name, accum_steps):
    make = contract.OPTIMIZERS[name]
    batch_size = 12 // accum_steps
    data = helpers.rows(60)
    large = helpers.fit_large_batch(
        make(), 12, data, epochs=1, run_eagerly=True
    )
    model = helpers.fit_way(
        "wrap", make(), accum_steps, batch_size, data, 1, run_eagerly=True
    )
    helpers.assert_close(model, large)


@slow_but_ranger
@pytest.mark.parametrize("way", ["callback", "optimizer", "cut"])
def test_every_way_in_equals_large_batch(name, way):
    make = contract.OPTIMIZERS[name]
    data = helpers.rows(36)
    large = helpers.fit_large_batch(make(), 12, data)
    if way == "cut":
        model = AccumModel.wrap(helpers.functional(), micro_batch_size=5)
        model.compile(make(), "mse")
        model.fit(*data, batch_size=12, epochs=2, shuffle=False, verbose=0)
    elif way == "optimizer" and name == "AdamAccumulate":
        model = helpers.functional()
        model.compile(make(accum_iters=3), "mse")
        model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0)
    else:
        model = helpers.fit_way(way, make(), 3, 4, data)
    helpers.assert_close(model, large)


@slow_but_ranger
def test_modes_agree(name):
    data = helpers.rows(20)
    models = []
    for mode in MODES.values():
        model = helpers.functional()
        model.compile(contract.OPTIMIZERS[name](), "mse", **mode)
        model.fit(*data, batch_size=4, shuffle=False, verbose=0)
        models.append(model)
    helpers.assert_close(models[1], models[0])
    helpers.assert_close(models[2], models[0])


@slow_but_ranger
def test_mixed_precision(name):
    """https://github.com/tensorflow/addons/issues/1920"""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = helpers.functional()
    model.compile(contract.OPTIMIZERS[name](), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    before = helpers.weights(model)
    model.fit(*helpers.rows(16), batch_size=4, epochs=2, verbose=0)
    for old, new in zip(before, helpers.weights(model), strict=True):
        assert np.isfinite(new).all()
        assert not np.array_equal(old, new)
    model.optimizer.learning_rate = 0.25
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.25
    accumulating = AccumModel.wrap(helpers.functional(), 2)
    accumulating.compile(contract.OPTIMIZERS[name](), "mse")
    assert isinstance(accumulating.optimizer, AccumOptimizer)
    accumulating.fit(*helpers.rows(16), batch_size=4, verbose=0)
    assert int(accumulating.optimizer.iterations) == 2


def trained(name, num_batches, model=None):
    """A model after so many of 14 batches, by single steps.

    `fit` would end with the slow weights.
    """
    x, y = helpers.rows(56)
    first = 0
    if model is None:
        model = helpers.functional()
        model.compile(contract.OPTIMIZERS[name](), "mse")
    else:
        first = 7
    for batch in range(first, first + num_batches):
        part = slice(4 * batch, 4 * batch + 4)
        model.train_on_batch(x[part], y[part])
    return model


def state(model):
    return helpers.weights(model) + helpers.values(model.optimizer.variables)


@slow_but_ranger
@pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint"])
def test_resumed_equals_uninterrupted(name, kind, tmp_path):
    """https://github.com/tensorflow/addons/issues/1911"""
    whole = trained(name, 7)
    if kind == "keras":
        whole.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
    else:
        resumed = helpers.functional()
        resumed.set_weights([0 * each for each in resumed.get_weights()])
        resumed.compile(contract.OPTIMIZERS[name](), "mse")
        resumed.optimizer.build(resumed.trainable_variables)
        if kind == "weights":
            whole.save_weights(tmp_path / "model.weights.h5")
            resumed.load_weights(tmp_path / "model.weights.h5")
        else:
            path = tf.train.Checkpoint(
                model=whole, optimizer=whole.optimizer
            ).save(tmp_path / "checkpoint")
            tf.train.Checkpoint(
                model=resumed, optimizer=resumed.optimizer
            ).restore(path).assert_consumed()
    assert type(resumed.optimizer) is type(whole.optimizer)
    helpers.assert_equal(state(resumed), state(whole))
    for model in (whole, resumed):
        trained(name, 7, model)
    assert int(resumed.optimizer.iterations) == 14
    helpers.assert_equal(state(resumed), state(whole))


NESTED = {
    "accumulation outside": lambda make: AccumOptimizer(make(), 3),
    "loss scaling outside": lambda make: keras.optimizers.LossScaleOptimizer(
        make(), 8.0
    ),
    "both outside": lambda make: AccumOptimizer(
        keras.optimizers.LossScaleOptimizer(make(), 8.0), 3
    ),
    "accumulation inside": lambda make: Lookahead(AccumOptimizer(make(), 3), 2),
    "loss scaling inside": lambda make: Lookahead(
        keras.optimizers.LossScaleOptimizer(make(), 8.0), 2
    ),
}


@pytest.mark.parametrize("kind", ["keras", "weights"])
@pytest.mark.parametrize(
    "nesting",
    [
        name if name.startswith("acc") else pytest.param(name, marks=SLOW)
        for name in NESTED
    ],
)
def test_resumed_equals_uninterrupted_in_any_nesting(nesting, kind, tmp_path):
    """https://github.com/CyberZHG/keras-lookahead/issues/2"""
    make = lambda: NESTED[nesting](contract.OPTIMIZERS["Ranger"])
    models = []
    for _ in range(2):
        model = helpers.functional()
        model.compile(make(), "mse")
        models.append(model)
    whole, resumed = models
    trained("Ranger", 7, whole)
    if kind == "keras":
        whole.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
    else:
        whole.save_weights(tmp_path / "model.weights.h5")
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.load_weights(tmp_path / "model.weights.h5")
    helpers.assert_equal(state(resumed), state(whole))
    for model in (whole, resumed):
        trained("Ranger", 7, model)
    helpers.assert_equal(state(resumed), state(whole))


FRESH = """
import sys
import keras
import numpy as np
import accum_model
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
folder = sys.argv[1]
model = keras.models.load_model(folder + "/model.keras")
data = np.load(folder + "/data.npz")
for batch in range(7, 14):
    part = slice(4 * batch, 4 * batch + 4)
    model.train_on_batch(data["x"][part], data["y"][part])
np.savez(folder + "/after.npz", *model.get_weights())
"""


@SLOW
@every_optimizer
def test_fresh_process_resumes_without_custom_objects(name, tmp_path):
    whole = trained(name, 7)
    whole.save(tmp_path / "model.keras")
    x, y = helpers.rows(56)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)],
        check=True,
        capture_output=True,
    )
    after = np.load(tmp_path / "after.npz")
    trained(name, 7, whole)
    helpers.assert_equal(
        [after[key] for key in after.files], helpers.weights(whole)
    )
