"""All cycles of one optimizer: one per list of variables it is called with.

The owner of the buffers. A list of all variables has one cycle; an optimizer
that is called with parts in turn has one for each part, and nothing collected
for one part is lost to another.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from accum_model import accumulator
from accum_model import call_checks
from accum_model import file_checks
from accum_model.replicas import Replicas


class Buffers:
    """Makes, hands out, saves and loads the cycles of an optimizer.

    Args:
        variables: All trainable variables.
        add_variable: Makes a variable of the owning optimizer, see
            `keras.optimizers.Optimizer.add_variable`.
        accum_steps: int >= 1, micro-batches per update.
        replicas: Those that share the variables.
        accum_dtype: dtype of the sums, or None for float32 (float64 for
            float64 variables).

    Attributes:
        replicas: As given.
        accum_steps: int64 scalar variable, micro-batches in the next cycles.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        add_variable: Callable[..., keras.Variable],
        accum_steps: int,
        replicas: Replicas,
        accum_dtype: str | None = None,
    ) -> None:
        self.replicas = replicas
        self._accum_dtype = accum_dtype
        self._variables = list(variables)
        self._add_variable = add_variable
        with replicas.variables():
            self.accum_steps = add_variable(
                (),
                initializer=keras.initializers.Constant(accum_steps),
                dtype="int64",
                name="accum_steps",
            )
        # Made at once, so that a saved state finds its place before the first
        # step; given to the first list, or lists of parts, that ask.
        self._spare: accumulator.Accumulator | None = self._add_cycle(
            self._variables, [self._add_sum(v) for v in self._variables]
        )
        self._spare_sums: dict[int, keras.Variable] = {}
        self._cycles: dict[tuple[int, ...], accumulator.Accumulator] = {}

    def cycle_of(
        self, variables: Sequence[keras.Variable]
    ) -> accumulator.Accumulator:
        """The cycle of this list of variables."""
        keys = tuple(id(variable) for variable in variables)
        if keys not in self._cycles:
            call_checks.known_variables(variables, self._variables)
            self.replicas.together(lambda: self._start_cycle(keys, variables))
        return self._cycles[keys]

    def _start_cycle(self, keys, variables):
        spare, self._spare = self._spare, None
        if spare is not None:
            spare_keys = tuple(id(variable) for variable in spare.variables)
            if spare_keys == keys:
                self._cycles[keys] = spare
                return
            self._spare_sums = dict(zip(spare_keys, spare.sums, strict=True))
        with tf.init_scope():
            sums = [
                self._spare_sums.pop(key)
                if key in self._spare_sums
                else self._add_sum(variable)
                for key, variable in zip(keys, variables, strict=True)
            ]
            self._cycles[keys] = self._add_cycle(variables, sums)

    def all_cycles(self) -> Iterable[accumulator.Accumulator]:
        """Every cycle, in the order they were asked for."""
        if self._spare is not None:
            return [self._spare]
        return list(self._cycles.values())

    @property
    def cycle_length(self) -> tf.Tensor:
        """Micro-batches in the present cycle, of the first list."""
        return next(iter(self.all_cycles())).cycle_length.value

    def set_accum_steps(self, accum_steps: int) -> None:
        """Sets micro-batches per update, from each next cycle on."""
        self.accum_steps.assign(accum_steps)
        for cycle in self.all_cycles():
            if concrete(cycle.position) == 0:
                cycle.cycle_length.assign(accum_steps)

    def reset(self) -> None:
        """Empties every buffer and starts new cycles."""
        for cycle in self.all_cycles():
            cycle.reset(self.accum_steps)

    def save(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Writes all state into `store`."""
        store["accum_steps"] = self.accum_steps.numpy()
        index_of = {id(v): j for j, v in enumerate(self._variables)}
        for number, cycle in enumerate(self.all_cycles()):
            store[f"cycle_{number}_variables"] = np.array(
                [index_of[id(v)] for v in cycle.variables], "int64"
            )
            store[f"cycle_{number}_is_sum"] = np.array(bool(cycle.is_sum))
            for name, variable in cycle.shared_state().items():
                store[f"cycle_{number}_{name}"] = variable.numpy()
            is_empty = concrete(cycle.position) == 0
            for name, variable in cycle.local_state().items():
                # To read those of other machines takes all of them.
                store[f"cycle_{number}_{name}"] = (
                    np.zeros(variable.shape, variable.dtype)
                    if is_empty
                    else variable.numpy()
                )

    def load(self, store: Mapping[str, np.ndarray]) -> None:
        """Takes over the state that `save` wrote.

        Raises:
            ValueError: If the state does not fit; nothing is changed then.
        """
        values = {name: np.asarray(store[name]) for name in store.keys()}
        if "num_micro_batches" in values:
            file_checks.saved_batches(values)
        plan = [(self.accum_steps, file_checks.saved_accum_steps(values))]
        local_plan = []
        number = 0
        while f"cycle_{number}_variables" in values:
            prefix = f"cycle_{number}_"
            indices = values[prefix + "variables"].tolist()
            file_checks.saved_indices(indices, len(self._variables))
            file_checks.saved_cycle(values, prefix)
            cycle = self.cycle_of([self._variables[j] for j in indices])
            if prefix + "missing_weight" in values:
                _ = cycle.missing_weight
            if prefix + "num_spoiled" in values:
                _ = cycle.num_spoiled
            if cycle.is_sum is None and prefix + "is_sum" in values:
                # A step that was traced knows better than a file.
                cycle.is_sum = bool(values[prefix + "is_sum"])
            for name, variable in cycle.shared_state().items():
                value = file_checks.saved_value(values, prefix + name, variable)
                plan.append((variable, value))
            for name, variable in cycle.local_state().items():
                is_optional = name in accumulator.OPTIONAL
                if is_optional and prefix + name not in values:
                    continue  # Nobody had looked when it was written: zero.
                value = file_checks.saved_value(values, prefix + name, variable)
                local_plan.append((variable, value))
            number += 1
        self.reset()
        for variable, value in plan:
            variable.assign(value)
        for variable, value in local_plan:
            self.replicas.assign_total(variable, value)

    def _add_sum(self, variable):
        path = getattr(variable, "path", variable.name)
        with self.replicas.local_variables():
            return self._add_variable(
                variable.shape,
                dtype=accumulator.sum_dtype(variable, self._accum_dtype),
                name=path.replace("/", "_").replace(":", "_") + "_gradient_sum",
            )

    def _add_cycle(self, variables, sums):
        with self.replicas.variables():
            return accumulator.Accumulator(
                variables,
                sums,
                self._add_variable,
                concrete(self.accum_steps),
                self.replicas,
            )


def concrete(variable: keras.Variable) -> int:
    """The value of a counter, also while a graph is being traced."""
    with tf.init_scope():
        return int(variable.numpy())
