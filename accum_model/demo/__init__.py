"""The demo: one network, trained four ways, with the same result.

Run it with `python -m accum_model`; `--help` lists the options.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import tensorflow as tf

from accum_model import _version
from accum_model.demo import digits
from accum_model.demo import options
from accum_model.demo import report
from accum_model.demo import training


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the four ways, prints a table and draws the loss curves.

    Args:
        argv: Options as strings, or None for those of the command line.

    Returns:
        Exit code: 0, or 1 if the ways differ in float64 by more than rounding,
        or 2 if scikit-learn or matplotlib is missing.

    Raises:
        SystemExit: With code 2 if an option is wrong, with 0 after `--help`.

    Example:
        >>> main(["--epochs", "2", "--float64"])  # doctest: +SKIP
        0
    """
    chosen = options.parse(argv)
    try:
        importlib.import_module("sklearn.datasets")
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        print(
            f"The demo needs scikit-learn and matplotlib: {error}. "
            'Run: pip install "accum_model[demo]"',
            file=sys.stderr,
        )
        return 2

    dtype = "float64" if chosen.float64 else "float32"
    print(
        f"accum_model {_version.__version__}, Keras {keras.__version__}, "
        f"TensorFlow {tf.__version__}, {dtype}.\n"
        f"Handwritten digits: {digits.TRAINING_ROWS} images for training, "
        f"{digits.VALIDATION_ROWS} for validation."
    )
    with _floats(dtype):
        results = training.train_all(
            chosen.batch_size, chosen.accum_steps, chosen.epochs
        )
    print(f"\n{report.table(results)}\n")
    report.draw(results, chosen.output)
    print(f"Loss curves: {chosen.output}")
    return report.verdict(results, is_exact=chosen.float64)


@contextlib.contextmanager
def _floats(dtype: str) -> Iterator[None]:
    """Makes Keras compute in `dtype` inside the block."""
    floatx = keras.config.floatx()
    # Keras makes it once, from floatx, and then keeps it.
    policy = keras.config.dtype_policy()
    try:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
