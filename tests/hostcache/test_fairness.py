"""What clients have had."""

from __future__ import annotations

import pytest

from hostcache.fairness import SWEEP_SIZE, ClientAccounts


def test_a_generated_token_costs_two_of_a_prompt_and_a_double_share_halves_both() -> None:
    accounts = ClientAccounts({"twice": 2.0})
    once, twice = accounts.open("once"), accounts.open("twice")
    for account in (once, twice):
        account.charge_prompt(10)
        account.counter += account.token_cost
    assert (once.counter, twice.counter) == (12, 6)


def test_a_client_does_not_save_up_while_it_is_away() -> None:
    accounts = ClientAccounts({})
    busy, busier, back = (accounts.open(name) for name in ("busy", "busier", "back"))
    for account, tokens in ((busy, 500), (busier, 900)):
        accounts.begin_waiting(account)
        account.charge_prompt(tokens)
    accounts.begin_waiting(back)
    assert back.counter == 500  # the least of those that wait


def test_a_client_that_has_had_more_than_others_keeps_that() -> None:
    accounts = ClientAccounts({})
    least, most = accounts.open("least"), accounts.open("most")
    accounts.begin_waiting(least)
    most.charge_prompt(70)
    accounts.begin_waiting(most)
    assert (least.counter, most.counter) == (0, 70)


def test_when_nobody_waits_the_last_one_that_did_is_the_measure() -> None:
    accounts = ClientAccounts({})
    last, new = accounts.open("last"), accounts.open("new")
    accounts.begin_waiting(last)
    last.charge_prompt(300)
    accounts.stop_waiting(last)
    last.counter += last.token_cost
    accounts.begin_waiting(new)
    assert new.counter == 302


def test_the_second_request_of_a_client_that_waits_lifts_nothing() -> None:
    accounts = ClientAccounts({})
    behind, ahead = accounts.open("behind"), accounts.open("ahead")
    accounts.begin_waiting(behind)
    ahead.charge_prompt(50)
    accounts.begin_waiting(ahead)
    accounts.begin_waiting(behind)
    assert behind.counter == 0


def test_names_that_come_once_are_forgotten() -> None:
    """Each is lifted to the one before it, so whoever came earlier would be lifted anyway if it came back."""
    accounts = ClientAccounts({})
    for number in range(20 * SWEEP_SIZE):
        account = accounts.open(f"client {number}")
        accounts.begin_waiting(account)
        account.charge_prompt(7)
        accounts.stop_waiting(account)
        accounts.close(account)
    assert len(accounts) <= 2 * SWEEP_SIZE


def test_what_a_client_has_had_beyond_others_is_not_forgotten() -> None:
    accounts = ClientAccounts({})
    greedy = accounts.open("greedy")
    accounts.begin_waiting(greedy)
    accounts.stop_waiting(greedy)
    greedy.charge_prompt(10**6)
    accounts.close(greedy)
    for number in range(2 * SWEEP_SIZE):
        account = accounts.open(f"client {number}")
        accounts.begin_waiting(account)
        accounts.stop_waiting(account)
        account.counter = 0  # whatever it was lifted to
        accounts.close(account)
    assert accounts.open("greedy") is greedy


@pytest.mark.parametrize("rounds", [1, 1000])
def test_coming_and_going_beside_one_that_waits_leaves_nothing_behind(rounds: int) -> None:
    accounts = ClientAccounts({})
    patient, restless = accounts.open("patient"), accounts.open("restless")
    accounts.begin_waiting(patient)
    for _ in range(rounds):
        accounts.begin_waiting(restless)
        accounts.stop_waiting(restless)
    assert len(accounts._index) == 2
