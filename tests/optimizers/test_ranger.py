"""Ranger: Lookahead around RAdam, published numbers, errors."""

import contract
import helpers
import numpy as np
import pytest
import reference
import tensorflow as tf

from accum_model import Lookahead
from accum_model import RAdam
from accum_model import Ranger


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "arguments", [{}, {"beta_2": 0.875, "weight_decay": 0.125}]
)
def test_ranger_matches_reference(arguments, sparse):
    start, _ = contract.scripted(1)
    contract.assert_matches_reference(
        Ranger(2**-6, **arguments),
        reference.lookahead(reference.radam(2**-6, **arguments), start, 6, 0.5),
        sparse=sparse,
    )


def test_ranger_is_lookahead_around_radam():
    optimizer = Ranger()
    assert isinstance(optimizer, Lookahead)
    assert type(optimizer.inner_optimizer) is RAdam
    expected = RAdam().get_config() | {"sync_period": 6, "slow_step_size": 0.5}
    config = optimizer.get_config()
    del expected["name"], config["name"]
    assert config == expected
    start, gradients = contract.scripted(13)
    helpers.assert_equal(
        contract.apply_all(optimizer, start, gradients),
        contract.apply_all(Lookahead(RAdam(), 6, 0.5), start, gradients),
    )


def test_ranger_single_update_is_radams():
    start, gradients = contract.scripted(5)
    helpers.assert_equal(
        contract.apply_all(Ranger(), start, gradients),
        contract.apply_all(RAdam(), start, gradients),
    )


# tensorflow/addons, tensorflow_addons/optimizers/tests/rectified_adam_test.py:
# weights after so many updates with constant gradients, to 2e-4.
ADDONS = {"beta_1": 0.95, "slow_step_size": 0.45}


def test_ranger_equals_published_numbers_dense():
    values = contract.apply_all(
        Ranger(1e-3, **ADDONS),
        np.array([1.0, 2.0, 3.0, 4.0]),
        [np.array([0.1, 0.2, 0.03, 0.04])] * 100,
    )
    expected = [0.993126, 1.992901, 2.993283, 3.993261]
    np.testing.assert_allclose(values[-1], expected, rtol=0, atol=2e-4)


def test_ranger_equals_published_numbers_sparse():
    gradient = tf.IndexedSlices(
        tf.constant([0.1, 0.04], "float64"), tf.constant([0, 3]), [4]
    )
    values = contract.apply_all(
        Ranger(1e-3, **ADDONS), np.array([1.0, 2.0, 3.0, 4.0]), [gradient] * 150
    )
    expected = [0.988156, 2.0, 3.0, 3.988291]
    np.testing.assert_allclose(values[-1], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sync_period": 0},
        {"sync_period": 1.5},
        {"slow_step_size": 0.0},
        {"slow_step_size": 2},
        {"total_steps": 10.5},
        {"warmup_proportion": -1},
    ],
)
def test_ranger_invalid_arguments(arguments):
    (name,) = arguments
    with pytest.raises(
        ValueError, match=f"`{name}` must be .*Received: {name}"
    ):
        Ranger(**arguments)
