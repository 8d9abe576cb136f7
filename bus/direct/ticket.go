package direct

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// Body names what a ticket is for: a body in the shared memory of the server's host, or one of the server's own process.
type Body struct {
	Location wire.Location // zero: ID is the body's number in the process of the server
	ID       uint64
	Length   int64
}

// Ticket permits one receiver to read one body. It travels over the bus, and is as secret as the body.
type Ticket struct {
	Addresses []string `msgpack:"addresses"`
	Server    []byte   `msgpack:"server"`          // SHA-256 of the server's certificate; empty: plain text
	Grant     []byte   `msgpack:"grant"`           // what the receiver shows to the server
	Key       []byte   `msgpack:"key"`             // proves that the receiver has the ticket, and is never sent to the server
	Relay     bool     `msgpack:"relay,omitempty"` // the server receives the body itself, and passes it on
}

const (
	keySize      = sha256.Size
	grantSize    = keySize + 8 + 8 + 8 + 16 + 3*8
	mostAddress  = 16 // of a ticket, and of a server
	ticketExpiry = time.Minute
)

// grant is what a server is asked for. Its bytes, all numbers little-endian:
//
//	 0 32 bytes  SHA-256 of the receiver's certificate   56 16 bytes  arena, zero: the body has an ID
//	32 int64     expiry by the server's clock, Unix ms    72 uint64    segment
//	40 uint64    ID                                       80 uint64    offset
//	48 int64     length                                   88 uint64    generation
type grant struct {
	receiver [keySize]byte
	expires  time.Time
	body     Body
}

func (g *grant) encode() []byte {
	le := binary.LittleEndian
	b := append(make([]byte, 0, grantSize), g.receiver[:]...)
	b = le.AppendUint64(b, uint64(g.expires.UnixMilli()))
	b = le.AppendUint64(b, g.body.ID)
	b = le.AppendUint64(b, uint64(g.body.Length))
	at := g.body.Location
	var arena [16]byte
	_, _ = hex.Decode(arena[:], []byte(at.Owner)) // checked when the ticket is made
	b = append(b, arena[:]...)
	for _, v := range [...]uint64{at.Segment, at.Offset, at.Gen} {
		b = le.AppendUint64(b, v)
	}
	return b
}

func decodeGrant(b []byte) (grant, error) {
	if len(b) != grantSize {
		return grant{}, errors.New("the grant is cut off")
	}
	number := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	g := grant{receiver: [keySize]byte(b), expires: time.UnixMilli(int64(number(32)))}
	g.body = Body{ID: number(40), Length: int64(number(48))}
	if arena := [16]byte(b[56:]); arena != [16]byte{} {
		g.body.Location = wire.Location{Owner: hex.EncodeToString(arena[:]), Segment: number(72), Offset: number(80), Gen: number(88)}
	}
	return g, nil
}

// Issuer makes the tickets of one server. A process that has it can permit anything that the server can read.
type Issuer struct {
	Addresses []string `json:"addresses"`
	Server    []byte   `json:"server,omitempty"`
	Key       []byte   `json:"key"`
}

func newIssuer(addresses []string, fingerprint []byte) Issuer {
	key := make([]byte, keySize)
	_, _ = rand.Read(key) // it never fails
	return Issuer{Addresses: addresses, Server: fingerprint, Key: key}
}

// Ticket permits the receiver with a certificate of that SHA-256 to read a body, beginning within a minute.
func (i *Issuer) Ticket(receiver []byte, body Body) (Ticket, error) {
	return i.ticket(receiver, body, time.Now().Add(ticketExpiry))
}

func (i *Issuer) ticket(receiver []byte, body Body, expires time.Time) (Ticket, error) {
	if len(receiver) != keySize {
		return Ticket{}, bus.Errorf(bus.CodeMalformed, "the key of a receiver has %d bytes", len(receiver))
	}
	if arena, err := hex.DecodeString(body.Location.Owner); err != nil || !body.Location.IsZero() && len(arena) != 16 {
		return Ticket{}, bus.Errorf(bus.CodeMalformed, "the location of a body has no arena")
	}
	g := grant{receiver: [keySize]byte(receiver), expires: expires, body: body}
	shown := g.encode()
	return Ticket{Addresses: i.Addresses, Server: i.Server, Grant: shown, Key: mac(i.Key, shown)}, nil
}

func (t *Ticket) check(length int) error {
	g, err := decodeGrant(t.Grant)
	if err != nil || len(t.Key) != keySize || len(t.Addresses) == 0 || len(t.Addresses) > mostAddress || len(t.Server) != 0 && len(t.Server) != keySize {
		return bus.Errorf(bus.CodeMalformed, "a ticket that no server gives")
	}
	if g.body.Length != int64(length) {
		return bus.Errorf(bus.CodeMalformed, "a ticket for %d bytes instead of %d", g.body.Length, length)
	}
	return nil
}

func mac(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, part := range parts {
		h.Write(part)
	}
	return h.Sum(nil)
}

func equal(a, b []byte) bool { return subtle.ConstantTimeCompare(a, b) == 1 }
