"""`accum_steps` that changes with the epoch."""


def value_at(schedule: dict[int, int], epoch: int) -> int:
    """The value of a `{epoch: accum_steps}` schedule that holds at `epoch`.

    Args:
        schedule: Values by the first epoch they hold at, with a key 0.
        epoch: int >= 0, counted from 0.

    Returns:
        The value of the largest key that is not after `epoch`.

    Example:
        >>> value_at({0: 2, 10: 8}, epoch=9)
        2
        >>> value_at({0: 2, 10: 8}, epoch=10)
        8
    """
    return schedule[max(start for start in schedule if start <= epoch)]
