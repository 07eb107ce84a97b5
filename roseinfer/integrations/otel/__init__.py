"""OpenTelemetry: traces of requests, sent to a collector. Only `traces` needs the extra `otel`."""
