"""What the README and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import io
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap

import docutils.core
import pytest
from conftest import use_float

import accum_model

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
FIGURES = DOCS / "figures"
# Pages that show code: name, and the number of snippets.
PAGES = {
    str(path.relative_to(DOCS)): path.read_text().count("code-block:: python")
    for path in sorted(DOCS.rglob("*.rst"))
    if "code-block:: python" in path.read_text()
}
# Those that compile many training steps.
SLOW = {
    "equal_or_not.rst",
    "guides/checkpoints.rst",
    "guides/custom_training.rst",
    "guides/large_batches.rst",
    "guides/masked_text.rst",
    "guides/mixed_precision.rst",
    "guides/optimizers.rst",
    "guides/two_gradients.rst",
}
PAGES_WITH_MARKS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in PAGES
]


def block_pattern(language):
    return rf"\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)"


def blocks(text, language):
    """The code blocks of an rst text, in order."""
    found = re.findall(block_pattern(language), text)
    return [textwrap.dedent(block) for block in found]


def what_it_prints(snippet, namespace):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(snippet, namespace)
    return out.getvalue()


def render(path):
    """Renders a file; an error if docutils has anything to complain about."""
    return docutils.core.publish_string(
        path.read_text(),
        source_path=str(path),
        writer="html",
        settings_overrides={
            "halt_level": 2,
            "report_level": 2,
            "output_encoding": "unicode",
        },
    )


def test_readme_snippets_run_and_print_what_it_says():
    use_float("float32")
    text = (ROOT / "README.rst").read_text()
    snippets = blocks(text, "python")
    assert len(snippets) == 8
    namespace, printed = {}, []
    for snippet in snippets:
        printed.append(what_it_prints(snippet, namespace))
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
    # PyPI knows code-block, as docutils calls it: "code".
    render(ROOT / name)


@pytest.mark.parametrize("name", PAGES_WITH_MARKS)
def test_snippets_of_page_run_and_print_what_it_says(name):
    use_float("float32")
    text = (DOCS / name).read_text()
    # What is between two snippets, and may say what the first one prints.
    _, *parts = re.split(block_pattern("python"), text)
    assert len(parts) == 2 * PAGES[name]
    namespace = {}
    for snippet, after in zip(parts[::2], parts[1::2], strict=True):
        printed = what_it_prints(textwrap.dedent(snippet), namespace)
        for line in printed.splitlines():
            shown = f"``{line}``" in after or f"\n    {line}\n" in after
            assert shown, f"printed, but not on the page: {line}"
        if not printed:
            assert not after.lstrip().startswith("It prints")


def test_every_public_name_has_an_entry_and_nothing_else_has():
    text = (DOCS / "api.rst").read_text()
    entries = re.findall(r"^\.\. auto\w+:: accum_model\.(.+)$", text, re.M)
    assert len(entries) == len(set(entries))
    # The interface for optimizers of one's own is not needed by most.
    extra = {"two_point.TwoPointOptimizer"}
    assert set(entries) == set(accum_model.__all__) | extra


def test_every_page_is_in_the_table_of_contents():
    contents = (DOCS / "index.rst").read_text()
    for path in DOCS.rglob("*.rst"):
        name = str(path.relative_to(DOCS).with_suffix(""))
        assert name == "index" or f"\n    {name}\n" in contents


def labels(svg):
    """Words and numbers of a figure."""
    return re.findall(r"<text [^>]*>([^<]+)</text>", svg)


@pytest.mark.parametrize(
    "name", ["cycle", "memory", pytest.param("curves", marks=pytest.mark.slow)]
)
def test_figure_is_what_its_script_draws(name, tmp_path, monkeypatch):
    """As far as words and numbers go; strokes depend on matplotlib."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(FIGURES)
    importlib.import_module(name).main(folder=tmp_path)
    drawn = (tmp_path / f"{name}.svg").read_text()
    assert len(labels(drawn)) > 5
    assert labels(drawn) == labels((FIGURES / f"{name}.svg").read_text())
    assert "currentColor" in drawn


def test_numbers_of_the_memory_figure_are_those_of_the_benchmark():
    table = (ROOT / "benchmarks" / "README.rst").read_text()
    numbers = json.loads((FIGURES / "memory.json").read_text())
    rows = {"batch": numbers["batch"], **numbers["megabytes"]}
    for name, row in rows.items():
        cells = ["-" if each is None else str(each) for each in row]
        pattern = rf"^ +{name} +{' +'.join(cells)}$"
        assert re.search(pattern, table, re.MULTILINE), pattern


@pytest.mark.slow
def test_larger_batches_do_what_a_lower_rate_does(monkeypatch):
    """arXiv:1711.00489, in the script of the guide."""
    pytest.importorskip("sklearn")
    use_float("float32")
    monkeypatch.syspath_prepend(GUIDES)
    script = importlib.import_module("batch_size_schedules")
    lower, larger = (
        script.train(way, seed=0, epochs=28)
        for way in ("lower rate", "larger batches")
    )
    assert lower["updates"] == 28 * 80
    assert larger["updates"] == 12 * 80 + 8 * 20 + 8 * 5
    # Without either the training loss is lower by 0.012.
    assert larger["training loss"] == pytest.approx(
        lower["training loss"], abs=0.002
    )
    guide = (GUIDES / "batch_size_schedules.rst").read_text()
    assert "1,160 updates instead of 2,240" in guide.replace("\n", " ")


@pytest.mark.slow
def test_script_of_the_guide_on_losses_over_the_batch_runs():
    pytest.importorskip("sklearn")
    script = GUIDES / "losses_over_the_batch.py"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    # It ends in assertions.
    assert result.returncode == 0, result.stderr[-2000:]
    guide = script.with_suffix(".rst").read_text()
    columns = re.search(r"^ +weights .*$", result.stdout, re.MULTILINE)
    assert columns.group() in guide
    last = result.stdout.splitlines()[-1]
    assert last in guide


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
