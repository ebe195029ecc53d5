"""Times several callables in turns, so that noise meets all of them alike."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

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


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(each) for name, each in seconds.items()}


def versions() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def print_versions() -> None:
    """Prints it."""
    print(
        "Keras {keras}, TensorFlow {tensorflow}, Python {python}, {machine}, "
        "{gpus} GPUs, {date}".format(**versions())
    )


def write_json(
    path: str | None, options: argparse.Namespace, results: Any
) -> None:
    """Writes versions, options and results into a file, if one is named."""
    if path is None:
        return
    content = {
        "versions": versions(),
        "options": vars(options),
        "results": results,
    }
    with open(path, "w") as file:
        json.dump(content, file, indent=1)
