package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestItEndsByItself(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	require.NoError(t, run(ctx))
	require.Greater(t, policy.Load(), int64(200), "the policy has learnt")
}
