// Package dashboard is what a head shows over HTTP: the page, the data behind it as JSON and as a live stream, and the
// answers to health checks. The page is embedded in the binary and loads nothing from elsewhere.
//
//	observer, err := dashboard.Observe(b, log)
//	handler := dashboard.Handler(dashboard.Config{Observer: observer, …})
package dashboard
