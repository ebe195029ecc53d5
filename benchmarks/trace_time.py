"""How long does it take until the first update of a model of many variables?

Seconds of processor time to trace the training step of a chain of dense layers
(the first number is the trainable variables), and to run it for the first time;
with --jit-compile XLA compiles it. A new model each time, the least of a few.

    python -m benchmarks.trace_time
"""

import argparse
import gc
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from accum_model import AccumModel
from accum_model import Lookahead
from benchmarks import _timing

WIDTH = 4
NUM_ROWS = 8
PLAIN = "plain Keras"

Optimizer = keras.optimizers.Optimizer


def chain(num_variables: int) -> keras.Model:
    """Dense layers one after the other."""
    inputs = hidden = keras.Input((WIDTH,))
    for _ in range(num_variables // 2):
        hidden = keras.layers.Dense(WIDTH)(hidden)
    return keras.Model(inputs, hidden)


def plain(model: keras.Model, make: Callable[..., Optimizer]):
    """Model and optimizer as they are."""
    return model, make()


def lookahead(model: keras.Model, make: Callable[..., Optimizer]):
    """Lookahead around the optimizer."""
    return model, Lookahead(make())


def built_in(model: keras.Model, make: Callable[..., Optimizer]):
    """Keras's own accumulation."""
    return model, make(gradient_accumulation_steps=2)


def across(model: keras.Model, make: Callable[..., Optimizer]):
    """Accumulation across steps."""
    return AccumModel.wrap(model, accum_steps=2), make()


def cut(model: keras.Model, make: Callable[..., Optimizer]):
    """The batch cut in one step."""
    return AccumModel.wrap(model, micro_batch_size=NUM_ROWS // 2), make()


COLUMNS = {
    PLAIN: plain,
    "Keras's built-in accumulation": built_in,
    "across steps": across,
    "in one step": cut,
    "Lookahead": lookahead,
}
OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}


def first_call(
    column: Callable[..., tuple[keras.Model, Optimizer]],
    num_variables: int,
    optimizer: str,
    jit_compile: bool,
) -> float:
    """Seconds of the first call of a train function, all variables made."""
    make = OPTIMIZERS[optimizer]
    model, optimizer = column(chain(num_variables), make)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    ones = tf.constant(np.ones((NUM_ROWS, WIDTH), "float32"))
    # A data set of batches of unknown size, as `fit` makes of arrays.
    data = iter(
        tf.data.Dataset.from_tensor_slices((ones, ones)).batch(NUM_ROWS)
    )
    begin = time.process_time()
    model.train_function(data)
    return time.process_time() - begin


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--num-variables", type=int, nargs="+", default=[20, 100, 300]
    )
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file to write all times to")
    options = parser.parse_args(arguments)
    _timing.print_versions()
    first_call(plain, 2, options.optimizers[0], options.jit_compile)
    results = {}
    for optimizer in options.optimizers:
        for number in options.num_variables:
            seconds = {name: [] for name in COLUMNS}
            for _ in range(options.rounds):
                for name, column in COLUMNS.items():
                    seconds[name].append(
                        first_call(
                            column, number, optimizer, options.jit_compile
                        )
                    )
                    gc.collect()
            results[f"{optimizer}, {number}"] = seconds
            title = f"{optimizer}, {number} variables"
            print(f"\n{title:32}{'s':>9}{'/plain':>9}")
            for name, values in seconds.items():
                ratio = min(values) / min(seconds[PLAIN])
                print(f"  {name:30}{min(values):9.2f}{ratio:9.2f}", flush=True)
    _timing.write_json(options.json, options, results)


if __name__ == "__main__":
    main()
