// Package bustest starts real nats-servers for tests, with connections that can drop, duplicate, delay and swap messages.
//
//	func TestMain(m *testing.M) { bustest.Main(m) } // fails on leaked goroutines; External needs it
//
//	b := bustest.Open(t)                                        // a private bus; asynchronous errors fail the test
//	srv := bustest.StartServer(t, bustest.Options{})            // one server for several buses,
//	f := bustest.NewFaults(srv)                                 // a faulty connection to it
//	b1 := bustest.Open(t, bus.Config{InProcess: f})
//	b2 := bustest.Open(t, bus.Config{InProcess: srv})
//	f.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool { return m.Toward == bustest.ToServer }))
//	f.SetRule(bustest.Random(1, 0.05, 0.05, 0.05, 0.05, nil))   // drop, double, delay, swap
//	bustest.Reconnected(t, b1.Conn(), f.Cut)                    // cut the connection and wait for the reconnect
//	f.Freeze(); f.Thaw()                                        // a host that hangs
//	srv.Stop(); srv.Restart()                                   // same store, same port
//	url := bustest.External(t)                                  // a separate process with default limits
//	f = bustest.NewFaults(bustest.Dial(url))                    // a faulty connection to that
package bustest
