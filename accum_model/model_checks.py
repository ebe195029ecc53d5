"""Checks of models, callbacks and strategies, and of what they hold."""

from typing import Any

import keras
import tensorflow as tf

from accum_model import checks


def keras_model(name: str, value: Any) -> keras.Model:
    """Returns `value`; raises unless it is a model of Keras 3."""
    if isinstance(value, keras.Model):
        return value
    way_out = "Pass an instance of keras.Model."
    if checks.comes_from_tf_keras(value):
        way_out = (
            "It is a model of tf_keras (Keras 2). Build it with keras (Keras "
            "3) instead; unset TF_USE_LEGACY_KERAS if tf.keras is used."
        )
    raise TypeError(
        f"`{name}` must be a Keras 3 model. {checks.received(name, value)} "
        f"{way_out}"
    )


def compiled(model: keras.Model) -> None:
    """Raises unless `model` was compiled with an optimizer."""
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "`AccumCallback` needs a model that is compiled with an optimizer. "
            f"Received: model={model.name!r} (of type {type(model).__name__}), "
            "not compiled. Call model.compile(optimizer, loss) first."
        )


def strategy(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns `strategy`; raises for those whose replicas keep no copies."""
    refused = (
        tf.distribute.ParameterServerStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    )
    if isinstance(strategy, refused):
        raise ValueError(
            "`strategy` must give each replica a copy of the variables, which "
            "all of them update together. Received: "
            f"{type(strategy).__name__}. Use tf.distribute.MirroredStrategy "
            "on one machine, or tf.distribute.MultiWorkerMirroredStrategy on "
            "several."
        )
    return strategy


def not_wrapped(value: keras.Model, cls: type) -> None:
    """Refuses to wrap a model that accumulates already."""
    if isinstance(value, cls):
        raise ValueError(
            f"`model` must not be an {cls.__name__} already. Received: "
            f"model={value.name!r} with accum_steps={value.accum_steps!r}. "
            "Set model.accum_steps instead."
        )


def same_accum_steps(first: str, one: int, second: str, other: int) -> None:
    """Raises if `accum_steps` was given twice with different values."""
    if one != other:
        raise ValueError(
            "`accum_steps` must be the same wherever it is given. Received: "
            f"accum_steps={one!r} ({first}) and accum_steps={other!r} "
            f"({second}). Leave it out in one of the two places."
        )


def options_in_one_place(first: str, second: str, options: dict) -> None:
    """Refuses options for an optimizer that has its own."""
    given = {
        name: value for name, value in options.items() if value is not None
    }
    if given:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"Options of {first} must not be given when {second} is there: "
            f"{', '.join(f'`{name}`' for name in given)}. Received: {listed} "
            f"({first}). Pass them to {second}."
        )


def only_one(callbacks: list, cls: type) -> None:
    """Refuses two callbacks that would both end cycles."""
    found = [item for item in callbacks if isinstance(item, cls)]
    if len(found) > 1:
        raise ValueError(
            "The list of callbacks must hold one `AccumCallback` only. "
            f"Received: {len(found)} of them. Leave one out."
        )


def not_in_use(is_in_use: bool, callback: keras.callbacks.Callback) -> None:
    """Refuses a callback that an outer `fit` is using."""
    if is_in_use:
        name = type(callback).__name__
        raise RuntimeError(
            f"`{name}` must serve one fit at a time. Received: the same object "
            "inside a fit that has not ended. Pass another one, such as "
            f"{name}()."
        )
