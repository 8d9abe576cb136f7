// Package actorstest is the conformance suite of a worker, in whatever language it is written. Exercise drives workers
// of a standard class over the wire, as any driver would, and asks for nothing that does not travel on it.
//
//	func TestConformance(t *testing.T) {
//		actorstest.Exercise(t, func(t *testing.T, b *bus.Bus, role actorstest.Role) {
//			// start role.World workers of class actorstest.ClassName that reach b's server, in this process or at
//			// b.URL(), and return when all are ready; end those that are left in t.Cleanup
//		})
//	}
//
// # The class
//
// A worker has a list of events, strings in the order in which they happened, and the methods of this table. The
// methods of the control lane answer while others run; await blocks one of its slots.
//
//	method     lane           argument    does
//	echo       work           any value   answers with it
//	args       work           any         answers [how many positional arguments, names of the named ones, sorted]
//	double     work           int         answers with twice as much; anything else than an int is refused by name
//	note       work           string      the string is an event; answers with the number of events
//	size       work           bytes       answers with their number
//	big        work           int n       answers with n bytes, the i-th of them byte(i*7)
//	fail       work           string      fails with an error whose message is the string
//	panic      work           string      panics with the string; an uncaught exception where there are no panics
//	block      work           key         "begin key"; waits for release(key), then "end key", and answers with the key;
//	                                      when the call is cancelled first, "cancel key", and fails as cancelled
//	ignore     work           key         like block, but after "cancel key" it goes on waiting for release(key)
//	meet       concurrent, 3  key         like block
//	ping       control        none        answers "pong"
//	events     control        none        answers with the list of events
//	await      control        string      answers when that event has happened, at once if it has already
//	release    control        key         lets block, ignore and meet of this key go on, or pass when they come
//	configured control        none        answers with what the configure verb gave last, or the constructor's
//	                                      configuration
//	env        control        name        answers with the variable's value as the set_env verb left it, or ""
//
// The configuration is any value. The class takes the configure and set_env verbs.
//
// The second class, SecondClassName, is made by the create verb. Its configuration is a string: with "fail" its
// constructor fails with the message "told to fail", with "panic" it panics. Methods, in the work lane, without
// arguments: config answers with the configuration, where with [name of the object, rank].
package actorstest
