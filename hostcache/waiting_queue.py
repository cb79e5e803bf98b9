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

    Requests of one priority are a class. Its level is that priority, plus one for each `ageing_seconds` that somebody
    in it has waited, so that nobody waits for ever behind a stream of higher priorities. The highest level comes first.
    Within a class, and among classes of one level, those that were preempted come first, the oldest in front; then the
    oldest request of the client that has had least. So age lifts a class and not a client: whoever sends more than its
    share has old requests, and passes nobody of its class by them.

    Choosing takes O(log n) comparisons, and so does moving up a level.

    Args:
        accounts: what clients have had.
        ageing_seconds: waiting that is worth one priority.

    Attributes:
        announced: branches that will wait when what they begin with has been computed; the queue's limit counts them.
    """

    def __init__(self, accounts: ClientAccounts, ageing_seconds: float) -> None:
        self.announced = 0
        self._accounts = accounts
        self._ageing_seconds = ageing_seconds
        self._classes: dict[int, _Class] = {}  # by priority
        self._order: list[tuple[int, int]] = []  # level and priority of each, ascending
        self._promotions = Timeline(lambda time, request: request.promotion == time)
        self._count = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """All of them, as they would be taken if nobody were charged meanwhile. For reports: O(n log n)."""
        order = [request for request in iter(self.take, None) if request is not None]
        for request in order:
            self.put_back(request)
        return iter(order)

    def announce(self, account: ClientAccount, branches: int) -> None:
        """So many more branches of this client will wait later; fewer, if negative."""
        self.announced += branches
        account.announced += branches

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
        if not self._order:
            return None
        level, priority = self._order[-1]
        first = self._classes[priority].first()
        for _, priority in self._order[bisect.bisect_left(self._order, level, key=_level) : -1]:
            first = min(first, self._classes[priority].first(), key=_turn)
        return first

    def take(self) -> Request | None:
        """The first request; it still waits, and the caller either has it `leave` or puts it back."""
        request = self.first()
        if request is not None:
            self._extract(request)
        return request

    def put_back(self, request: Request) -> None:
        """Back to the place it was taken from."""
        kind = self._classes.get(request.priority)
        if kind is None:
            kind = self._classes[request.priority] = _Class(request.priority)
        else:
            self._forget_level(kind)
        kind.insert(request)
        bisect.insort(self._order, (kind.level, kind.priority))

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
        kind = self._classes[request.priority]
        self._forget_level(kind)
        kind.remove(request)
        if kind.empty:
            del self._classes[kind.priority]
        else:
            bisect.insort(self._order, (kind.level, kind.priority))

    def _forget_level(self, kind: _Class) -> None:
        del self._order[bisect.bisect_left(self._order, (kind.level, kind.priority))]


class _Class:
    """Requests of one priority."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self._ages: list[int] = []  # of all, ascending
        self._preempted: list[Request] = []  # in order of arrival, as each client's list
        self._clients: dict[ClientAccount, list[Request]] = {}
        self._heap: list[tuple[float, int, ClientAccount]] = []  # counter and oldest request of each client, or less

    @property
    def empty(self) -> bool:
        return not self._ages

    @property
    def level(self) -> int:
        return self.priority + self._ages[-1]

    def insert(self, request: Request) -> None:
        bisect.insort(self._ages, request.age)
        if request.preemptions:
            bisect.insort(self._preempted, request, key=_arrival)
            return
        requests = self._clients.setdefault(request.account, [])
        bisect.insort(requests, request, key=_arrival)
        if requests[0] is request:
            heapq.heappush(self._heap, (request.account.counter, request.id, request.account))

    def remove(self, request: Request) -> None:
        del self._ages[bisect.bisect_left(self._ages, request.age)]
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


def _level(entry: tuple[int, int]) -> int:
    return entry[0]


def _turn(request: Request) -> tuple[bool, float, int]:
    """Among the first of their classes."""
    return not request.preemptions, 0.0 if request.preemptions else request.account.counter, request.id


def _arrival(request: Request) -> int:
    return request.id
