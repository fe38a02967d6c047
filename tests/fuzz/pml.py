"""Prompt Cache: schemas and prompts in PML."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from launch.inputs.options import PromptOptions
from launch.outputs.layout_table import layout_table
from policies.prompt_cache import PromptCache, Schema
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import PIECES, changed_bytes
from tests.fuzz.target import Target
from tests.prompt_cache.serving import chatting
from tests.prompt_cache.test_pml import CHAT

MAX_POSITIONS = 2000

SCHEMA = """\
<schema name="cities">
  <system>You are a travel guide for <param name="who" len="3"/>.</system>
  <module name="plan" pinned="true">Plan a trip of <param name="days" len="4"/> days.
    <module name="inner">With <b-c/> or not.</module>
  </module>
  <union>
    <module name="miami" src="miami.txt"/>
    <module name="paris" xml:space="preserve"> Paris &amp; its bridges. <![CDATA[ <x> ]]></module>
  </union>
  <user>And now: </user>
  <scaffold modules="plan miami"/>
</schema>
""".replace("<b-c/> ", "")
SMALL = (
    '<schema name="s">Text. <module name="a">One.</module>'
    '<module name="b">Two <param name="p" len="2"/></module></schema>'
)
PROMPT = (
    '<prompt schema="cities" who="x"><plan days="3"><inner/></plan><miami/>'
    "<user>Highlight surf &#233; spots.</user></prompt>"
)
PROMPTS = (
    PROMPT,
    '<prompt schema="cities"><paris/> and text at the end</prompt>',
    '<prompt schema="cities">Only text.</prompt>',
)

MARKUP = (
    '<!DOCTYPE a [<!ENTITY x "y"><!ENTITY z "&x;&x;&x;&x;">]>',
    '<!DOCTYPE a SYSTEM "file:///etc/passwd">',
    "&x;",
    "&#0;",
    "&#xD800;",
    "&#10;",
    "&amp;",
    "<?pi x?>",
    '<?xml version="1.0" encoding="utf-16"?>',
    "<!-- -- -->",
    "<![CDATA[",
    "]]>",
    '<module name="a">',
    '<module name="plan">x</module>',
    '<module name="system">x</module>',
    '<module name="">x</module>',
    '<module name="é">x</module>',
    '<module name="f" src="../x.txt"/>',
    '<module name="f" src="/etc/passwd"/>',
    '<module name="f" src="out.txt"/>',
    '<module name="f" src="loop"/>',
    '<module name="f" src="pipe"/>',
    '<module name="f" src="."/>',
    '<module name="f" src=""/>',
    '<module name="f" src="none&#10;x.txt"/>',
    "</module>",
    "<union>",
    "<union></union>",
    "</union>",
    '<param name="p" len="9"/>',
    '<param name="p" len="0"/>',
    '<param name="p" len="65536"/>',
    '<param name="p" len="99999999999999999999"/>',
    '<param name="p" len="٣"/>',
    '<param name="p" len="-1"/>',
    '<param name="p" len="1e3"/>',
    '<scaffold modules="a"/>',
    '<scaffold modules=""/>',
    '<scaffold modules="plan plan"/>',
    '<scaffold modules="miami paris"/>',
    "<system>x</system>",
    "<assistant>x",
    "<user/>",
    "<plan/>",
    "<inner/>",
    "<paris/>",
    "<plan days='a very long argument that does not fit in there at all'>",
    "<x:y/>",
    ' xml:space="preserve"',
    ' xml:space="x"',
    ' xmlns="a"',
    " a='1' a='2'",
    "<a>" * 40,
    "<plan>" * 2000,
    '<module name="m">' * 1000,
    "x" * 20_000,
    "<a/>" * 2000,
    "☃content☃",
    "<|end|>",
)
XML_PIECES = (*(text.encode() for text in MARKUP), *PIECES[:12])


@st.composite
def markup(draw: st.DrawFn) -> bytes:
    """Elements of PML one after the other and in each other, most of them closed."""
    tags, text = [], ""
    for _ in range(draw(st.integers(1, 12))):
        action = draw(st.integers(0, 3))
        if action == 0 and tags:
            text += f"</{tags.pop()}>"
        elif action == 1:
            text += draw(st.text(max_size=8)) if draw(st.booleans()) else " text "
        else:
            tag = draw(st.sampled_from(["module", "union", "param", "system", "user", "scaffold", "assistant", "a"]))
            name = draw(st.sampled_from(["a", "b", "c", "a.b", "A-1", "_"]))
            text += f'<{tag} name="{name}">' if tag == "module" else f"<{tag}>"
            if tag == "param":
                text = f'{text[: -len(tag) - 2]}<param name="{name}" len="{draw(st.integers(0, 12))}"/>'
            elif tag == "scaffold":
                text = f'{text[: -len(tag) - 2]}<scaffold modules="{name} {draw(st.sampled_from("abc"))}"/>'
            else:
                tags.append(tag)
    text += "".join(f"</{tag}>" for tag in reversed(tags))
    return f'<schema name="s">{text}</schema>'.encode("utf-8", errors="surrogatepass")


def write_sources(folder: Path) -> None:
    """Files beside a schema: one to be read, and what must not be."""
    (folder / "miami.txt").write_text("Miami has beaches.\n")
    (folder / "loop").symlink_to("loop")
    (folder / "out.txt").symlink_to("/etc/hostname")
    import os

    os.mkfifo(folder / "pipe")


@cache
def cities() -> PromptCache:
    schema = Schema.from_xml(SCHEMA.replace(' src="miami.txt"/>', ">Miami has beaches.</module>"))
    return PromptCache(schema, chatting(CHAT), max_positions=MAX_POSITIONS)


def check_schema(content: bytes, folder: Path) -> Outcome:
    from transformers import LlamaConfig

    from launch.inputs.prompt_cache import read_prompt_cache

    write_sources(folder)
    path = folder / "schema.xml"
    path.write_bytes(content)
    policy = PromptCacheOptions(schema=str(path))
    config = LlamaConfig(max_position_embeddings=MAX_POSITIONS)

    def use(found: PromptCache) -> None:
        layout_table(found.layout)
        ends = [segment.positions[-1] for segment in found.segments]
        assert max(ends, default=0) < MAX_POSITIONS
        assert all(segment.content_key for segment in found.segments)
        prompt = found.prompt(f'<prompt schema="{_attribute(found.schema.name)}">Text.</prompt>')
        assert prompt.new_ids and layout_table(found.layout, prompt)

    return judged(lambda: read_prompt_cache(policy, chatting(CHAT), config), use, names=[str(path)], folder=folder)


def _attribute(text: str) -> str:
    """An attribute as XML writes it."""
    for character, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        ('"', "&quot;"),
        ("\n", "&#10;"),
        ("\t", "&#9;"),
        ("\r", "&#13;"),
    ):
        text = text.replace(character, escaped)
    return text


def check_prompt(content: bytes, folder: Path) -> Outcome:
    from launch.inputs.prompt_cache import read_reusing_prompts

    path = folder / "prompt.xml"
    path.write_bytes(content)

    def use(found: object) -> None:
        from launch.inputs.prompts import Prompts

        assert isinstance(found, Prompts) and found.reusing is not None
        for prompt in found.reusing:
            assert prompt.end <= MAX_POSITIONS + 1 and prompt.ids
            layout_table(cities().layout, prompt)

    return judged(
        lambda: read_reusing_prompts(PromptOptions(file=str(path)), cities()), use, names=[str(path)], folder=folder
    )


TARGETS = (
    Target(
        name="prompt cache, schemas",
        reads="launch/inputs/prompt_cache.py read_prompt_cache",
        inputs=changed_bytes([SCHEMA.encode(), SMALL.encode()], XML_PIECES) | markup(),
        check=check_schema,
        share=12,
    ),
    Target(
        name="prompt cache, prompts",
        reads="launch/inputs/prompt_cache.py read_reusing_prompts",
        inputs=changed_bytes([prompt.encode() for prompt in PROMPTS], XML_PIECES),
        check=check_prompt,
        share=8,
    ),
)
