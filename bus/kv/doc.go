// Package kv keeps keys and values in a JetStream stream: compare-and-set by revision, atomic batches, watches, leases and
// a leader whose writes are fenced by its epoch. A key that was deleted stays deleted after a crash of the server (see
// checkpoint.go), which JetStream's own key-value store does not promise.
//
//	bucket, err := kv.Open(ctx, b, kv.Config{Bucket: "troupe_registry"})
//	revision, err := bucket.Create(ctx, "role.train", value)
//	revision, err = bucket.Update(ctx, "role.train", other, revision)
package kv
