"""The order in which requests are admitted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache import BlockPool, BlockTable, Namespace, Request
from hostcache.fairness import ClientAccounts
from hostcache.waiting_queue import WaitingQueue

AGEING = 10.0
POOL = BlockPool(1, 4)


def request(number: int, accounts: ClientAccounts, priority: int = 0, client: str = "") -> Request:
    table = BlockTable(POOL, lambda *_: None)
    made = Request(number, np.zeros(4, np.int32), 1, 1, Namespace("model"), table, priority=priority)
    made.account = accounts.open(client)
    return made


def test_a_higher_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    for number, priority in enumerate((0, 2, 0, 2, -1)):
        queue.push(request(number, accounts, priority), now=0)
    assert [waiting.id for waiting in queue] == [1, 3, 0, 2, 4]


def test_waiting_is_worth_a_priority_for_each_ageing_time() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    old = request(0, accounts)
    queue.push(old, now=0)
    for number, now in ((1, 15.0), (2, 20.0)):
        queue.push(request(number, accounts, priority=2), now)
    queue.promote(19.9)
    assert queue.first() is not old
    queue.promote(20.0)
    assert queue.first() is old  # two ageing times make up for two priorities, and it came first


def test_the_time_before_a_preemption_counts() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    twice = request(0, accounts)
    queue.push(twice, now=0)
    queue.remove(twice, now=6)  # runs for a minute
    queue.push(twice, now=66)
    queue.promote(69.9)
    assert twice.level == 0
    queue.promote(70.0)
    assert twice.level == 1


def test_whoever_gave_way_comes_before_all_others_of_its_level() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    first, second, third = (request(number, accounts, client=str(number)) for number in range(3))
    second.preemptions = third.preemptions = 1
    third.account.charge_prompt(1000)
    for waiting in (first, third, second):
        queue.push(waiting, now=0)
    assert list(queue) == [second, third, first]


def test_age_lifts_a_priority_and_no_client_in_it() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    flood = [request(number, accounts, client="flood") for number in range(3)]
    for waiting in flood:
        queue.push(waiting, now=0)
    queue.promote(20.0)
    shy, higher = request(3, accounts, client="shy"), request(4, accounts, priority=1, client="higher")
    for newcomer in (shy, higher):
        queue.push(newcomer, now=20.0)
    flood[0].account.charge_prompt(100)
    # Two ageing times lift the flood's priority above the higher one, and the client that has had least is before it.
    assert [queue.take() for _ in range(5)] == [shy, *flood, higher]


def test_within_a_level_the_client_that_has_had_least_goes_first() -> None:
    accounts = ClientAccounts({})
    queue = WaitingQueue(accounts, AGEING)
    flood = [request(number, accounts, client="flood") for number in range(3)]
    for waiting in flood:
        queue.push(waiting, now=0)
    other = request(3, accounts, client="other")
    queue.push(other, now=0)
    assert queue.take() is flood[0]  # equal so far: the oldest
    flood[0].account.charge_prompt(10)
    queue.leave(flood[0], now=0)
    assert list(queue) == [other, flood[1], flood[2]]
    assert [queue.take() for _ in range(4)] == [other, flood[1], flood[2], None]


class QueueAgainstModel(RuleBasedStateMachine):
    """A list that is sorted anew for every question knows the order, too."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = ClientAccounts({"b": 2.0})
        self.queue = WaitingQueue(self.accounts, AGEING)
        self.now = 0.0
        self.waiting: dict[Request, float] = {}  # when each would have begun to wait, had it waited all the time
        self.running: list[Request] = []
        self.next_id = 0

    def best(self, waiting: Iterable[Request]) -> Request:
        """The one of these that goes first."""
        classes: dict[int, list[Request]] = {}
        for one in waiting:
            classes.setdefault(one.priority, []).append(one)
        levels = {
            priority: priority + max(int((self.now - self.waiting[one]) / AGEING) for one in members)
            for priority, members in classes.items()
        }
        highest = max(levels.values())

        def turn(one: Request) -> tuple[bool, float, int, int]:
            if one.preemptions:
                return False, 0.0, one.id, one.id
            own = [
                other.id for other in classes[one.priority] if other.account is one.account and not other.preemptions
            ]
            return True, one.account.counter, min(own), one.id

        return min((one for p, members in classes.items() if levels[p] == highest for one in members), key=turn)

    @rule(priority=st.integers(-1, 2), client=st.sampled_from("abc"))
    def push(self, priority: int, client: str) -> None:
        new = request(self.next_id, self.accounts, priority, client)
        self.next_id += 1
        self.waiting[new] = self.now
        self.queue.push(new, self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        back = data.draw(st.sampled_from(self.running))
        self.running.remove(back)
        back.preemptions += 1
        self.waiting[back] = self.now - back.waited
        self.queue.push(back, self.now)

    @precondition(lambda self: self.waiting)
    @rule(served=st.integers(0, 5), admit=st.booleans())
    def take(self, *, served: int, admit: bool) -> None:
        expected = self.best(self.waiting)
        assert self.queue.first() is expected
        assert self.queue.take() is expected
        if admit:
            expected.account.charge_prompt(served)
            self.queue.leave(expected, self.now)
            assert expected.waited == self.now - self.waiting.pop(expected)
            self.running.append(expected)
        else:
            self.queue.put_back(expected)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(list(self.waiting)))
        self.queue.remove(gone, self.now)
        del self.waiting[gone]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        account = data.draw(st.sampled_from(self.running)).account
        account.counter += account.token_cost

    @rule(quarters=st.integers(1, 60))
    def pass_time(self, quarters: int) -> None:
        self.now += quarters / 4  # exact in binary, as the ageing time is: no rounding at a promotion
        self.queue.promote(self.now)

    @invariant()
    def in_the_models_order(self) -> None:
        assert len(self.queue) == len(self.waiting)
        left, order = set(self.waiting), []
        while left:
            order.append(self.best(left))
            left.remove(order[-1])
        assert list(self.queue) == order


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
