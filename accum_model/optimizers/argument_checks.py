"""Checks of the optimizers' arguments, and the wording of their errors."""

import numbers
from typing import Any

from accum_model import checks


def sync_period(value: Any) -> int:
    """Checks updates between two moves of the slow weights."""
    return checks.positive_int(
        "sync_period", value, "It counts updates; the paper takes 5 or 10."
    )


def slow_step_size(value: Any) -> float:
    """Checks the share of the way that slow weights go."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(
            "`slow_step_size` must be a number in (0, 1]. "
            f"{checks.received('slow_step_size', value)} "
            "Pass 0.5 to go half of the way to the fast weights."
        )
    return float(value)


def num_updates(name: str, value: Any) -> int:
    """Checks a number of updates that may be 0."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < 0:
        raise ValueError(
            f"`{name}` must be an int >= 0. {checks.received(name, value)} "
            "It counts updates; pass 0 for no warm-up."
        )
    return int(value)


def proportion(name: str, value: Any) -> float:
    """Checks a share of a whole."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise ValueError(
            f"`{name}` must be a number in [0, 1]. "
            f"{checks.received(name, value)} "
            "Pass 0.1 for one tenth of the updates."
        )
    return float(value)


def decay_rate(name: str, value: Any) -> float:
    """Checks the decay rate of a moving average."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(
            f"`{name}` must be a number in [0, 1). "
            f"{checks.received(name, value)} "
            "Leave it out for the default."
        )
    return float(value)


def at_least(name: str, value: Any, least: float) -> float:
    """Checks a finite number that must not be less than `least`."""
    if not _is_number(value) or not least <= value < float("inf"):
        raise ValueError(
            f"`{name}` must be a finite number >= {least}. "
            f"{checks.received(name, value)} Leave it out for the default."
        )
    return float(value)


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
