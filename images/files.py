"""Pictures as files that say what they show: each has an alt text and a digest of the drawing."""

from __future__ import annotations

import io
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.animation import AbstractMovieWriter, FuncAnimation
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text
from PIL import Image

Drawn = Axes | FuncAnimation
COLOURS = 128  # of an animation


def contents(drawn: Drawn) -> list[str]:
    """What a picture shows, a line per artist: words, and boxes and lines with their extents.

    Extents are in the units of the axes, and ticks are left out, so that the lines are the same for
    all versions of the libraries; the bytes of a PNG are not. Of an animation, every frame is shown
    once, in order.

    >>> import matplotlib.pyplot as plt
    >>> ax = plt.figure().subplots()
    >>> line = ax.plot([0, 1], [2, 3], color="black")
    >>> contents(ax)
    ['line #000000 0,2 1,3']
    """
    if isinstance(drawn, Axes):
        return _of_figure(cast(Figure, drawn.get_figure(root=True)))
    recorder = Recorder()
    drawn.save("", recorder)
    return recorder.lines


def digest(lines: list[str]) -> str:
    """A short name for the lines: 16 hexadecimal digits."""
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def save(drawn: Drawn, path: Path, alt: str) -> None:
    """Write a PNG or, of an animation, a GIF; its comment is the alt text and the digest.

    A narrow figure has more dots to an inch: its words stay legible on a phone.
    """
    comment = f"{alt} [{digest(contents(drawn))}]"
    if isinstance(drawn, FuncAnimation):
        drawn.save(str(path), Gif(comment, milliseconds(drawn)))
    else:
        figure = cast(Figure, drawn.get_figure(root=True))
        dpi = max(120, 900 / figure.get_size_inches()[0])
        figure.savefig(path, dpi=dpi, metadata={"Software": None, "comment": comment})


def milliseconds(animation: FuncAnimation) -> int:
    """How long each frame stays; a GIF counts in hundredths of a second."""
    return 10 * max(1, round(cast(Any, animation.event_source).interval / 10))


class Writer(AbstractMovieWriter):
    """A writer that takes its frames itself: matplotlib does not draw each again for a window."""

    def setup(self, fig: Figure, outfile: Any, dpi: float | None = None) -> None:
        super().setup(fig, outfile, dpi)
        self.canvas = fig.canvas
        FigureCanvasBase(fig)  # draws nothing

    def finish(self) -> None:
        self.fig.set_canvas(self.canvas)


class Recorder(Writer):
    """Instead of a file: the contents of each frame, in `lines`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def grab_frame(self, **options: Any) -> None:
        self.lines += ["frame", *_of_figure(self.fig)]


class Gif(Writer):
    """A GIF that loops, all frames in one palette, so that only what moves takes room."""

    def __init__(self, comment: str, milliseconds: int) -> None:
        super().__init__()
        self.comment, self.milliseconds = comment, milliseconds
        self.frames: list[np.ndarray] = []  # a number 0xRRGGBB per pixel

    def grab_frame(self, **options: Any) -> None:
        buffer = io.BytesIO()
        self.fig.savefig(buffer, format="rgba", dpi=self.dpi)
        red, green, blue, _ = (
            np.frombuffer(buffer.getvalue(), np.uint8).reshape(-1, 4).astype(int).T
        )
        self.frames.append(red << 16 | green << 8 | blue)

    def finish(self) -> None:
        super().finish()
        # The last frame shows everything, so its most frequent colours make the palette.
        colours, pixels = np.unique(self.frames[-1], return_counts=True)
        palette = bytes_of(colours[np.argsort(-pixels, kind="stable")[:COLOURS]])
        first, *rest = (self._indexed(frame, palette) for frame in self.frames)
        first.save(
            self.outfile,
            save_all=True,
            append_images=rest,
            duration=self.milliseconds,
            loop=0,
            optimize=True,
            comment=self.comment.encode(),
        )

    def _indexed(self, frame: np.ndarray, palette: np.ndarray) -> Image.Image:
        colours, which = np.unique(frame, return_inverse=True)
        nearest = ((bytes_of(colours)[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1)
        image = Image.frombytes("P", self.frame_size, nearest[which].astype(np.uint8).tobytes())
        image.putpalette(palette.ravel().tolist())
        return image


def bytes_of(colours: np.ndarray) -> np.ndarray:
    """Red, green and blue of numbers 0xRRGGBB: shape (colours, 3).

    >>> bytes_of(np.array([0x0072B2]))
    array([[  0, 114, 178]])
    """
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)


def _of_figure(figure: Figure) -> list[str]:
    return [line for ax in figure.axes for line in _of_axes(ax)]


def _of_axes(ax: Axes) -> Iterator[str]:
    for words in (
        ax.get_title("left"),
        ax.get_title(),
        ax.get_title("right"),
        ax.get_xlabel(),
        ax.get_ylabel(),
    ):
        if words:
            yield f"title {words}"
    legend = ax.get_legend()
    for text in legend.get_texts() if legend else ():
        yield f"legend {text.get_text()}"
    for artist in (*ax.texts, *ax.patches, *ax.lines, *ax.collections):
        if artist.get_visible():
            yield from _of_artist(artist)


def _of_artist(artist: Artist) -> Iterator[str]:
    match artist:
        case Annotation():
            yield f"text {_points([artist.xy, artist.get_position()])} {artist.get_text()}"
        case Text():
            yield f"text {_points([artist.get_position()])} {artist.get_text()}"
        case Line2D():
            yield f"line {to_hex(cast(Any, artist.get_color()))} {_points(artist.get_xydata())}"
        case Patch():
            box = artist.get_path().get_extents(artist.get_patch_transform())
            fill, edge = (
                to_hex(cast(Any, colour))
                for colour in (artist.get_facecolor(), artist.get_edgecolor())
            )
            yield f"box {fill} {edge} {artist.get_hatch() or ''} {_points(box.get_points())}"
        case Collection():
            colours = np.asarray(artist.get_facecolor())
            for i, path in enumerate(artist.get_paths()):
                colour = to_hex(colours[i % len(colours)]) if len(colours) else "none"
                yield f"box {colour} {_points(path.get_extents().get_points())}"


def _points(xy: Any) -> str:
    return " ".join(f"{x:.5g},{y:.5g}" for x, y in np.asarray(xy, float))
