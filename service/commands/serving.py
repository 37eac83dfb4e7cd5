"""What `attncache serve` does with its settings: find the model, listen, load the engine, and serve."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence

from attncache_core import AttnCacheError, PrefillEngine
from service.errors import InvalidSettings
from service.loading.checkpoints import checkpoint_of
from service.loading.engines import load_engines
from service.loading.remote import with_remote_database
from service.loading.renewals import with_renewals
from service.loading.summary import slowness, summary
from service.settings import Settings
from service.state import Loaded
from service.web.listeners import open_listeners
from service.workers.supervisor import serve_with_workers

logger = logging.getLogger(__name__)


def run_server(settings: Settings) -> None:
    """Serve until a signal ends the process. Raises what refuses a setting, the model or the database."""
    _check_shared(settings)
    # Before the server listens, so that a missing model is reported at once.
    checkpoint = checkpoint_of(settings)
    if settings.workers != 1:
        checkpoint = checkpoint.as_it_is()  # what workers that are started again load, too
    listeners = open_listeners(settings)
    urls = [listener.url for listener in listeners]

    def load(share: Settings, worker: int) -> Iterator[Loaded]:
        def of_folder(local: Settings) -> Iterator[Loaded]:
            engines = load_engines(local, checkpoint, builds=worker == 0)
            return with_renewals(engines, local, renews=worker == 0)

        engines = with_remote_database(share, checkpoint, of_folder, leads=worker == 0)
        return _summarised(engines, share, urls) if worker == 0 else engines

    failure = serve_with_workers(settings, load, listeners)
    if isinstance(failure, AttnCacheError):
        raise failure
    sys.exit(1)  # the traceback has been logged


def _check_shared(settings: Settings) -> None:
    """Warn if the shared store cannot be used now. Raises InvalidSettings if it never can."""
    address = settings.shared_address
    if address is None:
        return
    try:
        from service.shared.client import check_store
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            "--shared needs another package; install it with: pip install 'attncache[cluster]'",
            field="shared",
        ) from error
    check_store(address, has_blocks=settings.shared_for("kv") is not None)


def _summarised(loaded: Iterator[Loaded], settings: Settings, urls: Sequence[str]) -> Iterator[Loaded]:
    """Yield what is loaded. Logs the summary of each engine before it serves."""
    for next_loaded in loaded:
        if isinstance(next_loaded, PrefillEngine):
            if slow := slowness(next_loaded.info()):
                logger.warning("%s", slow)
            for line in summary(next_loaded, settings, urls):
                logger.info("%s", line)
        yield next_loaded
