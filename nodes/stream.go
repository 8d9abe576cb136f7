package nodes

import (
	"time"

	"troupe/bus"
)

// The streams of output and of events.
const (
	logStream   = "troupe_logs"
	eventStream = "troupe_events"
)

// One replica: output is large, and the files of the nodes have it too.
func logStreamConfig() bus.LogStreamConfig {
	return bus.LogStreamConfig{Name: logStream, Subject: bus.Logs("", "", "", -1), MaxBytes: 256 << 20, MaxAge: 7 * 24 * time.Hour, Replicas: 1}
}

func eventStreamConfig(replicas int) bus.LogStreamConfig {
	return bus.LogStreamConfig{Name: eventStream, Subject: bus.AllEvents(), MaxBytes: 16 << 20, MaxAge: 30 * 24 * time.Hour, Replicas: replicas}
}
