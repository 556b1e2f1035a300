"""Settings of a service that do not fit are refused, by their name and with what they may be."""

from __future__ import annotations

import pytest

from weft.errors import UsageError
from weft.serve import server
from weft.serve.settings import Settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("runtime", "tensorrt", "one of auto, torch, openvino, onnx; got 'tensorrt'"),
        ("device", "tpu", "one of auto, cpu, cuda, mps; got 'tpu'"),
        ("precision", "int3", "one of auto, fp32, bf16; got 'int3'"),
        ("port", 70000, "a whole number at least 0 and at most 65535; got 70000"),
        ("port", 3.5, "a whole number at least 0 and at most 65535; got 3.5"),
        ("max_batch", 0, "a whole number at least 1 and at most 4096; got 0"),
        ("max_batch", 4097, "at most 4096; got 4097"),
        ("workers", None, "a whole number at least 1 and at most 1024; got null"),
        ("threads", 5000, "a whole number at least 1 and at most 1024; got 5000"),
        ("reject_at_error", 7.0, "a number at least 0 and below 1; got 7"),
        ("max_latency", 0, "a number above 0 and at most 60 s; got 0"),
        ("timeout", "3", "a number above 0 and at most 3600 s; got '3'"),
        ("timeout", 0, "above 0 and at most 3600 s; got 0"),
        ("timeout", float("nan"), "above 0 and at most 3600 s; got nan"),
        ("max_wait", -1, "a number at least 0 and at most 1 s; got -1"),
        ("max_queue", 15, "at least max_images, 16, so that one request fits; got 15"),
        ("names", "a", "a list; got 'a'"),
        ("names", ("a b",), "a host name without a port; got 'a b'"),
        ("names", ("a:80",), "a host name without a port; got 'a:80'"),
        ("proxies", ("bad",), "an address, a network such as 10.0.0.0/8, or *; got 'bad'"),
        ("is_open", 1, "true or false; got 1"),
        ("token", "p\xe4sswort", "ASCII letters, digits and punctuation"),
        ("token", " a", "begins or ends with a space. Change WEFT_TOKEN"),
        ("token", "a\n", "ASCII"),
        ("token", "\udce4", "ASCII"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(run="x", **{name: value})
    assert words in str(caught.value)
    assert {"names": "name", "proxies": "proxy"}.get(name, name).lower() in str(caught.value).lower()


def test_authentication_is_either_on_or_off() -> None:
    with pytest.raises(UsageError, match="got both WEFT_TOKEN and --no-token"):
        Settings(run="x", is_open=True, token="x")


@pytest.mark.parametrize("host", ["a..b", ".x", "a" * 64])
def test_a_host_that_is_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=rf"name or address of this machine; {host}:0: not a host name\."):
        server.serve(Settings(run="model", host=host, port=0))
