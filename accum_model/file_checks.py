"""Checks of what a file says a cycle has collected.

A damaged file, or one of another model, is refused before anything changes.
"""

from collections.abc import Mapping

import keras
import numpy as np

from accum_model import checks


def saved_accum_steps(values: Mapping[str, np.ndarray]) -> int:
    """Checks the `accum_steps` that a file holds."""
    value = values.get("accum_steps")
    if value is None or value.shape != () or not value >= 1:
        raise ValueError(
            "The saved `accum_steps` must be an int >= 1. "
            f"{checks.received('accum_steps', value)} The file is damaged, or "
            "not of an AccumOptimizer."
        )
    return checks.accum_steps(value.item())


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
