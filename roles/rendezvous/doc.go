// Package rendezvous has the store by which the ranks of a role find each other, as torch.distributed wants it: keys with values, on which others
// wait. The driver that created the role holds it in memory. It belongs to one epoch of the membership: with the next one its keys are gone,
// and who still waits for one is told who has left and come.
package rendezvous
