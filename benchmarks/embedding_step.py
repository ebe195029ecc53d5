"""What does a micro-batch cost whose gradient touches 16 rows of a big table?

One call of the compiled training step, in the middle of a cycle, on an
embedding of 200,000 x 16 with SGD; plain Keras updates in every call, the
others collect.

    python -m benchmarks.embedding_step

                                           ms   ratio
    plain Keras, an update each          3.40    1.00
    accum_model                          1.27    0.38
    accum_model, nonfinite               1.52    0.45
    Keras's built-in accumulation        4.34    1.28
"""

import argparse
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from accum_model import AccumModel
from benchmarks import _timing

NEVER = 1_000_000  # No cycle ends while it is timed.


def table_model(num_ids: int, width: int) -> keras.Model:
    """Four ids looked up, joined and summed up."""
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(num_ids, width)(inputs)
    hidden = keras.layers.Flatten()(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def training_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, data: tuple
) -> Callable[[], object]:
    """One compiled training step on the same batch."""
    model.compile(optimizer, "mse")
    model.make_train_function()
    return lambda: model.train_function(iter([data]))


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-ids", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", help="file to write all times to")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    data = (
        tf.constant(rng.integers(0, options.num_ids, (4, 4)), "int32"),
        tf.ones((4, 1)),
    )

    def make():
        return table_model(options.num_ids, options.width)

    def sgd(**kwargs):
        return keras.optimizers.SGD(0.1, **kwargs)

    calls = {
        "plain Keras, an update each": training_step(make(), sgd(), data),
        "accum_model": training_step(
            AccumModel.wrap(make(), NEVER), sgd(), data
        ),
        "accum_model, nonfinite": training_step(
            AccumModel.wrap(make(), NEVER, nonfinite="skip_update"), sgd(), data
        ),
        "Keras's built-in accumulation": training_step(
            make(), sgd(gradient_accumulation_steps=NEVER), data
        ),
    }
    _timing.print_versions()
    print(f"table of {options.num_ids} x {options.width}, 16 ids per call")
    seconds = _timing.interleaved(calls, options.rounds)
    _timing.print_table(seconds, "plain Keras, an update each")
    _timing.write_json(options.json, options, seconds)


if __name__ == "__main__":
    main()
