// Package direct moves bodies from one process to another over a connection of their own, past the server of the bus.
//
// The owner of a body gives a receiver a Ticket, over the bus. With it the receiver reads this body, and nothing else, from a Server:
// that of the owner's process, or that of its node, which reads the body in the shared memory of the host.
//
//	server, err := direct.Serve(direct.Config{Listen: "10.0.0.1:0", OpenFunc: open}) // at the owner
//	ticket, err := server.Ticket(client.Fingerprint(), direct.Body{ID: 7, Length: n})
//
//	client := direct.NewClient()                                                     // at the receiver
//	got, err := client.Pull(ctx, ticket, body, moved)                                // an error: the first got bytes are there
//
// Nothing here is needed for a body to arrive: after every error the rest is pulled over the bus.
package direct
