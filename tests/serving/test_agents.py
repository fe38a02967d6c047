"""Agents' own packages, also of Node, against a server: what they ask for is answered, by a tiny random model.

They come from the package index into an environment of their own, and where they do not the tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch

from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, ModelName
from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer, serving
from tests.serving.packages import INSTALL_S, installed

RUN_S = 120

BEGIN = """
import json, sys
from pathlib import Path
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field

class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a random model would not end otherwise
    north: bool

class Sighting(BaseModel):
    '''Where a ship was seen.'''
    ship: Literal["Terror", "Erebus"]
    miles: int = Field(ge=0, le=9)
    places: list[Place] = Field(max_length=2)

URL, KEY, QUESTION = sys.argv[1], "none", "Where is it?"
TOOL = {"type": "function", "function": {"name": "Sighting", "parameters": Sighting.model_json_schema()}}
def told(found):
    print(json.dumps(found.model_dump()))
"""

CLIENTS = {
    "pydantic-ai-slim[openai]": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("fake", provider=OpenAIProvider(base_url=URL, api_key=KEY))
agent = Agent(model, output_type=Sighting, model_settings={"max_tokens": 400})
told(agent.run_sync(QUESTION).output)
""",
    "instructor": """
import instructor
from openai import OpenAI
client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.TOOLS)
said = [{"role": "user", "content": QUESTION}]
create = client.chat.completions.create
told(create(model="fake", response_model=Sighting, messages=said, max_tokens=400, max_retries=0))
""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="fake", base_url=URL, api_key=KEY, max_tokens=400)
told(model.with_structured_output(Sighting, method="function_calling").invoke(QUESTION))
bound = model.bind_tools([TOOL], tool_choice="required").invoke(QUESTION)
told(Sighting(**bound.tool_calls[0]["args"]))
streamed = None
for chunk in model.bind_tools([TOOL], tool_choice="required").stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
told(Sighting(**streamed.tool_calls[0]["args"]))
""",
    "litellm": """
import litellm
asked = {"model": "openai/fake", "api_base": URL, "api_key": KEY, "tools": [TOOL], "tool_choice": "required"}
said = [{"role": "user", "content": QUESTION}]
message = litellm.completion(**asked, messages=said, max_tokens=400).choices[0].message
told(Sighting.model_validate_json(message.tool_calls[0].function.arguments))
""",
    "llm": """
import os, subprocess, tempfile
folder = Path(tempfile.mkdtemp())
about = {"model_id": "served", "model_name": "fake", "api_base": URL, "supports_schema": True}
(folder / "extra-openai-models.yaml").write_text(json.dumps([about]))  # JSON is YAML
run = [str(Path(sys.executable).parent / "llm"), "-m", "served", "--no-log", "--key", KEY, "-o", "max_tokens", "400"]
for more in ([], ["--no-stream"]):
    asked = [*run, *more, "--schema", json.dumps(Sighting.model_json_schema()), QUESTION]
    done = subprocess.run(asked, env=os.environ | {"LLM_USER_PATH": str(folder)}, check=True, stdout=subprocess.PIPE)
    told(Sighting.model_validate_json(done.stdout))
""",
    "anthropic": """
from anthropic import Anthropic
client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
said = [{"role": "user", "content": QUESTION}]
tool = {"name": "Sighting", "input_schema": Sighting.model_json_schema()}
asked = {"model": "fake", "max_tokens": 400, "messages": said, "tools": [tool]}
asked["tool_choice"] = {"type": "tool", "name": "Sighting"}
answer = client.messages.create(**asked)
[call] = answer.content
told(Sighting(**call.input))
with client.messages.stream(**asked) as stream:
    [streamed] = stream.get_final_message().content
told(Sighting(**streamed.input))
assert streamed.input == call.input and answer.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": call.id, "content": "no"}
said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
more = client.messages.create(model="fake", max_tokens=9, messages=said, tools=[tool])
counted = client.messages.count_tokens(model="fake", messages=said, tools=[tool]).input_tokens
assert counted == more.usage.input_tokens + more.usage.cache_read_input_tokens
""",
}
"""A program for each package, which prints what it was told."""

AIDER = """
import os, subprocess
run = [str(Path(sys.executable).parent / "aider"), "--model", "openai/fake", "--openai-api-base", URL]
run += ["--openai-api-key", KEY, "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-pretty"]
run += ["--no-show-model-warnings", "--chat-mode", "ask", "--map-tokens", "0", "--no-stream", "--message", QUESTION]
subprocess.run(run, env=os.environ | {"HOME": os.getcwd()}, check=True)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=8192)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=chat_tokenizer()) as served,
    ):
        yield served.url + "/v1"


def said_by(package: str, program: str, url: str, folder: Path) -> str:
    """What a program prints that uses a package."""
    python = installed(package, folder / "environment") / "python"
    run = [str(python), "-c", BEGIN + program, url]
    done = subprocess.run(run, capture_output=True, text=True, timeout=RUN_S, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
@pytest.mark.parametrize("package", CLIENTS)
def test_a_package_for_agents_is_told_what_it_asks_for(url: str, package: str, tmp_path: Path) -> None:
    said = said_by(package, CLIENTS[package], url, tmp_path)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found and all(each["ship"] in ("Terror", "Erebus") and 0 <= each["miles"] <= 9 for each in found)


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
def test_aider_shows_an_answer_and_counts_its_tokens(tmp_path: Path) -> None:
    """It asks for no JSON; its count is that of the server's metrics."""
    with serving() as served:
        served.engine.says = served.engine.tokenizer("hello world")["input_ids"]
        said = said_by("aider-chat", AIDER, served.url + "/v1", tmp_path)
        metrics = httpx2.get(served.url + "/metrics", trust_env=False).text
    [received] = re.findall(r"Tokens: [\d.]+k? sent, (\d+) received", said)
    [made] = re.findall(r"^runahead:generation_tokens_total (\d+)", metrics, flags=re.MULTILINE)
    assert "\nhello world\n" in said and received == made


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { ship: { enum: ["Terror", "Erebus"] }, miles: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["ship", "miles"],
};
const seen = (found) => { console.log(JSON.stringify(found)); return "noted"; };
const sighting = { type: "function", function: { name: "Sighting", parameters, parse: JSON.parse, function: seen } };
const asked = { model: "fake", max_tokens: 400, messages: [{ role: "user", content: "Where is it?" }] };
asked.tools = [sighting];
asked.tool_choice = { type: "function", function: { name: "Sighting" } };
const runner = client.chat.completions.runTools(asked);
await runner.done();
const [result] = runner.messages.filter((message) => message.role === "tool");
if (result.content !== "noted") throw new Error(JSON.stringify(runner.messages));
const said = { model: "fake", max_output_tokens: 20, input: "Where is it?" };
let streamed = "";
for await (const event of await client.responses.create({ ...said, stream: true }))
  if (event.type === "response.output_text.delta") streamed += event.delta;
const whole = await client.responses.create(said);
if (!streamed || whole.output_text !== streamed) throw new Error(streamed);
"""


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
def test_the_client_for_node_runs_the_tools_that_it_is_told_to_call(url: str, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("there is no npm here")
    (tmp_path / "program.mjs").write_text(NODE)
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "openai"]
    try:
        made = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"openai for Node did not install in {INSTALL_S} s")
    if made.returncode:
        pytest.skip(f"openai for Node does not install here: {made.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run([node, "program.mjs", url], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    [found] = map(json.loads, done.stdout.splitlines())
    assert found["ship"] in ("Terror", "Erebus") and 0 <= found["miles"] <= 9
