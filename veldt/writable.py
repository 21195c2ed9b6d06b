"""Directories in which libraries keep caches and settings, where neither the package nor the home can be written.

In a container the user may have no home and no name, and the package may belong to somebody else. Then a private directory
below the temporary one is used: of this user, and closed to all others.
"""

import os
import stat
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# The variable that names a library's directory, and where it is otherwise.
USUAL = {
    "NUMBA_CACHE_DIR": (HERE / "storing" / "__pycache__", "~/.cache"),
    "MPLCONFIGDIR": ("~/.config",),
    "TORCHINDUCTOR_CACHE_DIR": ("~/.cache",),
}


def provide() -> None:
    """Called before these libraries are imported: names a directory for each that has none."""
    if sys.platform == "win32":  # the temporary directory and the home are always the user's own there
        return
    for variable, usual in USUAL.items():
        if not any(map(can_write, (os.environ.get(variable, ""), *usual))):
            os.environ[variable] = str(private() / variable.lower())


def can_write(path: str | Path) -> bool:
    """Whether files can be created in this directory, which may have to be created first."""
    place = Path(os.path.expanduser(path)) if path else Path()
    if not place.is_absolute():  # no home is known
        return False
    while not os.path.exists(place):  # unlike Path.exists: no error where a directory above is closed to this user
        place = place.parent
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def private() -> Path:
    """A directory of this user, with its caches; a new one if somebody else made one of that name."""
    path = Path(tempfile.gettempdir()) / f"veldt-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return path
    except OSError:  # it is a file, or a link to nowhere
        pass
    return Path(tempfile.mkdtemp(prefix="veldt-"))
