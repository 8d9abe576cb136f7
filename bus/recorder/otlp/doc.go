// Package otlp sends the records of the flight recorder as OpenTelemetry spans: OTLP over HTTP with JSON, to the endpoint of
// OTEL_EXPORTER_OTLP_ENDPOINT. It is small, so that every process has it, workers in Python too; the official exporters would add gRPC and
// protobuf to each of them.
package otlp
