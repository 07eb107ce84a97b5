"""Start of traces for the composition of an API process."""

from roseinfer.server.observe.tracing import Tracing


def traces_to(endpoint: str | None) -> Tracing | None:
    """Return traces to the collector at `endpoint`; None if there is no collector."""
    if endpoint is None:
        return None
    from roseinfer.integrations.otel.traces import Traces  # needs the extra `otel`

    return Traces.to(endpoint)
