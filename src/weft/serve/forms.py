"""Parse files from multipart/form-data bodies (RFC 7578)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from weft.serve.guard import RequestError
from weft.text import printable, reason_of

MAX_FIELDS, MAX_FIELD_BYTES = 8, 1024  # parts of a form without a file name; they are skipped
MAX_HEADER_BYTES = 4096  # of one line in the header of a part


@dataclass
class Upload:
    """One uploaded image: the file name that the client sent, and the bytes of the file."""

    name: str
    data: bytes | bytearray


def parse_form(body: bytes | bytearray, content_type: str, max_images: int) -> list[Upload]:
    """Return the files of a form in their order, in time proportional to the length of the body.

    Args:
        body: the complete body of the request.
        content_type: its Content-Type header, with the boundary.
        max_images: maximum number of files.

    Raises:
        RequestError: the form is malformed, has more than `max_images` files, or has none.
    """
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    uploads: list[Upload] = []
    part, is_file = bytearray(), False
    try:
        with PushMultipartParser(
            boundary, max_header_size=MAX_HEADER_BYTES, max_segment_count=max_images + MAX_FIELDS, strict=True
        ) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    part, is_file = bytearray(), event.filename is not None
                    if is_file:
                        name = printable(PurePosixPath(event.filename or "").name)[:200] or "image"
                        uploads.append(Upload(name, part))
                elif event is not None:  # None marks the end of a part
                    part += event
                    if not is_file and len(part) > MAX_FIELD_BYTES:
                        raise MultipartError(f"a field has more than {MAX_FIELD_BYTES} bytes")
                if len(uploads) > max_images:
                    raise RequestError(
                        413, "too-many-images", f"A request must have at most {max_images} images; this one has more."
                    )
    except (MultipartError, UnicodeError) as error:
        raise RequestError(400, "form", f"The multipart form cannot be parsed: {reason_of(error)}.") from None
    if not uploads:
        raise RequestError(400, "no-image", "A form must have at least one file; this one has none.")
    return uploads
