"""The demo: what it prints and draws, and what it refuses."""

import contextlib
import io
import pathlib
import re
import runpy
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest

from accum_model import AccumModel
from accum_model import demo
from accum_model.demo import digits
from accum_model.demo import report
from accum_model.demo import training

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

NAMES = [
    "large batch",
    "AccumModel.wrap",
    "class Net(AccumModel)",
    "AccumCallback",
]


class Run(NamedTuple):
    """A run of the demo: exit code, stdout, PNG, Keras's dtypes around it."""

    code: int
    text: str
    output: pathlib.Path
    dtypes_before: tuple[str, str]
    dtypes_after: tuple[str, str]


def dtypes():
    return keras.config.floatx(), keras.config.dtype_policy().name


def rows(text):
    """The rows of the table: name, loss, accuracy, updates, difference."""
    pattern = r"^\d\. (.+?) +([\d.]+) +([\d.]+) +(\d+) +(\S+) +[\d.]+$"
    return re.findall(pattern, text, flags=re.MULTILINE)


@pytest.fixture(autouse=True)
def clean_keras():
    """Replaces the one for all tests: the demo must do without."""


@pytest.fixture(scope="module")
def float64_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "new" / "folder" / "curves.png"
    before = dtypes()
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = demo.main(
            ["--float64", "--epochs", "2", "--output", str(output)]
        )
    return Run(code, stdout.getvalue(), output, before, dtypes())


@pytest.fixture
def no_training(monkeypatch):
    def fail(*args):
        pytest.fail("Training has started.")

    monkeypatch.setattr(training, "train_all", fail)


def made_up_results(*last_weights):
    return [
        training.Result(name, [2.0, 1.0], 0.5, 2, [np.ones(2), weight], 1.0)
        for name, weight in zip(NAMES, np.array(last_weights), strict=True)
    ]


def test_main_float64_table_has_four_ways_with_equal_updates(float64_run):
    table = rows(float64_run.text)
    assert [row[0] for row in table] == NAMES
    # 1437 rows are 5 batches of 256 and a short one; 2 epochs.
    assert [row[3] for row in table] == ["12"] * 4


def test_main_float64_losses_and_accuracies_are_equal(float64_run):
    table = rows(float64_run.text)
    assert len({row[1:3] for row in table}) == 1
    assert float(table[0][2]) > 0.5


def test_main_float64_differences_are_rounding(float64_run):
    differences = [row[4] for row in rows(float64_run.text)]
    assert differences[0] == "-"
    assert all(0 <= float(text) < 1e-9 for text in differences[1:])
    assert "All weight differences are below 1e-09." in float64_run.text
    assert float64_run.code == 0


def test_main_float64_restores_dtypes(float64_run):
    assert float64_run.dtypes_after == float64_run.dtypes_before
    assert float64_run.dtypes_after[0] == "float32"


def test_main_prints_headings_in_order(float64_run):
    headings = re.findall(r"^\d of 4: .*$", float64_run.text, re.MULTILINE)
    assert [heading[0] for heading in headings] == ["1", "2", "3", "4"]
    words = ["batch_size=256", "wrap", "base class", "AccumCallback"]
    for heading, word in zip(headings, words, strict=True):
        assert word in heading


def test_main_without_terminal_prints_one_line_per_epoch(float64_run):
    assert "\r" not in float64_run.text
    assert len(re.findall(r"^\d+/\d+ - ", float64_run.text, re.M)) == 4 * 2


def test_main_output_is_png_with_four_visible_curves(float64_run):
    assert f"Loss curves: {float64_run.output}\n" in float64_run.text
    assert float64_run.output.is_absolute()
    assert float64_run.output.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    image = matplotlib.image.imread(float64_run.output)[..., :3]
    height, width, _ = image.shape
    # Inside the axes, left of the legend.
    inside = image[height // 6 : -height // 6, width // 6 : width // 2]
    pixels = inside.reshape(-1, 3)
    for line in report._LINES:
        color = matplotlib.colors.to_rgb(line["color"])
        is_near = np.all(np.abs(pixels - color) < 0.01, axis=1)
        assert is_near.sum() > 100, line


def test_command_float32_says_why_weights_differ(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accum_model", "--epochs", "1"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("accum_model", run_name="__main__")
    assert raised.value.code == 0
    text = capsys.readouterr().out
    table = rows(text)
    assert [row[0] for row in table] == NAMES
    assert [row[3] for row in table] == ["6"] * 4
    assert all(0 < float(row[4]) < 1e-4 for row in table[1:])
    assert "round differently" in text
    assert "--float64" in text
    assert f"Loss curves: {tmp_path / 'accum_model_demo.png'}" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "accum_model_demo.png"]


@pytest.mark.parametrize(
    "argv, option",
    [
        (["--epochs", "0"], "--epochs"),
        (["--epochs", "-3"], "--epochs"),
        (["--epochs", "2.5"], "--epochs"),
        (["--accum-steps", "0"], "--accum-steps"),
        (["--accum-steps", "eight"], "--accum-steps"),
        (["--batch-size", "0"], "--batch-size"),
        (["--batch-size", ""], "--batch-size"),
        (["--batch-size", "250"], "--batch-size 248 or 256"),
        (["--batch-size", "4"], "--batch-size 8"),
        (["--batch-size", "1437"], "--batch-size 1432"),
        (["--batch-size", "900", "--accum-steps", "1600"], "--accum-steps"),
        (["--batch-size", "1440"], "--batch-size: must be at most 1437"),
        (["--epoch", "3"], "--epoch 3"),
        (["--loud"], "--loud"),
        (["--output", ""], "--output"),
        (["--output", "curves.pdf"], "--output"),
        (["--output", "plots/"], "--output"),
    ],
)
def test_main_bad_option_exits_with_2(
    argv, option, capsys, tmp_path, monkeypatch, no_training
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        demo.main(argv)
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    # After the usage, which names every option.
    assert option in printed.err.split("error: ")[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["folder.png", "file/curves.png"])
def test_main_unwritable_output_exits_with_2(
    name, capsys, tmp_path, no_training
):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as raised:
        demo.main(["--output", str(tmp_path / name)])
    assert raised.value.code == 2
    message = capsys.readouterr().err.split("error: ")[1]
    assert message.startswith("argument --output: cannot write")
    assert str(tmp_path / name) in message


@pytest.mark.parametrize("module", ["sklearn.datasets", "matplotlib.figure"])
def test_main_missing_package_returns_2(
    module, capsys, tmp_path, monkeypatch, no_training
):
    monkeypatch.setitem(sys.modules, module, None)
    assert demo.main(["--output", str(tmp_path / "curves.png")]) == 2
    message = capsys.readouterr().err
    assert 'pip install "accum_model[demo]"' in message
    assert module in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [1.0 + 2e-9, np.nan])
def test_main_float64_other_weights_return_1(
    wrong, capsys, tmp_path, monkeypatch
):
    results = made_up_results(1.0, 1.0, wrong, 1.0)
    monkeypatch.setattr(training, "train_all", lambda *args: results)
    argv = ["--output", str(tmp_path / "curves.png")]
    assert demo.main(["--float64", *argv]) == 1
    assert "not below 1e-09" in capsys.readouterr().err
    assert demo.main(argv) == 0


def test_main_equal_weights_says_so(capsys, tmp_path, monkeypatch):
    results = made_up_results(1.0, 1.0, 1.0, 1.0)
    monkeypatch.setattr(training, "train_all", lambda *args: results)
    assert demo.main(["--output", str(tmp_path / "curves.png")]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_main_failure_restores_dtypes(tmp_path, monkeypatch):
    def fail(*args):
        assert dtypes() == ("float64", "float64")
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train_all", fail)
    before = dtypes()
    assert before[0] == "float32"
    with pytest.raises(KeyboardInterrupt):
        demo.main(["--float64", "--output", str(tmp_path / "curves.png")])
    assert dtypes() == before


def test_network_any_base_has_the_same_weights():
    plain = training.network(keras.Model)
    accumulating = training.network(AccumModel, accum_steps=2)
    pairs = zip(plain.weights, accumulating.weights, strict=True)
    for one, two in pairs:
        np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_load_keeps_every_row_once():
    import sklearn.datasets

    data = digits.load(seed=1)
    assert data.x_train.shape == (digits.TRAINING_ROWS, 8, 8, 1)
    assert data.x_train.dtype == keras.config.floatx()
    images = np.concatenate([data.x_train, data.x_validation])
    labels = np.concatenate([data.y_train, data.y_validation])
    found = np.column_stack([images.reshape(-1, 64) * 16, labels])
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    expected = np.column_stack([images, labels])
    np.testing.assert_array_equal(
        found[np.lexsort(found.T)], expected[np.lexsort(expected.T)]
    )


@pytest.mark.parametrize("is_terminal, verbose", [(True, 1), (False, 2)])
def test_train_shows_progress_bars_in_a_terminal_only(
    is_terminal, verbose, monkeypatch
):
    class Stop(Exception):
        pass

    def fit(self, *args, **kwargs):
        raise Stop(kwargs["verbose"])

    monkeypatch.setattr(keras.Model, "fit", fit)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    way = training.four_ways(8, 2)[0]
    with pytest.raises(Stop, match=str(verbose)):
        training.train(way, digits.load(seed=1), epochs=1)
