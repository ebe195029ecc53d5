"""What does an update cost, by each of the ways to come to a large batch?

One update with Adam on 64 rows, 8 rows at a time, against the bare forward and
backward passes, compiled, whose gradients are summed, and one update, compiled
(the limit).

    python -m benchmarks.step_time

    wide MLP                         us/row   /limit  /built-in   /plain
      limit                          1213.2     1.00       0.79     3.25
      ...
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from benchmarks import _cases
from benchmarks import _columns
from benchmarks import _same_weights
from benchmarks import _timing
from benchmarks._columns import Settings
from benchmarks._columns import Trainer

FIRST_CALLS = (_columns.UNCUT, _columns.CUT, _columns.CUT_BATCH_LOSS)


def update_seconds(
    case: _cases.Case, settings: Settings, columns: list[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each column's updates, checked to be the same updates."""
    # What the others are held against is always there.
    wanted = [
        name
        for name in _columns.COLUMNS
        if name in (*columns, _columns.LIMIT, _columns.UNCUT, _columns.BUILT_IN)
    ]
    trainers = {name: _columns.COLUMNS[name](case, settings) for name in wanted}
    for trainer in trainers.values():
        for _ in range(_same_weights.NUM_UPDATES):
            trainer.update()
    _same_weights.check(
        case,
        {
            name: trainer.model
            for name, trainer in trainers.items()
            if name != _columns.SMALL  # It makes eight updates of each.
        },
        _columns.UNCUT,
    )
    return _timing.interleaved(
        {name: trainer.update for name, trainer in trainers.items()}, rounds
    )


def first_call(
    column: Callable[..., Trainer], case: _cases.Case, settings: Settings
) -> float:
    """Seconds of the first update of a new model: tracing, and one step."""
    trainer = column(case, settings)
    begin = time.perf_counter()
    trainer.update()
    seconds = time.perf_counter() - begin
    del trainer
    gc.collect()
    return seconds


def _print_updates(name, seconds, batch_size):
    medians = _timing.medians(seconds)
    print(
        f"\n{name:32}{'us/row':>9}{'/limit':>9}{'/built-in':>11}{'/plain':>9}"
    )
    for column, median in medians.items():
        print(
            f"  {column:30}{1e6 * median / batch_size:9.1f}"
            f"{median / medians[_columns.LIMIT]:9.2f}"
            f"{median / medians[_columns.BUILT_IN]:11.2f}"
            f"{median / medians[_columns.UNCUT]:9.2f}",
            flush=True,
        )


def _print_first_calls(name, case, settings, rounds):
    seconds = {column: [] for column in FIRST_CALLS}
    for _ in range(rounds):
        for column, values in seconds.items():
            values.append(first_call(_columns.COLUMNS[column], case, settings))
    base = statistics.median(seconds[_columns.UNCUT])
    print(f"\n{name + ', first call':32}{'ms':>9}{'/plain':>9}")
    for column, values in seconds.items():
        median = statistics.median(values)
        print(f"  {column:30}{1e3 * median:9.0f}{median / base:9.2f}")
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(_cases.CASES))
    parser.add_argument("--columns", nargs="+", default=list(_columns.COLUMNS))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--first-calls", type=int, default=3)
    parser.add_argument("--json", help="file to write all times to")
    options = parser.parse_args(arguments)
    if options.batch_size % options.micro_batch_size:
        parser.error("--batch-size must be a multiple of --micro-batch-size")
    settings = Settings(
        options.batch_size, options.micro_batch_size, options.jit_compile
    )
    _timing.print_versions()
    print(
        f"batch {settings.batch_size}, micro-batches of "
        f"{settings.micro_batch_size}, jit_compile={settings.jit_compile}, "
        f"medians of {options.rounds} rounds in turns"
    )
    results = {}
    for name in options.models:
        case = _cases.CASES[name]
        seconds = update_seconds(
            case, settings, options.columns, options.rounds
        )
        _print_updates(name, seconds, settings.batch_size)
        results[name] = {"update": seconds}
        if options.first_calls:
            results[name]["first_call"] = _print_first_calls(
                name, case, settings, options.first_calls
            )
        gc.collect()
    _timing.write_json(options.json, options, results)


if __name__ == "__main__":
    main()
