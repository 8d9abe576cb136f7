package cli

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"troupe/bus"
)

const (
	ConfigName = "troupe.yaml"
	maxConfig  = 1 << 20
)

// configVariables are the environment variables that take precedence over the same setting of the configuration file.
var configVariables = map[string][]string{
	"url": {"TROUPE_URL"}, "namespace": {"TROUPE_NAMESPACE"}, "creds": {"TROUPE_CREDS"}, "fingerprint": {"TROUPE_FINGERPRINT"},
	"token-file": {"TROUPE_TOKEN", "TROUPE_TOKEN_FILE"}, "log-level": {"TROUPE_LOG_LEVEL"}, "log-format": {"TROUPE_LOG_FORMAT"},
}

// configFile is a parsed file of settings. The top level has the flags of all commands (url, namespace, raw) and a section for each
// command, whose keys are its flags and its subcommands.
type configFile struct {
	path string
	root *yaml.Node // a mapping; nil: the file is empty
}

// ConfigPath is the file of --config or TROUPE_CONFIG, or the first that exists of the user's and the machine's; empty: none.
func (c *CLI) ConfigPath() (path string, given bool) {
	if path := cmp.Or(c.Config, c.Env("TROUPE_CONFIG")); path != "" {
		return path, true
	}
	var candidates []string
	switch dir, home := c.Env("XDG_CONFIG_HOME"), c.Env("HOME"); {
	case dir != "":
		candidates = append(candidates, filepath.Join(dir, "troupe", ConfigName))
	case home != "":
		candidates = append(candidates, filepath.Join(home, ".config", "troupe", ConfigName))
	}
	for _, path := range append(candidates, filepath.Join("/etc/troupe", ConfigName)) {
		if _, err := os.Stat(path); err == nil {
			return path, false
		}
	}
	return "", false
}

func readConfig(path string) (*configFile, error) {
	data, err := bus.ReadFile(path, maxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, Usagef("--config %s: there is no such file", path)
	}
	if err != nil {
		return nil, Usagef("--config: %w", err)
	}
	f := &configFile{path: path}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return f, nil
	case err != nil:
		return nil, Usagef("%s: %w", path, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, Usagef("%s: more than one document; give one", path)
	}
	f.root = doc.Content[0]
	if f.root.Kind == yaml.ScalarNode && f.root.Tag == "!!null" {
		f.root = nil
	} else if f.root.Kind != yaml.MappingNode {
		return nil, f.errorf(f.root, "give settings as NAME: VALUE")
	}
	return f, nil
}

func (f *configFile) errorf(n *yaml.Node, format string, args ...any) error {
	return Usagef("%s:%d: %w", f.path, n.Line, fmt.Errorf(format, args...))
}

// each calls do with the keys and values of a mapping. A key that occurs twice is an error.
func (f *configFile) each(n *yaml.Node, do func(key, value *yaml.Node) error) error {
	if n == nil {
		return nil
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			return f.errorf(key, "%s is set twice", key.Value)
		}
		seen[key.Value] = true
		if value.Kind == yaml.AliasNode {
			value = value.Alias
		}
		if err := do(key, value); err != nil {
			return err
		}
	}
	return nil
}

// check refuses keys that no command has, and values that its flags refuse. It sets the flags of root, which must be a fresh one.
func (f *configFile) check(root *cobra.Command) error {
	return f.each(f.root, func(key, value *yaml.Node) error {
		if flag := sharedFlag(root, key.Value); flag != nil {
			return f.set(flag, key.Value, key, value)
		}
		for _, sub := range root.Commands() {
			if sub.Name() == key.Value {
				return f.checkSection(sub, key, value)
			}
		}
		return f.unknown(key, "", append(sharedNames(root), commandNames(root)...))
	})
}

func (f *configFile) checkSection(cmd *cobra.Command, name, section *yaml.Node) error {
	path := strings.TrimPrefix(cmd.CommandPath(), "troupe ")
	if section.Kind == yaml.ScalarNode && section.Tag == "!!null" {
		return nil
	}
	if section.Kind != yaml.MappingNode {
		return f.errorf(name, "%s is a command: give its flags as NAME: VALUE", path)
	}
	return f.each(section, func(key, value *yaml.Node) error {
		if flag := cmd.Flags().Lookup(key.Value); flag != nil && key.Value != "help" {
			return f.set(flag, path+"."+key.Value, key, value)
		}
		for _, sub := range cmd.Commands() {
			if sub.Name() == key.Value {
				return f.checkSection(sub, key, value)
			}
		}
		return f.unknown(key, path+".", append(flagNames(cmd.Flags()), commandNames(cmd)...))
	})
}

// apply sets the flags of the command that is run, except those of the command line and those that a variable sets.
func (f *configFile) apply(cmd *cobra.Command, env func(string) string) error {
	section := f.root
	set := func(key, value *yaml.Node) error {
		flag := cmd.Flags().Lookup(key.Value)
		if flag == nil || flag.Changed || slices.ContainsFunc(configVariables[key.Value], func(v string) bool { return env(v) != "" }) {
			return nil
		}
		return f.set(flag, key.Value, key, value)
	}
	words := strings.Fields(cmd.CommandPath())[1:]
	var sections []*yaml.Node
	for _, word := range words {
		var next *yaml.Node
		if err := f.each(section, func(key, value *yaml.Node) error {
			if key.Value == word && value.Kind == yaml.MappingNode {
				next = value
			}
			return nil
		}); err != nil {
			return err
		}
		if section = next; next == nil {
			break
		}
		sections = append(sections, next)
	}
	if len(sections) == len(words) && len(words) > 0 { // the section of the command goes before the top level
		if err := f.each(sections[len(sections)-1], set); err != nil {
			return err
		}
	}
	return f.each(f.root, func(key, value *yaml.Node) error {
		if sharedFlag(cmd.Root(), key.Value) == nil {
			return nil
		}
		return set(key, value)
	})
}

// set gives a flag the value of a node: a scalar, or for a flag that takes several a list or a mapping.
func (f *configFile) set(flag *pflag.Flag, name string, key, value *yaml.Node) error {
	list, isList := flag.Value.(pflag.SliceValue)
	var err error
	switch {
	case value.Kind == yaml.ScalarNode && value.Tag == "!!null":
		return f.errorf(key, "%s has no value", name)
	case value.Kind == yaml.ScalarNode:
		err = flag.Value.Set(value.Value)
	case isList && value.Kind == yaml.SequenceNode:
		var values []string
		for _, item := range value.Content {
			values = append(values, item.Value)
		}
		err = list.Replace(values)
	case isList && value.Kind == yaml.MappingNode:
		var values []string
		for i := 0; i+1 < len(value.Content); i += 2 {
			values = append(values, value.Content[i].Value+"="+value.Content[i+1].Value)
		}
		err = list.Replace(values)
	case isList:
		return f.errorf(key, "%s: give a value, a list or k: v", name)
	default:
		return f.errorf(key, "%s: give one value", name)
	}
	if err != nil {
		return f.errorf(key, "%s: %w", name, err)
	}
	flag.Changed = true
	return nil
}

func (f *configFile) unknown(key *yaml.Node, within string, known []string) error {
	slices.Sort(known)
	known = slices.Compact(known)
	if near := nearest(key.Value, known); near != "" {
		return f.errorf(key, "%s%s is unknown; did you mean %s?", within, key.Value, near)
	}
	return f.errorf(key, "%s%s is unknown; there are %s", within, key.Value, strings.Join(known, ", "))
}

// sharedFlag is a flag that the top level may set: those of every command, and those of every command that talks to a head.
func sharedFlag(root *cobra.Command, name string) *pflag.Flag {
	if flag := root.PersistentFlags().Lookup(name); flag != nil && name != "config" {
		return flag
	}
	if name != "url" && name != "namespace" {
		return nil
	}
	for _, sub := range root.Commands() {
		if flag := sub.Flags().Lookup(name); flag != nil && sub.Flags().Lookup("url") != nil && sub.Flags().Lookup("namespace") != nil {
			return flag
		}
	}
	return nil
}

func sharedNames(root *cobra.Command) []string {
	names := []string{"url", "namespace"}
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "config" {
			names = append(names, f.Name)
		}
	})
	return names
}

func flagNames(flags *pflag.FlagSet) (names []string) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			names = append(names, f.Name)
		}
	})
	return names
}

func commandNames(cmd *cobra.Command) (names []string) {
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" && sub.Name() != "completion" && sub.Name() != "config" {
			names = append(names, sub.Name())
		}
	}
	return names
}

// nearest is the known name that needs the fewest edits, if they are few; empty otherwise.
func nearest(name string, known []string) string {
	best, least := "", 1+max(2, len(name)/3)
	for _, k := range known {
		if n := editDistance(name, k); n < least {
			best, least = k, n
		}
	}
	return best
}

// editDistance is the number of insertions, deletions and replacements of bytes that make b of a.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}

// LoadConfig sets the flags of a command from the configuration file, if there is one.
func (c *CLI) LoadConfig(cmd *cobra.Command) error {
	path, _ := c.ConfigPath()
	if path == "" {
		return nil
	}
	f, err := readConfig(path)
	if err != nil {
		return err
	}
	if err := f.check(c.freshRoot()); err != nil {
		return err
	}
	return f.apply(cmd, c.Env)
}

// CheckConfig checks a configuration file, and returns the command line with its settings.
func (c *CLI) CheckConfig(path string) (*cobra.Command, error) {
	f, err := readConfig(path)
	if err != nil {
		return nil, err
	}
	root := c.freshRoot()
	return root, f.check(root)
}

// freshRoot is the command line with no flag set.
func (c *CLI) freshRoot() *cobra.Command {
	return c.NewRoot(&CLI{Env: c.Env, Out: io.Discard, Err: io.Discard})
}
