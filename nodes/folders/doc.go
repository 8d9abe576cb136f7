// Package folders carries folders of a driver's machine to the nodes whose workers run in them. [Ship] stores a folder at the head under the
// hash of its content; the [Cache] of an agent fetches it once for all workers that use it.
package folders
