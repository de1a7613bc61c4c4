"""Contact sheets: a grid of thumbnails with index and label, as PNG."""

from __future__ import annotations

import functools
import io
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from ...errors import ImageError
from ..decode.images import decode_image
from ..headers import read_header

_THUMB = 128
_LINE = 15
_CAPTION = 3 * _LINE + 6
_GAP = 10
_TITLE = 40
_WIDTH_TO_HEIGHT = 1.6  # of the sheet, approximately
_INK, _FAINT, _PAPER, _FRAME = "#202020", "#808080", "#ffffff", "#e4e4e4"
_WRONG, _RIGHT, _OTHER = "#c62828", "#2e7d32", "#1565c0"
_SIZE = 12
# Pillow's built-in font has little more than ASCII; nearly every machine has one of these.
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf")


@dataclass(frozen=True)
class Tile:
    """One sample on the sheet."""

    index: int
    image: bytes | str  # encoded image, or the reason why it cannot be read
    label: str
    clean: str | None = None  # clean label, if it is known and differs
    base: str | None = None  # `given: 3 cat`: the label that this one replaced, if there are no clean labels


def decode_upright(content: bytes) -> Image.Image:
    """Decode as in training: RGB, upright. Raises ImageError with the reason."""
    try:
        return Image.fromarray(decode_image(content, read_header(content)))
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise ImageError(f"cannot be decoded: {error}") from None


def draw_sheet(tiles: Sequence[Tile], title: str) -> bytes:
    """Draw the sheet; returns a PNG file."""
    cell_width, cell_height = _THUMB + _GAP, _THUMB + _CAPTION + _GAP
    columns = max(1, min(len(tiles), round(math.sqrt(len(tiles) * _WIDTH_TO_HEIGHT * cell_height / cell_width))))
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (max(480, columns * cell_width + _GAP), rows * cell_height + _TITLE), _PAPER)
    pen = _Pen(sheet)
    pen.write((_GAP, 10), title, _INK, sheet.width - 2 * _GAP)
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        _draw_tile(sheet, pen, tile, _GAP + column * cell_width, _TITLE + row * cell_height)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


@functools.cache
def _system_font() -> ImageFont.FreeTypeFont | None:
    for name in _FONTS:
        try:
            return ImageFont.truetype(name, _SIZE)
        except OSError:
            continue
    return None


class _Pen:
    def __init__(self, sheet: Image.Image) -> None:
        self.draw = ImageDraw.Draw(sheet)
        self._accents = _system_font() is not None
        self._font = _system_font() or ImageFont.load_default(_SIZE)

    def _drawable(self, text: str) -> str:
        text = text.encode(errors="backslashreplace").decode()
        if self._accents:
            return text
        return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))

    def write(self, at: tuple[int, int], text: str, colour: str, width: int) -> None:
        """Write one line, truncated to the width."""
        shown = self._drawable(text)
        while shown and self._font.getlength(shown) > width:
            shown = shown.removesuffix("...")[:-1].rstrip() + "..." if len(shown) > 4 else shown[:-1]
        self.draw.text(at, shown, fill=colour, font=self._font)

    def wrap(self, text: str, width: int, max_lines: int) -> list[str]:
        """Wrap the text at whitespace, to at most `max_lines` lines."""
        lines = [""]
        for word in self._drawable(text).split():
            longer = f"{lines[-1]} {word}".strip()
            if self._font.getlength(longer) <= width or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(word)
        return lines[:max_lines]


def _draw_tile(sheet: Image.Image, pen: _Pen, tile: Tile, x: int, y: int) -> None:
    try:
        if isinstance(tile.image, str):
            raise ImageError(tile.image)
        thumb = decode_upright(tile.image)
        thumb.thumbnail((_THUMB, _THUMB))
        if thumb.width * 2 <= _THUMB and thumb.height * 2 <= _THUMB:  # enlarge tiny images
            scale = _THUMB // max(thumb.size)
            thumb = thumb.resize((thumb.width * scale, thumb.height * scale), Image.Resampling.NEAREST)
        sheet.paste(thumb, (x + (_THUMB - thumb.width) // 2, y + (_THUMB - thumb.height) // 2))
    except ImageError as reason:
        _draw_broken(pen, str(reason), x, y)
    mark = _WRONG if tile.clean is not None else _OTHER if tile.base is not None else None
    pen.draw.rectangle((x - 1, y - 1, x + _THUMB, y + _THUMB), outline=mark or _FRAME)
    y += _THUMB + 3
    pen.write((x, y), f"#{tile.index}", _FAINT, _THUMB)
    pen.write((x, y + _LINE), tile.label, mark or _INK, _THUMB)
    if tile.clean is not None:
        pen.write((x, y + 2 * _LINE), f"clean: {tile.clean}", _RIGHT, _THUMB)
    elif tile.base is not None:
        pen.write((x, y + 2 * _LINE), tile.base, _FAINT, _THUMB)


def _draw_broken(pen: _Pen, reason: str, x: int, y: int) -> None:
    """Draw a crossed-out box with the reason."""
    far_x, far_y = x + _THUMB - 1, y + _THUMB - 1
    pen.draw.line((x, y, far_x, far_y), fill=_FRAME, width=2)
    pen.draw.line((x, far_y, far_x, y), fill=_FRAME, width=2)
    for i, line in enumerate(pen.wrap(reason, _THUMB - 8, max_lines=_THUMB // _LINE - 1)):
        pen.write((x + 4, y + 4 + i * _LINE), line, _WRONG, _THUMB - 8)
