"""One of several local workers, each a process; run by `test_machines`.

python -m tests.machine_worker FOLDER INDEX PORTS TASK
"""

import json
import os
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
index, ports, task = int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
        "task": {"type": "worker", "index": index},
    }
)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

# Before anything else that starts TensorFlow.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

from accum_model import AccumCallback  # noqa: E402
from accum_model import AccumModel  # noqa: E402
from tests import helpers  # noqa: E402

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def train(name, **kwargs):
    """Trains, and leaves weights and logs in a file."""
    model = make(**kwargs)
    callbacks = [AccumCallback(verbose=0)]
    history = fit(model, callbacks=callbacks, validation_data=helpers.rows(8))
    history["evaluate"] = model.evaluate(*helpers.rows(9), 4, verbose=0)
    predicted = model.predict(helpers.rows(9)[0], batch_size=4, verbose=0)
    write(name, model, logs=json.dumps(history), predicted=predicted)
    return model


def make(**kwargs):
    with strategy.scope():
        model = AccumModel.wrap(helpers.functional(), **kwargs)
        optimizer = keras.optimizers.Adam(0.125, global_clipnorm=0.5)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, num_epochs=2, **kwargs):
    data = helpers.rows(22)
    history = model.fit(
        *data,
        batch_size=4,
        epochs=num_epochs,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return history.history


def write(name, model, **kwargs):
    path = folder / f"{name}-{index}.npz"
    np.savez(path, *model.get_weights(), **kwargs)


class Kill(keras.callbacks.Callback):
    """The last worker dies at the beginning of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and index == len(ports) - 1:
            os._exit(9)


def backup():
    # Each worker needs a folder of its own: there may be no shared disk.
    return keras.callbacks.BackupAndRestore(str(folder / f"backup-{index}"))


if task == "train":
    train("once", accum_steps=1)
    model = train("thrice", accum_steps=3)
    train("cut", micro_batch_size=1)
    if index == 0:
        model.save(folder / "model.keras")
elif task == "die":
    fit(make(accum_steps=3), 3, callbacks=[backup(), Kill()])
elif task == "resume":
    model = make(accum_steps=3)
    fit(model, 3, callbacks=[backup()])
    write("resumed", model)
