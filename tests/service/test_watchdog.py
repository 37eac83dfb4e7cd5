"""The watchdog notices batches and event loops that do not end, and the health routes say so."""

import asyncio
import contextlib
import logging
import threading

import pytest
from fake_engine import serving
from raw_http import wait_until
from running import until, until_metric

from service.settings.names import MAX_SECONDS
from service.upkeep.watchdog import Condition, Watchdog

HOUR = 3600.0


def test_nothing_is_overdue_before_the_first_batch_within_its_time_and_after_the_last():
    watchdog, patient = Watchdog(stuck_seconds=1e-9), Watchdog(stuck_seconds=HOUR)
    assert (watchdog.condition, watchdog.overdue_seconds) == (Condition.FINE, 0.0)
    with contextlib.suppress(ZeroDivisionError), watchdog.watching(), patient.watching():
        wait_until(lambda: watchdog.condition is Condition.STUCK)
        assert watchdog.overdue_seconds > 0
        assert (patient.condition, patient.overdue_seconds) == (Condition.FINE, 0.0)
        _ = 1 / 0
    assert (watchdog.condition, watchdog.overdue_seconds) == (Condition.FINE, 0.0)


def test_part_of_a_batch_is_watched_by_itself_and_the_batch_goes_on_behind_it():
    watchdog, here = Watchdog(stuck_seconds=HOUR), threading.get_ident()
    with watchdog.watching():
        watchdog._began[here] -= 3 * HOUR
        with watchdog.watching():
            assert watchdog.condition is Condition.FINE
        assert watchdog.condition is Condition.STUCK
    assert watchdog.condition is Condition.FINE


def test_thread_that_hangs_is_not_hidden_by_threads_that_work():
    watchdog, may_end = Watchdog(stuck_seconds=1e-3), threading.Event()

    def hang():
        with watchdog.watching():
            may_end.wait()

    thread = threading.Thread(target=hang)
    thread.start()

    def is_stuck_beside_other_batches():
        with watchdog.watching():
            return watchdog.condition is Condition.STUCK

    wait_until(is_stuck_beside_other_batches)
    may_end.set()
    thread.join()
    assert watchdog.condition is Condition.FINE


def test_event_loop_that_hangs_is_found_and_its_stack_logged(caplog):
    told, may_end = [], threading.Event()
    watchdog = Watchdog(stuck_seconds=0.02, tell=told.append)

    async def hang_the_event_loop(secret):
        watchdog.start(asyncio.get_running_loop())
        may_end.wait()
        assert secret
        await until(lambda: watchdog.condition is Condition.FINE)

    thread = threading.Thread(target=asyncio.run, args=(hang_the_event_loop("Sesam"),))
    with caplog.at_level(logging.ERROR):
        thread.start()
        wait_until(lambda: watchdog.condition is Condition.STUCK)
        wait_until(lambda: "in hang_the_event_loop" in caplog.text)
        wait_until(lambda: told[-1] > 0.02)
        may_end.set()
        thread.join()
    watchdog.stop()
    assert "Sesam" not in caplog.text


def test_stack_of_what_is_stuck_is_logged_though_something_else_was_overdue_before(caplog):
    watchdog, here = Watchdog(stuck_seconds=HOUR), threading.get_ident()

    def work(seconds):
        with watchdog.watching():
            watchdog._began[here] -= seconds
            watchdog._report()

    def hang():
        work(3 * HOUR)

    work(1.5 * HOUR)
    assert "in hang\n" not in caplog.text
    hang()
    assert "in hang\n" in caplog.text
    assert "/health has status 503" in caplog.text


def test_longest_times_that_settings_allow_end_no_thread():
    watchdog = Watchdog(MAX_SECONDS, exit_when_stuck=True)
    watchdog._watch_interpreter()
    watchdog.stop()
    assert 2 * MAX_SECONDS < threading.TIMEOUT_MAX


async def test_overdue_server_is_not_ready_and_a_stuck_one_not_healthy():
    async with serving(stuck_seconds=HOUR) as client:
        watchdog = client._transport.app.state.service.watchdog
        statuses = []
        for condition in (1.5 * HOUR, 2.5 * HOUR):
            with watchdog.watching():
                watchdog._began[threading.get_ident()] -= condition
                answers = [await client.get(path) for path in ("/health", "/ready")]
                # The watchdog's thread tells it, because an event loop that hangs tells nothing.
                least = condition - HOUR
                overdue = (await until_metric(client, least, "attncache_overdue_seconds"))[
                    "attncache_overdue_seconds",
                ]
            statuses.append([answer.status_code for answer in answers])
            assert answers[1].json()["error"]["code"] == "stuck"
            assert overdue == pytest.approx(least, abs=60)
        assert statuses == [[200, 503], [503, 503]]
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
