package otlp

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Config is where to export to, and as what.
type Config struct {
	Traces     string            // URL; empty: no traces
	Metrics    string            // URL; empty: no metrics
	Headers    map[string]string // of each request
	Resource   map[string]string // attributes of the process, with service.name
	Timeout    time.Duration     // of a request; zero: 10 s
	Every      time.Duration     // between two batches of spans; zero: 2 s
	MetricTime time.Duration     // between two exports of metrics; zero: a minute
}

// FromEnvironment reads the variables of the OpenTelemetry specification: OTEL_EXPORTER_OTLP_ENDPOINT, its variants for traces and metrics,
// OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT and _PROTOCOL, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_METRIC_EXPORT_INTERVAL,
// OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER and OTEL_SDK_DISABLED. Without an endpoint the Config is empty.
func FromEnvironment(getenv func(string) string, service string) (Config, error) {
	c := Config{Resource: map[string]string{"service.name": service}}
	if strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true") {
		return c, nil
	}
	base := strings.TrimRight(getenv("OTEL_EXPORTER_OTLP_ENDPOINT"), "/")
	for _, signal := range []struct {
		at             *string
		name, exporter string
	}{{&c.Traces, "TRACES", "OTEL_TRACES_EXPORTER"}, {&c.Metrics, "METRICS", "OTEL_METRICS_EXPORTER"}} {
		variable := "OTEL_EXPORTER_OTLP_" + signal.name + "_ENDPOINT"
		switch to := getenv(variable); {
		case getenv(signal.exporter) == "none":
		case to != "":
			*signal.at = to
		case base != "":
			*signal.at, variable = base+"/v1/"+strings.ToLower(signal.name), "OTEL_EXPORTER_OTLP_ENDPOINT"
		}
		if *signal.at == "" {
			continue
		}
		if u, err := url.Parse(*signal.at); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return Config{}, fmt.Errorf("%s %q is not a URL like http://host:4318", variable, getenv(variable))
		}
	}
	if c.Traces == "" && c.Metrics == "" {
		return c, nil
	}
	if protocol := getenv("OTEL_EXPORTER_OTLP_PROTOCOL"); protocol == "grpc" {
		return Config{}, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported: use http/json, with the collector's HTTP port (4318)")
	}
	var err error
	if c.Headers, err = pairs("OTEL_EXPORTER_OTLP_HEADERS", getenv("OTEL_EXPORTER_OTLP_HEADERS")); err != nil {
		return Config{}, err
	}
	attributes, err := pairs("OTEL_RESOURCE_ATTRIBUTES", getenv("OTEL_RESOURCE_ATTRIBUTES"))
	if err != nil {
		return Config{}, err
	}
	for k, v := range attributes {
		c.Resource[k] = v
	}
	if name := getenv("OTEL_SERVICE_NAME"); name != "" {
		c.Resource["service.name"] = name
	}
	if c.Timeout, err = milliseconds("OTEL_EXPORTER_OTLP_TIMEOUT", getenv); err != nil {
		return Config{}, err
	}
	c.MetricTime, err = milliseconds("OTEL_METRIC_EXPORT_INTERVAL", getenv)
	return c, err
}

func milliseconds(name string, getenv func(string) string) (time.Duration, error) {
	text := getenv(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > 1e9 {
		return 0, fmt.Errorf("%s %q is not a number of milliseconds", name, text)
	}
	return time.Duration(n) * time.Millisecond, nil
}

// pairs reads k=v,k=v with escaped values.
func pairs(name, text string) (map[string]string, error) {
	out := map[string]string{}
	for _, pair := range strings.Split(text, ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		k, v, found := strings.Cut(pair, "=")
		value, err := url.PathUnescape(strings.TrimSpace(v))
		if !found || err != nil || strings.TrimSpace(k) == "" {
			return nil, fmt.Errorf("%s: it must be KEY=VALUE,KEY=VALUE with percent escapes", name) // the text may hold a secret
		}
		out[strings.TrimSpace(k)] = value
	}
	return out, nil
}
