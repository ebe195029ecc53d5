"""Several machines, as local processes, against plain Keras on one device."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import accum_model
from tests import helpers

# Seconds; a worker that waits for ever for another must not hold up the tests.
LIMIT = 240
pytestmark = pytest.mark.slow


def free_ports(number):
    """Ports nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def run_workers(folder, number, task):
    """Runs `number` workers; returns their exit codes and what they printed."""
    ports = json.dumps(free_ports(number))
    logs = [open(folder / f"{task}-{j}.log", "w+") for j in range(number)]
    root = pathlib.Path(accum_model.__file__).parents[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.machine_worker"]
            + [str(folder), str(index), ports, task],
            stdout=logs[index],
            stderr=subprocess.STDOUT,
            cwd=root,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )
        for index in range(number)
    ]
    try:
        limit = time.monotonic() + LIMIT
        for worker in workers:
            worker.wait(max(1, limit - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    return [worker.returncode for worker in workers], texts


def train(folder, number, task):
    codes, texts = run_workers(folder, number, task)
    assert codes == [0] * number, "\n\n".join(text[-3000:] for text in texts)


def one_device(accum_steps):
    model = helpers.functional()
    optimizer = keras.optimizers.Adam(0.125, global_clipnorm=0.5)
    model.compile(optimizer, "mse", metrics=["mae"])
    history = model.fit(
        *helpers.rows(22),
        batch_size=4 * accum_steps,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=helpers.rows(8),
    )
    return model, history.history


def assert_equal(weights, model):
    for ours, theirs in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=helpers.EXACT)


@pytest.mark.parametrize("number", [2, 3])
def test_workers_are_one_device(tmp_path, number):
    """keras-team/keras#20582 and keras-team/keras#20585."""
    train(tmp_path, number, "train")
    for name, accum_steps in {"once": 1, "thrice": 3, "cut": 1}.items():
        large, logs = one_device(accum_steps)
        for index in range(number):
            with np.load(tmp_path / f"{name}-{index}.npz") as found:
                weights = [found[key] for key in found if key.startswith("arr")]
                ours = json.loads(str(found["logs"]))
                predicted = found["predicted"]
            assert_equal(weights, large)
            # The last batch of 2 rows goes to 2 workers, or 3: one has none.
            np.testing.assert_allclose(
                ours["effective_batch_size"],
                [22 / -(-6 // accum_steps)] * 2,
            )
            x = helpers.rows(9)[0]
            assert predicted.shape == large.predict(x, verbose=0).shape
            if shows_sums_over_replicas():
                for key in ("loss", "mae", "val_loss", "val_mae"):
                    np.testing.assert_allclose(
                        ours[key],
                        logs[key],
                        rtol=shown_precision(key, number),
                        atol=helpers.EXACT,
                    )
    # Saved by the chief, it is an ordinary file.
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.accum_steps == 3
    assert_equal(loaded.get_weights(), one_device(3)[0])


def shown_precision(key, num_replicas):
    """Keras multiplies losses by one third, say, as rounded to float32."""
    is_rounded = float(np.float32(1 / num_replicas)) != 1 / num_replicas
    return 1e-7 if is_rounded and "loss" in key else 0


def shows_sums_over_replicas():
    """False for Keras before 3.10, whose metrics forget other replicas."""
    return hasattr(keras.metrics.Mean().total, "synchronization")


def test_death_of_a_worker_is_told_and_survived(tmp_path):
    codes, texts = run_workers(tmp_path, 2, "die")
    assert codes[1] == 9
    # Not the time limit: the other one has noticed, and says what it is.
    assert codes[0] not in (0, -9), texts[0][-3000:]
    assert any(word in texts[0] for word in ("UNAVAILABLE", "Unavailable"))
    train(tmp_path, 2, "resume")
    model = helpers.functional()
    optimizer = keras.optimizers.Adam(0.125, global_clipnorm=0.5)
    model.compile(optimizer, "mse")
    model.fit(
        *helpers.rows(22), batch_size=12, epochs=3, shuffle=False, verbose=0
    )
    with np.load(tmp_path / "resumed-0.npz") as found:
        assert_equal([found[key] for key in found], model)


def test_script_of_the_guide(tmp_path):
    root = pathlib.Path(accum_model.__file__).parents[1]
    script = root / "docs" / "guides" / "several_machines.py"
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, script, str(index), *addresses],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(2)
    ]
    try:
        lines = [each.communicate(timeout=LIMIT)[0] for each in workers]
    finally:
        for each in workers:
            each.kill()
    losses = [line.partition(": ")[2] for line in lines]
    assert losses[0].startswith("loss") and losses[0] == losses[1]
    assert (tmp_path / "model.keras").exists()
