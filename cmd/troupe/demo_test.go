package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Without the demo program, the error says how to build it.
func TestDemoIsNotInstalled(t *testing.T) {
	_, stderr, code := newShell(t).run("demo")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "run `make demo`")
}
