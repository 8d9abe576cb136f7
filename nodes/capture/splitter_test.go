package capture

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSplitter(t *testing.T) {
	long := strings.Repeat("ä", lineMost) // twice as many bytes
	for name, test := range map[string]struct {
		in   []string
		want []string
	}{
		"lines":           {[]string{"a\nb\n"}, []string{"a", "b"}},
		"in pieces":       {[]string{"a", "b\nc", "d"}, []string{"ab", "cd"}},
		"progress":        {[]string{"10%\r20%\r30%\n"}, []string{"10%", "20%", "30%"}},
		"windows":         {[]string{"a\r", "\nb\r\n"}, []string{"a", "b"}},
		"empty lines":     {[]string{"\n\na\n"}, []string{"", "", "a"}},
		"no text":         {[]string{"a\xff\xfeb\n"}, []string{"a\uFFFDb"}},
		"nothing":         {[]string{""}, nil},
		"not ended":       {[]string{"a"}, []string{"a"}},
		"cut":             {[]string{strings.Repeat("x", lineMost+5) + "\nz\n"}, []string{strings.Repeat("x", lineMost) + " … [cut: 5 bytes more]", "z"}},
		"cut in a letter": {[]string{"x" + long + "\n"}, []string{"x" + strings.Repeat("ä", lineMost/2-1) + fmt.Sprintf(" … [cut: %d bytes more]", 2*lineMost-lineMost+2)}},
	} {
		t.Run(name, func(t *testing.T) {
			var s splitter
			var got []string
			for _, in := range test.in {
				got = append(got, s.split([]byte(in))...)
			}
			got = append(got, s.rest()...)
			require.Equal(t, test.want, got)
		})
	}
}
