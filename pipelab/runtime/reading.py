"""Files of users, whatever they turn out to be."""

import gzip
import os
import zlib
from pathlib import Path
from stat import S_ISFIFO

LARGEST_FILE = 2**26  # bytes of a table, a profile, or a record
CUT_OFF = "cut off, or neither JSON nor CSV"


def regular(path: Path) -> Path:
    """The path. ValueError if something there is no file: a pipe, say, would be waited for."""
    if os.path.lexists(path) and not path.is_file():
        raise ValueError("it is not a file")
    return path


def at_once(name: str, flags: int) -> int:
    """An opener that does not wait for the other end of a pipe."""
    file = os.open(name, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(file, True)
    return file


def read_bytes(path: str | Path, most: int = LARGEST_FILE) -> bytearray:
    """The content of a file, which may be gzipped.

    ValueError, without its name, if it cannot be read or is a pipe that nobody writes to, and as
    soon as it is too large.
    """
    content = bytearray()
    try:
        with open(path, "rb", opener=at_once) as file:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            source = gzip.GzipFile(fileobj=file) if zipped else file
            while part := source.read(2**20):
                content += part
                if len(content) > most:
                    raise ValueError(f"more than {most:,} bytes: give a smaller file")
            if not content and S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise ValueError("a pipe that nobody writes to: name a file")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{CUT_OFF}: {error}") from None
    except OSError as error:
        raise ValueError(f"{error.strerror}: name a file that can be read") from None
    return content
