"""What does the gradient noise scale cost?

One update with Adam on 64 rows, 8 rows at a time, with and without
`AccumCallback(noise_scale=True)`, in turns: with batches that are cut inside
the step, and with one batch per micro-batch. The last column is the median of
the ratios of neighbours.

    python -m benchmarks.noise_scale
"""

import argparse
import statistics
from typing import Any

import keras
import tensorflow as tf

from accum_model import AccumCallback
from benchmarks import _cases
from benchmarks import _columns
from benchmarks import _same_weights
from benchmarks import _timing


def trainer(
    case: _cases.Case, batch_size: int, rows: int, is_cut: bool, is_on: bool
) -> _columns.Trainer:
    """Returns a new model and what makes one update of it.

    Args:
        case: The model and its data.
        batch_size: Rows per update.
        rows: Rows per micro-batch.
        is_cut: True to cut batches inside the step, False to accumulate.
        is_on: True to estimate the noise scale.
    """
    steps = batch_size // rows
    options: dict[str, Any] = {"accum_steps": steps}
    rows_per_call, num_calls = rows, steps
    if is_cut:
        options = {"micro_batch_size": rows}
        rows_per_call, num_calls = batch_size, 1
    model = case.model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(epsilon=1e-5), loss)
    callback = AccumCallback(**options, noise_scale=is_on, verbose=0)
    # As `fit` does, without its end.
    callbacks = keras.callbacks.CallbackList([callback], model=model)
    model.make_train_function()
    callbacks.on_train_begin()
    data = tf.data.Dataset.from_tensor_slices(case.data(batch_size))
    data = data.batch(rows_per_call, drop_remainder=True).cache().repeat()
    iterator = iter(data)

    def make_update():
        for _ in range(num_calls):
            model.train_function(iterator)

    return _columns.Trainer(model, make_update)


def main(arguments: list[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(_cases.CASES))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", help="file to write all times to")
    options = parser.parse_args(arguments)
    _timing.print_versions()
    print(f"{'':32}{'off ms':>9}{'on ms':>9}{'ratio':>8}")
    results = {}
    for name in options.models:
        for is_cut in (True, False):
            trainers = {
                kind: trainer(
                    _cases.CASES[name],
                    options.batch_size,
                    options.micro_batch_size,
                    is_cut,
                    is_on,
                )
                for kind, is_on in (("off", False), ("on", True))
            }
            calls = {kind: each.update for kind, each in trainers.items()}
            _timing.interleaved(calls, 0, warm_up=_same_weights.NUM_UPDATES)
            _same_weights.check(
                _cases.CASES[name],
                {kind: each.model for kind, each in trainers.items()},
                "off",
            )
            seconds = _timing.interleaved(calls, options.rounds)
            off, on = (1e3 * statistics.median(s) for s in seconds.values())
            ratio = statistics.median(
                b / a
                for a, b in zip(seconds["off"], seconds["on"], strict=True)
            )
            title = f"{name}, {'cut' if is_cut else 'one batch each'}"
            print(f"{title:32}{off:9.2f}{on:9.2f}{ratio:8.3f}", flush=True)
            results[title] = seconds
    _timing.write_json(options.json, options, results)


if __name__ == "__main__":
    main()
