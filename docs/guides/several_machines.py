"""One of two workers on this machine: `python several_machines.py INDEX`."""

import json
import os
import sys

ADDRESSES = ["127.0.0.1:12345", "127.0.0.1:12346"]


def main(index, addresses):
    """Trains on the rows of worker `index`, together with the others."""
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    import keras
    import numpy as np

    from accum_model import AccumModel

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(256, 20)), rng.normal(size=(256, 1))
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
        model = AccumModel.wrap(model, accum_steps=4)
        model.compile("adam", loss="mse")
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=3,
        verbose=0,
        validation_data=(x, y),
        callbacks=[keras.callbacks.BackupAndRestore(f"backup-{index}")],
    )
    print(f"worker {index}: loss {history.history['loss'][-1]:.6f}")
    if index == 0:
        model.save("model.keras")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or ADDRESSES)
