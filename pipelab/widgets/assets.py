"""The browser's parts of the widgets: scripts and styles."""

from pathlib import Path

HERE = Path(__file__).parent


def read_assets(*names: str | Path) -> str:
    """Files one after the other, of this folder or by their full path; shared ones come first."""
    return "\n".join((HERE / name).read_text() for name in names)
