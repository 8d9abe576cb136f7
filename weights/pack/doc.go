// Package pack moves the bytes of weights in memory: between tensors and buckets, as a plan says, with a digest of each bucket; and
// between two versions of a bucket as the values that changed. It is pure but for the memory that it is given, and uses several
// goroutines.
package pack
