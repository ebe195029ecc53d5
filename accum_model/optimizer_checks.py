"""Checks of optimizers, and of what is handed to them."""

from collections.abc import Mapping
from typing import Any

import keras

from accum_model import checks
from accum_model import optimizer_chain


def optimizer(name: str, value: Any) -> keras.optimizers.Optimizer:
    """Returns `value` as a Keras optimizer, made from a name or a config.

    Raises:
        TypeError: If `value` is no optimizer, name or config.
        ValueError: If the name or the config is not known, or if the
            optimizer accumulates gradients by itself.
    """
    if isinstance(value, (str, Mapping)):
        try:
            value = keras.optimizers.get(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"`{name}` must name a Keras optimizer or hold the config of "
                f"one. {checks.received(name, value)} Pass an instance, such "
                "as keras.optimizers.Adam(1e-3)."
            ) from error
    if not isinstance(value, keras.optimizers.Optimizer):
        way_out = "Pass a name, a config or an instance of a Keras optimizer."
        if checks.comes_from_tf_keras(value):
            way_out = (
                "It is an optimizer of tf_keras (Keras 2). Take the one of the "
                "same name in keras.optimizers (Keras 3)."
            )
        raise TypeError(
            f"`{name}` must be a Keras optimizer. "
            f"{checks.received(name, value)} {way_out}"
        )
    return value


def accumulates_once(name: str, value: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that accumulates by Keras's own option too."""
    for each in optimizer_chain.chain(value):
        steps = each.gradient_accumulation_steps
        if steps:
            raise ValueError(
                f"`{name}` must not accumulate gradients itself. Received: "
                f"gradient_accumulation_steps={steps!r} in an optimizer of "
                f"type {type(each).__name__}. Leave "
                "`gradient_accumulation_steps` out and pass "
                f"accum_steps={steps!r} instead."
            )


def scales_once(name: str, value: keras.optimizers.Optimizer | None) -> None:
    """Refuses two loss scales, of which the second divides for nothing."""
    num_scaling = sum(
        isinstance(each, keras.optimizers.LossScaleOptimizer)
        for each in optimizer_chain.chain(value)
    )
    if num_scaling > 1:
        raise ValueError(
            f"`{name}` must scale the loss once. Received: {num_scaling} "
            f"LossScaleOptimizers in an optimizer of type "
            f"{type(value).__name__}; Keras adds one under a mixed_float16 "
            "policy. Leave yours out, or pass auto_scale_loss=False to "
            "model.compile."
        )


def not_nested(name: str, value: keras.optimizers.Optimizer, cls: type) -> None:
    """Refuses an accumulating optimizer inside another one."""
    found = optimizer_chain.find(value, cls)
    if found is not None:
        raise ValueError(
            f"`{name}` must not be, or hold, an {type(found).__name__}, "
            "because cycles do not nest. Received: "
            f"{name} with accum_steps={found.accum_steps!r} inside. Pass "
            "its inner_optimizer and the product of both accum_steps."
        )


def same_number(grads: list, variables: list) -> None:
    """Raises unless there is one gradient per variable."""
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one item per variable. Received: "
            f"len(grads)={len(grads)} and {len(variables)} variables. Pass "
            "None for a variable without a gradient."
        )
