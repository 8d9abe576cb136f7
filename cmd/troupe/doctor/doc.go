// Package doctor judges the state of a head, its nodes, roles, queues and pipelines. Judge is a pure function from Facts to
// Findings; cmd/troupe collects the facts.
package doctor
