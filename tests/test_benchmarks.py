"""Benchmarks run on the smallest of cases and print what they promise."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from accum_model import AccumModel
from benchmarks import _columns
from benchmarks import _same_weights
from benchmarks import _timing
from benchmarks import embedding_step
from benchmarks import gpu
from benchmarks import noise_scale
from benchmarks import peak_memory
from benchmarks import scaling
from benchmarks import step_time
from benchmarks import trace_time

TINY = ["--models", "small MLP", "--batch-size", "4", "--micro-batch-size", "2"]


@pytest.fixture(autouse=True)
def float32():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_step_time_prints_columns_and_writes_json(tmp_path, capsys):
    file = tmp_path / "times.json"
    columns = [_columns.CALLBACK, _columns.CUT]
    arguments = [*TINY, "--rounds", "2", "--first-calls", "0", "--columns"]
    step_time.main([*arguments, *columns, "--json", str(file)])
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    timed = written["results"]["small MLP"]["update"]
    references = {_columns.LIMIT, _columns.UNCUT, _columns.BUILT_IN}
    assert set(timed) == {*columns, *references}
    for column, seconds in timed.items():
        assert f"\n  {column:30}" in printed
        assert len(seconds) == 2
    assert written["versions"]["keras"] == keras.__version__
    assert written["options"]["batch_size"] == 4


def test_columns_that_train_to_other_weights_are_refused():
    case = step_time._cases.CASES["small MLP"]
    plain, same, other = (case.model() for _ in range(3))
    for model in (plain, same):
        first = model.trainable_variables[0]
        first.assign_add(tf.ones(first.shape))
    _same_weights.check(case, {"plain": plain, "same": same}, "plain")
    with pytest.raises(RuntimeError, match="'other' has trained to other wei"):
        _same_weights.check(case, {"plain": plain, "other": other}, "plain")


@pytest.mark.parametrize("benchmark", [step_time, scaling, noise_scale])
def test_benchmarks_refuse_to_time_other_work(benchmark, monkeypatch):
    class Refused(Exception):
        pass

    def refuse(*args):
        raise Refused

    monkeypatch.setattr(_same_weights, "check", refuse)
    with pytest.raises(Refused):
        benchmark.main(
            {
                step_time: [*TINY, "--columns", _columns.CUT],
                scaling: ["--num-micro-batches", "1"],
                noise_scale: TINY,
            }[benchmark]
        )


def test_every_case_has_data_for_its_model():
    for case in step_time._cases.CASES.values():
        x, y = case.data(2)
        assert case.model()(x).shape == (2, 10)
        assert y.shape == (2,)


@pytest.mark.slow
def test_trace_time_prints_every_column(capsys):
    trace_time.main(
        ["--num-variables", "2", "--optimizers", "sgd", "--rounds", "1"]
    )
    printed = capsys.readouterr().out
    for column in trace_time.COLUMNS:
        assert f"\n  {column:30}" in printed


@pytest.mark.slow
def test_scaling_prints_both_tables_and_leaves_out_what_is_too_big(capsys):
    scaling.main(
        "--num-micro-batches 1 2 --num-parameters 1e4 1e8 --rounds 3".split()
    )
    printed = capsys.readouterr().out
    for label in ("k=1", "k=2", "1e+04"):
        assert f"\n{label:>12}" in printed
    assert "left out" in printed


def test_scaling_makes_models_of_the_size_asked_for():
    for number in (1e5, 1e6):
        size = scaling.mlp(int(number)).model().count_params()
        assert size == pytest.approx(number, rel=0.05)


@pytest.mark.slow
def test_peak_memory_across_steps_does_not_grow_with_accum_steps(
    capsys, tmp_path
):
    """https://github.com/meta-pytorch/torchtune/issues/2134"""
    file = tmp_path / "peaks.json"
    arguments = ["--batch-sizes", "4", "16", "--micro-batch-size", "2"]
    peak_memory.main([*arguments, "--columns", "across", "--json", str(file)])
    assert "across steps" in capsys.readouterr().out
    (written,) = json.loads(file.read_text())["results"].values()
    assert written["bytes_per_parameter"] == 4
    # The allocator keeps some of what is freed.
    assert written["16"] < 1.1 * written["4"]


@pytest.mark.slow
def test_accumulating_step_costs_what_a_plain_one_does():
    """https://github.com/andreped/GradientAccumulator/issues/102"""
    settings = _columns.Settings(batch_size=64, micro_batch_size=8)
    case = step_time._cases.CASES["wide MLP"]
    calls = {
        name: _columns.COLUMNS[name](case, settings).update
        for name in (_columns.SMALL, _columns.ACROSS)
    }
    seconds = _timing.interleaved(calls, rounds=5, warm_up=1)
    small, across = map(min, seconds.values())
    assert across < 1.15 * small


def test_step_on_a_big_table_touches_the_rows_it_looks_up():
    """https://github.com/keras-team/keras/issues/4365"""
    ids = np.array([[1, 5, 5, 7], [5, 9, 9, 9]])
    seconds = {}
    for accum_steps in (1, 10**6):
        model = AccumModel.wrap(
            embedding_step.table_model(200_000, 16), accum_steps
        )
        step = embedding_step.training_step(
            model, keras.optimizers.SGD(0.1), (ids, np.ones((2, 1)))
        )
        times = []
        for _ in range(20):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
        seconds[accum_steps] = min(times)
    assert seconds[10**6] < 1.5 * seconds[1], seconds
    (total,) = [
        v.numpy() for v in model.optimizer.variables if v.shape == (200_000, 16)
    ]
    assert list(np.flatnonzero(np.any(total, 1))) == [1, 5, 7, 9]


@pytest.mark.slow
def test_embedding_step_prints_and_writes_every_column(capsys, tmp_path):
    file = tmp_path / "times.json"
    arguments = ["--num-ids", "50", "--rounds", "2", "--json", str(file)]
    embedding_step.main(arguments)
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())["results"]
    assert "accum_model, nonfinite" in written
    assert all(column in printed for column in written)


def test_gpu_says_that_there_is_none(capsys):
    gpu.main([])
    assert "sees no GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_gpu_measures_a_small_model_on_the_cpu(capsys):
    gpu.main(["--on-cpu", "--rounds", "2", "--policies", "mixed_float16"])
    printed = capsys.readouterr().out
    assert "small MLP, mixed_float16" in printed
    assert "auto, of 32 rows: 32" in printed
    assert keras.config.dtype_policy().name == "float32"


def test_gpu_leaves_out_what_there_is_no_time_for(capsys):
    options = gpu.argparse.Namespace(minutes=1, rounds=1)
    clock = iter([0, 61, 122]).__next__
    parts = {"small": None, "big": None}
    assert gpu.measure_all(parts, ("float32",), options, None, clock) == {}
    assert capsys.readouterr().out.count("left out, no time") == 2
