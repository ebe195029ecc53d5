"""Checks of what a file says a cycle has collected.

A damaged file, or one of another model, is refused before anything changes.
"""

from collections.abc import Mapping

import keras
import numpy as np

from accum_model import checks


def saved_accum_steps(values: Mapping[str, np.ndarray]) -> int:
    """Checks the `accum_steps` that a file holds."""
    return _counter(values, "accum_steps", 1)


def saved_batches(values: Mapping[str, np.ndarray]) -> int:
    """Checks the number of micro-batches that a file holds."""
    return _counter(values, "num_micro_batches", 0)


def saved_cycle(values: Mapping[str, np.ndarray], prefix: str) -> None:
    """Checks where in its cycle a saved cycle is, and what it weighs."""
    length = _counter(values, f"{prefix}cycle_length", 1)
    position = _counter(values, f"{prefix}cycle_position", 0)
    weight = values.get(f"{prefix}weight_sum")
    if position >= length:
        raise ValueError(
            "The saved `cycle_position` must be less than `cycle_length`. "
            f"Received: cycle_position={position}, cycle_length={length}. The "
            "file is damaged."
        )
    if weight is None or weight.shape != () or weight.dtype.kind != "f":
        raise ValueError(
            "The saved `weight_sum` must be a number. "
            f"{checks.received('weight_sum', weight)} The file is damaged."
        )
    if weight < 0:
        raise ValueError(
            "The saved `weight_sum` must be >= 0. "
            f"{checks.received('weight_sum', weight)} The file is damaged."
        )


def _counter(values: Mapping[str, np.ndarray], name: str, least: int) -> int:
    value = values.get(name)
    is_int = (
        value is not None and value.shape == () and value.dtype.kind in "iu"
    )
    if not is_int or value < least:
        raise ValueError(
            f"The saved `{name}` must be an int >= {least}. "
            f"{checks.received(name, value)} The file is damaged, or not of an "
            "AccumOptimizer."
        )
    return int(value)


def saved_indices(indices: list[int], num_variables: int) -> None:
    """Checks which variables a saved cycle says it is for."""
    if any(not 0 <= index < num_variables for index in indices):
        raise ValueError(
            "A saved cycle must be for variables that the optimizer has. "
            f"Received: indices up to {max(indices)} for {num_variables} "
            "variables. The file is of another model."
        )


def saved_value(
    values: Mapping[str, np.ndarray], name: str, variable: keras.Variable
) -> np.ndarray:
    """Returns the saved value of `variable`; checks that it fits."""
    shape = values[name].shape if name in values else None
    if shape != tuple(variable.shape):
        raise ValueError(
            f"The saved value of `{variable.path}` must have the shape "
            f"{tuple(variable.shape)}. Received: shape={shape!r}. The file is "
            "of another model."
        )
    return values[name]
