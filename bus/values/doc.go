// Package values moves bodies of any size between processes, and refers to values that stay where they are until they are needed.
//
//	store := values.New(session)                       // a layer of a bus.Session
//	ref, err := store.References().Put(body, nil, nil) // the body belongs to the value now
//	refs.Get(ref, memory, func(v values.Value, err error) { … }) // in any process of the namespace
//	refs.Release(ref)
//
// Receivers pull bodies: in place in shared memory of the host, or in chunks over the bus, once per host.
package values
