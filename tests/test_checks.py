"""Bad arguments: the right exception, a message that helps, nothing changed.

https://github.com/huggingface/transformers/pull/32020
"""

import os
import subprocess
import sys

import helpers
import keras
import numpy as np
import pytest

import accum_model
from accum_model import AccumCallback
from accum_model import AccumModel
from accum_model import AccumOptimizer

BAD_STEPS = [0, -1, 1.5, "4", True, [4]]

STEPS_TAKERS = {
    "optimizer": lambda k: AccumOptimizer("sgd", k),
    "functional": lambda k: AccumModel(*helpers.tensors(), accum_steps=k),
    "wrap": lambda k: AccumModel.wrap(helpers.functional(), accum_steps=k),
    "subclass": lambda k: helpers.subclass_of(AccumModel)(accum_steps=k),
    "callback": lambda k: AccumCallback(accum_steps=k),
    "schedule": lambda k: AccumCallback(accum_steps={0: k}),
    "effective": lambda k: accum_model.effective_batch_size(8, k),
    "updates": lambda k: accum_model.updates_per_epoch(8, k),
}


@pytest.mark.parametrize("taker", STEPS_TAKERS)
def test_accum_steps_must_be_a_positive_int(taker):
    bad = BAD_STEPS if taker == "callback" else [*BAD_STEPS, None]
    for value in bad:
        with pytest.raises(ValueError) as caught:
            STEPS_TAKERS[taker](value)
        message = str(caught.value)
        assert "`accum_steps` must be an int >= 1. Received: " in message
        assert f"accum_steps={value!r}" in message
        assert f"(of type {type(value).__name__})" in message
        assert message.endswith(".")


@pytest.mark.parametrize("taker", STEPS_TAKERS)
def test_accum_steps_takes_numpy_integers(taker):
    """https://github.com/huggingface/transformers/pull/32020"""
    made = STEPS_TAKERS[taker](np.int64(4))
    if isinstance(made, (AccumModel, AccumOptimizer)):
        assert type(made.accum_steps) is int
        assert made.accum_steps == 4


@pytest.mark.parametrize("value", ["keep", "Flush", 1, True])
def test_remainder_must_be_known(value):
    for take in (
        lambda: AccumModel(*helpers.tensors(), remainder=value),
        lambda: AccumModel.wrap(helpers.functional(), 2, value),
        lambda: AccumCallback(2, value),
        lambda: accum_model.updates_per_epoch(8, 2, value),
    ):
        with pytest.raises(ValueError, match="`remainder` must be one of"):
            take()
    with pytest.raises(ValueError, match="`remainder` must be one of"):
        AccumModel(*helpers.tensors(), remainder=None)


@pytest.mark.parametrize("value", [2, -1, True, None, "1"])
def test_verbose_must_be_0_or_1(value):
    with pytest.raises(ValueError, match="`verbose` must be 0 or 1"):
        AccumCallback(2, verbose=value)


@pytest.mark.parametrize(
    "value, message",
    [
        ({1: 4}, "must say what holds from epoch 0"),
        ({}, "must say what holds from epoch 0"),
        ({0: 2, -1: 4}, "must be epochs"),
        ({0: 2, "1": 4}, "must be epochs"),
        ({0: 2, True: 4}, "must be epochs"),
        ({0: 2, 1: 0}, "`accum_steps` must be an int >= 1"),
    ],
)
def test_schedule_must_be_complete(value, message):
    with pytest.raises(ValueError, match=message):
        AccumCallback(accum_steps=value)


@pytest.mark.parametrize("value", [None, 3, object(), keras.optimizers.SGD])
def test_inner_optimizer_must_be_an_optimizer(value):
    with pytest.raises(TypeError, match="`inner_optimizer` must be a Keras"):
        AccumOptimizer(value)


@pytest.mark.parametrize("value", ["adamm", {"class_name": "Nothing"}, {}])
def test_inner_optimizer_must_be_known(value):
    with pytest.raises(ValueError, match="`inner_optimizer` must name a Keras"):
        AccumOptimizer(value)


def test_inner_optimizer_must_not_accumulate():
    inner = keras.optimizers.Adam(gradient_accumulation_steps=4)
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(gradient_accumulation_steps=4)
    )
    for value in (inner, scaled):
        with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
            AccumOptimizer(value, 2)
    for nested in (
        AccumOptimizer("sgd", 2),
        keras.optimizers.LossScaleOptimizer(AccumOptimizer("sgd", 2)),
    ):
        with pytest.raises(ValueError, match="cycles do not nest"):
            AccumOptimizer(nested, 2)
    model = AccumModel.wrap(helpers.functional(), 2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        model.compile(inner, "mse")
    assert not model.compiled
    plain = helpers.functional()
    plain.compile(inner, "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        AccumModel.wrap(plain, 2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        plain.fit(*helpers.rows(4), verbose=0, callbacks=[AccumCallback(2)])
    assert plain.optimizer is inner


def fake_tf_keras(base):
    """What a class of tf_keras looks like; the package need not be there."""
    return type("Thing", (base,), {"__module__": "tf_keras.src.something"})()


def test_tf_keras_is_refused_with_the_way_out():
    model = fake_tf_keras(object)
    for take in (
        lambda: AccumModel.wrap(model, 2),
        lambda: AccumCallback(2).set_model(model),
    ):
        with pytest.raises(TypeError, match="It is a model of tf_keras"):
            take()
    with pytest.raises(TypeError, match="It is an optimizer of tf_keras"):
        AccumOptimizer(fake_tf_keras(object))


@pytest.mark.parametrize("value", [None, "model", keras.layers.Dense])
def test_wrap_and_callback_take_only_models(value):
    with pytest.raises(TypeError, match="`model` must be a Keras 3 model"):
        AccumModel.wrap(value, 2)
    with pytest.raises(TypeError, match="`model` must be a Keras 3 model"):
        AccumCallback(2).set_model(value)


def test_wrap_refuses_what_accumulates_already():
    model = AccumModel.wrap(helpers.functional(), 2)
    with pytest.raises(ValueError, match="must not be an AccumModel already"):
        AccumModel.wrap(model, 2)


def test_callback_needs_a_compiled_model():
    model = helpers.functional()
    with pytest.raises(ValueError, match="`AccumCallback` needs a model"):
        AccumCallback(2).set_model(model)


def test_two_values_of_accum_steps_are_refused():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/21534"""
    data = helpers.rows(8)
    clash = "`accum_steps` must be the same wherever it is given"
    model = AccumModel.wrap(helpers.functional(), 2)
    with pytest.raises(ValueError, match=clash):
        model.compile(AccumOptimizer("sgd", 4), "mse")
    assert not model.compiled
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=clash):
        model.fit(*data, verbose=0, callbacks=[AccumCallback(4)])
    with pytest.raises(ValueError, match=clash):
        model.fit(*data, verbose=0, callbacks=[AccumCallback({0: 3, 1: 4})])
    assert model.accum_steps == 2
    plain = helpers.functional()
    plain.compile(AccumOptimizer("sgd", 2), "mse")
    with pytest.raises(ValueError, match=clash):
        AccumModel.wrap(plain, 4)
    with pytest.raises(ValueError, match=clash):
        plain.fit(*data, verbose=0, callbacks=[AccumCallback(4)])
    # The same value twice, and a schedule that has it, are no conflict.
    for steps in (2, {0: 2, 1: 4}):
        for each in (model, plain):
            each.fit(
                *data,
                batch_size=2,
                verbose=0,
                callbacks=[AccumCallback(steps, verbose=0)],
            )
            assert int(each.optimizer.iterations) in (2, 4)


def test_apply_checks_its_arguments_before_anything_changes():
    variable = keras.Variable(np.ones(2))
    optimizer = AccumOptimizer("sgd", 2)
    with pytest.raises(ValueError, match="`trainable_variables` must be given"):
        optimizer.apply([np.ones(2)])
    optimizer.apply([], [variable])
    assert not optimizer.built
    optimizer.build([variable])
    with pytest.raises(ValueError, match="one item per variable"):
        optimizer.apply([np.ones(2), np.ones(2)], [variable])
    for weight in (-1, np.nan):
        with pytest.raises(ValueError, match="`weight` must be a scalar >= 0"):
            optimizer.apply([np.ones(2)], [variable], weight=weight)
    with pytest.raises(ValueError, match="weight of shape"):
        optimizer.apply([np.ones(2)], [variable], weight=[1.0, 2.0])
    assert optimizer.num_micro_batches == optimizer.cycle_position == 0
    optimizer.apply([np.ones(2)])  # The variables of build.
    assert optimizer.num_micro_batches == 1


@pytest.mark.parametrize("value", [0, -8, 2.5, "8", True, None])
def test_batch_size_helpers_check_rows_and_replicas(value):
    for name, take in {
        "batch_size": lambda: accum_model.effective_batch_size(value),
        "num_replicas": lambda: accum_model.effective_batch_size(8, 1, value),
        "effective_batch_size": lambda: accum_model.accum_steps_for(value, 8),
        "num_batches": lambda: accum_model.updates_per_epoch(value, 8),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}` must be an int >= 1"):
            take()


@pytest.mark.parametrize(
    "backend, code",
    [
        ("jax", "import accum_model"),
        (
            "tensorflow",
            "import keras; keras.backend.backend = lambda: 'jax'; "
            "import accum_model",
        ),
    ],
)
def test_another_keras_backend_is_refused_at_import(backend, code):
    environment = dict(os.environ, KERAS_BACKEND=backend)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "accum_model needs Keras on the TensorFlow backend" in result.stderr
    assert "backend='jax'" in result.stderr
    assert "KERAS_BACKEND=tensorflow" in result.stderr


def test_data_without_rows_is_refused():
    model = AccumModel.wrap(helpers.functional(), 2)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="must have a batch dimension"):
        model.train_step(np.float64(1.0))
    with pytest.raises(ValueError, match="must hold a tensor"):
        model.train_step((None, None))
