// Package display makes the output of many workers readable on the terminal of their driver: prefixes, merging of equal lines, and limits.
package display
