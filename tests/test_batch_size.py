"""effective_batch_size, accum_steps_for, updates_per_epoch."""

import keras
import pytest

from accum_model import accum_steps_for
from accum_model import effective_batch_size
from accum_model import updates_per_epoch


def test_effective_batch_size_counts_steps_and_replicas():
    """https://github.com/Lightning-AI/litgpt/pull/1947"""
    assert effective_batch_size(8) == 8
    assert effective_batch_size(8, accum_steps=4, num_replicas=2) == 64


def test_accum_steps_for_needs_a_whole_number():
    """https://github.com/OpenNMT/OpenNMT-tf/issues/813"""
    assert accum_steps_for(64, 8, 2) == 4
    with pytest.raises(ValueError, match="effective_batch_size=60") as caught:
        accum_steps_for(60, 8, 2)
    assert "nearest multiples of 16: 48 or 64." in str(caught.value)
    with pytest.raises(ValueError, match="multiples of 16: 16"):
        accum_steps_for(8, 8, 2)


@pytest.mark.parametrize(
    "num_batches, remainder, updates",
    [(10, "flush", 3), (10, "drop", 2), (20, "carry", 5), (8, "flush", 2)],
)
def test_updates_per_epoch(num_batches, remainder, updates):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2257"""
    assert updates_per_epoch(num_batches, 4, remainder) == updates
    assert type(updates_per_epoch(num_batches, 4, remainder)) is int


def test_schedule_made_from_it_ends_at_the_last_update():
    updates = 3 * updates_per_epoch(10, 4)
    decay = keras.optimizers.schedules.CosineDecay(1.0, updates, alpha=0.125)
    assert float(decay(updates)) == pytest.approx(0.125)
    assert float(decay(updates - 1)) > 0.125
