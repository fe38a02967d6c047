"""A page of another origin in a headless Chromium asks a server: it reads answers where its origin is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from launch.server.keys import Keys
from tests.serving.browser import Browser
from tests.serving.fakes import Served, serving
from tests.serving.test_page import KEY, browser  # noqa: F401 (browser is a fixture)

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
FETCH = """
(async () => {
    const headers = {"content-type": "application/json", "authorization": "Bearer %s", "x-stainless-lang": "js"};
    try {
        const answer = await fetch("%s", {method: "POST", headers, body: JSON.stringify(%s)});
        const reader = answer.body.getReader(), decoder = new TextDecoder();
        let text = "";
        for (let part = await reader.read(); !part.done; part = await reader.read())
            text += decoder.decode(part.value, {stream: true});
        return {status: answer.status, text, identity: answer.headers.get("x-request-id")};
    } catch (error) {
        return {name: error.name};
    }
})()
"""
"""What OpenAI's client does in a browser: a header of its own makes the browser ask beforehand."""


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Address of an empty page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(60)
    server.server_close()


def fetched(browser: Browser, page: str, served: Served, **more: object) -> dict[str, object]:  # noqa: F811
    """What a script of the page reads of an answer."""
    url = served.url + "/v1/chat/completions"
    return browser.open(page).value(FETCH % (KEY, url, json.dumps(BODY | more)))


def test_a_page_of_a_named_origin_reads_answers_whole_and_streamed(browser: Browser, page: str) -> None:  # noqa: F811
    with serving(cors_origins=[page], keys=Keys([KEY])) as served:
        headers = {"authorization": f"Bearer {KEY}"}
        url = served.url + "/v1/chat/completions"
        expected = httpx2.post(url, json=BODY, headers=headers, trust_env=False).json()
        whole = fetched(browser, page, served)
        assert whole["status"] == 200 and whole["identity"]
        assert json.loads(str(whole["text"]))["choices"] == expected["choices"]
        streamed = str(fetched(browser, page, served, stream=True)["text"])
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == expected["choices"][0]["message"]["content"] and streamed.endswith("data: [DONE]\n\n")
        refused = fetched(browser, page, served, max_tokens=-1)
        assert refused["status"] == 400 and "max_tokens" in str(refused["text"])


@pytest.mark.parametrize("origins", [[], ["https://a.example"]])
def test_a_page_of_another_origin_reads_nothing_and_nothing_is_asked(
    browser: Browser,  # noqa: F811
    page: str,
    origins: list[str],
) -> None:
    with serving(cors_origins=origins) as served:
        assert fetched(browser, page, served) == {"name": "TypeError"}
        assert served.engine.batches == []
