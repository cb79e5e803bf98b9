"""Who is next: priority, age, who gave way before, and what each client has had."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from .fairness import ClientAccount, ClientAccounts
from .request import Request
from .timeline import Timeline

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Requests that wait, in the order in which they are admitted.

    A request's level is its priority plus one for each `ageing_seconds` it has waited, so that nobody waits for ever
    behind a stream of higher priorities. The highest level comes first. Within a level come those that were preempted,
    oldest first; then the oldest request of the client that has had least.

    Choosing takes O(log n) comparisons, and so does moving up a level.

    Args:
        accounts: what clients have had.
        ageing_seconds: waiting that is worth one priority.
    """

    def __init__(self, accounts: ClientAccounts, ageing_seconds: float) -> None:
        self._accounts = accounts
        self._ageing_seconds = ageing_seconds
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # the levels that hold somebody, ascending
        self._promotions = Timeline(lambda time, request: request.promotion == time)
        self._count = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """All of them, as they would be taken if nobody were charged meanwhile. For reports: O(n log n)."""
        for level in reversed(self._order):
            yield from self._levels[level].in_order()

    def push(self, request: Request, now: float) -> None:
        """A request waits from now on. What it waited before counts."""
        self._accounts.begin_waiting(request.account)
        self._count += 1
        request.waiting_since = now - request.waited
        request.promotion = request.waiting_since + (request.age + 1) * self._ageing_seconds
        self._promotions.add(request.promotion, request)
        self.put_back(request)

    def first(self) -> Request | None:
        """The request that `take` would give."""
        return self._levels[self._order[-1]].first() if self._order else None

    def take(self) -> Request | None:
        """The first request; it still waits, and the caller either has it `leave` or puts it back."""
        request = self.first()
        if request is not None:
            self._extract(request)
        return request

    def put_back(self, request: Request) -> None:
        """Back to the place it was taken from."""
        level = self._levels.get(request.level)
        if level is None:
            level = self._levels[request.level] = _Level()
            bisect.insort(self._order, request.level)
        level.insert(request)

    def leave(self, request: Request, now: float) -> None:
        """A request that was taken waits no more."""
        self._count -= 1
        request.waited = now - request.waiting_since
        request.promotion = None
        self._accounts.stop_waiting(request.account)

    def remove(self, request: Request, now: float) -> None:
        """Whatever its place, a request waits no more."""
        self._extract(request)
        self.leave(request, now)

    def promote(self, now: float) -> None:
        """Move up whoever has waited another `ageing_seconds`."""
        for request in self._promotions.due(now):
            self._extract(request)
            request.age += 1
            request.promotion = request.waiting_since + (request.age + 1) * self._ageing_seconds
            self._promotions.add(request.promotion, request)
            self.put_back(request)

    def _extract(self, request: Request) -> None:
        level = self._levels[request.level]
        level.remove(request)
        if level.empty:
            del self._levels[request.level]
            del self._order[bisect.bisect_left(self._order, request.level)]


class _Level:
    """Requests of one level."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []  # in order of arrival, as each client's list
        self._clients: dict[ClientAccount, list[Request]] = {}
        self._heap: list[tuple[float, int, ClientAccount]] = []  # counter and oldest request of each client, or less

    @property
    def empty(self) -> bool:
        return not self._preempted and not self._clients

    def insert(self, request: Request) -> None:
        if request.preemptions:
            bisect.insort(self._preempted, request, key=_arrival)
            return
        requests = self._clients.setdefault(request.account, [])
        bisect.insort(requests, request, key=_arrival)
        if requests[0] is request:
            heapq.heappush(self._heap, (request.account.counter, request.id, request.account))

    def remove(self, request: Request) -> None:
        requests = self._preempted if request.preemptions else self._clients[request.account]
        del requests[bisect.bisect_left(requests, request.id, key=_arrival)]
        if not request.preemptions and not requests:
            del self._clients[request.account]

    def first(self) -> Request:
        if self._preempted:
            return self._preempted[0]
        while True:  # counters only rise, so an entry that is out of date stands too far in front
            counter, oldest, account = self._heap[0]
            requests = self._clients.get(account)
            if requests is None:
                heapq.heappop(self._heap)
            elif (counter, oldest) == (account.counter, requests[0].id):
                return requests[0]
            else:
                heapq.heapreplace(self._heap, (account.counter, requests[0].id, account))

    def in_order(self) -> list[Request]:
        clients = sorted(self._clients.values(), key=lambda requests: (requests[0].account.counter, requests[0].id))
        return self._preempted + [request for requests in clients for request in requests]


def _arrival(request: Request) -> int:
    return request.id
