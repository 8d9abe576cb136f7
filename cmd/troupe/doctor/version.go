package doctor

import "golang.org/x/mod/semver"

// OlderVersion reports whether version a is of an older release than b. Builds of one release, and versions that are no numbers, are not.
func OlderVersion(a, b string) bool {
	a, b = "v"+a, "v"+b
	return semver.IsValid(a) && semver.IsValid(b) && semver.Compare(a, b) < 0
}
