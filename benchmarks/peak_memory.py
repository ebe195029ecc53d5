"""How much memory does a step take whose batch is cut into micro-batches?

Peak of the resident memory above its idle level, while `fit` trains a CNN of
six convolutions (32 to 128 filters) on images of 128x128x3 from an array. Each
figure comes from a process of its own: its idle level is taken after imports,
with model and data made; all that follows counts, tracing included.

    python -m benchmarks.peak_memory

Memory that the allocator of the C library keeps for later is no need of the
step. The processes run with one arena and give large blocks back when they are
freed (`ALLOCATOR`).
"""

import argparse
import os
import resource
import subprocess
import sys

import keras
import numpy as np

from accum_model import AccumModel
from benchmarks import _timing

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
SIDE = 128
BYTES_PER_MB = 10**6

UNCUT = "uncut"
CUT = "micro_batch"
CUT_BATCH_LOSS = "batch"
COLUMNS = {
    UNCUT: "plain Keras, uncut",
    CUT: "accum_model, cut",
    CUT_BATCH_LOSS: "accum_model, cut, batch loss",
}


def cnn() -> keras.Model:
    """Six convolutions, a pooling after every second one."""
    inputs = keras.Input((SIDE, SIDE, 3))
    hidden = inputs
    for filters in (32, 64, 128):
        for _ in range(2):
            hidden = keras.layers.Conv2D(
                filters, 3, padding="same", activation="relu"
            )(hidden)
        hidden = keras.layers.MaxPooling2D()(hidden)
    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


def peak(column: str, batch_size: int, options: argparse.Namespace) -> int:
    """Trains in this process; returns bytes of its peak above idle."""
    model = cnn()
    if column != UNCUT:
        model = AccumModel.wrap(
            model,
            micro_batch_size=options.micro_batch_size,
            loss_scope=column,
        )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=options.jit_compile,
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch_size, SIDE, SIDE, 3), dtype="float32")
    y = rng.integers(0, 10, (batch_size,)).astype("int32")
    idle = _resident()
    model.fit(x, y, batch_size, epochs=options.steps, shuffle=False, verbose=0)
    return _peak_resident() - idle


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak_resident():
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


def peak_of_child(column: str, batch_size: int, arguments: list[str]) -> float:
    """Trains in a new process; returns megabytes of its peak above idle."""
    command = [sys.executable, "-m", "benchmarks.peak_memory", *arguments]
    command += ["--point", column, str(batch_size)]
    done = subprocess.run(
        command,
        env={**os.environ, **ALLOCATOR},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stderr[-3000:]}"
        )
    return int(done.stdout.split()[-1]) / BYTES_PER_MB


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[64, 256, 512]
    )
    parser.add_argument("--max-uncut", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS))
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        column, batch_size = options.point
        print(peak(column, int(batch_size), options))
        return
    _timing.print_versions()
    print(
        f"micro-batches of {options.micro_batch_size}, {options.steps} steps, "
        f"jit_compile={options.jit_compile}; MB above idle"
    )
    sizes = options.batch_sizes
    print(f"{'batch':30}" + "".join(f"{size:9}" for size in sizes))
    data = [size * SIDE * SIDE * 3 * 4 / BYTES_PER_MB for size in sizes]
    print(f"{'data':30}" + "".join(f"{each:9.0f}" for each in data))
    for column in options.columns:
        print(f"{COLUMNS[column]:30}", end="", flush=True)
        for size in sizes:
            if column == UNCUT and size > options.max_uncut:
                print(f"{'-':>9}", end="")
                continue
            megabytes = peak_of_child(column, size, sys.argv[1:])
            print(f"{megabytes:9.0f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
