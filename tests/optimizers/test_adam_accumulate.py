"""AdamAccumulate: Adam on the mean of several batches, with decay."""

import copy

import contract
import helpers
import keras
import numpy as np
import pytest
import reference
from conftest import use_float

from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import AdamAccumulate


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"amsgrad": True}, {"decay": 0.25}, {"weight_decay": 0.125}],
)
def test_adam_accumulate_matches_reference(arguments, sparse):
    arguments = {"beta_1": 0.875, "beta_2": 1 - 2**-7, **arguments}
    arguments["epsilon"] = 2**-20
    contract.assert_matches_reference(
        AdamAccumulate(2**-6, **arguments),
        reference.adam(2**-6, **arguments),
        sparse=sparse,
    )


def test_adam_accumulate_with_its_defaults_matches_reference():
    """Keras takes beta_2 through float32 when it corrects the bias.

    That changes the root of 1 - beta_2, and with it each step of about the
    rate, by up to 7e-6 of itself.
    """
    change = abs((1 - float(np.float32(0.999))) / 0.001 - 1) / 2
    assert change < 7e-6
    contract.assert_matches_reference(
        AdamAccumulate(), reference.adam(), atol=100 * 0.001 * change
    )


@pytest.mark.parametrize("accum_iters", [1, 2, 4])
def test_adam_accumulate_equals_accum_optimizer_around_adam(accum_iters):
    start, gradients = contract.scripted(12)
    helpers.assert_equal(
        contract.apply_all(
            AdamAccumulate(accum_iters=accum_iters), start, gradients
        ),
        contract.apply_all(
            AccumOptimizer(keras.optimizers.Adam(), accum_iters),
            start,
            gradients,
        ),
    )


def test_adam_accumulate_single_update_is_of_the_mean():
    start, gradients = contract.scripted(3)
    values = contract.apply_all(
        AdamAccumulate(2**-6, accum_iters=3), start, gradients
    )
    helpers.assert_equal(values[:2], [start, start])
    (expected,) = contract.apply_all(
        AdamAccumulate(2**-6), start, [gradients.mean(axis=0)]
    )
    helpers.assert_close([values[2]], [expected])


def test_decay_counts_updates_and_leaves_the_rate_settable():
    """With gradients that do not change Adam steps by its rate."""
    optimizer = AdamAccumulate(
        0.5, 0.875, 0.875, epsilon=0, decay=0.5, accum_iters=2
    )
    values = contract.apply_all(
        optimizer, np.array([0.0]), [np.array([-1.0])] * 8
    )
    steps = np.diff(values[1::2, 0], prepend=0.0)
    np.testing.assert_allclose(
        steps, 0.5 / (1 + 0.5 * np.arange(4)), rtol=1e-12
    )
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25


def test_weight_decay_uses_the_decayed_rate():
    values = contract.apply_all(
        AdamAccumulate(0.5, decay=1.0, weight_decay=0.5),
        np.array([1.0]),
        [np.zeros(1)] * 3,
    )
    factors = 1 - 0.5 * 0.5 / np.arange(1, 4)
    np.testing.assert_allclose(values[:, 0], np.cumprod(factors))


def test_accum_iters_is_accum_steps():
    optimizer = AdamAccumulate(accum_iters=np.int64(3))
    assert optimizer.accum_iters == optimizer.accum_steps == 3
    optimizer.accum_iters = 5
    assert optimizer.accum_steps == 5
    assert optimizer.get_config()["accum_iters"] == 5
    assert "accum_steps" not in optimizer.get_config()
    contract.assert_config_round_trip(optimizer)
    assert AdamAccumulate().inner_optimizer.epsilon == keras.config.epsilon()


@pytest.mark.parametrize("way", ["model", "callback"])
def test_accum_iters_and_accum_steps_must_agree(way):
    data = helpers.rows(8)

    def train(accum_iters, accum_steps):
        optimizer = AdamAccumulate(accum_iters=accum_iters)
        model, callbacks = helpers.functional(), []
        if way == "model":
            model = AccumModel.wrap(model, accum_steps)
        else:
            callbacks = [AccumCallback(accum_steps, verbose=0)]
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(*data, batch_size=2, verbose=0, callbacks=callbacks)
        return optimizer

    with pytest.raises(
        ValueError, match="must be the same.*accum_steps=3.*accum_steps=2"
    ):
        train(2, 3)
    assert int(train(2, 2).iterations) == 2
    assert int(train(1, 4).iterations) == 1


def test_model_without_its_own_accum_steps_takes_accum_iters(tmp_path):
    model = AccumModel.wrap(helpers.functional())
    model.compile(AdamAccumulate(accum_iters=4), "mse")
    assert model.accum_steps == 4
    model.fit(*helpers.rows(6), batch_size=1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is AdamAccumulate
    assert loaded.optimizer.accum_iters == 4
    assert int(loaded.optimizer.iterations) == 2


def test_loss_scaling_inside_is_saved(tmp_path):
    use_float("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = AccumModel.wrap(helpers.functional())
    model.compile(AdamAccumulate(accum_iters=2), "mse")
    inner = model.optimizer.inner_optimizer
    assert isinstance(inner, keras.optimizers.LossScaleOptimizer)
    model.optimizer.build(model.trainable_variables)
    inner.dynamic_scale.assign(64.0)
    config = model.optimizer.get_config()
    # Keras changes the config of a LossScaleOptimizer when it reads it.
    made = AdamAccumulate.from_config(copy.deepcopy(config))
    assert isinstance(made.inner_optimizer, keras.optimizers.LossScaleOptimizer)
    assert made.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    scaling = loaded.optimizer.inner_optimizer
    assert isinstance(scaling, keras.optimizers.LossScaleOptimizer)
    assert not hasattr(scaling.inner_optimizer, "inner_optimizer")
    assert float(scaling.dynamic_scale) == 64.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"accum_iters": 0}, "`accum_iters` must be an int >= 1"),
        ({"accum_iters": 1.5}, "`accum_iters` must be an int >= 1"),
        ({"accum_iters": True}, "`accum_iters` must be an int >= 1"),
        ({"decay": -0.5}, "`decay` must be a finite number >= 0"),
        ({"decay": None}, "`decay` must be a finite number >= 0"),
        ({"epsilon": -1}, "`epsilon` must be a finite number >= 0"),
        ({"nonfinite": "skip"}, "`nonfinite` must be one of"),
        (
            {"gradient_accumulation_steps": 2},
            "must not accumulate gradients itself",
        ),
    ],
)
def test_adam_accumulate_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"{message}.*Received: "):
        AdamAccumulate(**arguments)
