"""Checks of how methods are called, where Keras or TensorFlow would be terse.

Static properties only: nothing is computed, and nothing has changed when one
of them raises.
"""

import numbers
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accum_model import checks

# Settings of models and callbacks, which no method of theirs takes.
SETTINGS = (
    "accum_steps",
    "remainder",
    "nonfinite",
    "accum_dtype",
    "gradient_transform",
    "micro_batch_size",
    "loss_scope",
)

# What `keras.Model(inputs, outputs)` knows. It ignores all else in silence.
_FUNCTIONAL_KEYWORDS = (
    "inputs",
    "outputs",
    "name",
    "trainable",
    "dtype",
    "autocast",
    "activity_regularizer",
)


def no_settings(method: str, keywords: Mapping[str, Any]) -> None:
    """Refuses settings of the model that were passed to one of its methods."""
    for name in SETTINGS:
        if name in keywords:
            raise TypeError(
                f"`{name}` is no argument of {method}. "
                f"{checks.received(name, keywords[name])} Pass it to "
                "AccumModel, AccumModel.wrap or AccumCallback."
            )


def model_positions(values: Sequence[Any]) -> None:
    """Refuses what is no input or output of a model made from tensors."""
    for value in values:
        if isinstance(value, keras.Model):
            raise TypeError(
                "`AccumModel` takes the tensors `inputs` and `outputs`, not a "
                f"model. {checks.received('model', value)} Call "
                "AccumModel.wrap(model, accum_steps=...) instead."
            )
        if isinstance(value, numbers.Number):
            raise TypeError(
                "`AccumModel` takes `inputs` and `outputs` by position, and "
                f"nothing else. {checks.received('argument', value)} Pass "
                "settings by name, as in accum_steps=4."
            )


def functional_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuses keywords that Keras would ignore."""
    for name, value in keywords.items():
        if name not in _FUNCTIONAL_KEYWORDS:
            raise TypeError(
                f"`{name}` is no argument of a model made from tensors. "
                f"{checks.received(name, value)} Pass one of "
                f"{(*SETTINGS, 'name', 'trainable')}."
            )


def optimizer_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuses keywords of others that were passed to an `AccumOptimizer`."""
    for name, value in keywords.items():
        way_out = (
            "Pass accum_steps, nonfinite, accum_dtype, gradient_transform or "
            "name; options such as clipnorm belong to the inner optimizer."
        )
        if name in SETTINGS:
            way_out = "Pass it to AccumModel or AccumCallback."
        raise TypeError(
            f"`{name}` is no argument of AccumOptimizer. "
            f"{checks.received(name, value)} {way_out}"
        )


def pairs(values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits what `apply_gradients` takes into gradients and variables."""
    grads, variables = [], []
    for value in values:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ValueError(
                "`grads_and_vars` must hold pairs (gradient, variable). "
                f"{checks.received('item', value)} Pass "
                "zip(gradients, variables), or call apply(gradients, "
                "variables)."
            )
        grads.append(value[0])
        variables.append(value[1])
    return grads, variables


def are_variables(values: Sequence[Any]) -> None:
    """Refuses anything but variables, such as gradients in their place."""
    for value in values:
        if not isinstance(value, (keras.Variable, tf.Variable)):
            raise TypeError(
                "`trainable_variables` must hold variables. "
                f"{checks.received('item', value)} Pass gradients first, then "
                "variables."
            )


def known_variables(
    variables: Sequence[keras.Variable], known: Sequence[keras.Variable]
) -> None:
    """Refuses variables that the optimizer was not built with.

    Keras does so when it updates, which is when a cycle has been collected.
    """
    ids = {id(variable) for variable in known}
    for variable in variables:
        if id(variable) not in ids:
            raise ValueError(
                "`trainable_variables` must be among the variables that the "
                "optimizer was built with. Received: "
                f"{_path(variable)!r}, not one of those {len(known)}. Call "
                "optimizer.build(all_variables) before the first call, or make "
                "a new optimizer; compile anew a model whose weights were "
                "frozen when it was compiled."
            )


def same_shapes(
    grads: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Refuses a gradient that does not fit its variable."""
    for gradient, variable in zip(grads, variables, strict=True):
        shape = getattr(gradient, "shape", None)
        if shape is None:  # None, or a number or list, which is converted.
            continue
        if not tf.TensorShape(shape).is_compatible_with(variable.shape):
            raise ValueError(
                "`grads` must hold one gradient of each variable's shape. "
                f"Received: shape {tuple(shape)} for `{_path(variable)}` of "
                f"shape {tuple(variable.shape)}. Pass gradients in the order "
                "of the variables."
            )


def _path(variable):
    # tf.Variable has none.
    return variable.path if hasattr(variable, "path") else variable.name
