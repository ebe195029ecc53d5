"""What every optimizer of the package must satisfy."""

import copy

import helpers
import keras
import numpy as np
import tensorflow as tf

from accum_model import AdamAccumulate
from accum_model import Lookahead
from accum_model import RAdam
from accum_model import Ranger

# Made small enough for every part of a rule to act within a few updates; all
# arguments are binary fractions.
OPTIMIZERS = {
    "RAdam": lambda **kw: RAdam(2**-4, 0.875, 0.875, **kw),
    "RAdam with warm-up": lambda **kw: RAdam(
        2**-4, 0.875, 0.875, total_steps=8, warmup_proportion=0.25, **kw
    ),
    "Lookahead": lambda **kw: Lookahead(
        keras.optimizers.SGD(0.125, momentum=0.5, **kw), 2
    ),
    "Ranger": lambda **kw: Ranger(2**-4, 0.875, 0.875, sync_period=2, **kw),
    "AdamAccumulate": lambda **kw: AdamAccumulate(2**-4, decay=0.25, **kw),
}

# The arguments of every Keras optimizer.
OPTIONS = {
    "weight_decay": {"weight_decay": 0.25},
    "clipnorm": {"clipnorm": 0.125},
    "clipvalue": {"clipvalue": 0.125},
    "global_clipnorm": {"global_clipnorm": 0.125},
    "use_ema": {
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 3,
    },
    "loss_scale_factor": {"loss_scale_factor": 8.0},
}


def scripted(num_updates, shape=(4, 2), seed=3):
    """Start values and gradients, of normal size."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.normal(size=(num_updates, *shape))


def apply_all(optimizer, start, gradients):
    """The values of a variable after each update; gradients as they are."""
    variable = keras.Variable(start)
    values = []
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
        values.append(variable.numpy())
    return np.array(values)


def as_slices(gradient):
    """Row 1 twice, row 3 once, and the dense gradient they stand for."""
    half = gradient[1] * 0.25
    values = np.stack([half, gradient[3], gradient[1] - half])
    dense = np.zeros_like(gradient)
    dense[[1, 3]] = gradient[[1, 3]]
    slices = tf.IndexedSlices(
        tf.constant(values),
        tf.constant([1, 3, 1]),
        tf.constant(gradient.shape),
    )
    return slices, dense


def assert_matches_reference(optimizer, step, atol=helpers.EXACT, sparse=False):
    """100 scripted updates of the optimizer and of its twin."""
    start, gradients = scripted(100)
    given = list(gradients)
    if sparse:
        given, gradients = zip(*map(as_slices, gradients), strict=True)
    values = apply_all(optimizer, start, given)
    expected, w = [], start
    for gradient in gradients:
        w = step(w, gradient)
        expected.append(w)
    np.testing.assert_allclose(values, expected, rtol=0, atol=atol)


def assert_config_round_trip(optimizer):
    """The same arguments, and the same update."""
    config = optimizer.get_config()
    for made in (
        # Keras changes a config that holds a schedule when it reads it.
        type(optimizer).from_config(copy.deepcopy(config)),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        keras.optimizers.get(keras.optimizers.serialize(optimizer)),
    ):
        assert type(made) is type(optimizer)
        assert made.get_config() == config
    start, gradients = scripted(4)
    helpers.assert_equal(
        apply_all(made, start, gradients),
        apply_all(optimizer, start, gradients),
    )
