package registry

import "encoding/json"

// Announcement is what a process of this host would announce, and to which subject.
func Announcement(namespace, session string, pid int) (subject string, data []byte, err error) {
	start, err := startedAt(pid)
	if err != nil {
		return "", nil, err
	}
	data, err = json.Marshal(announcement{Session: session, Process: driverProcess{Host: thisHost(), PID: pid, Start: start}})
	return driversOf(namespace, thisHost()), data, err
}
