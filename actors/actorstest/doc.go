// Package actorstest is the conformance suite for workers in any language. Exercise calls workers of a standard class over
// the wire and needs no other access to them.
//
//	func TestConformance(t *testing.T) {
//		actorstest.Exercise(t, func(t *testing.T, b *bus.Bus, role actorstest.Role) {
//			// start role.World workers of class actorstest.ClassName that reach b's server, in this process or at
//			// b.URL(), and return when all are ready; end the remaining ones in t.Cleanup
//		})
//	}
//
// # The class
//
// A worker has a list of events, strings in order of occurrence, and the methods of this table. The methods of the
// control lane answer while others run; await blocks one of its slots.
//
//	method     lane           argument    does
//	echo       work           any value   answers with it
//	args       work           any         answers [number of positional arguments, sorted names of the named ones]
//	double     work           int         answers with 2n; the error of another type names the type
//	note       work           string      the string is an event; answers with the number of events
//	size       work           bytes       answers with the length
//	big        work           int n       answers with n bytes, the i-th of them byte(i*7)
//	fail       work           string      fails with an error whose message is the string
//	panic      work           string      panics with the string; an uncaught exception where there are no panics
//	block      work           key         "begin key"; waits for release(key), then "end key", and answers with the key;
//	                                      when the call is cancelled first, "cancel key", and fails as cancelled
//	ignore     work           key         like block, but after "cancel key" it still waits for release(key)
//	meet       concurrent, 3  key         like block
//	ping       control        none        answers "pong"
//	events     control        none        answers with the list of events
//	await      control        string      answers once the event has occurred
//	release    control        key         releases present and future calls of block, ignore and meet with this key
//	configured control        none        answers with the configuration of the last configure verb, or the
//	                                      constructor's
//	env        control        name        answers with the variable's value that the set_env verb has set, or ""
//
// The configuration is any value. The class supports the configure and set_env verbs.
//
// Objects of the second class, SecondClassName, are created by the create verb. Its configuration is a string: with "fail" its
// constructor fails with the message "told to fail", with "panic" it panics. Methods, in the work lane, without
// arguments: config answers with the configuration, where with [name of the object, rank].
package actorstest
