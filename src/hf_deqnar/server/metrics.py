"""What the server counts, in the text format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("hf_deqnar_requests", "Answered requests.", ("path", "status"), registry=registry)
        self.seconds = Histogram(
            "hf_deqnar_request_seconds", "Time to the end of a response.", ("path",), buckets=SECONDS, registry=registry
        )
        self.active = Gauge("hf_deqnar_active_requests", "Translation requests in progress.", registry=registry)
        self.waiting = Gauge("hf_deqnar_waiting_texts", "Sentences that wait for a batch.", registry=registry)
        self.batch_size = Histogram("hf_deqnar_batch_size", "Sentences of a batch.", buckets=SIZES, registry=registry)
        self.characters = Counter("hf_deqnar_characters", "Characters of accepted requests.", registry=registry)
        self.disconnected = Counter(
            "hf_deqnar_disconnected", "Clients that left before their response.", registry=registry
        )
