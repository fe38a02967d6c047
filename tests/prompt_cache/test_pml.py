"""PML: what is read, where it stands, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.outputs.layout_table import layout_table
from policies.prompt_cache import PMLError, Prompt, PromptCache, Schema
from policies.prompt_cache.xml_reader import MAX_BYTES, Element, read_xml
from policies.reuse import PromptTooLong, ReusingPrompt
from tests.prompt_cache.serving import chatting
from tests.tokenizers_for_tests import byte_level

ROOT = Path(__file__).resolve().parent.parent.parent

CHAT = (
    "{% for m in messages %}<|end|>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant:{% endif %}"
)


def cache(schema: str, **options: int) -> PromptCache:
    return PromptCache(Schema.from_xml(schema), chatting(CHAT), **options)


def text_of(ids: list[int]) -> str:
    return byte_level().decode(ids)


def length(text: str) -> int:
    return len(byte_level()(text)["input_ids"])


def texts(element: Element) -> list[str]:
    return [child if isinstance(child, str) else f"<{child.tag}>" for child in element.children]


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        ("<a>\n  one\n  two\n</a>", ["one\n  two"]),
        ("<a>one <b/> two</a>", ["one ", "<b>", " two"]),
        ("<a> one <b/>\n two </a>", [" one ", "<b>", "two "]),
        ("<a>\n<b/>\n</a>", ["<b>"]),
        ("<a><b/> <b/></a>", ["<b>", " ", "<b>"]),
        ("<a>one&#10;</a>", ["one\n"]),
        ("<a>one&#10;\n  </a>", ["one\n"]),
        ("<a>\n <![CDATA[\n x < y\n]]>\n</a>", ["\n x < y\n"]),
        ('<a xml:space="preserve">\n one\n</a>', ["\n one\n"]),
        ("<a>one<!-- not\ntext -->\n two</a>", ["one\n two"]),
        ("<a>one &lt;&amp;&gt; two\r\n</a>", ["one <&> two"]),
    ],
)
def test_white_space_beside_a_tag_is_dropped_where_it_has_a_line_break(xml: str, expected: list[str]) -> None:
    assert texts(read_xml(xml, source="x")) == expected


def test_a_module_stands_where_the_schema_puts_it() -> None:
    schema = (
        '<schema name="s">in front<module name="a">first <param name="p" len="3"/> end<module name="b">inner</module>'
        "behind</module>"
        '<union><module name="c">short</module><module name="d">a longer text</module></union>last</schema>'
    )
    made = cache(schema)
    at = {module.name: module for module in made.layout.modules}
    start = length("in front")
    assert (at["a"].start, at["a"].end) == (start, start + sum(map(length, ("first ", " end", "inner", "behind"))) + 3)
    [slot] = at["a"].slots.values()
    assert (slot.start, len(slot)) == (start + length("first "), 3)
    assert at["b"].start == slot.start + 3 + length(" end") and at["b"].parent == "a"
    assert at["c"].start == at["d"].start == at["a"].end and at["c"].union == at["d"].union is not None
    assert at["d"].end == made.layout.num_positions - length("last") > at["c"].end
    assert text_of(list(at[""].tokens.values())) == "in frontlast"
    again, other = cache(schema), cache(schema.replace("inner", "other"))
    assert made.layout.modules == again.layout.modules != other.layout.modules


def test_a_prompt_is_the_text_that_it_says() -> None:
    made = cache(
        '<schema name="s"><system>Help.</system><user><module name="a">About <param name="what" len="9"/>: </module>'
        '<module name="b">never this. </module><module name="c">always that. </module></user></schema>'
    )
    prompt = made.prompt('<prompt schema="s"><c/><a what="ice"/></prompt>')
    assert text_of(prompt.ids) == ("<|end|>system:Help.\n<|end|>user:About ice: always that. \n<|end|>assistant:")
    assert prompt.num_cached + len(prompt.new_ids) == len(prompt.ids)
    later = made.prompt('<prompt schema="s"><c/><user>And now?</user></prompt>')
    assert text_of(later.ids) == (
        "<|end|>system:Help.\n<|end|>user:always that. \n<|end|>user:And now?\n<|end|>assistant:"
    )


def test_only_arguments_text_and_link_tokens_are_computed() -> None:
    schema = (
        '<schema name="s"><module name="a">the letters of <param name="p" len="4"/> from the ice</module>'
        '<module name="b">to his sister, hello world</module></schema>'
    )
    source = '<prompt schema="s"><a p="x"/><b/>hello</prompt>'
    free = cache(schema, link_tokens=0).prompt(source)
    assert text_of(list(free.new_ids)) == "xhello"
    linked = cache(schema, link_tokens=2).prompt(source)
    # Behind the argument, and at the beginning of b; in front of a nothing stands.
    assert len(linked.new_ids) == len(free.new_ids) + 4 and linked.ids == free.ids
    assert len(cache(schema, link_tokens=1000).prompt(source).uses) == 1
    assert [use.segment.name for use in free.uses] == ["a", "b"]


def test_the_order_of_imports_changes_nothing() -> None:
    made = cache(
        '<schema name="s">x<module name="a">one</module><module name="b">two</module><module name="c">three</module>'
        "</schema>"
    )
    first = made.prompt('<prompt schema="s"><a/><b/><c/> go on</prompt>')
    second = made.prompt('<prompt schema="s"><c/><a/><b/> go on</prompt>')
    assert first.ids == second.ids and first.new_positions == second.new_positions
    assert {use.segment for use in first.uses} == {use.segment for use in second.uses}


def test_text_between_imports_takes_the_room_of_what_is_left_out() -> None:
    made = cache(
        '<schema name="s"><module name="a">one</module><module name="b">a much longer text</module>'
        '<module name="c">three</module></schema>'
    )
    prompt = made.prompt('<prompt schema="s"><a/> and then <c/></prompt>')
    assert text_of(prompt.ids) == "one and then three"
    start = made.layout.by_name["b"].start
    assert list(range(start, start + length(" and then "))) == [
        position for position in prompt.new_positions if position < made.layout.by_name["c"].start
    ]
    with pytest.raises(
        PMLError, match=r"prompt:1: <prompt>: text in front of <b> has \d+ tokens, and there is room fo"
    ):
        made.prompt('<prompt schema="s"><a/> and then <b/></prompt>')


def test_the_largest_scaffold_that_is_imported_whole_is_used() -> None:
    made = cache(
        '<schema name="s">x <module name="a">one</module><module name="b">two</module><module name="c">three</module>'
        '<scaffold modules="a b"/><scaffold modules="a b c"/></schema>',
        link_tokens=0,
    )
    names = {
        imports: [use.segment.name for use in made.prompt(f'<prompt schema="s">{imports} z</prompt>').uses]
        for imports in ("<a/><b/><c/>", "<a/><b/>", "<a/><c/>")
    }
    assert names["<a/><b/><c/>"] == ["(outside) + a + b + c"]
    assert names["<a/><b/>"] == ["(outside) + a + b"]
    assert sorted(names["<a/><c/>"]) == ["(outside)", "a", "c"]


def test_both_spellings_of_a_slot_are_the_same_slot() -> None:
    schema = (
        '<schema name="s">in front <param name="q" len="2"/><module name="a">one <param name="p" len="3"/> end</module>'
        "</schema>"
    )
    as_authors = schema.replace("<param ", "<parameter ").replace("len=", "length=")
    mixed = schema.replace("len=", "length=")
    ours, *others = (cache(each).layout.modules for each in (schema, as_authors, mixed))
    assert [module.slots for module in ours] == [{"q": ours[0].slots["q"]}, {"p": ours[1].slots["p"]}]
    assert all(ours == other for other in others)


UNIONS = (
    '<schema name="s">x <module name="outer">o<union{first}><module name="a">aa</module><module name="b">b</module>'
    '</union></module><user><union{second}><module name="c">c</module><module name="d">d<union{third}>'
    '<module name="e">e</module><module name="f">f</module></union></module></union></user>'
    '<module name="g">g</module>{scaffolds}</schema>'
)


@pytest.mark.parametrize(
    ("first", "second", "third", "scaffolds"),
    [
        ("a", "c", "", ["outer a c g"]),
        ("b", "", "", ["outer b g"]),
        ("", "d", "", ["outer d g"]),
        ("", "d", "f", ["outer d f g"]),
        ("a", "", "f", ["outer a g", "d f"]),
        ("", "", "", []),
    ],
)
def test_a_union_with_a_scaffold_is_a_scaffold_of_what_stands_outside_of_unions(
    first: str, second: str, third: str, scaffolds: list[str]
) -> None:
    def said(name: str) -> str:
        return f' scaffold="{name}"' if name else ""

    theirs = UNIONS.format(first=said(first), second=said(second), third=said(third), scaffolds="")
    elements = "".join(f'<scaffold modules="{modules}"/>' for modules in scaffolds)
    ours = UNIONS.format(first="", second="", third="", scaffolds=elements)
    assert [each.modules for each in Schema.from_xml(theirs).scaffolds] == [tuple(each.split()) for each in scaffolds]
    assert cache(theirs).layout.modules == cache(ours).layout.modules
    assert cache(theirs).segments == cache(ours).segments
    for imports in ("<outer><a/></outer><c/><g/>", "<outer><b/></outer><d><f/></d><g/>", "<outer><b/></outer><g/>"):
        prompt = f'<prompt schema="s">{imports} and so on</prompt>'
        assert cache(theirs).prompt(prompt) == cache(ours).prompt(prompt)


def test_a_text_of_its_own_in_a_file_beside_the_schema(tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text("\n the letters\n from the ice\n", encoding="utf-8")
    path = tmp_path / "s.xml"
    path.write_text('<schema name="s"><module name="a" src="doc.txt"/></schema>', encoding="utf-8")
    assert Schema.from_xml(path).places["a"].module.children == ("the letters\n from the ice",)
    (tmp_path / "doc.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PMLError, match=r's.xml:1: <module>: src="doc.txt" is not UTF-8'):
        Schema.from_xml(path)
    (tmp_path / "doc.txt").write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(PMLError, match="is larger than 16 MiB"):
        Schema.from_xml(path)


@pytest.mark.parametrize("src", ["../secret.txt", "{root}/secret.txt", "none.txt", "link.txt", ".", "a&#10;b"])
def test_only_files_beside_the_schema_are_read(tmp_path: Path, src: str) -> None:
    folder = tmp_path / "schemas"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    path = folder / "s.xml"
    path.write_text(f'<schema name="s"><module name="a" src="{src.format(root=tmp_path)}"/></schema>')
    with pytest.raises(PMLError, match="leaves the schema's folder|cannot be read"):
        Schema.from_xml(path)


ENTITY = '<!DOCTYPE schema [<!ENTITY x SYSTEM "{file}">]><schema name="s">&x;</schema>'


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ('<!DOCTYPE a [<!ENTITY b "x">]>\n<schema name="s">&b;</schema>', "document types and entities are not taken"),
        ('<?php x ?><schema name="s">a</schema>', "processing instructions are not taken"),
        ('<schema name="s">&nbsp;</schema>', "schema:1: <schema>: is not well-formed XML: undefined entity"),
        (
            '<schema name="s">\n<module name="a">x</schema>',
            "schema:2: <module>: is not well-formed XML: mismatched tag",
        ),
        ('<schema xmlns:x="y" name="s">a</schema>', "namespaces are not taken"),
        ("<schema name='s'>" + "<union>" * 40, "is nested deeper than 32 levels"),
        ("<prompt schema='s'>x</prompt>", 'schema:1: <prompt>: a schema begins with <schema name="...">'),
        ("<schema>x</schema>", '<schema>: needs name="..."'),
        ('<schema name="s"/>', "<schema>: is empty"),
        ('<schema name="s">\n<paragraph/></schema>', "schema:2: <paragraph>: is unknown in a schema"),
        ('<schema name="s"><module name="a"/></schema>', "<module>: a is empty"),
        ('<schema name="s"><module name="user">x</module></schema>', "has a meaning of its own in PML"),
        ('<schema name="s"><module name="1 a">x</module></schema>', "must be letters, digits"),
        ('<schema name="s"><module name="a" len="1">x</module></schema>', "<module>: has no attribute len"),
        ('<schema name="s"><module name="a" src="b">x</module></schema>', "has src and content of its own"),
        ('<schema name="s"><module name="a" src="b"/></schema>', "is for schemas in files"),
        ('<schema name="s"><module name="a">x<module name="a">y</module></module></schema>', "a contains itself"),
        (
            '<schema name="s"><module name="a">x</module>\n\n<module name="a">y</module></schema>',
            "schema:3: <module>: a is also the name of the module in line 1",
        ),
        ('<schema name="s"><param name="p" len="0"/></schema>', 'len="0" must be a number of tokens from 1'),
        ('<schema name="s"><param name="p" len="9999999999"/></schema>', "must be a number of tokens from 1"),
        ('<schema name="s"><param name="p" len="²"/></schema>', "must be a number of tokens from 1"),
        ('<schema name="s"><parameter name="p"/></schema>', '<parameter>: needs length="..."'),
        ('<schema name="s"><param name="p"/></schema>', '<param>: needs len="..."'),
        ('<schema name="s"><parameter name="p" length="0"/></schema>', 'length="0" must be a number of tokens from 1'),
        (
            '<schema name="s"><parameter name="p" length="1">x</parameter></schema>',
            "is a slot and has no content; write <parameter .../>",
        ),
        ('<schema name="s">\n<param name="p" len="1" length="1"/></schema>', "schema:2: <param>: has len and length"),
        (
            '<schema name="s"><parameter name="p" length="1" scaffold="x"/></schema>',
            "<parameter>: has no attribute scaffold; it takes name, length",
        ),
        (
            '<schema name="s">\n<union scaffold="c"><module name="a">x</module><module name="b">y</module></union>'
            "</schema>",
            'schema:2: <union>: scaffold="c" is no member of this union; it has a, b',
        ),
        (
            '<schema name="s"><union scaffold=""><module name="a">x</module></union></schema>',
            'scaffold="" is no member of this union',
        ),
        (
            '<schema name="s"><union default="a"><module name="a">x</module></union></schema>',
            "<union>: has no attribute default; it takes scaffold",
        ),
        ('<schema name="s"><param name="p" len="1">x</param></schema>', "is a slot and has no content"),
        (
            '<schema name="s"><param name="p" len="1"/><user><param name="p" len="1"/></user></schema>',
            "p is there twice in one module",
        ),
        ('<schema name="s"><union>x</union></schema>', "<union>: holds modules only, and there is text (x)"),
        ('<schema name="s"><union/></schema>', "<union>: is empty"),
        ('<schema name="s">x<scaffold modules="b"/></schema>', "<scaffold>: there is no module b"),
        (
            '<schema name="s"><union><module name="a">x</module><module name="b">y</module></union>'
            '<scaffold modules="a b"/></schema>',
            "a and b are members of one union",
        ),
        ('<schema name="s"><user><system>x</system></user></schema>', "is inside of another message"),
    ],
)
def test_what_is_no_schema_is_refused_in_one_line(xml: str, message: str) -> None:
    with pytest.raises(PMLError) as caught:
        Schema.from_xml(xml)
    assert message in str(caught.value) and "\n" not in str(caught.value)


SCHEMA = (
    '<schema name="s">text <param name="q" len="2"/><module name="a">one <param name="p" len="2"/>'
    '<module name="inner">deep</module></module>'
    '<union><module name="b">two</module><module name="c">three</module></union></schema>'
)


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ('<schema name="s">x</schema>', 'prompt:1: <schema>: a prompt begins with <prompt schema="...">'),
        ("<prompt/>", '<prompt>: needs schema="..."'),
        ('<prompt schema="t"/>', 'schema="t" is not the schema s'),
        ('<prompt schema="s">\n<bb/></prompt>', "prompt:2: <bb>: schema s has no such module; did you mean <b/>?"),
        ('<prompt schema="s"><b/>\n<c/></prompt>', "prompt:2: <c>: is in one union with <b>"),
        ('<prompt schema="s"><b/><b/></prompt>', "<b>: is imported twice"),
        (
            '<prompt schema="s"><inner/></prompt>',
            "<inner>: is not a module of the schema itself; write <a><inner/></a>",
        ),
        ('<prompt schema="s"><b><inner/></b></prompt>', "<inner>: is not a module of <b>; write <a><inner/></a>"),
        ('<prompt schema="s"><a>text</a></prompt>', "<a>: has text in it (text)"),
        ('<prompt schema="s"><a x="1"/></prompt>', "<a>: has no parameter x; it has p"),
        ('<prompt schema="s" p="1"/>', "<prompt>: has no parameter p; it has q"),
        ('<prompt schema="s">\n<a p="a b c a b c"/></prompt>', "prompt:2: <a>: p has "),
        ('<prompt schema="s" q="a b c a b c"/>', "prompt:1: <prompt>: q has "),
        ('<prompt schema="s"><user><a/></user></prompt>', "<a>: stands in <user>"),
    ],
)
def test_a_prompt_that_does_not_fit_its_schema_is_refused(xml: str, message: str) -> None:
    made = cache(SCHEMA)
    with pytest.raises(PMLError) as caught:
        made.prompt(xml)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_lies_beyond_the_models_positions_is_refused() -> None:
    schema = '<schema name="s"><module name="a">one two three</module>\n<module name="b">four</module></schema>'
    room = length("one two three")
    with pytest.raises(PMLError, match=r"schema:2: <module>: module b reaches position \d+ of the model's"):
        cache(schema, max_positions=room + 1)
    with pytest.raises(PromptTooLong, match=r"prompt:1: <prompt>: reaches position \d+ of the model's"):
        cache(schema, max_positions=room + length("four")).prompt('<prompt schema="s"><b/>and more</prompt>')


def test_chat_tags_need_a_chat_template() -> None:
    schema = Schema.from_xml('<schema name="s">\n<system>x</system></schema>')
    with pytest.raises(PMLError, match="schema:2: <system>: needs a chat template"):
        PromptCache(schema, chatting(None))
    with pytest.raises(PMLError, match="schema:2: <system>: is not possible as the first message"):
        PromptCache(schema, chatting("{{ raise_exception('no system') }}"))


def test_the_layout_is_told_as_a_table() -> None:
    made = cache(SCHEMA, link_tokens=0)
    prompt = made.prompt('<prompt schema="s"><a p="x"/><c/>more</prompt>')
    lines = layout_table(made.layout, prompt).splitlines()
    rows = {line.split()[0]: line for line in lines[2:-1]}
    assert set(rows) == {"(outside)", "a", "inner", "b", "c"} and "  inner" in layout_table(made.layout)
    assert "one of union 1" in rows["b"] and "p (2 at " in rows["a"]
    reused = {name: int(line.split()[-1]) for name, line in rows.items()}
    assert reused == {
        "(outside)": length("text "), "a": length("one "), "inner": 0, "b": 0, "c": length("three")
    }  # fmt: skip
    assert lines[-1].startswith(f"prompt: {len(prompt.ids)} tokens, {prompt.num_cached} reused")


def test_the_examples_fit_together() -> None:
    made = PromptCache(Schema.from_xml(ROOT / "examples/cities.xml"), chatting(CHAT), link_tokens=0)
    prompt = made.prompt(ROOT / "examples/trip.xml")
    told = text_of(prompt.ids)
    assert "Plan a trip of 3 days for two people.\nMiami is" in told and "October.\nHighlight the surf spots." in told
    assert told.endswith("assistant:") and "Lisbon" not in told


TAGS = st.sampled_from(
    [
        "schema",
        "module",
        "union",
        "param",
        "parameter",
        "scaffold",
        "system",
        "user",
        "prompt",
        "a",
        "b",
        "inner",
        "x:y",
        "é",
    ]
)
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["name", "len", "length", "src", "modules", "scaffold", "schema", "pinned", "p", "q", "xml:space"]),
    st.sampled_from(["s", "a", "b", "3", "-1", "", "a b", "true", "../x", "preserve", "a&#0;", "<"]),
    max_size=3,
)


@st.composite
def pieces(draw: st.DrawFn) -> str:
    """Something that looks like PML: tags that may close, text, and what XML allows besides."""
    out = []
    for _ in range(draw(st.integers(1, 8))):
        tag = draw(TAGS)
        attributes = "".join(f' {name}="{value}"' for name, value in draw(ATTRIBUTES).items())
        inner = draw(st.sampled_from(["", "text", "\n ", "&#10;", "&x;", "<![CDATA[ ]]>", "<!-- -->", "<?p?>", "\x00"]))
        close = draw(st.sampled_from([f"</{tag}>", "", "</schema>"]))
        out.append(f"<{tag}{attributes}>{inner}{close}")
    return "".join(out)


@given(text=st.one_of(st.binary(max_size=60), st.text(max_size=60), pieces()))
def test_any_file_is_read_or_refused_in_one_line(text: str | bytes) -> None:
    try:
        root = read_xml(text, source="x")
    except PMLError as error:
        assert "\n" not in str(error)
        return
    schema = Schema.from_xml(SCHEMA)
    as_text = text if isinstance(text, str) else text.decode()
    if not as_text.lstrip().startswith("<"):
        return
    for read in (Schema.from_xml, lambda xml: Prompt.from_xml(xml, schema)):
        try:
            read(as_text)
        except PMLError as error:
            assert "\n" not in str(error)
    assert isinstance(root, Element)


@given(body=pieces(), wrap=st.sampled_from(["schema", "prompt"]))
def test_any_schema_and_prompt_is_laid_out_or_refused_in_one_line(body: str, wrap: str) -> None:
    head = 'name="s"' if wrap == "schema" else 'schema="s"'
    try:
        made = cache(f"<schema {head}>{body}</schema>" if wrap == "schema" else SCHEMA)
        prompt = made.prompt('<prompt schema="s">x</prompt>' if wrap == "schema" else f"<prompt {head}>{body}</prompt>")
    except PMLError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(prompt, ReusingPrompt) and len(prompt.ids) == prompt.num_cached + len(prompt.new_ids)
