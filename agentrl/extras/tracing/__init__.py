"""Traces: spans of attempts and requests, sent to a collector of OpenTelemetry, and MLflow."""
