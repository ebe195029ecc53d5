"""The public names, and nothing besides."""

import ast
import pathlib
import re

import accum_model

PACKAGE = pathlib.Path(accum_model.__file__).parent


def test_all_names_exist_and_are_documented():
    assert sorted(accum_model.__all__) == sorted(set(accum_model.__all__))
    readme = (PACKAGE.parent / "README.rst").read_text()
    changelog = (PACKAGE.parent / "CHANGELOG.rst").read_text()
    for name in accum_model.__all__:
        assert isinstance(name, str)
        value = getattr(accum_model, name)
        if not name.startswith("_"):
            assert value.__doc__
            assert f"``{name}" in readme + changelog


def test_nothing_else_is_public():
    modules = {path.stem for path in PACKAGE.iterdir()}
    public = {name for name in vars(accum_model) if not name.startswith("_")}
    assert public - modules == {
        name for name in accum_model.__all__ if not name.startswith("_")
    }


def test_version_is_that_of_the_metadata():
    assert re.fullmatch(r"\d+\.\d+\.\d+", accum_model.__version__)


def test_private_names_of_keras_are_used_in_one_file_only():
    """https://github.com/andreped/GradientAccumulator/issues/37

    Attributes with a leading underscore are taken of `self` only, or are
    defined in this package.
    """
    own = set()
    uses = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            if isinstance(node, ast.Attribute):
                is_private = re.match(r"_[a-z]", node.attr)
                owner = ast.unparse(node.value)
                if isinstance(node.ctx, ast.Store) and owner == "self":
                    own.add(node.attr)
                elif is_private and owner not in ("self", "cls"):
                    uses.append((path.name, owner, node.attr))
    foreign = [
        use
        for use in uses
        if use[2] not in own and use[0] != "_keras_compat.py"
    ]
    allowed = {("_version", "__version__")}
    assert [use for use in foreign if use[1:] not in allowed] == [
        use for use in foreign if use[1] == "accum_model"
    ]
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "keras.src" not in text
        assert "tensorflow.python" not in text


def test_imports_go_only_downward():
    """The order of the modules, lowest first."""
    order = [
        "_version",
        "_backend",
        "_keras_compat",
        "freezing",
        "optimizer_chain",
        "checks",
        "optimizer_checks",
        "model_checks",
        "call_checks",
        "file_checks",
        "schedule",
        "batch_size",
        "guard",
        "shadow",
        "replicas",
        "noise_scale",
        "ledger",
        "noise_report",
        "data_rows",
        "distributed_step",
        "loss_terms",
        "micro_batch",
        "batch_statistics",
        "two_point",
        "gradient_clipping",
        "accumulator",
        "nonfinite",
        "buffers",
        "pooled_moments",
        "inner_update",
        "update",
        "single_update",
        "cycle_state",
        "optimizer_state",
        "optimizer",
        "nesting",
        "loading",
        "variant",
        "cut.cut_checks",
        "cut.chunks",
        "cut.chunk_loop",
        "cut.pure_state",
        "cut.kept_outputs",
        "cut.plan",
        "cut.cutting",
        "cut.gradient_sum",
        "cut.evaluation",
        "cut.denominators",
        "cut.micro_batch_scope",
        "cut.batch_scope",
        "cut.second_point",
        "cut.cut_step",
        "cut.auto_size",
        "settings",
        "compiling",
        "train_step",
        "epoch_boundary",
        "model",
        "attachment",
        "callback",
        "layers.accum_batch_normalization",
        "optimizers.argument_checks",
        "optimizers.dense_gradients",
        "optimizers.inner_options",
        "optimizers.wrapper",
        "optimizers.update_rate",
        "optimizers.adam_accumulate",
        "optimizers.radam",
        "optimizers.lookahead",
        "optimizers.ranger",
        "optimizers.heun",
        "optimizers.sam",
        "optimizers.lookahead_swap",
    ]
    paths = [
        *PACKAGE.glob("*.py"),
        *PACKAGE.glob("cut/*.py"),
        *PACKAGE.glob("layers/*.py"),
        *PACKAGE.glob("optimizers/*.py"),
    ]
    for path in paths:
        if path.stem in ("__init__", "__main__"):
            continue
        imported = re.findall(
            r"^from accum_model(?: import |\.)((?:(?:cut|layers|optimizers)"
            r"(?: import |\.))?\w+)",
            path.read_text(),
            re.MULTILINE,
        )
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        place = order.index(name)
        for each in imported:
            assert order.index(each.replace(" import ", ".")) < place, name
