"""RAdam: the rule, its thresholds, warm-up, published numbers, errors."""

import contract
import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

from accum_model import RAdam

VARIANTS = {
    "defaults": {},
    "amsgrad": {"amsgrad": True, "beta_2": 0.875},
    "threshold 4": {"sma_threshold": 4, "beta_2": 0.9},
    "never rectified": {"beta_2": 0.5, "sma_threshold": 4},
    "just not rectified": {"beta_2": 0.6, "sma_threshold": 4},
    "no early steps": {"degenerate_to_sgd": False, "weight_decay": 0.125},
    "weight decay": {"weight_decay": 0.125},
    "warm-up": {"total_steps": 60, "min_learning_rate": 2**-9},
    "warm-up only": {"total_steps": 100, "warmup_proportion": 1.0},
    "decay only": {
        "total_steps": 60,
        "warmup_proportion": 0.0,
        "weight_decay": 0.125,
    },
    "fractional warm-up": {"total_steps": 7, "warmup_proportion": 0.3},
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", VARIANTS)
def test_radam_matches_reference(name, sparse):
    arguments = {"learning_rate": 2**-6, **VARIANTS[name]}
    contract.assert_matches_reference(
        RAdam(**arguments), reference.radam(**arguments), sparse=sparse
    )


@pytest.mark.parametrize("beta_2", [0.999, 0.9])
@pytest.mark.parametrize("threshold", [4, 5])
def test_radam_first_rectified_update(beta_2, threshold):
    """https://github.com/taki0112/RAdam-Tensorflow/issues/2"""
    start, gradients = contract.scripted(10)
    arguments = {
        "learning_rate": 2**-6,
        "beta_2": beta_2,
        "sma_threshold": threshold,
    }
    values = contract.apply_all(
        RAdam(degenerate_to_sgd=False, **arguments), start, gradients
    )
    first = next(
        n for n, value in enumerate(values, 1) if np.any(value - start)
    )
    rho_inf = 2 / (1 - beta_2) - 1
    lengths = [
        rho_inf - 2 * t * beta_2**t / (1 - beta_2**t) for t in range(1, 11)
    ]
    assert first == 1 + next(
        n for n, length in enumerate(lengths) if length >= threshold
    )
    if (beta_2, threshold) == (0.999, 5):
        assert first == 6


def test_radam_single_update_is_a_step_of_momentum():
    values = contract.apply_all(
        RAdam(0.5), np.array([1.0, 2.0]), [np.array([0.25, -1.0])]
    )
    np.testing.assert_allclose(values, [[0.875, 2.5]], rtol=1e-15)


def test_radam_without_early_steps_is_finite_on_a_steep_loss():
    """No update before the sixth, and then a bounded one.

    The gradient of 1e10 w^2 / 2: steps of momentum would be 1e7 wide.
    """
    for degenerate, is_wild in ((True, True), (False, False)):
        variable = keras.Variable(np.array([1.0]))
        optimizer = RAdam(1e-3, degenerate_to_sgd=degenerate)
        largest = 0.0
        for _ in range(20):
            optimizer.apply([1e10 * variable.numpy()], [variable])
            largest = max(largest, abs(variable.numpy()[0]))
        assert (largest > 1e6) == is_wild
        assert np.isfinite(variable.numpy()).all()


# tensorflow/addons, tensorflow_addons/optimizers/tests/rectified_adam_test.py:
# constant gradients, and weights after so many updates, to 2e-4 (they were
# computed in float32 and by an older rule of the first updates).
ADDONS = {
    "plain": (100, {}, [0.985769, 1.985269, 2.986119, 3.986068]),
    "amsgrad": (
        100,
        {"amsgrad": True},
        [0.985769, 1.985269, 2.986119, 3.986068],
    ),
    "weight decay": (
        100,
        {"weight_decay": 0.01},
        [0.984775, 1.983276, 2.983125, 3.982076],
    ),
    "warm-up": (
        100,
        {"total_steps": 100, "min_learning_rate": 1e-5},
        [0.994062, 1.993912, 2.994167, 3.994152],
    ),
}


@pytest.mark.parametrize("name", ADDONS)
def test_radam_equals_published_numbers_dense(name):
    num_updates, arguments, expected = ADDONS[name]
    gradient = np.array([0.1, 0.2, 0.03, 0.04])
    values = contract.apply_all(
        RAdam(1e-3, **arguments),
        np.array([1.0, 2.0, 3.0, 4.0]),
        [gradient] * num_updates,
    )
    np.testing.assert_allclose(values[-1], expected, rtol=0, atol=2e-4)


# The same file. Rows that have no gradient stay where they are there, even
# with weight decay; here sparse gradients equal dense ones.
ADDONS_SPARSE = {
    "plain": ({}, [0.959333, 3.959632], [2.0, 3.0]),
    "amsgrad": ({"amsgrad": True}, [0.959333, 3.959632], [2.0, 3.0]),
    "weight decay": (
        {"weight_decay": 0.01},
        [0.957368, 3.951673],
        [2.0 * (1 - 1e-5) ** 200, 3.0 * (1 - 1e-5) ** 200],
    ),
    "warm-up": (
        {"total_steps": 200, "min_learning_rate": 1e-5},
        [0.982629, 3.982674],
        [2.0, 3.0],
    ),
}


@pytest.mark.parametrize("name", ADDONS_SPARSE)
def test_radam_equals_published_numbers_sparse(name):
    arguments, touched, untouched = ADDONS_SPARSE[name]
    gradient = tf.IndexedSlices(
        tf.constant([0.1, 0.04], "float64"), tf.constant([0, 3]), [4]
    )
    values = contract.apply_all(
        RAdam(1e-3, **arguments),
        np.array([1.0, 2.0, 3.0, 4.0]),
        [gradient] * 200,
    )
    np.testing.assert_allclose(values[-1][[0, 3]], touched, rtol=0, atol=2e-4)
    np.testing.assert_allclose(values[-1][[1, 2]], untouched, rtol=1e-7)


# torch.optim.RAdam of PyTorch 2.13.0 (CPU, float64), lr=2**-5,
# betas=(0.875, beta_2), eps=0, decoupled_weight_decay=True, 20 updates.
TORCH = [
    (0.999, 0, [0.9243907531950066, -2.3822158830511846, 3.113727566935901]),
    (0.875, 0, [0.918281330806628, -2.6391043178153133, 3.3584465145500753]),
    (
        0.999,
        0.125,
        [0.8542547849658181, -2.2079557840005073, 2.8820435997301335],
    ),
    (
        0.875,
        0.125,
        [0.8484666415064537, -2.4590453425202137, 3.1212123135871708],
    ),
]


@pytest.mark.parametrize("beta_2, weight_decay, expected", TORCH)
def test_radam_equals_pytorch(beta_2, weight_decay, expected):
    t = np.arange(20.0)
    gradients = np.stack(
        [np.sin(t + 1), 2 + np.cos(3 * t), -0.25 * (t + 1)], axis=-1
    )
    values = contract.apply_all(
        RAdam(2**-5, 0.875, beta_2, epsilon=0, weight_decay=weight_decay),
        np.array([1.0, -2.0, 3.0]),
        gradients,
    )
    np.testing.assert_allclose(values[-1], expected, rtol=0, atol=1e-12)


def test_radam_weight_decay_uses_the_rate_in_use_and_can_be_excluded():
    optimizer = RAdam(0.5, weight_decay=0.5, total_steps=8)
    kept, decayed = (
        keras.Variable(np.array([1.0]), name=name)
        for name in ("bias", "kernel")
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.warmup_proportion = 0.5
    for number in range(1, 5):
        before = decayed.numpy()
        optimizer.apply([np.zeros(1), np.zeros(1)], [kept, decayed])
        rate = 0.5 * number / 4
        np.testing.assert_allclose(decayed.numpy(), before * (1 - 0.5 * rate))
        assert float(optimizer.learning_rate) == 0.5
    np.testing.assert_array_equal(kept.numpy(), [1.0])


def test_radam_counts_iterations_in_float64_for_half_precision():
    """A count in bfloat16 would stand still at 256."""
    variable = keras.Variable(np.zeros(2), dtype="bfloat16")
    optimizer = RAdam(2**-6, total_steps=1024, warmup_proportion=1.0)
    optimizer.build([variable])
    optimizer.iterations.assign(1000)
    optimizer.apply([-np.ones(2, "float32")], [variable])
    step = variable.numpy().astype("float64")
    rate = 2**-6 * 1001 / 1024
    # One update from moments of zero: the bias is all but gone.
    t = 1001
    rho_inf, power = 1999, 0.999**t
    rho = rho_inf - 2 * t * power / (1 - power)
    r = np.sqrt(
        (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    )
    expected = rate * r * 0.1 / np.sqrt(0.001 / (1 - power))
    np.testing.assert_allclose(step, expected, rtol=0.05)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"beta_1": 1.0}, r"`beta_1` must be a number in \[0, 1\)"),
        ({"beta_2": -0.1}, r"`beta_2` must be a number in \[0, 1\)"),
        ({"beta_2": True}, r"`beta_2` must be a number in \[0, 1\)"),
        ({"epsilon": -1e-7}, "`epsilon` must be a finite number >= 0"),
        ({"sma_threshold": 3.9}, "`sma_threshold` must be .* >= 4"),
        ({"total_steps": 10.5}, "`total_steps` must be an int >= 0"),
        ({"total_steps": -1}, "`total_steps` must be an int >= 0"),
        ({"total_steps": True}, "`total_steps` must be an int >= 0"),
        ({"warmup_proportion": 1.5}, r"must be a number in \[0, 1\]"),
        ({"warmup_proportion": -0.1}, r"must be a number in \[0, 1\]"),
        ({"warmup_proportion": float("nan")}, r"a number in \[0, 1\]"),
        ({"min_learning_rate": -1.0}, "`min_learning_rate` must be"),
        ({"min_learning_rate": "0"}, "`min_learning_rate` must be"),
    ],
)
def test_radam_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"{message}.*Received: "):
        RAdam(**arguments)


def test_radam_takes_numpy_numbers():
    optimizer = RAdam(total_steps=np.int64(4), warmup_proportion=np.float32(0))
    contract.assert_config_round_trip(optimizer)
    assert type(optimizer.get_config()["total_steps"]) is int


def test_radam_refuses_gradients_without_their_variables():
    with pytest.raises(ValueError, match="`grads` must hold one item per"):
        RAdam().apply([np.ones(1)], [keras.Variable([1.0])] * 2)
    with pytest.raises(ValueError, match="must already be built"):
        RAdam().apply([np.ones(1)])
