package bus

import (
	"net/url"
	"strconv"
	"strings"
)

// parseURL reads the URL of a server; without a scheme it is nats://. The error may quote the password.
func parseURL(text string) (*url.URL, error) {
	text = strings.TrimSpace(text)
	if !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	return url.Parse(text)
}

// Redact lists URLs for messages, with xxxxx instead of user and password.
func Redact(urls ...string) string {
	var names []string
	for _, u := range urls {
		scheme, rest, found := strings.Cut(u, "://")
		if !found {
			scheme, rest = "", u
		}
		if at := strings.LastIndex(rest, "@"); at >= 0 {
			if scheme == "" {
				scheme = "nats" // user:password@host
			}
			u = scheme + "://xxxxx@" + rest[at+1:]
		} else if colon := strings.LastIndex(rest, ":"); colon >= 0 && !isPort(rest[colon+1:]) {
			u = scheme + "://xxxxx" // the first part of a password with a comma
		}
		names = append(names, u)
	}
	return strings.Join(names, ",")
}

func isPort(text string) bool {
	_, err := strconv.ParseUint(strings.TrimRight(text, "/"), 10, 16)
	return err == nil || strings.HasSuffix(text, "]") // an IPv6 address without a port
}

// SplitSecret returns the URLs without user and password, and those as the content of a token file: a token, or a user and its password
// on two lines. It is empty if the URLs have none. Arguments, assignments and files that others read name the file.
func SplitSecret(urls []string) (bare []string, secret string, err error) {
	for _, text := range urls {
		u, err := parseURL(text)
		if err != nil {
			return nil, "", Errorf(CodeInvalid, "URL %q cannot be read; give nats://HOST:PORT, and the special characters of a password as %%XX", Redact(text))
		}
		if u.User == nil {
			bare = append(bare, strings.TrimSpace(text))
			continue
		}
		own := u.User.Username()
		if password, has := u.User.Password(); has {
			own += "\n" + password
		}
		if secret != "" && secret != own {
			return nil, "", Errorf(CodeInvalid, "URLs %s have different users; give one user for all of them", Redact(urls...))
		}
		u.User, secret = nil, own
		bare = append(bare, u.String())
	}
	return bare, secret, nil
}
