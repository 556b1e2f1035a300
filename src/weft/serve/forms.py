"""Parse files from multipart/form-data bodies (RFC 7578)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from weft.serve.guard import Refusal
from weft.text import printable

FIELDS, FIELD_BYTES = 8, 1024  # parts of a form that are no files, and are skipped
HEADER_BYTES = 4096  # of one line in the header of a part


@dataclass
class Sent:
    """One image of a request: the name that the client gave it, and its bytes."""

    name: str
    data: bytes | bytearray


def files_of(body: bytes | bytearray, content_type: str, max_images: int) -> list[Sent]:
    """The files of a form, in their order. Takes time in proportion to the body, whatever its content.

    Raises:
        Refusal: the form is malformed, or has more than `max_images` files or none.
    """
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    files: list[Sent] = []
    part, is_file = bytearray(), False
    try:
        with PushMultipartParser(
            boundary, max_header_size=HEADER_BYTES, max_segment_count=max_images + FIELDS, strict=True
        ) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    part, is_file = bytearray(), event.filename is not None
                    if is_file:
                        files.append(Sent(_name(event.filename or ""), part))
                elif event is not None:  # None: the end of a part
                    part += event
                    if not is_file and len(part) > FIELD_BYTES:
                        raise MultipartError(f"a field has more than {FIELD_BYTES} bytes")
                if len(files) > max_images:
                    raise Refusal(413, "too-many-images", f"A request may have {max_images} pictures; this has more.")
    except (MultipartError, UnicodeError) as error:
        text = printable(str(error))[:200].rstrip(".")
        raise Refusal(400, "form", f"The form cannot be read: {text}.") from None
    if not files:
        raise Refusal(400, "no-image", "A form must have at least one file; this has none.")
    return files


def _name(filename: str) -> str:
    return printable(PurePosixPath(filename).name)[:200] or "image"
