package kv_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// Members that open a bucket at once, which none of them has, all get it: the server may say that its name is taken before it finds it.
func TestMembersOpenABucketAtOnce(t *testing.T) {
	t.Parallel()
	m := bustest.StartMembers(t)
	for n := range 4 {
		errs := make([]error, 9)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				_, errs[i] = kv.Open(t.Context(), m.Bus(i%3), kv.Config{Bucket: fmt.Sprintf("b%d", n), MaxBytes: 1 << 20, Replicas: bus.AllReplicas})
			})
		}
		wg.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
	}
}
