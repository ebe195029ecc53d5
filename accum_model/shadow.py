"""Methods of single objects, replaced for the time of a block.

For the block alone: other threads that call the method meanwhile, such as the
replicas of a strategy, get the original or a replacement of their own.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

# (the method as it was, *args, **kwargs) -> what the method returns.
Replacement = Callable[..., Any]

_lock = threading.Lock()


@contextlib.contextmanager
def method(owner: Any, name: str, replacement: Replacement) -> Iterator[None]:
    """Calls `replacement` where the method `name` of `owner` is called.

    Args:
        owner: The object. It must allow attributes to be set.
        name: Name of the method.
        replacement: Called with the method as it was before the block, and
            with what the method is called with.
    """
    with _lock:
        shadow = vars(owner).get(name)
        if not isinstance(shadow, _Shadow):
            shadow = _Shadow(owner, name)
            # Frameworks track what is set as an attribute.
            vars(owner)[name] = shadow
        shadow.num_blocks += 1
    before = shadow.present.get() or shadow.original
    present = functools.partial(replacement, before)
    token = shadow.present.set(functools.update_wrapper(present, before))
    try:
        yield
    finally:
        shadow.present.reset(token)
        with _lock:
            shadow.num_blocks -= 1
            if not shadow.num_blocks:
                shadow.withdraw(owner, name)


class _Shadow:
    """Stands in for a method and calls what the thread has for it."""

    def __init__(self, owner, name):
        self.had = name in vars(owner)
        self.original = getattr(owner, name)
        self.num_blocks = 0
        self.present = contextvars.ContextVar(name, default=None)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args, **kwargs):
        return (self.present.get() or self.original)(*args, **kwargs)

    def withdraw(self, owner, name):
        if self.had:
            vars(owner)[name] = self.original
        else:
            del vars(owner)[name]
