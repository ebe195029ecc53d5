"""The learning rate through every nesting, for the callbacks that set it.

https://github.com/tensorflow/addons/issues/605
"""

import helpers
import keras
import numpy as np
import pytest
from conftest import use_float

from accum_model import AccumModel
from accum_model import AccumOptimizer
from accum_model import AdamAccumulate
from accum_model import Lookahead
from accum_model import RAdam
from accum_model import Ranger

LossScale = keras.optimizers.LossScaleOptimizer

NESTINGS = {
    "RAdam": lambda: RAdam(0.5, total_steps=100),
    "Ranger": lambda: Ranger(0.5),
    "AdamAccumulate": lambda: AdamAccumulate(0.5, accum_iters=2, decay=0.5),
    "Lookahead": lambda: Lookahead(keras.optimizers.SGD(0.5)),
    "Accum(Ranger)": lambda: AccumOptimizer(Ranger(0.5), 2),
    "Accum(LossScale(Ranger))": lambda: AccumOptimizer(
        LossScale(Ranger(0.5)), 2
    ),
    "Lookahead(Accum)": lambda: Lookahead(
        AccumOptimizer(keras.optimizers.SGD(0.5), 2)
    ),
    "LossScale(Lookahead)": lambda: LossScale(
        Lookahead(keras.optimizers.SGD(0.5))
    ),
    "Lookahead(LossScale)": lambda: Lookahead(
        LossScale(keras.optimizers.SGD(0.5))
    ),
    "Accum(Lookahead(LossScale))": lambda: AccumOptimizer(
        Lookahead(LossScale(keras.optimizers.SGD(0.5))), 2
    ),
}


def innermost(optimizer):
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


@pytest.mark.parametrize("name", NESTINGS)
def test_rate_can_be_read_and_set(name):
    optimizer = NESTINGS[name]()
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    assert float(innermost(optimizer).learning_rate) == 0.25


@pytest.mark.parametrize("name", NESTINGS)
def test_callbacks_set_the_rate(name):
    use_float("float32")
    model = helpers.functional()
    model.compile(NESTINGS[name](), "mse", run_eagerly=True)
    rates = []
    history = model.fit(
        *helpers.rows(8),
        batch_size=4,
        epochs=4,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: 0.125 if epoch == 0 else rate
            ),
            # No loss is 1000 better than another.
            keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=1, min_delta=1000.0
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: rates.append(
                    float(innermost(model.optimizer).learning_rate)
                )
            ),
        ],
    ).history
    np.testing.assert_array_equal(rates, [0.125, 0.125, 0.0625, 0.03125])
    assert len(history["learning_rate"]) == 4


def test_rate_of_an_accumulating_model_reaches_a_warmed_optimizer():
    model = AccumModel.wrap(helpers.functional(), 2)
    optimizer = RAdam(0.5, total_steps=4, warmup_proportion=1.0)
    model.compile(optimizer, "mse")
    model.train_on_batch(*helpers.rows(4))
    model.optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("name", ["RAdam", "Ranger", "AdamAccumulate"])
def test_rate_in_use_does_not_outlive_an_update_that_fails(name):
    optimizer = NESTINGS[name]()
    variable = keras.Variable([1.0, 2.0])
    with pytest.raises(Exception):  # noqa: B017
        for _ in range(2):
            optimizer.apply([np.ones((3, 3, 3))], [variable])
    assert float(optimizer.learning_rate) == 0.5
