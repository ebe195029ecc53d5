"""Draws the peak memory of a step against the effective batch size."""

import json
import pathlib

import drawing

NUMBERS = drawing.FOLDER / "memory.json"
LINES = {
    "plain Keras, large batch": ("plain Keras", drawing.ORANGE, "o-"),
    "in one step": ("micro_batch_size=8", drawing.BLUE, "s-"),
    "in one step, batch loss": (
        'with loss_scope="batch"',
        drawing.GREEN,
        "x--",
    ),
}


def main(folder: pathlib.Path = drawing.FOLDER) -> None:
    """Writes `memory.svg`."""
    numbers = json.loads(NUMBERS.read_text())
    figure = drawing.new_figure(height=3.2)
    axes = figure.subplots()
    for column, megabytes in numbers["megabytes"].items():
        label, color, style = LINES[column]
        points = [
            (rows, peak)
            for rows, peak in zip(numbers["batch"], megabytes, strict=True)
            if peak is not None
        ]
        axes.plot(*zip(*points, strict=True), style, color=color, label=label)
        rows, peak = points[-1]
        if "loss" not in column:
            axes.annotate(
                f"{peak:,} MB",
                (rows, peak),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
            )
    axes.set_xlabel("rows per update")
    axes.set_ylabel("peak memory (MB)")
    axes.set_xticks(numbers["batch"])
    axes.set_xlim(0, 560)
    axes.set_ylim(0, 2900)
    axes.legend(frameon=False, loc="center right", fontsize=10)
    drawing.save(
        figure,
        "memory",
        "Peak memory against rows per update: plain Keras grows to 2,495 MB "
        "at 256 rows, cut batches stay at 366 MB with 512 rows.",
        folder,
    )


if __name__ == "__main__":
    main()
