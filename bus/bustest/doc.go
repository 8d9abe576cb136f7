// Package bustest gives a test a real nats-server and the means to hurt the way to it. There is no fake bus.
//
//	func TestMain(m *testing.M) { bustest.Main(m) } // no goroutine may be left; External needs it too
//
//	b := bustest.Open(t)                                        // a private bus; asynchronous errors fail the test
//	srv := bustest.StartServer(t, bustest.Options{})            // one server for several buses,
//	f := bustest.NewFaults(srv)                                 // one of them on a bad line
//	b1 := bustest.Open(t, bus.Config{InProcess: f})
//	b2 := bustest.Open(t, bus.Config{InProcess: srv})
//	f.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool { return m.Toward == bustest.ToServer }))
//	f.SetRule(bustest.Random(1, 0.05, 0.05, 0.05, 0.05, nil))   // drop, double, delay, swap
//	bustest.Reconnected(t, b1.Conn(), f.Cut)                    // reconnect in the middle
//	f.Freeze(); f.Thaw()                                        // a host that hangs
//	srv.Stop(); srv.Restart()                                   // same store, same port
//	url := bustest.External(t)                                  // a process of its own, default limits
//	f = bustest.NewFaults(bustest.Dial(url))                    // and a bad line to that
package bustest
