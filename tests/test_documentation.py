"""What the README and the docstrings show is what happens."""

import ast
import contextlib
import doctest
import importlib
import io
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap

import docutils.core
import docutils.nodes
import docutils.utils
import pytest
from conftest import use_float
from docutils.parsers import rst

import accum_model

ROOT = pathlib.Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "guides"
GUIDE_NAMES = sorted(path.name for path in GUIDES.glob("*.rst"))


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


class LiteralInclude(rst.Directive):
    """Sphinx's directive as far as the guides use it: a function of a file."""

    required_arguments = 1
    option_spec = {"pyobject": rst.directives.unchanged_required}

    def run(self):
        script = pathlib.Path(self.state.document.current_source).parent
        source = (script / self.arguments[0]).read_text()
        wanted = self.options["pyobject"]
        for node in ast.parse(source).body:
            if getattr(node, "name", None) == wanted:
                text = ast.get_source_segment(source, node)
                return [docutils.nodes.literal_block(text, text)]
        raise self.error(f"no {wanted} in {self.arguments[0]}")


rst.directives.register_directive("literalinclude", LiteralInclude)


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


@pytest.mark.parametrize("name", GUIDE_NAMES)
def test_guide_renders_with_all_that_it_includes(name):
    included = re.findall(r":pyobject: (\w+)", (GUIDES / name).read_text())
    html = render(GUIDES / name)
    for function in included:
        assert f"def {function}(" in html


def test_guide_that_includes_what_is_not_there_does_not_render(tmp_path):
    (tmp_path / "script.py").write_text("def one():\n    pass\n")
    text = ".. literalinclude:: script.py\n    :pyobject: {}\n"
    page = tmp_path / "page.rst"
    page.write_text(text.format("one"))
    assert "def one()" in render(page)
    page.write_text(text.format("two"))
    with pytest.raises(docutils.utils.SystemMessage, match="no two"):
        render(page)


@pytest.mark.parametrize("name", GUIDE_NAMES)
def test_guide_snippets_run_and_print_what_it_says(name):
    use_float("float32")
    text = (GUIDES / name).read_text()
    # What is between two snippets, and may say what the first one prints.
    _, *parts = re.split(block_pattern("python"), text)
    assert len(parts) >= 2
    namespace = {}
    for snippet, after in zip(parts[::2], parts[1::2], strict=True):
        printed = what_it_prints(textwrap.dedent(snippet), namespace)
        for line in printed.splitlines():
            shown = f"``{line}``" in after or f"\n    {line}\n" in after
            assert shown, f"printed, but not in the guide: {line}"
        if not printed:
            assert not after.lstrip().startswith("It prints")


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
