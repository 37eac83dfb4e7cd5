"""What tests of a server share: a clock, metrics by name, API keys, and a request that was answered."""

from prometheus_client.parser import text_string_to_metric_families

from service.observability.finished import FinishedRequest


class Clock:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


def samples(text):
    """Return a dictionary: (name, label value, ...) -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


ONE = "first-key-0123456789"

TWO = "second-key-0123456789"

OPS = "operator-key-0123456789"

FILE = f"""# who    key
one   {ONE}   # the shop
two   {TWO}

ops   {OPS}   admin requests_per_minute=6 tokens_per_minute=600 in_flight=2
"""


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def keys_file(folder, text=FILE):
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return path


ANSWERED = FinishedRequest("id-1", "POST", "/embed", 200, 10.0, 10.25, 1e9, "one", 2, 30, 20, 1, [], {})
