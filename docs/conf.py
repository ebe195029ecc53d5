"""Settings of the documentation: `make docs`."""

import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from sphinx.util import inspect

from accum_model import __version__

project = "accum_model"
copyright = "the authors of accum_model, MIT licence"  # noqa: A001
release = version = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"accum_model {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sphinx = False

# Docstrings write code as Keras does, in single backticks.
default_role = "code"
# What a program prints is not Python.
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]


def link_guides(app, path, parent, content):
    """The README names files, which PyPI can show; here they are links."""
    content[0] = re.sub(
        r"``docs/(guides/\w+)\.rst``", r":doc:`/\1`", content[0]
    )


def signature_of_init(app, what, name, obj, options, signature, returns):
    """Keras hides that of a model behind `__new__`."""
    if what == "class" and signature == "(*args, **kwargs)":
        found = inspect.signature(obj.__init__, bound_method=True)
        text = inspect.stringify_signature(found, show_annotation=False)
        return text, None
    return None


def setup(app):
    """Has Sphinx call what is above."""
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("include-read", link_guides)
