"""The browser's parts of the widgets: scripts and styles."""

from pathlib import Path

HERE = Path(__file__).parent


def read_assets(*names: str) -> str:
    """Files one after the other: what several widgets share comes first."""
    return "\n".join((HERE / name).read_text() for name in names)
