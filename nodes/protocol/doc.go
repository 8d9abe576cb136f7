// Package protocol defines the messages between the agents of nodes and the placement service, and the events that both
// emit. It is a package of its own because agents (package nodes) and the service (package placement) do not import each
// other. It contains plain values only: no clock, no I/O.
//
//	agent ── Heartbeat, with a Report every few ──► placement service
//	agent ── Report, as the value of its lease ───► placement service
//	agent ◄── ReportRequest, with KillOrders ────── placement service
//	agent, placement service ── Event ────────────► event stream
package protocol
