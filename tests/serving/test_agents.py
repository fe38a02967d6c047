"""Agents' own packages against a server: what they ask of tools is answered, by a tiny random model.

They come from the package index into an environment of their own, and where they do not the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
}
"""A program for each package, which prints what it was told."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=8192)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=chat_tokenizer()) as served,
    ):
        yield served.url + "/v1"


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + RUN_S + 60)
@pytest.mark.parametrize("package", CLIENTS)
def test_a_package_for_agents_is_told_what_it_asks_for(url: str, package: str, tmp_path: Path) -> None:
    python = installed(package, tmp_path / "environment") / "python"
    run = [str(python), "-c", BEGIN + CLIENTS[package], url]
    done = subprocess.run(run, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found and all(each["ship"] in ("Terror", "Erebus") and 0 <= each["miles"] <= 9 for each in found)
