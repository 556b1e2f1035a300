"""Schemas of the HTTP interface: bodies, predictions and errors, as in /openapi.json."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


# The names of these classes are the names of the schemas in /openapi.json.
class ClassProbability(BaseModel):
    """A class and its probability."""

    name: str = Field(alias="class")
    probability: float = Field(ge=0, le=1)


class AttentionMap(BaseModel):
    """Attention map: rows of values from 0 to 1, from top to bottom, over a region of the image."""

    grid: list[list[float]]
    region: list[float] = Field(description="left, top, width, height; as fractions of the sides of the image")


class ErrorDetails(BaseModel):
    """Code and message of an error."""

    code: str
    message: str
    request_id: str | None = None


class ImageResult(BaseModel):
    """Prediction for one image, or the error."""

    image: str
    top: list[ClassProbability] | None = None
    rejected: bool | None = Field(None, description="not certain: below the threshold of --reject-at-error")
    unknown: bool | None = Field(None, description="resembles no training image: perhaps none of the classes")
    overlay: AttentionMap | None = None
    error: ErrorDetails | None = None


class Prediction(BaseModel):
    """Predictions in the order of the images, and the time that the service needed."""

    answers: list[ImageResult]
    milliseconds: float


class ErrorResponse(BaseModel):
    """Error response."""

    error: ErrorDetails


BODY = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image"],
                "properties": {
                    "image": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
                },
            }
        },
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The body is malformed, or the image cannot be used"},
    401: {"model": ErrorResponse, "description": "The token is missing or wrong"},
    403: {"model": ErrorResponse, "description": "The request comes from a page of another site"},
    408: {"model": ErrorResponse, "description": "The body was not received in time"},
    413: {"model": ErrorResponse, "description": "The body is too long, or has too many images"},
    415: {"model": ErrorResponse, "description": "The body is not an image"},
    421: {"model": ErrorResponse, "description": "The Host header is not a host name of the service"},
    422: {"model": ErrorResponse, "description": "A parameter is out of range, or the image exceeds a limit"},
    429: {"model": ErrorResponse, "description": "Too many images are waiting; Retry-After has the number of seconds"},
    503: {"model": ErrorResponse, "description": "The service is stopping or overloaded, or the model failed"},
    504: {"model": ErrorResponse, "description": "The response was not ready in time"},
}
