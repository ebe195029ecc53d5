"""How much memory does an update take, by each way to a large batch?

Peak of the resident memory above its idle level, while `fit` trains a CNN of
six convolutions (32 to 128 filters) on images of 128x128x3: in one step from an
array, across steps on one micro-batch over and over. Each figure comes from a
process of its own: its idle level is taken after imports, with model and data
made; all that follows counts, tracing included.

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
import tensorflow as tf

from accum_model import AccumModel
from benchmarks import _timing

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
SIDE = 128
BYTES_PER_MB = 10**6

UNCUT = "uncut"
BUILT_IN = "built_in"
ACROSS = "across"
CUT = "micro_batch"
CUT_BATCH_LOSS = "batch"
COLUMNS = {
    UNCUT: "plain Keras, large batch",
    BUILT_IN: "Keras's built-in accumulation",
    ACROSS: "across steps",
    CUT: "in one step",
    CUT_BATCH_LOSS: "in one step, batch loss",
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


def _compiled(column, batch_size, options):
    """The model of a column, and the rows that one call of it is given."""
    model, rows, adam = cnn(), batch_size, {}
    num_parts = batch_size // options.micro_batch_size
    if column == BUILT_IN:
        rows = options.micro_batch_size
        adam = {"gradient_accumulation_steps": num_parts}
    elif column == ACROSS:
        rows = options.micro_batch_size
        model = AccumModel.wrap(model, accum_steps=num_parts)
    elif column != UNCUT:
        model = AccumModel.wrap(
            model,
            micro_batch_size=options.micro_batch_size,
            loss_scope=column,
        )
    model.compile(
        keras.optimizers.Adam(**adam),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=options.jit_compile,
    )
    return model, rows


def peak(column: str, batch_size: int, options: argparse.Namespace) -> int:
    """Trains in this process; returns bytes of its peak above idle."""
    model, rows = _compiled(column, batch_size, options)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, SIDE, SIDE, 3), dtype="float32")
    y = rng.integers(0, 10, (rows,)).astype("int32")
    data, num_steps = (x, y, rows), None
    if rows != batch_size:
        # The same rows each time: what grows with the batch is then not data.
        num_steps = batch_size // rows
        data = (tf.data.Dataset.from_tensors((x, y)).repeat(),)
    idle = _resident()
    model.fit(
        *data,
        steps_per_epoch=num_steps,
        epochs=options.steps,
        shuffle=False,
        verbose=0,
    )
    return _peak_resident() - idle


def buffer_bytes(column: str, options: argparse.Namespace) -> tuple[int, int]:
    """Bytes that stay between steps beyond plain Keras, and parameters."""
    sizes = []
    for each in (UNCUT, column):
        model, _ = _compiled(each, 2 * options.micro_batch_size, options)
        model.optimizer.build(model.trainable_variables)
        sizes.append(
            sum(
                v.value.dtype.size * int(np.prod(v.shape))
                for v in model.optimizer.variables
                if v.shape != ()  # Counters.
            )
        )
    return sizes[1] - sizes[0], model.count_params()


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


def main(arguments: list[str] | None = None) -> None:
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
    parser.add_argument("--json", help="file to write all figures to")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
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
    results = {}
    for column in options.columns:
        print(f"{COLUMNS[column]:30}", end="", flush=True)
        results[column] = {}
        for size in sizes:
            if column == UNCUT and size > options.max_uncut:
                print(f"{'-':>9}", end="")
                continue
            megabytes = peak_of_child(column, size, _for_child(options))
            results[column][size] = megabytes
            print(f"{megabytes:9.0f}", end="", flush=True)
        print()
    print("\nbytes per parameter kept between steps")
    for column in options.columns:
        kept, num_parameters = buffer_bytes(column, options)
        results[column]["bytes_per_parameter"] = kept / num_parameters
        print(f"{COLUMNS[column]:30}{kept / num_parameters:9.2f}")
    _timing.write_json(options.json, options, results)


def _for_child(options):
    arguments = [
        f"--micro-batch-size={options.micro_batch_size}",
        f"--steps={options.steps}",
    ]
    return [*arguments, *(["--jit-compile"] if options.jit_compile else [])]


if __name__ == "__main__":
    main()
