// Package spec declares pipelines: streams, stages and items, in Go or in a YAML file, and checks them as a whole.
//
//	file, err := spec.ParseFile(text, classes) // err lists every mistake with its line and a remedy
//	err = file.Spec.Check()
package spec
