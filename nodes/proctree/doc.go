// Package proctree finds and kills the process trees of workers. A process that has left its parent, its process group and its session is
// found by the marker in its environment ([MarkerEnv]), and where the system permits control groups by its group ([Cgroups]).
package proctree
