"""Training that is killed goes on as if nothing had happened."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("killed_training.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_20_kills_leave_the_weights_of_the_undisturbed_run(tmp_path):
    """https://github.com/huggingface/transformers/issues/22143

    SIGKILL inside cycles, at both ends of epochs, with a file half written and
    before it is renamed: 10 times a model that is saved and renamed, 10 times
    a callback with `BackupAndRestore(double_checkpoint=True)`.
    """
    result = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "10"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    ends = json.loads(result.stdout.splitlines()[-1])
    assert ends == {
        "wrap": {"kills": 10, "equal": True},
        "callback": {"kills": 10, "equal": True},
    }
