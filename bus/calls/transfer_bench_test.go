package calls_test

import (
	"fmt"
	"testing"

	"troupe/bus"
	"troupe/bus/bustest"
)

// BenchmarkTransfer moves large bodies one to one and one to eight, each worker on a connection of its own.
func BenchmarkTransfer(b *testing.B) {
	const size = 64 << 20
	for _, server := range []string{"embedded", "external"} {
		for _, world := range []int{1, 8} {
			for _, method := range []string{"crc", "big"} {
				b.Run(fmt.Sprintf("%s/%d/%s", server, world, map[string]string{"crc": "argument", "big": "answer"}[method]), func(b *testing.B) {
					cfg := bus.Config{}
					if server == "external" {
						cfg.URLs = []string{bustest.External(b)}
					}
					driver := bustest.Open(b, cfg)
					s := newTestRole(b, world)
					for r := range world {
						s.start(dial(b, driver), r)
					}
					body := pattern(size, 1)
					if method == "big" {
						body = fmt.Append(nil, size)
					}
					ep := endpoint(b, driver)
					good(b, scatter(b, ep, s.call("skim", body)))
					b.SetBytes(int64(size * world))
					for b.Loop() {
						good(b, scatter(b, ep, s.call(map[string]string{"crc": "skim", "big": "same"}[method], body)))
					}
				})
			}
		}
	}
}
