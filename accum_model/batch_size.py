"""Arithmetic of batch sizes: rows, micro-batches, replicas, updates."""

from accum_model import checks


def effective_batch_size(
    batch_size: int, accum_steps: int = 1, num_replicas: int = 1
) -> int:
    """Rows per update.

    Args:
        batch_size: int >= 1, rows per micro-batch on one replica.
        accum_steps: int >= 1, micro-batches per update. Defaults to 1.
        num_replicas: int >= 1, devices that train in step. Defaults to 1.

    Returns:
        `batch_size * accum_steps * num_replicas`.

    Raises:
        ValueError: If an argument is not an int >= 1.

    Example:
        >>> effective_batch_size(8, accum_steps=4, num_replicas=2)
        64
    """
    return (
        _rows("batch_size", batch_size)
        * checks.accum_steps(accum_steps)
        * _replicas(num_replicas)
    )


def accum_steps_for(
    effective_batch_size: int, batch_size: int, num_replicas: int = 1
) -> int:
    """The `accum_steps` that makes an effective batch size.

    Args:
        effective_batch_size: int >= 1, rows per update.
        batch_size: int >= 1, rows per micro-batch on one replica.
        num_replicas: int >= 1, devices that train in step. Defaults to 1.

    Returns:
        int >= 1.

    Raises:
        ValueError: If an argument is not an int >= 1, or the result would not
            be a whole number.

    Example:
        >>> accum_steps_for(64, batch_size=8, num_replicas=2)
        4
    """
    rows = _rows("effective_batch_size", effective_batch_size)
    per_step = _rows("batch_size", batch_size) * _replicas(num_replicas)
    if rows % per_step:
        below = rows // per_step * per_step
        nearest = f"{below} or {below + per_step}" if below else f"{per_step}"
        raise ValueError(
            "`effective_batch_size` must be a multiple of batch_size x "
            "num_replicas. Received: "
            f"effective_batch_size={effective_batch_size!r}, "
            f"batch_size={batch_size!r}, num_replicas={num_replicas!r}. "
            f"The nearest multiples of {per_step}: {nearest}."
        )
    return rows // per_step


def updates_per_epoch(
    num_batches: int, accum_steps: int, remainder: str = "flush"
) -> int:
    """Updates made from a number of batches.

    Args:
        num_batches: int >= 1, batches of one epoch. With `"carry"` cycles run
            across epochs: pass the batches of all epochs for all updates.
        accum_steps: int >= 1, batches per update.
        remainder: `"flush"`, `"carry"` or `"drop"`. Defaults to `"flush"`.

    Returns:
        int: rounded up with `"flush"`, rounded down otherwise.

    Raises:
        ValueError: If a number is not an int >= 1 or `remainder` is unknown.

    Example:
        >>> updates_per_epoch(10, 4)
        3
        >>> updates_per_epoch(10, 4, remainder="drop")
        2
        >>> updates_per_epoch(2 * 10, 4, remainder="carry")
        5
    """
    num_batches = checks.positive_int(
        "num_batches", num_batches, "Pass the number of batches of an epoch."
    )
    accum_steps = checks.accum_steps(accum_steps)
    if checks.remainder(remainder) == "flush":
        return -(-num_batches // accum_steps)
    return num_batches // accum_steps


def _rows(name: str, value: int) -> int:
    return checks.positive_int(name, value, "Pass a number of rows.")


def _replicas(value: int) -> int:
    return checks.positive_int(
        "num_replicas", value, "Pass the number of devices, 1 for one."
    )
