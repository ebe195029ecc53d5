"""One seed, float64 and a clean Keras for every test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import hypothesis
import keras
import pytest
import tensorflow as tf

# Test workers share the cores; more threads each only get in the way.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

# For tests of several replicas, which are devices of their own to TensorFlow.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)

# Here, because `--hypothesis-profile` looks for them before tests are imported.
hypothesis.settings.register_profile(
    "short", max_examples=20, deadline=None, derandomize=True
)
hypothesis.settings.register_profile("long", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("short")

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}


# Marked `core`: what would break first on another Keras or Python.
CORE = {
    "test_interruptions.py",
    "test_keras_compat.py",
    "test_model.py",
    "test_optimizer.py",
    "test_public_api.py",
    "test_resume.py",
    "test_serialization.py",
    "test_wrong_calls.py",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in CORE and "slow" not in item.keywords:
            item.add_marker("core")


@pytest.fixture(autouse=True)
def clean_keras():
    use_float("float64")
    keras.utils.set_random_seed(0)
    yield
    use_float("float32")


def use_float(dtype):
    """Keras remembers the policy it made of the first `floatx` it saw."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@pytest.fixture(params=MODES)
def mode(request):
    """Arguments of `compile` for each way Keras runs a step."""
    return MODES[request.param]
