package direct

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"time"
)

// A connection, after TLS. The server begins with 16 random bytes, the nonce. Then the receiver sends requests, and the server answers
// them in order. All numbers are little-endian.
//
//	request    0 grant of the ticket
//	           96 uint64 offset, 104 uint64 length: a range of the body; length zero: no more of it is needed, which has no answer
//	           112 32 bytes: HMAC of the nonce, the number of the request on this connection and the first 112 bytes, with the ticket's key
//	answer     for each piece of up to 256 KiB: uint32 length, uint32 CRC32C, the bytes;
//	           uint32 zero, uint32 zero: the next piece has not reached the server yet, said four times a second;
//	           a refusal: uint32 zero, uint32 reason
//
// The request's number makes a request that was recorded useless. It is not sent.
const (
	nonceSize   = 16
	rangeSize   = 16
	requestSize = grantSize + rangeSize + keySize
	pieceHead   = 8
	chunkSize   = 1 << 20   // a range that a connection asks for
	pieceSize   = 256 << 10 // what is checked, and passed on to the next host, at a time

	aliveEvery   = 250 * time.Millisecond // a server that waits for the next piece says that it does
	starvedLimit = 30 * time.Second       // a receiver that hears only that gives up
)

// refusal is why a server does not answer a request. The numbers never change their meaning.
type refusal uint32

const (
	refusedTicket  refusal = 1 // it is not of this server, not for this receiver, or was changed
	refusedExpired refusal = 2
	refusedGone    refusal = 3 // the body is not there any more
	refusedRange   refusal = 4
)

func (r refusal) Error() string {
	switch r {
	case refusedTicket:
		return "the server refuses the ticket"
	case refusedExpired:
		return "the ticket has expired"
	case refusedGone:
		return "the body is not there any more"
	case refusedRange:
		return "the range is not within the body"
	}
	return fmt.Sprintf("the server refuses: reason %d", uint32(r))
}

var errStarved = errors.New("the server has had no more of the body for 30 s")

var errChanged = errors.New("a piece arrived changed: its checksum is another one")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendRequest encodes the request of that number.
func appendRequest(b []byte, t *Ticket, nonce []byte, number, offset, length uint64) []byte {
	at := len(b)
	b = append(b, t.Grant...)
	b = binary.LittleEndian.AppendUint64(b, offset)
	b = binary.LittleEndian.AppendUint64(b, length)
	return append(b, proof(t.Key, nonce, number, b[at:])...)
}

func proof(key, nonce []byte, number uint64, request []byte) []byte {
	return mac(key, nonce, binary.LittleEndian.AppendUint64(nil, number), request)
}

// writePiece sends a piece of a body.
func writePiece(w io.Writer, piece []byte) error {
	var head [pieceHead]byte
	binary.LittleEndian.PutUint32(head[:], uint32(len(piece)))
	binary.LittleEndian.PutUint32(head[4:], crc32.Checksum(piece, castagnoli))
	if _, err := w.Write(head[:]); err != nil {
		return err
	}
	_, err := w.Write(piece)
	return err
}

// writeRefusal sends a refusal in place of a piece; zero: the piece comes later.
func writeRefusal(w io.Writer, why refusal) error {
	var head [pieceHead]byte
	binary.LittleEndian.PutUint32(head[4:], uint32(why))
	_, err := w.Write(head[:])
	return err
}

// readPieces receives a range of a body. After an error the content of body is undefined.
func readPieces(r io.Reader, body []byte, moved func(n int)) error {
	var head [pieceHead]byte
	for since := time.Now(); len(body) > 0; {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		n, sum := int64(binary.LittleEndian.Uint32(head[:])), binary.LittleEndian.Uint32(head[4:])
		if n == 0 && sum == 0 {
			if time.Since(since) > starvedLimit {
				return errStarved
			}
			continue
		}
		if n == 0 {
			return refusal(sum)
		}
		if n > chunkSize || n > int64(len(body)) {
			return fmt.Errorf("a piece of %d bytes, where %d are missing", n, len(body))
		}
		if _, err := io.ReadFull(r, body[:n]); err != nil {
			return err
		}
		if crc32.Checksum(body[:n], castagnoli) != sum {
			return errChanged
		}
		if moved != nil {
			moved(int(n))
		}
		body, since = body[n:], time.Now()
	}
	return nil
}

// progressConn is a connection whose reads and writes fail after a time in which not a byte moves. Short writes wait in a buffer for
// the next flush: TLS writes its records one by one.
type progressConn struct {
	net.Conn
	limit    time.Duration
	pending  []byte
	buffered *bufio.Reader // of rawReader, below TLS; nil: reads are long
}

// rawReader reads the connection itself.
type rawReader struct{ *progressConn }

func (r rawReader) Read(b []byte) (int, error) {
	if err := r.SetReadDeadline(time.Now().Add(r.limit)); err != nil {
		return 0, err
	}
	return r.Conn.Read(b)
}

const (
	writeBuffer = 128 << 10
	readBuffer  = 128 << 10
	writeMost   = 256 << 10 // bytes of one write with its own deadline
)

func (c *progressConn) Read(b []byte) (int, error) {
	if err := c.flush(); err != nil {
		return 0, err
	}
	if c.buffered != nil {
		return c.buffered.Read(b)
	}
	return rawReader{c}.Read(b)
}

func (c *progressConn) Write(b []byte) (int, error) {
	if len(c.pending)+len(b) <= writeBuffer {
		if c.pending == nil {
			c.pending = make([]byte, 0, writeBuffer)
		}
		c.pending = append(c.pending, b...)
		return len(b), nil
	}
	if len(b) > writeBuffer/2 {
		return len(b), c.writeNow(b)
	}
	if err := c.flush(); err != nil {
		return 0, err
	}
	c.pending = append(c.pending, b...)
	return len(b), nil
}

func (c *progressConn) flush() error {
	if len(c.pending) == 0 {
		return nil
	}
	return c.writeNow(nil)
}

// writeNow writes what is pending, and b.
func (c *progressConn) writeNow(b []byte) error {
	for len(c.pending)+len(b) > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
			return err
		}
		n := min(len(b), writeMost)
		parts := net.Buffers{c.pending, b[:n]} // one system call
		c.pending = c.pending[:0]
		if _, err := parts.WriteTo(c.Conn); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}
