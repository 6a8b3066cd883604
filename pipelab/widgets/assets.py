"""The browser's parts of the widgets: scripts and styles."""

from pathlib import Path

HERE = Path(__file__).parent


def read_assets(*names: str | Path) -> str:
    """The joined text of files, of this folder or by full path; name shared ones first."""
    return "\n".join((HERE / name).read_text() for name in names)
