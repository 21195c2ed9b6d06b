"""Files that somebody else may have made: no link is followed, only regular files are opened, and what is read is bounded.

with open(path, "ab", opener=regular) as file: ...

Text from such files is shown without control characters, which a terminal would obey.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import yaml

SMALL = 4 * 2**20  # bytes of a file that describes something, such as config.yaml
LARGE = 256 * 2**20
SAFE = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))  # Windows has none of them


def regular(path: str | Path, flags: int) -> int:
    """An opener for `open`. Raises an OSError for a link, a pipe, a device or a directory, and never waits for a writer."""
    if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):  # Windows
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    try:
        handle = os.open(path, flags | SAFE, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def named(path: Path) -> Path:
    """A file that the user named: that may be a link."""
    return path.resolve() if path.is_symlink() else path


def read_bytes(path: Path, most: int) -> bytes:
    with open(path, "rb", opener=regular) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


def read_text(path: Path, most: int = SMALL) -> str:
    return read_bytes(path, most).decode("utf-8")


class YamlLoader(yaml.SafeLoader):
    """YAML in which a value that its tag does not fit, such as `!!bool perhaps`, is a YAMLError as any other mistake."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, OverflowError):
            why = f"this is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from None


class ConfigLoader(YamlLoader):
    """Without aliases: a few lines of them are a value too large to print."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it has an alias")
        return super().compose_node(parent, index)


def printable(text: str) -> str:
    """The text with a replacement character for each that is neither printable nor a line break."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain(value: Any) -> Any:
    """A value of JSON or YAML with all of its text printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {plain(key): plain(x) for key, x in value.items()}
    if isinstance(value, list):
        return [plain(x) for x in value]
    return value
