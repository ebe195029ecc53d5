"""The options of the command line, checked before anything is trained."""

import argparse
import pathlib
from collections.abc import Sequence

from accum_model.demo import digits


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options and makes the folder of the output.

    Args:
        argv: Options as strings, or None for those of the command line.

    Returns:
        Namespace with `epochs`, `accum_steps`, `batch_size`, `float64` and
        `output`, an absolute `pathlib.Path`.

    Raises:
        SystemExit: With code 2 and a message on stderr if an option is wrong.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.batch_size > digits.TRAINING_ROWS:
        parser.error(
            "argument --batch-size: must be at most "
            f"{digits.TRAINING_ROWS}, the rows there are for training. "
            f"Received: {options.batch_size}. Pass a smaller number."
        )
    if options.batch_size % options.accum_steps:
        parser.error(
            "argument --batch-size: must be a multiple of --accum-steps. "
            f"Received: --batch-size {options.batch_size} and --accum-steps "
            f"{options.accum_steps}. "
            f"{_way_out(options.batch_size, options.accum_steps)}"
        )
    try:
        _check_writable(options.output)
    except OSError as error:
        parser.error(
            f"argument --output: cannot write {str(options.output)!r} "
            f"({error.strerror}: {error.filename!r}). Pass the path of a PNG "
            "file in a folder you can write to."
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accum_model",
        description="Trains a small network on handwritten digits with a large "
        "batch, and three times with gradients accumulated over smaller ones: "
        "the weights come out the same.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--epochs",
        type=_positive_int,
        default=5,
        metavar="N",
        help="epochs of each of the four runs (default: %(default)s)",
    )
    parser.add_argument(
        "--accum-steps",
        type=_positive_int,
        default=8,
        metavar="N",
        help="batches per update of the three runs that accumulate "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive_int,
        default=256,
        metavar="N",
        help="rows of the large batch, a multiple of --accum-steps "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--float64",
        action="store_true",
        help="compute in float64, and fail unless all weights are equal to "
        "1e-9",
    )
    parser.add_argument(
        "--output",
        type=_png_path,
        default="accum_model_demo.png",
        metavar="FILE.png",
        help="where the loss curves are drawn (default: %(default)s)",
    )
    return parser


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number >= 1. Received: {text!r}. Pass a number "
            "such as 8."
        )
    return value


def _png_path(text: str) -> pathlib.Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(
            f"must be the path of a PNG file. Received: {text!r}. Pass a path "
            "that ends in .png."
        )
    return pathlib.Path(text).absolute()


def _way_out(batch_size: int, accum_steps: int) -> str:
    below = batch_size // accum_steps * accum_steps
    above = below + accum_steps
    nearest = [n for n in (below, above) if 1 <= n <= digits.TRAINING_ROWS]
    if not nearest:
        return "Pass a smaller --accum-steps."
    return f"Pass --batch-size {' or '.join(map(str, nearest))}."


def _check_writable(path: pathlib.Path) -> None:
    """Makes the folder of `path`, and opens the file as a trial."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()
