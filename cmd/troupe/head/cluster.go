package head

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
)

const (
	clusterSize  = 3 // two are less available than one: both are needed to store anything
	clusterPort  = "7422"
	formPoll     = 50 * time.Millisecond // of states in memory
	bundleMost   = 1 << 20
	bundleFormat = 1
)

// clusterFile is STORE/cluster.json: the cluster that the store is a member of.
type clusterFile struct {
	Name    string   `json:"name"`
	Members []string `json:"members"`           // HOST:PORT for clients; routes are at the next port
	Own     string   `json:"own"`               // the member that has this store
	Restore bool     `json:"restore,omitempty"` // the first member restores a backup before any other one serves
	Left    []string `json:"left,omitempty"`    // members that have left for good
}

func clusterPath(store string) string { return filepath.Join(store, "cluster.json") }

// readCluster is nil if the store is that of a head alone, or new. A head that was a member before is the only one in it.
func readCluster(store string) (*clusterFile, error) { return readClusterFile(clusterPath(store)) }

func readClusterFile(path string) (*clusterFile, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	f := &clusterFile{}
	if err == nil {
		err = json.Unmarshal(data, f)
	}
	if err != nil {
		return nil, fmt.Errorf("the cluster of the store: %s: %w", path, err)
	}
	return f, nil
}

func (f *clusterFile) write(store string) error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	return nodes.WritePrivate(clusterPath(store), append(data, '\n'))
}

// bundle is what the members of a cluster share: who they are, and the secrets by which they, agents and drivers know each other.
type bundle struct {
	Format      int      `json:"format"`
	Name        string   `json:"name"`
	Members     []string `json:"members"`
	Token       string   `json:"token"`
	Certificate string   `json:"certificate"` // PEM
	Key         string   `json:"key"`         // PEM
	Restore     bool     `json:"restore,omitempty"`
}

// makeBundle makes the identity of a new cluster: that of the head whose backup is given, if it has its secrets.
func makeBundle(members []string, backup string) (*bundle, error) {
	random := make([]byte, 40)
	if _, err := rand.Read(random); err != nil {
		return nil, err
	}
	cert, key, err := newCertificate()
	if err != nil {
		return nil, err
	}
	b := &bundle{
		Format: bundleFormat, Name: "troupe-" + hex.EncodeToString(random[:8]), Members: members,
		Token: hex.EncodeToString(random[8:]), Certificate: string(cert), Key: string(key), Restore: backup != "",
	}
	if backup == "" {
		return b, nil
	}
	secrets, err := backupSecrets(backup)
	if token := strings.TrimSpace(string(secrets["token"])); token != "" {
		b.Token = token
	}
	if secrets["cert.pem"] != nil && secrets["key.pem"] != nil {
		b.Certificate, b.Key = string(secrets["cert.pem"]), string(secrets["key.pem"])
	}
	return b, err
}

func readBundle(path string) (*bundle, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o007 != 0 {
		return nil, cli.Usagef("--bundle %s: every user can read it (mode %04o), and it opens the cluster: chmod 600 it", path, info.Mode().Perm())
	}
	data, err := bus.ReadFile(path, bundleMost)
	if err != nil {
		return nil, err
	}
	b := &bundle{}
	if err := json.Unmarshal(data, b); err != nil || b.Token == "" || b.Name == "" || len(b.Members) != clusterSize {
		return nil, cli.Usagef("--bundle %s is not a bundle of `troupe up --init` or `troupe cluster bundle`", path)
	}
	if b.Format != bundleFormat {
		return nil, cli.Usagef("--bundle %s has format %d; this version reads %d", path, b.Format, bundleFormat)
	}
	return b, nil
}

func (b *bundle) write(path string) error {
	data, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		return err
	}
	return nodes.WritePrivate(path, append(data, '\n'))
}

// install writes the secrets into a store.
func (b *bundle) install(store string) error {
	return errors.Join(
		nodes.WritePrivate(filepath.Join(store, "token"), []byte(b.Token+"\n")),
		nodes.WritePrivate(filepath.Join(store, "key.pem"), []byte(b.Key)),
		nodes.WritePrivate(filepath.Join(store, "cert.pem"), []byte(b.Certificate)))
}

// parseMembers reads the members of a cluster, HOST or HOST:PORT.
func parseMembers(given []string) (members []string, err error) {
	for _, text := range given {
		if !strings.Contains(text, ":") {
			text = net.JoinHostPort(text, clusterPort)
		}
		host, portText, err := net.SplitHostPort(text)
		port, err2 := strconv.ParseUint(portText, 10, 16)
		if err != nil || err2 != nil || host == "" || port == 0 || port == 65535 || strings.ContainsAny(host, " \t/@") {
			return nil, cli.Usagef("--cluster %q: give HOST or HOST:PORT of each of the three members", text)
		}
		if slices.Contains(members, text) {
			return nil, cli.Usagef("--cluster: %s is there twice", text)
		}
		members = append(members, text)
	}
	if len(members) != clusterSize {
		return nil, cli.Usagef("--cluster has %s, and must have %d: two are less available than one, because nothing is stored unless both are there",
			cli.Counted(len(members), "member"), clusterSize)
	}
	return members, nil
}

// clusterFlags are the flags of up for a member of a cluster.
type clusterFlags struct {
	members []string
	own     string
	bundle  string
	init    bool
	restore string
}

func (f *clusterFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.members, "cluster", nil, "be one of three heads with one store: HOST or HOST:PORT of each; the port after it is for them alone")
	cmd.Flags().StringVar(&f.own, "member", "", "which member of --cluster this is (default the one whose address this machine has)")
	cmd.Flags().BoolVar(&f.init, "init", false, "make the bundle of a new cluster, unless it is there, on one member")
	cmd.Flags().StringVar(&f.bundle, "bundle", "", "file with the secrets of the cluster, for a member whose store is new (with --init, default STORE/bundle)")
	cmd.Flags().StringVar(&f.restore, "restore", "", "with --init: backup of a head, to go on with what it had")
}

func (f *clusterFlags) given() bool {
	return len(f.members) > 0 || f.own != "" || f.bundle != "" || f.init || f.restore != ""
}

// clusterOf finds out which cluster a store belongs to: what the store says, or the flags if it is new. Nil: the head is alone. The bundle
// is that of a new store; nil with init: it must be made.
func (c command) clusterOf(store string, f *clusterFlags) (*clusterFile, *bundle, error) {
	var members []string
	kept, err := readClusterFile(growthPath(store))
	if err == nil && kept == nil {
		kept, err = readCluster(store)
	}
	if err == nil && kept != nil && slices.Contains(kept.Left, kept.Own) {
		err = cli.Usagef("%s is the store of a member that has left its cluster; start the head with another store, or remove this one", store)
	}
	if err == nil && len(f.members) > 0 {
		members, err = parseMembers(f.members)
	}
	if err != nil {
		return nil, nil, err
	}
	if kept != nil {
		if members != nil && !sameMembers(members, kept.Members) {
			c.Warnf("troupe: --cluster is not what the store says: the members are %s; they change with `troupe cluster replace`, `grow` and `shrink`\n", strings.Join(kept.Members, ","))
		}
		return kept, nil, nil
	}
	if !f.given() {
		return nil, nil, nil
	}
	if streams, _ := os.ReadDir(bus.StreamsDir(store)); len(streams) > 0 { // an unreadable folder fails when the server opens it
		return nil, nil, cli.Usagef("--cluster: %s is the store of a head alone, and a cluster would delete its streams; use troupe cluster grow, or take a backup "+
			"(troupe backup --store %s -o FILE --secrets) and start the cluster with empty stores, the first member with --init --restore FILE", store, store)
	}
	b, err := f.readBundle()
	switch {
	case err != nil:
		return nil, nil, err
	case b != nil && members == nil:
		members = b.Members
	case b == nil && !f.init:
		return nil, nil, cli.Usagef("the store %s is new: give --init on one member, which makes the bundle, and --bundle FILE with it on the others", store)
	case members == nil:
		return nil, nil, cli.Usagef("--init: give the three members with --cluster")
	}
	own, err := ownMember(members, f.own)
	if err != nil {
		return nil, nil, err
	}
	file := &clusterFile{Members: members, Own: own}
	if b != nil {
		file.Name, file.Restore = b.Name, b.Restore
	}
	return file, b, nil
}

// readBundle is nil if there is none yet, which init makes.
func (f *clusterFlags) readBundle() (*bundle, error) {
	if f.bundle == "" {
		return nil, nil
	}
	b, err := readBundle(f.bundle)
	if errors.Is(err, fs.ErrNotExist) && f.init {
		return nil, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, cli.Usagef("--bundle: %w", err)
	}
	return b, err
}

func sameMembers(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// ownMember is the member that runs on this machine.
func ownMember(members []string, given string) (string, error) {
	if given != "" {
		for _, m := range members {
			if host, _, _ := net.SplitHostPort(m); m == given || host == given {
				return m, nil
			}
		}
		return "", cli.Usagef("--member %s is none of the members %s", given, strings.Join(members, ", "))
	}
	local := map[string]bool{nodes.HostName(): true}
	addresses, _ := net.InterfaceAddrs() // without addresses, --member is asked for
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok {
			local[ip.IP.String()] = true
		}
	}
	var own []string
	for _, m := range members {
		host, _, _ := net.SplitHostPort(m) // checked
		found, _ := net.LookupHost(host)   // a member that is not known yet is not this one
		if local[host] || slices.ContainsFunc(found, func(ip string) bool { return local[ip] }) {
			own = append(own, m)
		}
	}
	if len(own) != 1 {
		return "", cli.Usagef("which of %s is this machine? give it with --member HOST:PORT", strings.Join(members, ", "))
	}
	return own[0], nil
}

// listen is the address that a member listens on: its own one, or all of the machine's if that is a name.
func (f *clusterFile) listen() listenAddress {
	host, portText, _ := net.SplitHostPort(f.Own) // checked
	if net.ParseIP(host) == nil {
		host = "0.0.0.0"
	}
	port, _ := strconv.Atoi(portText)
	return listenAddress{text: net.JoinHostPort(host, portText), port: port}
}

// routeAddress is where the members reach a member: the port after that of its clients.
func routeAddress(member string) string {
	host, portText, _ := net.SplitHostPort(member) // checked
	port, _ := strconv.Atoi(portText)
	return net.JoinHostPort(host, strconv.Itoa(port+1))
}

// urls are the addresses of all members for clients, the own one first.
func (f *clusterFile) urls() []string {
	urls := []string{"tls://" + f.Own}
	for _, m := range f.Members {
		if m != f.Own {
			urls = append(urls, "tls://"+m)
		}
	}
	return urls
}

// found makes a new store that of a member: with the bundle, or as the first one, with a bundle that it writes for the others.
func (h *head) found() (err error) {
	if h.cluster.Name != "" && h.bundle == nil {
		return nil // it is one, or was
	}
	if h.bundle == nil {
		if h.bundle, err = makeBundle(h.cluster.Members, h.restore); err != nil {
			return err
		}
		if err := h.bundle.write(h.bundlePath); err != nil {
			return fmt.Errorf("write the bundle: %w", err)
		}
		h.cluster.Name, h.cluster.Restore, h.first = h.bundle.Name, h.bundle.Restore, true
	}
	if err := h.bundle.install(h.store); err != nil {
		return err
	}
	return h.cluster.write(h.store)
}

// joinCluster makes a head one of three, if its store or the flags say so.
func (c command) joinCluster(h *head, f upFlags, listenGiven bool) error {
	if f.cluster.given() && len(f.nats) > 0 {
		return cli.Usagef("--cluster and --nats exclude each other: the members are the servers")
	}
	if f.cluster.restore != "" && !f.cluster.init {
		return cli.Usagef("--restore goes with --init; without a cluster, use `troupe restore`")
	}
	var err error
	if h.cluster, h.bundle, err = c.clusterOf(h.store, &f.cluster); err != nil || h.cluster == nil || len(h.nats) > 0 {
		return err
	}
	if !listenGiven {
		h.at = h.cluster.listen()
	}
	h.at.loopback = false // TLS everywhere, with one certificate
	if h.bundlePath = f.cluster.bundle; h.bundlePath == "" {
		h.bundlePath = filepath.Join(h.store, "bundle")
	}
	h.bundlePath, err = filepath.Abs(h.bundlePath)
	h.restore, h.grows = f.cluster.restore, exists(growthPath(h.store))
	if h.restore == "" && (h.grows || exists(grownBackup(h.store))) {
		h.restore = grownBackup(h.store)
	}
	return err
}

// id names the head in logs and as the leader.
func (h *head) id() string {
	if h.cluster != nil {
		return h.cluster.Own
	}
	return h.file.Name
}

// config is nil for a head that is alone.
func (f *clusterFile) config(at listenAddress, tls *tls.Config) *bus.ClusterConfig {
	if f.alone() {
		return nil
	}
	cfg := &bus.ClusterConfig{Name: f.Name, Member: f.Own, Listen: routeAddress(at.text), Advertise: f.Own, Certificate: tls.Certificates[0]}
	for _, m := range f.Members {
		cfg.Routes = append(cfg.Routes, routeAddress(m))
	}
	return cfg
}

// formCluster returns when the cluster takes requests. The first member of a new one restores what a head alone had.
func (c command) formCluster(ctx context.Context, b *bus.Bus, h *head) error {
	if h.first {
		c.Warnf("troupe: the bundle of the cluster is %s; on each other member: troupe up --bundle FILE, with a copy of it that only its owner can read\n", h.bundlePath)
	}
	if err := c.awaitFormed(ctx, b.Member(), h.cluster); err != nil {
		return err
	}
	if h.cluster.Restore {
		if err := c.awaitRestored(ctx, b, h.restore); err != nil {
			return err
		}
		if err := os.RemoveAll(asidePath(h.store)); err != nil {
			return err
		}
	}
	return keepPort(h.store, h.cluster.Own)
}

// awaitRestored returns when the backup is restored, which the member does that has it. The mark of the ledger is what is written last.
func (c command) awaitRestored(ctx context.Context, b *bus.Bus, backup string) error {
	said := false
	return bus.Retry(ctx, bus.Backoff{First: 20 * time.Millisecond, Most: time.Second}, func() error {
		attempt, cancel := b.Attempt(ctx, storeAttempt)
		defer cancel()
		state, err := b.ServerState(attempt)
		switch {
		case err != nil || state.NoQuorum:
			return cmp.Or(err, error(bus.ErrUnavailable))
		case slices.ContainsFunc(state.Streams, func(s bus.StreamUsage) bool { return s.Name == placement.MarkStream }):
			return nil
		case backup == "":
			if !said {
				c.Warnf("troupe: waiting for the member that restores the backup\n")
			}
			said = true
			return bus.ErrUnavailable
		}
		manifest, err := checkBackup(backup)
		if err == nil {
			err = restoreStreams(ctx, b, backup, manifest, true) // what an attempt before this one has left goes
		}
		if errors.Is(err, bus.ErrUnavailable) { // a leader of the cluster has changed meanwhile, for instance
			c.Warnf("troupe: the backup is restored again: %v\n", err)
			return err
		}
		return bus.Permanent(err)
	})
}

// ignoreEnd is nil for the error of a head that a signal ends.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// awaitFormed waits until the members have met and have a leader, and says for which ones it waits.
func (c command) awaitFormed(ctx context.Context, m *bus.Member, f *clusterFile) error {
	for said := ""; !m.Formed(); {
		missing := slices.DeleteFunc(slices.Clone(f.Members), func(name string) bool { return name == f.Own })
		for _, p := range m.Peers() {
			missing = slices.DeleteFunc(missing, func(name string) bool { return name == p.Name })
		}
		text := "the members have met; they elect a leader"
		if len(missing) > 0 {
			text = "waiting for " + strings.Join(missing, ", ") + " of the cluster (troupe up --bundle FILE there, and port " + portOf(routeAddress(f.Own)) + " open between the members)"
		}
		if text != said {
			c.Warnf("troupe: %s\n", text)
			said = text
		}
		if err := bus.Sleep(ctx, formPoll); err != nil {
			return err
		}
	}
	return nil
}

func portOf(address string) string { return address[strings.LastIndex(address, ":")+1:] }
