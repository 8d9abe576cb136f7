package folders

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"troupe/bus"
)

// folderMost is the bytes of one folder.
const folderMost = 256 << 20

// packFolder packs a folder: equal content gives equal bytes, independent of owner and times.
func packFolder(folder string, excludes []string, limit int64) ([]byte, error) {
	root, err := filepath.Abs(folder)
	if err != nil {
		return nil, err
	}
	inside, err := os.OpenRoot(root)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "ship %s: %w", folder, err)
	}
	defer func() { _ = inside.Close() }() // nothing was written
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	pack := tar.NewWriter(zip)
	var total int64
	err = filepath.WalkDir(root, func(full string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, full)
		if err != nil || name == "." {
			return err
		}
		name = filepath.ToSlash(name)
		if excluded(name, excludes) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if d.Type()&fs.ModeSymlink != 0 {
			if err := checkTarget(inside, name); err != nil {
				return err
			}
		}
		n, err := packOne(pack, full, name, d)
		if total += n; err == nil && total > limit {
			err = bus.Errorf(bus.CodeInvalid, "it has more than %d MiB (up to %s); exclude what workers do not need", limit>>20, name)
		}
		return err
	})
	if err == nil {
		err = errors.Join(pack.Close(), zip.Close())
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "ship %s: %w", folder, err)
	}
	return out.Bytes(), nil
}

// excluded reports whether a pattern matches the path, or one of the names in it.
func excluded(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		whole, _ := path.Match(strings.TrimSuffix(p, "/"), name) // the patterns were checked
		base, _ := path.Match(strings.TrimSuffix(p, "/"), path.Base(name))
		return whole || base
	})
}

// packOne adds a file, a folder or a link, and of the mode only whether it is executable. Other kinds are refused.
func packOne(pack *tar.Writer, full, name string, d fs.DirEntry) (int64, error) {
	info, err := d.Info()
	if err != nil {
		return 0, err
	}
	h := &tar.Header{Name: name, Mode: 0o600, Format: tar.FormatPAX}
	switch {
	case d.IsDir():
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, name+"/", 0o700
	case info.Mode()&fs.ModeSymlink != 0:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(full); err != nil {
			return 0, err
		}
		if err := checkLink(name, h.Linkname); err != nil {
			return 0, err
		}
	case info.Mode().IsRegular():
		h.Typeflag, h.Size = tar.TypeReg, info.Size()
		if info.Mode().Perm()&0o111 != 0 {
			h.Mode = 0o700
		}
	default:
		return 0, fmt.Errorf("%s is neither a file, a folder nor a link (%v); exclude it", name, info.Mode().Type())
	}
	if err := pack.WriteHeader(h); err != nil || h.Typeflag != tar.TypeReg {
		return 512, err
	}
	f, err := os.Open(full)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	n, err := io.Copy(pack, io.LimitReader(f, h.Size))
	return n + 512, err
}

// checkTarget refuses a link that leads out of the folder through other links of it, which the text of its target does not
// show: s -> . and l -> s/.. are an example. A link to a missing file leads nowhere.
func checkTarget(root *os.Root, name string) error {
	_, err := root.Stat(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return fmt.Errorf("the link %s points outside the folder, through other links of it; exclude it: %w", name, err)
}

// checkLink refuses a link to a target outside the folder.
func checkLink(name, target string) error {
	if path.IsAbs(target) || !filepath.IsLocal(path.Join(path.Dir(name), target)) && path.Join(path.Dir(name), target) != "." {
		return fmt.Errorf("the link %s points outside the folder, to %s; exclude it", name, target)
	}
	return nil
}

// unpackFolder unpacks into the empty folder dir. It writes nothing outside, whatever data contains.
func unpackFolder(data []byte, dir string) error {
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var total int64
	var links []string
	for pack := tar.NewReader(zip); ; {
		h, err := pack.Next()
		if errors.Is(err, io.EOF) {
			return checkTargets(root, links)
		}
		if err != nil {
			return err
		}
		if total += h.Size + 512; total > 2*folderMost {
			return bus.Errorf(bus.CodeInvalid, "it unpacks to more than %d MiB", 2*folderMost>>20)
		}
		if err := unpackOne(root, pack, h); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		if h.Typeflag == tar.TypeSymlink {
			links = append(links, path.Clean(h.Name))
		}
	}
}

// checkTargets checks the links when all entries are there, because a later one can change where an earlier one leads.
func checkTargets(root *os.Root, links []string) error {
	for _, name := range links {
		if err := checkTarget(root, name); err != nil {
			return err
		}
	}
	return nil
}

func unpackOne(root *os.Root, pack io.Reader, h *tar.Header) error {
	name := path.Clean(h.Name)
	if !filepath.IsLocal(name) {
		return errors.New("the path is outside the folder")
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o700)
	case tar.TypeSymlink:
		if err := checkLink(name, h.Linkname); err != nil {
			return err
		}
		return root.Symlink(h.Linkname, name)
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fs.FileMode(h.Mode)&0o700)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, pack)
		return errors.Join(err, f.Close())
	}
	return fmt.Errorf("entries of type %q are not supported", h.Typeflag)
}
