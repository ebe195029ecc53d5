"""How batches are cut inside the step: what was asked for, and what fits."""

import tensorflow as tf

from accum_model.cut import cut_checks
from accum_model.cut.plan import Plan


class Cutting:
    """Rows per micro-batch, and what one loss is taken over.

    Args:
        micro_batch_size: None, int >= 1 or `"auto"`.
        loss_scope: `"micro_batch"` or `"batch"`.

    Attributes:
        micro_batch_size: As given.
        loss_scope: As given.
        plan: What is known of the step that is cut.
        size: Rows per micro-batch at present, or None for the whole batch.
        verbose: 0 to find a size in silence.

    Raises:
        ValueError: If an argument is not one of those above.
    """

    def __init__(
        self,
        micro_batch_size: int | str | None = None,
        loss_scope: str = "micro_batch",
    ) -> None:
        self.micro_batch_size = cut_checks.micro_batch_size(micro_batch_size)
        self.loss_scope = cut_checks.loss_scope(
            loss_scope, self.micro_batch_size
        )
        self.plan = Plan()
        self.size: int | None = None
        self.verbose = 1
        self._num_commits: tf.Variable | None = None
        self._size_in_graph: tf.Variable | None = None
        self._rows_in_use: int | None = None
        self._has_said_size = False
        if self.is_auto:
            with tf.init_scope():
                self._num_commits = _counter(0)
                self._size_in_graph = _counter(tf.int64.max)
        else:
            self.size = self.micro_batch_size

    @property
    def cuts(self) -> bool:
        """True when batches are cut at all."""
        return self.micro_batch_size is not None

    @property
    def is_auto(self) -> bool:
        """True when the size is to be found."""
        return self.micro_batch_size == "auto"

    @property
    def rows_in_use(self) -> int | None:
        """Rows per micro-batch, for the logs; None while they are unknown."""
        return self._rows_in_use if self.is_auto else self.size

    def size_for(self, use_xla: bool) -> int | tf.Tensor | None:
        """The size as the step reads it, which may be in a graph.

        A graph need not be made anew for another size, unless XLA compiles it.
        """
        if use_xla or tf.executing_eagerly() or self._size_in_graph is None:
            return self.size
        return tf.convert_to_tensor(self._size_in_graph)

    @property
    def num_commits(self) -> int:
        """How many steps have begun to change the model."""
        return 0 if self._num_commits is None else int(self._num_commits)

    def note_commit(self) -> None:
        """Notes, in the step, that it begins to change the model."""
        if self._num_commits is not None:
            self._num_commits.assign_add(1)

    def halve(self, num_rows: int, cause: Exception) -> None:
        """Takes half the size, after one that did not fit.

        Args:
            num_rows: Rows of the batch that was tried.
            cause: The error that it ended with.

        Raises:
            tf.errors.ResourceExhaustedError: If a single row did not fit.
        """
        tried = min(self.size or num_rows, num_rows)
        if tried == 1:
            raise cut_checks.nothing_fits(num_rows) from cause
        self.size = -(-tried // 2)
        self._size_in_graph.assign(self.size)
        self._has_said_size = False

    def note_fit(self, num_rows: int) -> None:
        """Notes that a batch of `num_rows` fits, and says so once."""
        self._rows_in_use = self.size or max(self._rows_in_use or 0, num_rows)
        if not self._has_said_size:
            self._has_said_size = True
            if self.verbose:
                rows = self._rows_in_use
                print(
                    f'micro_batch_size="auto": {rows} '
                    f"{'rows fit' if rows > 1 else 'row fits'} (of a batch of "
                    f"{num_rows}).",
                    flush=True,
                )


def _counter(value):
    return tf.Variable(value, dtype="int64", trainable=False)
