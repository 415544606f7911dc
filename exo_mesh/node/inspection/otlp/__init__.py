"""Sends traces to a collector by OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp/)."""
