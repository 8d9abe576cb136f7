package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The demo is a program of its own; where it is not installed, the command says how to get it.
func TestDemoIsNotInstalled(t *testing.T) {
	_, stderr, code := newUser(t).types("demo")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "run `make demo`")
}
