"""What the four results say: a table, the loss curves and a verdict."""

import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from accum_model.demo.training import Result

# Bound on weight differences in float64, where rounding is about 1e-16.
TOLERANCE = 1e-9

_ROW = "{:24}{:>9}{:>12}{:>9}{:>17}{:>9}"

# Widest first, so that curves that coincide show as stripes in each other.
_LINES = [
    {"color": "#c7c7c7", "linewidth": 15, "linestyle": "-"},
    {"color": "#fdae6b", "linewidth": 9, "linestyle": "-"},
    {"color": "#3182bd", "linewidth": 4.5, "linestyle": "--"},
    {"color": "black", "linewidth": 1.5, "linestyle": ":"},
]


def table(results: Sequence[Result]) -> str:
    """Lays the results out in lines of at most 80 columns.

    Args:
        results: Results, that of the large batch first.
    """
    lines = [
        _ROW.format("", "final", "", "", "largest weight", ""),
        _ROW.format("", "training", "validation", "", "difference from", ""),
        _ROW.format(
            "way", "loss", "accuracy", "updates", "the large batch", "seconds"
        ),
    ]
    for number, result in enumerate(results, start=1):
        difference = f"{result.largest_difference(results[0]):.1e}"
        lines.append(
            _ROW.format(
                f"{number}. {result.name}",
                f"{result.losses[-1]:.5f}",
                f"{result.accuracy:.4f}",
                result.updates,
                "-" if number == 1 else difference,
                f"{result.seconds:.1f}",
            )
        )
    lines.append("Seconds are of `fit`, compiling the training step included.")
    return "\n".join(line.rstrip() for line in lines)


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Draws the loss curves on top of each other.

    Args:
        results: Results, in the order of the table.
        path: Where the PNG file is written.
    """
    # Only the demo needs it. Without pyplot it leaves the settings of the
    # program alone, needs no display, and draws with Agg.
    import matplotlib.figure
    import matplotlib.ticker

    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, result in enumerate(results, start=1):
        line = _LINES[number - 1]
        axes.plot(
            range(1, len(result.losses) + 1),
            result.losses,
            label=f"{number}. {result.name}",
            # A single epoch is a point, not a line.
            marker="o",
            markersize=line["linewidth"] + 2,
            solid_capstyle="round",
            **line,
        )
    axes.set_title("Training loss of the four ways, one on top of the other")
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss (cross-entropy)")
    axes.xaxis.set_major_locator(
        matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1)
    )
    axes.grid(alpha=0.3)
    axes.legend(
        handlelength=6, handletextpad=1.5, labelspacing=1.2, borderpad=1.2
    )
    figure.savefig(path, format="png", dpi=150)


def verdict(results: Sequence[Result], is_exact: bool) -> int:
    """Prints what the largest weight difference says.

    Args:
        results: Results, that of the large batch first.
        is_exact: True if the ways were trained in float64.

    Returns:
        Exit code: 1 if float64 shows a difference that is not rounding, else 0.
    """
    reference, *others = results
    # Not Python's max, which may lose a NaN.
    worst = np.max([other.largest_difference(reference) for other in others])
    if worst == 0:
        print("All weights are equal, bit for bit.")
        return 0
    if not is_exact:
        print(
            "The differences are not zero because sums of float32 numbers "
            "round differently\nin another order, and training amplifies that. "
            "Run with --float64 to see that\nit is rounding."
        )
        return 0
    if worst < TOLERANCE:
        print(f"All weight differences are below {TOLERANCE:.0e}.")
        return 0
    print(
        f"The largest weight difference, {worst:.1e}, is not below "
        f"{TOLERANCE:.0e}: the four ways did not make the same updates. Please "
        "report this with the output above.",
        file=sys.stderr,
    )
    return 1
