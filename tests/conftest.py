"""One seed, float64 and a clean Keras for every test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import pytest
import tensorflow as tf

# Test workers share the cores; more threads each only get in the way.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}


@pytest.fixture(autouse=True)
def clean_keras():
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(params=MODES)
def mode(request):
    """Arguments of `compile` for each way Keras runs a step."""
    return MODES[request.param]
