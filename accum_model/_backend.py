"""Refuses any Keras backend but TensorFlow, before anything else is imported.

The environment is looked at first: importing Keras for a backend that is not
installed fails with a message that does not help.
"""

import os
import sys


def require_tensorflow() -> None:
    """Raises ImportError unless Keras runs, or will run, on TensorFlow."""
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if "keras" in sys.modules or backend == "tensorflow":
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(
            "accum_model needs Keras on the TensorFlow backend. Received: "
            f"backend={backend!r}. Set the environment variable "
            "KERAS_BACKEND=tensorflow before Python starts, or write "
            '"backend": "tensorflow" into ~/.keras/keras.json.'
        )
