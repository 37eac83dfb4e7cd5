"""Settings: the fields of all groups, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from pydantic import SecretStr, model_validator

from service.settings.cluster import SHARED_USES, Cluster
from service.settings.connections import Connections, Observability, Supervision
from service.settings.limits import Limits
from service.settings.model import Model, Processor
from service.settings.names import Group, option_name, refused
from service.settings.network import UNIX_PEERS, Network, Security
from service.settings.reuse import Chunks, KeyValues, Reuse, Sessions

# Fields that say how attention maps, or keys and values, are reused.
_OF_MAPS = ("database", "threshold", "min_gain", "sample")
_OF_SAMPLE = ("sample_texts", "sample_half_life_hours", "renew_hours")
_OF_KEY_VALUES = ("kv_memory_bytes", "kv_dir", "kv_disk_bytes", "kv_disk_dtype", "warm", "blend")
# Uses of --shared, and a switch without which nothing is shared for them.
_SWITCHES_OF_USES = (("kv", "kv"), ("kv", "reuse"), ("findings", "maps"), ("findings", "reuse"))


class Settings(
    Network,
    Connections,
    Supervision,
    Security,
    Model,
    Processor,
    Limits,
    Reuse,
    KeyValues,
    Chunks,
    Sessions,
    Cluster,
    Observability,
):
    """The settings of one server. Read once and never changed."""

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_request_inputs > self.max_queue_sequences:
            # Otherwise such a request would get status 429 for ever.
            raise refused("--max-request-inputs must be at most --max-queue-sequences, which is smaller")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise refused("--tls-cert and --tls-key belong together; give both or none")
        if self.unix_socket and self.port != type(self).model_fields["port"].default:
            raise refused("--port has no effect with --unix-socket; leave one of them out")
        if self.tls_cert and self.unix_socket and self.admin_port is None:
            raise refused("--tls-cert has no effect with --unix-socket, which only this machine reaches")
        proxies = (self.trusted_proxies or "").split(",")
        if self.unix_socket is None and UNIX_PEERS in map(str.strip, proxies):
            raise refused(
                f"{UNIX_PEERS} in --trusted-proxies has no effect without --unix-socket; give both or none"
            )
        if self.admin_port is None:
            self._refuse(("admin_host",), "without --admin-port; give both or none")
        if self.classifier and self.labels:
            raise refused("--classifier and --labels both set the labels; leave one of them out")
        if self.blend is None:  # otherwise, blended chunks are verified
            self._refuse_without("maps", ("verify_rate",))
        self._refuse_without("maps", _OF_MAPS)
        self._refuse_without("kv", _OF_KEY_VALUES)
        if self.kv_dir is None:
            self._refuse(("kv_disk_bytes",), "without --kv-dir; give both or none")
            if not self.shared_for("kv"):
                self._refuse(("kv_disk_dtype",), "without --kv-dir or --shared; give one of them too")
        if self.shared is None:
            self._refuse(("shared_uses",), "without --shared; give both or none")
        uses = set(self.shared_uses.split(","))
        names_some = uses != set(SHARED_USES)  # all of them are the default
        for use, switch in _SWITCHES_OF_USES:
            if names_some and use in uses and not getattr(self, switch):
                raise refused(f"--shared-uses {use} has no effect with --no-{switch}; leave one of them out")
        if not self.sample:
            self._refuse(_OF_SAMPLE, "without --sample; give both or none")
        if self.blend is None:
            self._refuse(("divide_texts", "segment_tokens"), "without --blend; give both or none")
        if self.sample and isinstance(self.database, SecretStr):
            raise refused(
                "--sample needs a --database that is a folder; sample on a server with a folder, renew the "
                "folder, and push it to the URL"
            )
        if self.divide_texts and not self.segment_separator:
            raise refused("--divide-texts needs a --segment-separator; give one that is not empty")
        if self.blend is not None and self.database is not None:
            raise refused(
                "--blend has no effect with --database: a text takes stored maps, or stored keys and "
                "values; leave one of them out"
            )
        self._refuse_without("reuse", ("maps", *_OF_MAPS, "verify_rate", "kv", *_OF_KEY_VALUES))
        return self

    def _refuse_without(self, switch: str, options: Iterable[str]) -> None:
        """Refuse options that have no effect because a switch is off."""
        if not getattr(self, switch):
            self._refuse(options, f"with --no-{switch}; leave one of them out")

    def _refuse(self, options: Iterable[str], why: str) -> None:
        """Refuse options that have no effect, and are given. why: what makes them so, and the remedy."""
        for option in self.given(options):
            raise refused(f"{option} has no effect {why}")

    def given(self, names: Iterable[str]) -> list[str]:
        """Return the options of these fields that are given another value than the default."""
        fields = type(self).model_fields
        return [option_name(name) for name in names if getattr(self, name) != fields[name].default]


# In the order of the help and of the documentation.
GROUPS = cast(tuple[type[Group], ...], Settings.__bases__)
