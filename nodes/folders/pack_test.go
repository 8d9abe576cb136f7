package folders

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// tree makes files; a name with a trailing slash is a folder, a value with the prefix "->" a link.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		full := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(full), 0o755))
		if target, ok := bytes.CutPrefix([]byte(text), []byte("->")); ok {
			require.NoError(t, os.Symlink(string(target), full))
			continue
		}
		require.NoError(t, os.WriteFile(full, []byte(text), 0o755))
	}
	return dir
}

func TestPackedFolder(t *testing.T) {
	files := map[string]string{"a.py": "print(1)", "sub/b.py": "x", "sub/link": "->../a.py", ".git/HEAD": "ref", "sub/big.bin": "01", "deep/er/c": ""}
	one, err := packFolder(tree(t, files), []string{".git", "*.bin"}, folderMost)
	require.NoError(t, err)
	two, err := packFolder(tree(t, files), []string{".git", "*.bin"}, folderMost)
	require.NoError(t, err)
	require.Equal(t, one, two, "equal content gives equal bytes")
	dir := t.TempDir()
	require.NoError(t, unpackFolder(one, dir))
	text, err := os.ReadFile(filepath.Join(dir, "sub", "link"))
	require.NoError(t, err)
	require.Equal(t, "print(1)", string(text))
	require.NoDirExists(t, filepath.Join(dir, ".git"))
	require.NoFileExists(t, filepath.Join(dir, "sub", "big.bin"))
	require.DirExists(t, filepath.Join(dir, "deep", "er"))
}

func TestFoldersThatCannotBeShipped(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"points outside": {"sub/out": "->../../etc"}, "outside the folder": {"abs": "->/etc/passwd"}, "more than 0 MiB": {"big": string(make([]byte, 4096))},
	} {
		_, err := packFolder(tree(t, files), nil, 2048)
		require.ErrorContains(t, err, name)
	}
	// s is the folder itself, so that each of the three steps up leaves it, though the text of the target does not.
	_, err := packFolder(tree(t, map[string]string{"s": "->.", "l": "->s/s/s/../../.."}), nil, folderMost)
	require.ErrorContains(t, err, "points outside")
	_, err = packFolder(tree(t, map[string]string{"s": "->.", "file": "x", "l": "->s/file", "missing": "->nothing", "loop": "->loop"}), nil, folderMost)
	require.NoError(t, err)
	_, err = packFolder("/no/such/folder", nil, folderMost)
	require.ErrorContains(t, err, "/no/such/folder")
}

// This must not happen: a crafted archive writes outside its folder.
func TestCraftedArchive(t *testing.T) {
	for _, headers := range [][]tar.Header{
		{{Name: "../out", Typeflag: tar.TypeReg}},
		{{Name: "/out", Typeflag: tar.TypeReg}},
		{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../.."}, {Name: "l/out", Typeflag: tar.TypeReg}},
		{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}},
		{{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "."}, {Name: "s/s/s/l", Typeflag: tar.TypeSymlink, Linkname: "../../.."}},
		{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "s/s/s/../../.."}, {Name: "s", Typeflag: tar.TypeSymlink, Linkname: "."}},
		{{Name: "d", Typeflag: tar.TypeBlock}},
		{{Name: "h", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}},
	} {
		var data bytes.Buffer
		zip := gzip.NewWriter(&data)
		pack := tar.NewWriter(zip)
		for _, h := range headers {
			require.NoError(t, pack.WriteHeader(&h))
		}
		require.NoError(t, pack.Close())
		require.NoError(t, zip.Close())
		dir := t.TempDir()
		require.Error(t, unpackFolder(data.Bytes(), filepath.Join(dir)), "%v", headers)
		require.NoFileExists(t, filepath.Join(dir, "..", "out"))
	}
}
