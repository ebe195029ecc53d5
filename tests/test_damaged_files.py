"""Files that were tampered with, or cut off: refused, and nothing changed."""

import json
import shutil
import zipfile

import conftest
import h5py
import helpers
import keras
import numpy as np
import pytest

from accum_model import AccumModel

X, Y = helpers.rows(8)
STATE = "optimizer/cycle_state/vars/"


def trained(accum_steps, num_rows):
    """A model in the middle of a cycle."""
    model = AccumModel.wrap(helpers.functional(), accum_steps, "carry")
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(X[:num_rows], Y[:num_rows], batch_size=2, verbose=0)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    conftest.use_float("float64")
    folder = tmp_path_factory.mktemp("files")
    model = trained(3, 8)
    model.save(folder / "good.keras")
    model.save_weights(folder / "good.weights.h5")
    return folder


def settings_of_optimizer(config):
    return config["compile_config"]["optimizer"]["config"]


CONFIGS = {
    "accum_steps of 0": (
        lambda c: settings_of_optimizer(c).update(accum_steps=0),
        "`accum_steps` must be an int >= 1. Received: accum_steps=0",
    ),
    "accum_steps of 2.5": (
        lambda c: c["config"].update(accum_steps=2.5),
        "`accum_steps` must be an int >= 1. Received: accum_steps=2.5",
    ),
    "unknown keyword of the optimizer": (
        lambda c: settings_of_optimizer(c).update(accumsteps=4),
        "`accumsteps` is no argument of AccumOptimizer",
    ),
    "unknown keyword of the model": (
        lambda c: c["config"].update(accumsteps=4),
        "unexpected keyword argument 'accumsteps'",
    ),
    "unknown keyword of compile": (
        lambda c: c["compile_config"].update(accumsteps=4),
        "unexpected keyword argument 'accumsteps'",
    ),
    "unknown remainder": (
        lambda c: c["config"].update(remainder="keep"),
        "`remainder` must be one of",
    ),
    "no inner optimizer": (
        lambda c: settings_of_optimizer(c).pop("inner_optimizer"),
        "`inner_optimizer` must be a Keras optimizer. Received: ",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_file_with_another_config_is_refused(name, files, tmp_path):
    edit, message = CONFIGS[name]
    with (
        zipfile.ZipFile(files / "good.keras") as good,
        zipfile.ZipFile(tmp_path / "bad.keras", "w") as bad,
    ):
        for each in good.namelist():
            content = good.read(each)
            if each == "config.json":
                config = json.loads(content)
                edit(config)
                content = json.dumps(config).encode()
            bad.writestr(each, content)
    with pytest.raises((ValueError, TypeError)) as caught:
        keras.models.load_model(tmp_path / "bad.keras")
    assert message in str(caught.value)


def put(name, value):
    def edit(file):
        del file[name]
        file[name] = value

    return edit


WEIGHTS = {
    "accum_steps of 0": (
        put(STATE + "accum_steps", np.int64(0)),
        "`accum_steps` must be an int >= 1",
    ),
    "accum_steps of 2.5": (
        put(STATE + "accum_steps", 2.5),
        "`accum_steps` must be an int >= 1",
    ),
    "accum_steps of text": (
        put(STATE + "accum_steps", "three"),
        "`accum_steps` must be an int >= 1",
    ),
    "buffer of another shape": (
        put(STATE + "cycle_0_gradient_sum_2", np.ones((9, 9))),
        r"must have the shape \(7, 2\). Received: shape=\(9, 9\)",
    ),
    "buffer that is not there": (
        lambda file: file.__delitem__(STATE + "cycle_0_gradient_sum_2"),
        r"must have the shape \(7, 2\). Received: shape=None",
    ),
    "position beyond the cycle": (
        put(STATE + "cycle_0_cycle_position", np.int64(3)),
        "cycle_position=3, cycle_length=3",
    ),
    "cycle of no length": (
        put(STATE + "cycle_0_cycle_length", np.int64(0)),
        "`cycle_0_cycle_length` must be an int >= 1",
    ),
    "weight below zero": (
        put(STATE + "cycle_0_weight_sum", -1.0),
        "`weight_sum` must be >= 0",
    ),
    "batches below zero": (
        put(STATE + "num_micro_batches", np.int64(-3)),
        "`num_micro_batches` must be an int >= 0",
    ),
    "variables of another model": (
        put(STATE + "cycle_0_variables", np.arange(9)),
        "must be for variables that the optimizer has",
    ),
    "layer of another shape": (
        put("layers/dense_1/vars/0", np.ones((3, 3))),
        "must match",
    ),
    "slot of another shape": (
        put("optimizer/vars/3", np.ones((3, 3))),
        "must match",
    ),
}


# Keras, of groups that no file of it has.
@pytest.mark.filterwarnings("ignore:Skipping nested container")
@pytest.mark.parametrize("name", [*WEIGHTS, "cut off"])
def test_weight_file_that_does_not_fit_changes_nothing(name, files, tmp_path):
    path = tmp_path / "bad.weights.h5"
    if name == "cut off":
        content = (files / "good.weights.h5").read_bytes()
        path.write_bytes(content[: len(content) // 2])
        error = pytest.raises(OSError)
    else:
        edit, message = WEIGHTS[name]
        shutil.copy(files / "good.weights.h5", path)
        with h5py.File(path, "r+") as file:
            edit(file)
        error = pytest.raises(ValueError, match=message)
    model = trained(2, 6)
    before = [*model.variables, *model.optimizer.variables]
    values = helpers.values(before)
    with error:
        model.load_weights(path)
    after = [*model.variables, *model.optimizer.variables]
    assert [id(each) for each in after] == [id(each) for each in before]
    helpers.assert_equal(helpers.values(after), values)
    assert (model.accum_steps, model.optimizer.cycle_position) == (2, 1)
    # It goes on, and takes the file that is in order.
    model.fit(X[:2], Y[:2], batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 2
    model.load_weights(files / "good.weights.h5")
    assert (model.accum_steps, model.optimizer.cycle_position) == (3, 1)


def test_file_with_buffers_makes_a_compiled_step_use_them(files):
    model = AccumModel.wrap(helpers.functional())
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 4
    model.load_weights(files / "good.weights.h5")
    model.fit(X, Y, batch_size=2, verbose=0)  # 1 + 4 batches, flushed.
    assert int(model.optimizer.iterations) == 1 + 2
    assert model.optimizer.num_micro_batches == 8
