"""Renew a database from its sample every so many hours, in a process of the lowest priority.

    a look, once a second
      a renewal runs            nothing, until its process ends; then one line in the log
      a renewal is due          start its process
      reuse cannot pay here     nothing, until the server is started again

A renewal is due so many hours after the last decision about the database, or after the beginning of its
sample. One that failed is tried again after an hour.
"""

from __future__ import annotations

import logging
import subprocess
import time
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from attncache_core.corpus.sample import began_at
from attncache_core.reuse.maps.generations import RENEWAL, Renewal, Result, read_renewals
from service.errors import log_failure
from service.loading.rebuild import end_of, start_builder
from service.settings import Settings

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 3600.0


class RegularRenewals:
    """Owns the process that renews the database in the folder `root`."""

    def __init__(self, settings: Settings, root: Path) -> None:
        """settings: with renew_hours."""
        assert settings.renew_hours is not None
        self._settings, self._root = settings, root
        self._seconds = settings.renew_hours * 3600
        self._not_before = 0.0  # Unix time
        self._can_pay = True
        self._process: subprocess.Popen[str] | None = None

    def look(self) -> None:
        """Start a renewal if it is due, or say in the log how it has ended. Returns at once."""
        try:
            self._look()
        except Exception as error:  # such as memory that is missing for a process
            log_failure(logger, "the database cannot be renewed from its sample", error)
            self._not_before = time.time() + _RETRY_SECONDS

    def _look(self) -> None:
        if self._process is None:
            if self._is_due():
                logger.info("the database is being renewed from its sample, behind the requests")
                self._process = start_builder(self._settings, "renew")
        elif self._process.poll() is not None:
            process, self._process = self._process, None
            self._not_before = self._after(process)

    def close(self) -> None:
        """Stop a renewal. It goes on when it is started again."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _is_due(self) -> bool:
        now = time.time()
        # If the clock was ahead, what was found then is far away.
        if now < self._not_before <= now + max(self._seconds, _RETRY_SECONDS) or not self._can_pay:
            return False
        began = began_at(self._root)
        if began is None:
            return False
        decisions = [_moment(renewal) for renewal in read_renewals(self._root)[-1:]]
        self._not_before = max(moment for moment in (0.0, began, *decisions) if moment <= now) + self._seconds
        return now >= self._not_before

    def _after(self, process: subprocess.Popen[str]) -> float:
        """Log how a process has ended, and return the time before which no other is started."""
        printed = process.communicate()[0].strip().rpartition("\n")[2]
        try:
            renewal = RENEWAL.validate_json(printed)
        except ValidationError:
            reason = printed or f"its process {end_of(process)}"
            logger.warning("the database could not be renewed: %s", reason)
            return time.time() + _RETRY_SECONDS
        logger.info("%s", renewal.told())
        if renewal.result is Result.NO_GAIN:
            logger.info("no renewal is tried again until the server is started again")
            self._can_pay = False
        return 0.0


def _moment(renewal: Renewal) -> float:
    """Return the Unix time of a renewal; 0 if its line is damaged."""
    try:
        return datetime.fromisoformat(renewal.time).timestamp()
    except ValueError:
        return 0.0
