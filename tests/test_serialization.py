"""Files of models and optimizers: mid-cycle state, shape, fresh processes."""

import copy
import pickle
import subprocess
import sys

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer


def half_trained(accum_steps=3):
    """A model in the middle of a cycle, after 4 of 6 batches."""
    x, y = helpers.rows(12)
    model = AccumModel.wrap(helpers.functional(), accum_steps, "carry")
    model.compile(keras.optimizers.Adam(0.125), "mse")
    model.fit(x[:8], y[:8], batch_size=2, shuffle=False, verbose=0)
    return model


def train_rest(model):
    x, y = helpers.rows(12)
    model.fit(x[8:], y[8:], batch_size=2, shuffle=False, verbose=0)


def state(model):
    return helpers.weights(model) + helpers.values(model.optimizer.variables)


@pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint"])
def test_resume_in_mid_cycle_is_bit_equal(kind, tmp_path):
    """https://github.com/huggingface/transformers/issues/22143"""
    whole = half_trained()
    if kind == "keras":
        whole.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
        assert type(resumed) is type(whole)
        assert resumed.remainder == "carry"
    else:
        resumed = AccumModel.wrap(helpers.functional(), 3, "carry")
        resumed.compile(keras.optimizers.Adam(0.125), "mse")
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
    assert resumed.accum_steps == 3
    assert resumed.optimizer.cycle_position == 1
    assert resumed.optimizer.num_micro_batches == 4
    helpers.assert_equal(state(resumed), state(whole))
    train_rest(whole)
    train_rest(resumed)
    assert int(whole.optimizer.iterations) == 2
    helpers.assert_equal(state(resumed), state(whole))


def test_partial_cycle_can_be_discarded_after_loading(tmp_path):
    """https://github.com/the-database/traiNNer-redux/pull/96"""
    half_trained().save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    model.reset_accumulation()
    assert model.optimizer.cycle_position == 0
    before = helpers.weights(model)
    train_rest(model)
    helpers.assert_equal(helpers.weights(model), before)
    assert model.optimizer.cycle_position == 2


@pytest.mark.parametrize(
    "kind",
    [
        "wrap_functional",
        "wrap_sequential",
        "wrap_subclassed",
        "functional",
        "subclass",
    ],
)
def test_model_file_loads_as_what_it_was(kind, tmp_path):
    net, accum_net = (
        helpers.subclass_of(base) for base in (keras.Model, AccumModel)
    )
    if kind == "functional":
        model = AccumModel(*helpers.tensors(), accum_steps=2)
    elif kind == "subclass":
        model = accum_net(accum_steps=2)
        model(np.zeros((1, 5)))
    else:
        plain = {
            "wrap_functional": helpers.functional,
            "wrap_sequential": helpers.sequential,
            "wrap_subclassed": net,
        }[kind]()
        plain(np.zeros((1, 5)))
        model = AccumModel.wrap(plain, 2)
    model.compile("adam", "mse")
    model.fit(*helpers.rows(8), batch_size=2, verbose=0)
    model.accum_steps = 4
    model.save(tmp_path / "model.keras")
    own = accum_net if kind == "subclass" else net
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"Net": own}
    )
    assert isinstance(loaded, AccumModel)
    assert type(loaded).__name__ == type(model).__name__
    assert loaded.accum_steps == 4
    assert loaded.remainder == "flush"
    assert loaded.count_params() == model.count_params()
    helpers.assert_equal(state(loaded), state(model))
    for each in (model, loaded):
        each.fit(*helpers.rows(8), batch_size=2, shuffle=False, verbose=0)
    helpers.assert_equal(state(loaded), state(model))


def test_uncompiled_model_keeps_its_settings(tmp_path):
    model = AccumModel(*helpers.tensors(), accum_steps=5, remainder="drop")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not loaded.compiled
    assert loaded.accum_steps == 5
    assert loaded.remainder == "drop"


def test_fresh_process_needs_only_the_import(tmp_path):
    """https://github.com/andreped/GradientAccumulator/issues/42"""
    model = half_trained()
    model.save(tmp_path / "model.keras")
    train_rest(model)
    model.save_weights(tmp_path / "expected.weights.h5")
    code = f"""
import keras, numpy as np, accum_model
keras.config.set_floatx("float64")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(12, 5)), rng.normal(size=(12, 2))
model = keras.models.load_model(r"{tmp_path}/model.keras", safe_mode=True)
model.fit(x[8:], y[8:], batch_size=2, shuffle=False, verbose=0)
got = model.get_weights()
model.load_weights(r"{tmp_path}/expected.weights.h5")
for a, b in zip(got, model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-15)
print("resumed", model.accum_steps, int(model.optimizer.iterations))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "resumed 3 2" in result.stdout, result.stderr


@pytest.mark.parametrize("accum_steps", [1, 3])
def test_weight_files_go_both_ways(accum_steps, tmp_path):
    """https://github.com/andreped/GradientAccumulator/issues/26"""
    plain = helpers.functional()
    plain.compile("adam", "mse")
    plain.fit(*helpers.rows(4), verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = AccumModel.wrap(
        helpers.with_known_weights(helpers.functional(), seed=8), accum_steps
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "plain.weights.h5")
    helpers.assert_equal(helpers.weights(model), helpers.weights(plain))
    assert int(model.optimizer.iterations) == 1
    model.fit(*helpers.rows(6), batch_size=2, verbose=0)
    model.save_weights(tmp_path / "ours.weights.h5")
    fresh = helpers.functional()
    fresh.compile("adam", "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "ours.weights.h5")
    helpers.assert_equal(helpers.weights(fresh), helpers.weights(model))
    helpers.assert_equal(
        helpers.values(fresh.optimizer.variables),
        helpers.values(model.optimizer.inner_optimizer.variables),
    )


def test_exported_model_holds_no_buffer(tmp_path):
    model = half_trained()
    model.export(tmp_path / "export", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "export"))
    names = [variable.name for variable in exported.variables]
    assert len(names) == 4
    assert not any("gradient_sum" in name for name in names)


def test_optimizer_with_two_lists_is_saved_with_both_cycles():
    def make():
        rng = np.random.default_rng(0)
        variables = [keras.Variable(rng.normal(size=2)) for _ in range(2)]
        optimizer = AccumOptimizer(keras.optimizers.SGD(1.0), 2)
        optimizer.build(variables)
        return optimizer, variables

    optimizer, (a, b) = make()
    optimizer.apply([np.full(2, 1.0)], [a])
    optimizer.apply([np.full(2, 5.0)], [b])
    store = {}
    optimizer.cycle_state.save_own_variables(store)
    twin, (c, d) = make()
    twin.cycle_state.load_own_variables(store)
    for each, first, second in ((optimizer, a, b), (twin, c, d)):
        each.apply([np.full(2, 3.0)], [first])
        each.apply([np.full(2, 7.0)], [second])
    helpers.assert_equal(helpers.values([c, d]), helpers.values([a, b]))
    assert twin.num_micro_batches == 4


def damaged_states():
    return {
        "no accum_steps": lambda s: s.pop("accum_steps"),
        "bad accum_steps": lambda s: s.update(accum_steps=np.array(0)),
        "other shape": lambda s: s.update(
            cycle_0_gradient_sum_0=np.zeros((9, 9))
        ),
        "missing buffer": lambda s: s.pop("cycle_0_gradient_sum_1"),
        "other variables": lambda s: s.update(
            cycle_0_variables=np.array([0, 9])
        ),
    }


@pytest.mark.parametrize("damage", damaged_states())
def test_damaged_state_is_refused_and_changes_nothing(damage):
    variables = [keras.Variable(np.ones(2)), keras.Variable(np.ones(3))]
    optimizer = AccumOptimizer("sgd", 2)
    optimizer.apply([np.ones(2), np.ones(3)], variables)
    store = {}
    optimizer.cycle_state.save_own_variables(store)
    damaged_states()[damage](store)
    before = helpers.values(optimizer.variables)
    with pytest.raises(ValueError, match="[Ss]aved"):
        optimizer.cycle_state.load_own_variables(store)
    helpers.assert_equal(helpers.values(optimizer.variables), before)


def test_weights_load_before_the_optimizer_is_built(tmp_path):
    trained = half_trained()
    trained.save_weights(tmp_path / "model.weights.h5")
    fresh = AccumModel.wrap(helpers.functional(), 3)
    fresh.compile("adam", "mse")
    with pytest.warns(UserWarning, match="Skipping variable loading|objects"):
        fresh.load_weights(tmp_path / "model.weights.h5")
    helpers.assert_equal(helpers.weights(fresh), helpers.weights(trained))
    fresh.fit(*helpers.rows(6), batch_size=2, verbose=0)
    assert int(fresh.optimizer.iterations) == 1


def test_plain_model_loads_a_checkpoint_written_during_fit(tmp_path):
    path = tmp_path / "epoch.weights.h5"
    model = helpers.functional()
    model.compile("adam", "mse")
    model.fit(
        *helpers.rows(10),
        batch_size=2,
        verbose=0,
        callbacks=[
            AccumCallback(3, "carry", verbose=0),
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
        ],
    )
    expected = state(model)
    model.fit(*helpers.rows(10), verbose=0)
    model.load_weights(path)
    helpers.assert_equal(state(model), expected)


@pytest.mark.parametrize("kind", ["functional", "sequential", "tensors"])
def test_pickle_and_deepcopy(kind):
    model = {
        "functional": lambda: AccumModel.wrap(helpers.functional(), 2),
        "sequential": lambda: AccumModel.wrap(helpers.sequential(), 2),
        "tensors": lambda: AccumModel(*helpers.tensors(), accum_steps=2),
    }[kind]()
    model.compile("adam", "mse")
    model.fit(*helpers.rows(4), batch_size=2, verbose=0)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(copied, AccumModel)
        assert copied.accum_steps == 2
        helpers.assert_equal(state(copied), state(model))


def test_clone_model_is_keras_own():
    model = AccumModel.wrap(helpers.functional(), 2)
    model.compile("adam", "mse")
    cloned = keras.models.clone_model(model)
    # Older Keras does not ask the model for its settings.
    assert isinstance(cloned, AccumModel)
    # Keras clones every Sequential into a plain one.
    model = AccumModel.wrap(helpers.sequential(), 2)
    model.compile("adam", "mse")
    assert type(keras.models.clone_model(model)) is keras.Sequential
