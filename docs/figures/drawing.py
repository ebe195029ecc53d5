"""How the figures of the documentation look, and how they are written.

A figure is put into the page itself, and is drawn in the colour of the page's
text, so that it can be read on light and on dark. Five inches wide, it can be
read on a telephone too.
"""

import pathlib
import re

import matplotlib
import matplotlib.figure

FOLDER = pathlib.Path(__file__).parent
WIDTH = 5.0
# In the middle between light and dark.
BLUE, ORANGE, GREEN = "#3b86c8", "#d9762b", "#3f9a55"
# Stands for the colour of the text until the file is written.
TEXT = "#010203"

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "accum_model",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor"], TEXT),
    **dict.fromkeys(["xtick.color", "ytick.color"], TEXT),
}


def new_figure(height: float) -> matplotlib.figure.Figure:
    """An empty figure of the common width; `height` in inches."""
    matplotlib.rcParams.update(_STYLE)
    return matplotlib.figure.Figure((WIDTH, height), layout="constrained")


def save(
    figure: matplotlib.figure.Figure,
    name: str,
    description: str,
    folder: pathlib.Path = FOLDER,
) -> None:
    """Writes an SVG for use inside a page.

    Args:
        figure: What `new_figure` made.
        name: Name of the file, without its ending.
        description: For people who do not see it.
        folder: Where it is written.
    """
    path = folder / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    svg = path.read_text()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="\S+" height="\S+"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) (height|width)="\S+"', r"\1", svg)
    label = f'<svg class="figure" role="img" aria-label="{description}"'
    svg = svg.replace("*{", "svg.figure *{")
    # Ids must differ between figures of one page.
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("<svg", label, 1)
    path.write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n")
