package bus

import (
	"crypto/tls"
	"net"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"
)

// connecting is a client that the server asks about, and what happens when it is registered.
type connecting struct {
	token      string
	registered func()
}

func (c connecting) GetTLSConnectionState() *tls.ConnectionState { return nil }
func (c connecting) GetOpts() *server.ClientOpts                 { return &server.ClientOpts{Token: c.token} }
func (c connecting) RegisterUser(*server.User)                   { c.registered() }
func (c connecting) RemoteAddress() net.Addr                     { return nil }
func (c connecting) GetNonce() []byte                            { return nil }
func (c connecting) GetID() uint64                               { return 0 }
func (c connecting) Kind() int                                   { return server.CLIENT }

// A revocation between the check of a credential and the registration of its connection finds no connection to end: the connection is refused.
func TestRevokedWhileConnecting(t *testing.T) {
	t.Parallel()
	const token = "the-token-of-the-head"
	b, err := Open(t.Context(), Config{Server: ServerConfig{Token: token}})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	b.AcceptCredentials(nil, nil)
	text, c, err := Credential{Kind: WorkerCredential, Namespace: "run"}.Issue(token)
	require.NoError(t, err)
	require.True(t, b.srv.auth.Check(connecting{text, func() {}}))
	require.False(t, b.srv.auth.Check(connecting{text, func() { b.AcceptCredentials(map[string]struct{}{c.ID: {}}, nil) }}))
}
