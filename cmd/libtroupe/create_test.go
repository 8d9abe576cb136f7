package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestWorldOfMapping(t *testing.T) {
	for _, c := range []struct{ world, perRank, devices, want int }{
		{0, 0, 8, 8}, {0, 2, 8, 4}, {4, 0, 8, 4}, {4, 2, 8, 4}, {8, 1, 8, 8},
	} {
		got, err := worldOf(c.world, c.perRank, c.devices)
		assert.NoError(t, err)
		assert.Equal(t, c.want, got, "%+v", c)
	}
	for _, c := range []struct{ world, perRank, devices int }{{0, 3, 8}, {3, 0, 8}, {3, 2, 8}, {4, 1, 8}} {
		_, err := worldOf(c.world, c.perRank, c.devices)
		assert.ErrorContains(t, err, "device_mapping has 8 devices", "%+v", c)
	}
}
