"""How much of the machine each client has had: virtual token counters."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OUTPUT_WEIGHT", "PROMPT_WEIGHT", "ClientAccount", "ClientAccounts"]

PROMPT_WEIGHT = 1.0
"""What a token of a prompt costs its client; the values are those of the paper named at `ClientAccounts`."""

OUTPUT_WEIGHT = 2.0
"""What a generated token costs it."""

SWEEP_SIZE = 64
"""Accounts that are kept whatever they say."""


@dataclass(eq=False, slots=True)
class ClientAccount:
    """What one client has had.

    Attributes:
        name: the client.
        number: ascending in order of first appearance.
        weight: its share against that of others.
        counter: weighted tokens it was served; never falls.
        token_cost: what a generated token adds to it.
        waiting: its requests that wait.
        announced: its branches that will wait later.
        live: its requests that have not ended.
    """

    name: str = ""
    number: int = 0
    weight: float = 1.0
    counter: float = 0.0
    waiting: int = 0
    announced: int = 0
    live: int = 0
    indexed: bool = False
    token_cost: float = field(init=False)

    def __post_init__(self) -> None:
        self.token_cost = OUTPUT_WEIGHT / self.weight

    def charge_prompt(self, tokens: int) -> None:
        """`tokens` of a prompt are computed for it."""
        self.counter += tokens * PROMPT_WEIGHT / self.weight

    def charge_output(self, tokens: int) -> None:
        """`tokens` have been generated for it."""
        self.counter += tokens * self.token_cost


class ClientAccounts:
    """The accounts of all clients, by which the one that has had least is served first.

    This is the state of a scheduler by virtual token counters (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024, algorithm 2). A client that comes back from idleness does not bring the time it was away as
    credit: its counter is lifted to the least of those that wait, or of the one that waited last.

    Args:
        weights: shares of clients that are not 1.

    Example:
        >>> from hostcache.fairness import ClientAccounts
        >>> accounts = ClientAccounts({})
        >>> busy, back = accounts.open("busy"), accounts.open("back")
        >>> accounts.begin_waiting(busy)
        >>> busy.charge_prompt(500)
        >>> accounts.begin_waiting(back)
        >>> back.counter
        500.0
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._accounts: dict[str, ClientAccount] = {}
        self._numbers = itertools.count()
        self._index: list[tuple[float, int, ClientAccount]] = []  # a heap; a counter in it may be out of date: too low
        self._last: ClientAccount | None = None  # whose requests stopped waiting last
        self._sweep_at = SWEEP_SIZE

    def __len__(self) -> int:
        """Accounts that are kept."""
        return len(self._accounts)

    def open(self, name: str) -> ClientAccount:
        """The account of a client that brings a request; `close` it when the request has ended."""
        account = self._accounts.get(name)
        if account is None:
            account = ClientAccount(name, next(self._numbers), self._weights.get(name, 1.0))
            self._accounts[name] = account
        account.live += 1
        return account

    def close(self, account: ClientAccount) -> None:
        """A request of this client has ended."""
        account.live -= 1
        if len(self._accounts) > self._sweep_at:
            self._forget_idle()

    def places(self, name: str) -> int:
        """Places of the queue that a client holds."""
        account = self._accounts.get(name)
        return account.waiting + account.announced if account is not None else 0

    def begin_waiting(self, account: ClientAccount) -> None:
        """A request of this client waits from now on."""
        if account.waiting == 0:
            account.counter = max(account.counter, self._floor())
            if not account.indexed:
                account.indexed = True
                heapq.heappush(self._index, (account.counter, account.number, account))
        account.waiting += 1

    def stop_waiting(self, account: ClientAccount) -> None:
        """A request of this client waits no more."""
        account.waiting -= 1
        self._last = account

    def _floor(self) -> float:
        """The least counter of the clients that wait; of the last that did, if none does."""
        while self._index:
            counter, number, account = self._index[0]
            if account.waiting and counter == account.counter:
                return counter
            if account.waiting:
                heapq.heapreplace(self._index, (account.counter, number, account))
            else:
                heapq.heappop(self._index)
                account.indexed = False
        return self._last.counter if self._last is not None else 0.0

    def _forget_idle(self) -> None:
        """Forget idle clients that would be lifted anyway if they came back: nothing they had is lost by it."""
        floor = self._floor()
        idle = [name for name, account in self._accounts.items() if not account.live and account.counter <= floor]
        for name in idle:
            del self._accounts[name]
        self._sweep_at = 2 * len(self._accounts) + SWEEP_SIZE
