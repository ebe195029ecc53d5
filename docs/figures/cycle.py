"""Draws two cycles: what is collected, and when the weights change."""

import pathlib

import drawing

ROWS = [4, 4, 2, 4, 4, 2]
ACCUM_STEPS = 3
LANES = {"micro-batch": 2, "collected": 1, "weights": 0}


def main(folder: pathlib.Path = drawing.FOLDER) -> None:
    """Writes `cycle.svg`."""
    figure = drawing.new_figure(height=2.5)
    axes = figure.subplots()
    collected = 0
    for number, rows in enumerate(ROWS):
        if number % ACCUM_STEPS == 0:
            collected = 0
        collected += rows
        box(axes, "micro-batch", number, 1, f"{rows} rows", drawing.BLUE)
        box(axes, "collected", number, 1, f"{collected}", drawing.ORANGE)
    for cycle in range(len(ROWS) // ACCUM_STEPS):
        begin, end = cycle * ACCUM_STEPS, (cycle + 1) * ACCUM_STEPS
        label = f"$w_{cycle}$, unchanged"
        box(axes, "weights", begin, ACCUM_STEPS, label, drawing.GREEN)
        axes.plot([end, end], [-0.45, 2.45], color=drawing.TEXT, linestyle="--")
        axes.text(end, -0.62, "update", ha="center", va="top")
    for name, height in LANES.items():
        axes.text(-0.15, height, name, ha="right", va="center")
    axes.set_xlim(-1.9, len(ROWS) + 0.5)
    axes.set_ylim(-1.05, 2.5)
    axes.axis("off")
    drawing.save(
        figure,
        "cycle",
        "Two cycles of three micro-batches. Rows are collected, 4, 8, 10. "
        "Then the weights change once, and collecting starts at zero.",
        folder,
    )


def box(axes, lane, begin, length, label, color):
    """A labelled box in one lane, from micro-batch `begin` on."""
    axes.barh(
        LANES[lane],
        length - 0.06,
        left=begin + 0.03,
        height=0.7,
        color=color,
        alpha=0.35,
        edgecolor=color,
    )
    middle = begin + length / 2
    axes.text(middle, LANES[lane], label, ha="center", va="center", size=10)


if __name__ == "__main__":
    main()
