"""Which file systems let several processes share memory through a file, as SQLite's write-ahead log needs."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "orangefs"}
    | {"pvfs2", "glusterfs", "ocfs2", "gfs2", "panfs", "wekafs", "virtiofs", "vboxsf", "drvfs"}
)
"""Types of file systems on which other machines may see the same files, and memory maps are not shared."""


def is_shared(path: Path, mounts: Path = MOUNTS) -> bool:
    """Return whether `path` is on a file system that other machines share (in doubt, as with FUSE: yes).

    False where the system has no list of mounts.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    here = path.resolve()
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split(" ")[4].replace("\\040", " "))
        # Of two mounts at one place, the later one hides the earlier.
        if here.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split(" ")[0]
    return kind in SHARED or kind.startswith("fuse")
