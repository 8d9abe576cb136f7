package dashboard

import (
	"compress/gzip"
	"net/http"
	"strconv"
	"strings"
)

// compressed answers with gzip where the client takes it. A live stream is compressed as one body and flushed after each event: its
// snapshots resemble each other.
func compressed(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Accept-Encoding")
		if !takesGzip(r.Header.Values("Accept-Encoding")) {
			next.ServeHTTP(w, r)
			return
		}
		r.Header.Del("Range") // a range of the file would not be one of the compressed body
		zw := &gzipWriter{ResponseWriter: w}
		next.ServeHTTP(zw, r)
		zw.close()
	})
}

// takesGzip reports whether Accept-Encoding has gzip, with a weight above zero.
func takesGzip(accepts []string) bool {
	for coding := range strings.SplitSeq(strings.Join(accepts, ","), ",") {
		name, weight, weighted := strings.Cut(coding, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			q, err := strconv.ParseFloat(strings.TrimPrefix(strings.TrimSpace(weight), "q="), 64)
			return !weighted || err == nil && q > 0
		}
	}
	return false
}

// gzipWriter compresses the body of one response. One handler writes it.
type gzipWriter struct {
	http.ResponseWriter
	zip *gzip.Writer // nil: nothing was written yet, or the answer has no body
}

// WriteHeader implements http.ResponseWriter.
func (w *gzipWriter) WriteHeader(status int) {
	if w.zip == nil && status != http.StatusNotModified && status != http.StatusNoContent {
		w.Header().Del("Content-Length")
		w.Header().Set("Content-Encoding", "gzip")
		w.zip, _ = gzip.NewWriterLevel(w.ResponseWriter, gzip.BestSpeed) // the level is valid
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *gzipWriter) Write(data []byte) (int, error) {
	if w.zip == nil {
		w.WriteHeader(http.StatusOK)
	}
	return w.zip.Write(data)
}

// FlushError sends what was written. http.ResponseController calls it.
func (w *gzipWriter) FlushError() error {
	if w.zip != nil {
		if err := w.zip.Flush(); err != nil {
			return err
		}
	}
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap lets http.ResponseController set deadlines of the connection.
func (w *gzipWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *gzipWriter) close() {
	if w.zip != nil {
		_ = w.zip.Close() // fails only if the reader is gone
	}
}
