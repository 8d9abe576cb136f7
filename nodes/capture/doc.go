// Package capture reads what processes print: it makes the pipes for their stdout and stderr, splits the bytes into lines, and reads
// seldom from a process that prints all the time.
package capture
