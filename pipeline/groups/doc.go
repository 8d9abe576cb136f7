// Package groups decides what happens to groups of rollouts: siblings of one prompt, each of several turns, that train
// together or not at all. Requests and the time go in; events to store come out, and the same events make the state again
// after a crash. It is pure: no clock, no random numbers, no I/O.
//
//	put ──► free ──take──► held by a ticket ──finish each turn──► ended ──fields──► complete ─┐ all siblings, or
//	          ▲               │ the holder is gone,                                           │ some after a time
//	          └───────────────┘ too slow, or redispatched                group: complete ◄────┘
//	                                                    complete ──batch──► loaned to a ticket ──done──► trained
//	                                                        ▲                   │ the holder is gone
//	                                                        └───────────────────┘
package groups
