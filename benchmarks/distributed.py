"""Two workers on this machine: seconds and exchanges per row.

Run with `python -m benchmarks.distributed`. A wide MLP (2.6 million parameters)
is trained on micro-batches of 8 rows per worker, with an update for each of
them and with an update for every 8. Rounds of the two take turns.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys

ROWS = 8  # Per worker and micro-batch.
STEPS = 16  # Batches in a round.
NUM_WORKERS = 2


def worker(index: int, ports: list[int], rounds: int) -> None:
    """Trains, and prints what worker 0 has measured as one line of JSON."""
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
            "task": {"type": "worker", "index": index},
        }
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    sizes = _count_exchanges(strategy)

    import keras
    import numpy as np

    from accum_model import AccumModel
    from benchmarks import _timing

    def make(accum_steps):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((512,))]
        layers += [
            keras.layers.Dense(1024, activation="relu") for _ in range(3)
        ]
        with strategy.scope():
            model = keras.Sequential([*layers, keras.layers.Dense(10)])
            model = AccumModel.wrap(model, accum_steps=accum_steps)
            model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    num_rows = ROWS * NUM_WORKERS * STEPS
    x = rng.normal(size=(num_rows, 512)).astype("float32")
    y = rng.normal(size=(num_rows, 10)).astype("float32")
    models = {str(k): make(k) for k in (1, 8)}
    exchanges = {}

    def train(name):
        sizes.clear()
        models[name].fit(
            x, y, batch_size=ROWS * NUM_WORKERS, shuffle=False, verbose=0
        )
        largest = models[name].count_params()
        exchanges[name] = sizes.count(largest) / num_rows

    calls = {name: lambda name=name: train(name) for name in models}
    seconds = _timing.interleaved(calls, rounds, warm_up=1)
    if index == 0:
        per_row = {
            name: statistics.median(values) / num_rows
            for name, values in seconds.items()
        }
        print(json.dumps({"seconds": per_row, "exchanges": exchanges}))
        _timing.print_versions()


def _count_exchanges(strategy):
    """Notes the size of each exchange of several tensors when it runs."""
    import numpy as np
    import tensorflow as tf

    sizes: list[int] = []
    batch_reduce_to = strategy.extended.batch_reduce_to

    def counted(reduce_op, pairs, *args, **kwargs):
        local = [strategy.experimental_local_results(v)[0] for v, _ in pairs]
        size = sum(int(np.prod(tensor.shape)) for tensor in local)
        tf.py_function(lambda: sizes.append(size), [], [])
        return batch_reduce_to(reduce_op, pairs, *args, **kwargs)

    strategy.extended.batch_reduce_to = counted
    return sizes


def main() -> None:
    """Starts the workers and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.ports, args.rounds)
        return
    sockets = [socket.socket() for _ in range(NUM_WORKERS)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    command = [sys.executable, "-m", "benchmarks.distributed"]
    command += ["--ports", json.dumps(ports), "--rounds", str(args.rounds)]
    workers = [
        subprocess.Popen(
            [*command, "--worker", str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(NUM_WORKERS)
    ]
    lines = [each.communicate()[0].splitlines() for each in workers][0]
    figures = json.loads(lines[0])
    print(*lines[1:], sep="\n")
    print(
        f"{NUM_WORKERS} workers, micro-batches of {ROWS} rows each, "
        f"{args.rounds} rounds of {STEPS} batches\n"
    )
    print(f"{'accum_steps':>12}{'us per row':>12}{'ratio':>8}{'exchanges':>12}")
    base = figures["seconds"]["1"]
    for name, seconds in figures["seconds"].items():
        exchanges = figures["exchanges"][name]
        print(
            f"{name:>12}{1e6 * seconds:12.0f}{seconds / base:8.2f}"
            f"{exchanges:12.4f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
