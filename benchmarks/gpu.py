"""What do time and memory come to on a GPU, and does "auto" fit it?

ResNet-50 on 224x224 images and a transformer, in mixed_float16 and in bfloat16:
microseconds per row and the allocator's peak for the batch in one piece, for
Keras's own accumulation and for this package; then the size that
`micro_batch_size="auto"` finds for a batch that does not fit. Without a GPU it
says so and does nothing.

    python -m benchmarks.gpu

A part that would begin after --minutes is left out and named.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from accum_model import AccumModel
from benchmarks import _cases
from benchmarks import _columns
from benchmarks import _timing

COLUMNS = (
    _columns.UNCUT,
    _columns.BUILT_IN,
    _columns.ACROSS,
    _columns.CUT,
    _columns.CUT_BATCH_LOSS,
)
POLICIES = ("mixed_float16", "mixed_bfloat16")
BYTES_PER_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Part:
    """A model to be measured.

    Attributes:
        case: The model and its data.
        batch_size: Rows per update.
        micro_batch_size: Rows at a time.
        too_many: Rows of a batch that is not expected to fit.
    """

    case: _cases.Case
    batch_size: int
    micro_batch_size: int
    too_many: int


def _resnet():
    return keras.applications.ResNet50(
        weights=None, classes=_cases.NUM_CLASSES, classifier_activation=None
    )


PARTS = {
    "ResNet-50": Part(
        _cases.Case(_resnet, _cases.normal(224, 224, 3)), 128, 16, 4096
    ),
    "transformer": Part(_cases.CASES["transformer"], 1024, 64, 65536),
}


def measure(part: Part, rounds: int, device: str | None) -> dict[str, dict]:
    """Seconds per update and peak bytes, one column in memory at a time.

    Args:
        part: What to measure.
        rounds: Updates that are timed.
        device: Name of the device for its allocator's peak, or None.
    """
    settings = _columns.Settings(part.batch_size, part.micro_batch_size)
    results = {}
    for name in COLUMNS:
        if device is not None:
            tf.config.experimental.reset_memory_stats(device)
        try:
            update = _columns.COLUMNS[name](part.case, settings).update
            seconds = _timing.interleaved({name: update}, rounds)[name]
        except tf.errors.ResourceExhaustedError:
            results[name] = {"seconds": None, "peak": None}
        else:
            results[name] = {"seconds": seconds, "peak": _peak(device)}
        update = None
        keras.backend.clear_session()
        gc.collect()
    return results


def found_size(case: _cases.Case, num_rows: int) -> int:
    """The size that "auto" ends with for a batch of `num_rows`."""
    model = AccumModel.wrap(case.model(), micro_batch_size="auto")
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    # The same few rows over and over.
    x, y = (each[np.arange(num_rows) % 8] for each in case.data(8))
    with tf.device("CPU"):
        data = tf.data.Dataset.from_tensors((x, y))
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    return model.cutting.rows_in_use


def _peak(device):
    if device is None:
        return None
    return tf.config.experimental.get_memory_info(device)["peak"]


def _print_part(results, batch_size):
    for name, each in results.items():
        time_per_row, peak = "does not fit", ""
        if each["seconds"] is not None:
            median = sorted(each["seconds"])[len(each["seconds"]) // 2]
            time_per_row = f"{1e6 * median / batch_size:.1f}"
        if each["peak"] is not None:
            peak = f"{each['peak'] / BYTES_PER_GB:.2f}"
        print(f"  {name:30}{time_per_row:>12}{peak:>9}", flush=True)


def measure_all(
    parts: dict[str, Part],
    policies: tuple[str, ...],
    options: argparse.Namespace,
    device: str | None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict]:
    """Prints and returns all figures, as far as there is time."""
    begin, results = clock(), {}
    for name, part in parts.items():
        for policy in policies:
            title = f"{name}, {policy}"
            if clock() - begin > 60 * options.minutes:
                print(f"\n{title}: left out, no time", flush=True)
                continue
            before = keras.config.dtype_policy().name
            keras.config.set_dtype_policy(policy)
            try:
                print(f"\n{title:32}{'us/row':>12}{'GB':>9}")
                figures = measure(part, options.rounds, device)
                _print_part(figures, part.batch_size)
                size = found_size(part.case, part.too_many)
                print(f"  auto, of {part.too_many} rows: {size}", flush=True)
            finally:
                keras.config.set_dtype_policy(before)
            results[title] = {"columns": figures, "auto": size}
    return results


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables, or why there are none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(PARTS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument(
        "--on-cpu",
        action="store_true",
        help="measure a tiny model on the CPU, to try this file out",
    )
    parser.add_argument("--json", help="file to write all figures to")
    options = parser.parse_args(arguments)
    _timing.print_versions()
    parts = {name: PARTS[name] for name in options.models}
    device = "GPU:0"
    if options.on_cpu:
        device, small = None, _cases.CASES["small MLP"]
        parts = {"small MLP": Part(small, 16, 4, 32)}
    elif not tf.config.list_physical_devices("GPU"):
        print("TensorFlow sees no GPU: there is nothing to measure.")
        return
    results = measure_all(parts, tuple(options.policies), options, device)
    _timing.write_json(options.json, options, results)


if __name__ == "__main__":
    main()
