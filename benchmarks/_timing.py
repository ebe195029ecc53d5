"""Times several callables in turns, so that noise meets all of them alike."""

import platform
import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of each callable, one call of each per round."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def print_table(seconds: dict[str, list[float]], reference: str) -> None:
    """Prints medians in milliseconds, and their ratios to one of them."""
    base = statistics.median(seconds[reference])
    print(f"{'':36}{'ms':>9}{'ratio':>8}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:36}{1e3 * median:9.2f}{median / base:8.2f}")


def print_versions() -> None:
    """Prints what the figures depend on."""
    print(
        f"Keras {keras.__version__}, TensorFlow {tf.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, "
        f"{len(tf.config.list_physical_devices('GPU'))} GPUs"
    )
