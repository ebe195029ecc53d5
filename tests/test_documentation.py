"""What the README and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import io
import pathlib
import pkgutil
import re
import textwrap

import docutils.core
import docutils.utils
import pytest
from conftest import use_float

import accum_model

ROOT = pathlib.Path(__file__).parent.parent


def blocks(text, language):
    """The code blocks of an rst text, in order."""
    pattern = rf"\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)"
    return [textwrap.dedent(block) for block in re.findall(pattern, text)]


def test_readme_snippets_run_and_print_what_it_says():
    use_float("float32")
    text = (ROOT / "README.rst").read_text()
    snippets = blocks(text, "python")
    assert len(snippets) == 7
    namespace, printed = {}, []
    for snippet in snippets:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(snippet, namespace)
        printed.append(out.getvalue())
    assert printed[0] == "True\n"
    assert "It prints ``True``." in text
    assert printed[3].startswith("Effective batch size")
    assert printed[3] in textwrap.dedent(text).replace(
        "    Effective", "Effective"
    )
    assert printed[4] == "2 8\n"


def test_readme_names_its_commands():
    (commands,) = blocks((ROOT / "README.rst").read_text(), "bash")
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\S+)", commands, re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
    assert "make demo" in commands
    assert "make test" in commands


@pytest.mark.parametrize("name", ["README.rst", "CHANGELOG.rst"])
def test_rst_renders_without_a_warning(name):
    source = (ROOT / name).read_text()
    # PyPI knows code-block, as docutils calls it: "code".
    docutils.core.publish_string(
        source,
        writer="html",
        settings_overrides={"halt_level": 2, "report_level": 2},
    )


def modules():
    for info in pkgutil.walk_packages(accum_model.__path__, "accum_model."):
        if not info.name.endswith("__main__"):
            yield info.name


@pytest.mark.parametrize("name", list(modules()))
def test_docstring_examples(name):
    use_float("float32")
    module = importlib.import_module(name)
    results = doctest.testmod(
        module,
        extraglobs=vars(accum_model),
        optionflags=doctest.NORMALIZE_WHITESPACE,
    )
    assert results.failed == 0
