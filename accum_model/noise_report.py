"""What is said about the gradient noise scale: logs, a warning, advice."""

import warnings
from typing import Any

from accum_model import noise_scale
from accum_model.ledger import RowLedger


class NoiseReport:
    """Reports on one `fit` after the other.

    Args:
        verbose: 0 to print nothing.
    """

    def __init__(self, verbose: int) -> None:
        self._verbose = verbose
        self._epochs: list[tuple[noise_scale.Estimate, float]] = []
        self._has_warned = False

    def begin_fit(self) -> None:
        """Forgets the `fit` before."""
        self._epochs = []
        self._has_warned = False

    def begin_epoch(self, ledger: RowLedger) -> None:
        """Begins an estimate."""
        if ledger.noise is not None:
            ledger.noise.restart()

    def end_epoch(self, ledger: RowLedger, logs: dict[str, Any]) -> None:
        """Writes the estimate of the epoch into `logs`.

        Args:
            ledger: As it is at the end of the epoch.
            logs: Of the epoch, with `effective_batch_size` and `updates`.
        """
        if ledger.noise is None:
            return
        estimate = ledger.noise.estimate()
        if estimate.num_updates:
            logs["gradient_noise_scale"] = estimate.scale
            rows = float(logs["effective_batch_size"])
            self._epochs.append((estimate, rows))
        elif logs["updates"] and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "noise_scale=True has nothing to estimate from, because no "
                "update of this epoch was the mean of several micro-batches "
                "whose gradients are seen one by one. Pass accum_steps or "
                'micro_batch_size, with loss_scope="micro_batch".',
                stacklevel=2,
            )

    def end_fit(self) -> None:
        """Prints a line of advice, from the second half of the epochs.

        The noise scale grows while a model learns.
        """
        if not self._epochs or not self._verbose:
            return
        late = self._epochs[len(self._epochs) // 2 :]
        total, *others = [estimate for estimate, _ in late]
        for estimate in others:
            total += estimate
        rows = sum(rows for _, rows in late) / len(late)
        print(noise_scale.advice(total, rows), flush=True)
