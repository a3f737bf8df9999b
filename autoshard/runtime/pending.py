"""Messages on their way: what a collective gives until something needs it.

A collective is issued where it stands in a program and waited for where its result is used first, so that
what stands between the two runs beside the message. Nothing can use a result too early: whoever runs a
program takes it out of its `Pending` before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.runtime.checks.check_mode import collective

#: makes the results of a message that has arrived, given what arrived
Finish = Callable[[torch.Tensor], Any]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """Where what arrives is the result."""
    return x


class Relay:
    """A message in two hops. first: waits for what comes; then: sends that on."""

    __slots__ = ("_first", "_second", "_then")

    def __init__(
        self,
        first: Callable[[], torch.Tensor],
        then: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
    ) -> None:
        self._first, self._then = first, then
        self._second: Callable[[], torch.Tensor] | None = None

    def forward(self) -> None:
        """Waits for the first hop and issues the second, once."""
        if self._second is None:
            self._second = self._then(self._first())

    def __call__(self) -> torch.Tensor:
        self.forward()
        assert self._second is not None
        return self._second()


class PendingCollective:
    """One message.

    arriving: waits for what comes and gives it. held: what must stay alive until then. name: how errors call
    it.
    """

    __slots__ = ("__weakref__", "_arriving", "_finish", "_held", "_results", "name")

    def __init__(self, arriving: Callable[[], torch.Tensor], finish: Finish, held: object = None) -> None:
        self._arriving: Callable[[], torch.Tensor] | None = arriving
        self._finish, self._held = finish, held
        self._results: Any = None
        self.name = "a collective"

    def results(self) -> Any:
        """What the collective gives; waits for the message at the first call.

        Raises CollectiveError, with the collective's name, if it does not arrive.
        """
        if self._arriving is not None:
            with collective(self.name, None):
                self.arrive()
        return self._results

    def forward(self) -> PendingCollective:
        """The message, of two hops on its second."""
        if isinstance(self._arriving, Relay):
            self._arriving.forward()
        return self

    def arrive(self) -> Any:
        """The same, with the errors of torch.distributed as they are."""
        if self._arriving is not None:
            self._results = self._finish(self._arriving())
            # nothing that was sent or received lives on with the results
            self._arriving, self._finish, self._held = None, as_it_is, None
        return self._results


class Pending:
    """One result of a message. position: among several, None for a message with one."""

    __slots__ = ("_message", "_position")

    def __init__(self, message: PendingCollective, position: int | None = None) -> None:
        self._message, self._position = message, position

    def forward(self) -> PendingCollective:
        """Its message, of two hops on its second."""
        return self._message.forward()

    def get(self) -> torch.Tensor:
        """The result, waited for."""
        results = self._message.results()
        result: torch.Tensor = results if self._position is None else results[self._position]
        return result


class Issue:
    """A collective of one rank that is issued without being waited for.

    start: of the arguments of its node, gives a `PendingCollective`. count: of its results, None if they are
    no list. name: how errors call it. relays: whether the first of its arguments may be on its way.
    """

    __slots__ = ("count", "name", "relays", "start")

    def __init__(
        self, start: Callable[..., PendingCollective], count: int | None, name: str, relays: bool = False
    ) -> None:
        self.start, self.count, self.name, self.relays = start, count, name, relays

    def __call__(self, *args: Any, **kwargs: Any) -> Pending | list[Pending]:
        with collective(self.name, None):
            message = self.start(*args, **kwargs)
        message.name = self.name
        if self.count is None:
            return Pending(message)
        return [Pending(message, k) for k in range(self.count)]


def arrived(value: Any) -> Any:
    """The value itself, or what a pending one gives."""
    return value.get() if type(value) is Pending else value


def all_arrived(values: Sequence[Any]) -> list[Any]:
    return [value.get() if type(value) is Pending else value for value in values]


def wait(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a functional collective, once it is there."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result
