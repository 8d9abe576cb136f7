package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// TestRun runs the driver in the test process, and checks that it leaves no goroutine.
func TestRun(t *testing.T) {
	require.NoError(t, run(t.Context(), false))
	goleak.VerifyNone(t)
}

// TestPrograms builds trainer and attach, and attaches one to the other.
func TestPrograms(t *testing.T) {
	bin := t.TempDir()
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", bin, "troupe/examples/trainer", "troupe/examples/attach")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	trainer := exec.Command(filepath.Join(bin, "trainer"), "-serve")
	trainer.Stderr = os.Stderr
	stdout, err := trainer.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, trainer.Start())
	t.Cleanup(func() { _ = trainer.Process.Kill() })
	url, said := "", ""
	for lines := bufio.NewScanner(stdout); url == "" && lines.Scan(); {
		said += lines.Text() + "\n"
		url, _ = strings.CutPrefix(lines.Text(), "serving at ")
		if url == lines.Text() {
			url = ""
		}
	}
	require.Equal(t, `actor_train: 4 workers, dp 2 × tp 2
introduce: [ann is rank 0 bob is rank 1 cy is rank 2 dee is rank 3]
step   0: loss 61.0000, y = 1.02 x + 0.09
step  50: loss 0.0048, y = 3.00 x + 0.93
step 100: loss 0.0000, y = 3.00 x + 0.99
predict 10, 20, 30: [31.0 61.0 91.0]
inspect: [ann got 2 rows bob got 0 rows cy got 1 rows dee got 0 rows]
saved: ann has y = 3.00 x + 0.99
rank 3 alone: dee has y = 3.00 x + 0.99
serving at `+url+"\n", said)

	var answered bytes.Buffer
	attach := exec.Command(filepath.Join(bin, "attach"), "-url", url, "actor_train")
	attach.Stdout, attach.Stderr = &answered, os.Stderr
	require.NoError(t, attach.Run())
	require.Contains(t, answered.String(), "actor_train: 4 workers of class learner, ready since ")
	require.Contains(t, answered.String(), "  train_step   DP_MP_COMPUTE\n")
	require.Contains(t, answered.String(), "rank 3 on ")
	require.Contains(t, answered.String(), "predict 1, 2: [3.9")

	wrong, err := exec.Command(filepath.Join(bin, "attach"), "-url", url, "critic").CombinedOutput()
	require.Error(t, err)
	require.Equal(t, "attach: no role \"critic\" in this namespace; there are actor_train\n", string(wrong))

	require.NoError(t, trainer.Process.Signal(os.Interrupt))
	require.NoError(t, trainer.Wait(), "Ctrl-C ends it with exit code 0")
}
