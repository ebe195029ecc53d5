"""What becomes of the overhead as cycles and models grow?

Microseconds per row, and their ratio to the bare passes and one update (the
limit), first for k micro-batches per update on a small MLP, then for models of
more and more parameters with 8 micro-batches: MLPs of two wide layers.

    python -m benchmarks.scaling

The overhead above the limit should stay flat or fall. All columns are in memory
at once, each with weights, slots, sums, gradients and what the update makes of
them: what would need more than --memory GiB is left out.
"""

import argparse
import gc

import keras

from benchmarks import _cases
from benchmarks import _columns
from benchmarks import _same_weights
from benchmarks import _timing

COLUMNS = (
    _columns.LIMIT,
    _columns.BUILT_IN,
    _columns.ACROSS,
    _columns.CUT,
)
MICRO_BATCH_SIZE = 4
NUM_INPUTS = 64
# Arrays of the size of all parameters that a column holds at most.
NUM_COPIES = 8


def mlp(num_parameters: int) -> _cases.Case:
    """An MLP with about so many parameters: 64, n and n units."""
    width = round((num_parameters + (NUM_INPUTS / 2) ** 2) ** 0.5)
    width -= NUM_INPUTS // 2

    def make():
        inputs = hidden = keras.Input((NUM_INPUTS,))
        for _ in range(2):
            hidden = keras.layers.Dense(width, activation="relu")(hidden)
        return keras.Model(
            inputs, keras.layers.Dense(_cases.NUM_CLASSES)(hidden)
        )

    return _cases.Case(make, _cases.normal(NUM_INPUTS))


def measured(
    case: _cases.Case, num_micro_batches: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per update of each column."""
    settings = _columns.Settings(
        MICRO_BATCH_SIZE * num_micro_batches, MICRO_BATCH_SIZE
    )
    trainers = {
        name: _columns.COLUMNS[name](case, settings) for name in COLUMNS
    }
    calls = {name: trainer.update for name, trainer in trainers.items()}
    _timing.interleaved(calls, 0, warm_up=_same_weights.NUM_UPDATES)
    _same_weights.check(
        case,
        {name: trainer.model for name, trainer in trainers.items()},
        _columns.LIMIT,
    )
    seconds = _timing.interleaved(calls, rounds, warm_up=0)
    del calls, trainers
    gc.collect()
    return seconds


def _print_row(label, seconds, num_rows):
    medians = _timing.medians(seconds)
    limit = medians[_columns.LIMIT]
    parts = [
        f"{1e6 * each / num_rows:14.1f}{each / limit:6.2f}"
        for each in medians.values()
    ]
    print(f"{label:>12}" + "".join(parts), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--num-micro-batches",
        type=int,
        nargs="*",
        default=[1, 4, 16, 64, 256],
    )
    parser.add_argument(
        "--num-parameters",
        type=float,
        nargs="*",
        default=[1e5, 1e6, 1e7, 5e7, 1e8],
    )
    parser.add_argument("--memory", type=float, default=8, help="GiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file to write all times to")
    options = parser.parse_args(arguments)
    _timing.print_versions()
    print(f"micro-batches of {MICRO_BATCH_SIZE}; us/row, ratio to the limit")
    print(f"{'':12}" + "".join(f"{name[:19]:>20}" for name in COLUMNS))
    results = {"num_micro_batches": {}, "num_parameters": {}}
    for number in options.num_micro_batches:
        rounds = max(3, options.rounds if number < 64 else options.rounds // 2)
        seconds = measured(_cases.CASES["small MLP"], number, rounds)
        results["num_micro_batches"][number] = seconds
        _print_row(f"k={number}", seconds, MICRO_BATCH_SIZE * number)
    for number in map(int, options.num_parameters):
        gibibytes = 4 * number * NUM_COPIES * len(COLUMNS) / 2**30
        if gibibytes > options.memory:
            print(f"{number:12.0e}  needs about {gibibytes:.0f} GiB: left out")
            continue
        rounds = options.rounds if number < 1e7 else max(3, options.rounds // 3)
        seconds = measured(mlp(number), 8, rounds)
        results["num_parameters"][number] = seconds
        _print_row(f"{number:.0e}", seconds, MICRO_BATCH_SIZE * 8)
    _timing.write_json(options.json, options, results)


if __name__ == "__main__":
    main()
