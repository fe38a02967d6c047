"""Options of launch/serve.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from launch.inputs.options import (
    AUTO,
    PartitionOptions,
    ineffective_engine_settings,
    only_outer,
    require_reachable,
    require_tree_size,
    setup_of,
)
from launch.inputs.policies import checked, ineffective_options
from launch.server.answer.calls import ToolForm
from launch.server.request.template_variables import RESERVED
from runahead.config import (
    CacheOptions,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    ModelOptions,
    PrefillOptions,
    Profile,
    RanksOptions,
    choice,
    require,
)
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.serving.limits import QueueLimits


class UnknownFields(Enum):
    """How requests with unknown fields are treated."""

    ignore = "ignore"
    refuse = "refuse"


class Reasoning(Enum):
    """Whether answers begin with reasoning."""

    auto = "auto"
    think = "think"
    none = "none"


LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(kw_only=True)
class ServeOptions(QueueLimits):
    """Address, limits and log of the server. The limits of the queue are those of `QueueLimits`.

    Attributes:
        api_key_file: file of keys, a line "key" or "name:key" each, read again when it changes; None takes every
            request.
        hosts: names by which clients call the server, without ports, besides those of this host where it is reached
            from this host alone; None: only the latter without a key, and else any (`named_hosts`). A page whose name
            its owner binds to this address would otherwise ask from a browser on this host.
        cors_origins: origins (https://example.org) whose pages may read answers in browsers; "*" is any.
        chat_template: file with a chat template (Jinja) in place of the model's.
        template_kwargs: variables of the chat template, for requests that do not give these themselves.
        reasoning: whether answers begin with reasoning between <think> and </think>; `auto` goes by the chat template.
        tools: form in which the model calls tools; `auto` goes by the chat template, with `none` calls stay content.
        model_name: the model's name in the API; None is the name under which it was loaded, which is taken as well.
        prefix_cache_bytes: most bytes of keys and values of earlier prompts and answers that the last stage keeps for
            later prompts, or each stage where they decode together; 0 keeps none. "auto": half of the memory that rows
            leave unused at that time, and none where something else is in the way.
        prefix_host_bytes: most bytes of those that it keeps in host memory when they have no room among these.
        prefix_folder: where it keeps what has no room in host memory, and what is left at the end, for later servers
            too; None: nowhere.
        prefix_disk_bytes: most bytes of prefixes in this folder, and in that of each stage that keeps a part.
        handover: folder in which the last stage hands prompts over to other engines; None: none are.
        handover_bytes: most bytes of all its files, of which those that were not used for longest go first.
        prefix_share: requests of different keys reuse each other's prefixes, and so can learn of them.
        snapshot_tokens: of models whose layers hold states, keep these after every so many tokens of a prompt, too; 0:
            after prompts and answers alone.
        unknown_fields: what is done about fields of requests that nobody knows; known ones that would change the
            answer are refused.
        max_body_bytes, max_header_bytes: largest request.
        max_connections: most open connections; two more are kept for /health, /ready and /metrics.
        read_timeout_s: seconds in which a request must have arrived.
        write_timeout_s: seconds after which a client that reads nothing is given up.
        schema_tokens: with policy=prompt_cache, most tokens of all schemas that requests bring and that are kept; the
            least recently used is forgotten. With 0 they bring none.
        ping_s: seconds between comments in a stream that has no tokens yet.
        drain_s: seconds after SIGTERM in which requests that were taken may be answered.
        log: a line per request on standard error.
        log_prompts: these lines have the prompt's text.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    hosts: list[str] | None = None
    cors_origins: list[str] = field(default_factory=list)
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning: Reasoning = Reasoning.auto
    tools: ToolForm = ToolForm.auto
    model_name: str | None = None
    prefix_cache_bytes: int | str = AUTO
    prefix_host_bytes: int = 0
    prefix_folder: str | None = None
    prefix_disk_bytes: int = 64 * 2**30
    handover: str | None = None
    handover_bytes: int = 16 * 2**30
    prefix_share: bool = False
    snapshot_tokens: int = 0
    unknown_fields: UnknownFields = UnknownFields.ignore
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 16 * 2**10
    max_connections: int = 512
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    schema_tokens: int = 2**18
    ping_s: float = 10.0
    drain_s: float = 25.0
    log: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unknown_fields = choice("serve.unknown_fields", UnknownFields, self.unknown_fields)
        self.tools = choice("serve.tools", ToolForm, self.tools)
        self.reasoning = choice("serve.reasoning", Reasoning, self.reasoning)
        for name in self.template_kwargs:
            rule = "is no variable of a template that may be given"
            require(name not in RESERVED, "serve.template_kwargs", name, rule)
        require(bool(self.host), "serve.host", self.host, "must be an address")
        require(0 <= self.port <= 65535, "serve.port", self.port, "must be from 0 (any free port) to 65535")
        rule = "must be a list of names or addresses, without ports and brackets; leave it out to have the default"
        are_names = self.hosts is None or (bool(self.hosts) and all(map(_is_host, self.hosts)))
        require(are_names, "serve.hosts", self.hosts, rule)
        for origin in self.cors_origins:
            is_origin = origin == "*" or re.fullmatch(r"https?://[^/\s]+", origin) is not None
            rule = 'must be origins such as https://example.org, without a path, or "*"'
            require(is_origin, "serve.cors_origins", origin, rule)
        for name in ("max_body_bytes", "max_connections"):
            require(getattr(self, name) >= 1, f"serve.{name}", getattr(self, name), "must be at least 1")
        require_tree_size("serve.prefix_cache_bytes", self.prefix_cache_bytes)
        rule = "must be a number of bytes; 0 keeps no prefixes in host memory"
        require(self.prefix_host_bytes >= 0, "serve.prefix_host_bytes", self.prefix_host_bytes, rule)
        rule = "must be at least 1; without serve.prefix_folder nothing is kept on disk"
        require(self.prefix_disk_bytes >= 1, "serve.prefix_disk_bytes", self.prefix_disk_bytes, rule)
        rule = "must be a number of tokens; 0 keeps states after prompts and answers alone"
        require(self.snapshot_tokens >= 0, "serve.snapshot_tokens", self.snapshot_tokens, rule)
        require(self.prefix_folder != "", "serve.prefix_folder", "", "must name a folder; leave it out to keep none")
        require(self.handover != "", "serve.handover", "", "must name a folder; leave it out to hand no prompts over")
        require(self.handover_bytes >= 1, "serve.handover_bytes", self.handover_bytes, "must be at least 1")
        if not self.prefix_cache_bytes:
            rule = "has no effect with serve.prefix_cache_bytes=0, as prefixes are there first; leave one of them out"
            require(not self.prefix_host_bytes, "serve.prefix_host_bytes", self.prefix_host_bytes, rule)
            require(self.prefix_folder is None, "serve.prefix_folder", self.prefix_folder, rule)
            require(not self.snapshot_tokens, "serve.snapshot_tokens", self.snapshot_tokens, rule)
        require(self.max_header_bytes >= 1024, "serve.max_header_bytes", self.max_header_bytes, "must be at least 1024")
        require(
            self.schema_tokens >= 0, "serve.schema_tokens", self.schema_tokens, "must not be negative; 0 takes none"
        )
        for name in ("read_timeout_s", "write_timeout_s", "ping_s", "drain_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"serve.{name}", value, "must be a number of seconds above 0")

    @property
    def prefixes(self) -> str | None:
        """The option that asks for reuse of prefixes, for messages; "": none does; None: reuse where it is possible."""
        keeps_elsewhere = self.prefix_host_bytes or self.prefix_folder is not None or self.snapshot_tokens
        if self.prefix_cache_bytes == AUTO and not keeps_elsewhere:
            return None
        return f"serve.prefix_cache_bytes={self.prefix_cache_bytes}" if self.prefix_cache_bytes else ""

    @property
    def named_hosts(self) -> frozenset[str] | None:
        """Names, in lower case, that the Host of a request may have; None is any."""
        local = frozenset(LOCAL_HOSTS if self.host in LOCAL_HOSTS else ())
        if self.hosts is not None:
            return local.union(host.lower() for host in self.hosts)
        return local if local and self.api_key_file is None else None


def without_port(host: str) -> str:
    """The name in a Host header, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_host(name: str) -> bool:
    """Whether a name is as `without_port` gives it. An IPv6 address has several colons."""
    return without_port(f"[{name}]" if name.count(":") > 1 else name) == name.lower() != ""


@dataclass(kw_only=True)
class ServeRun:
    """One run of launch/serve.py.

    Attributes:
        policy: as in launch/infer.py.
        decode: `last` by default, since `auto` would time both ways while a request of a new length waits.
        generation: what a request gets that does not say otherwise.
        profile: profiler around the server for which ranges are named.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    policy: dict[str, Any] = field(default_factory=dict)
    cache: CacheOptions = field(default_factory=CacheOptions)
    decode: DecodeOptions = field(default_factory=lambda: DecodeOptions(name=DecodeName.last))
    generation: GenerationOptions = field(default_factory=lambda: GenerationOptions(max_new_tokens=512))
    profile: Profile = Profile.none

    def __post_init__(self) -> None:
        self.profile = only_outer(self.profile)
        self.policy = checked(self.policy)
        require_reachable(self.generation)
        check(self.setup)
        has_tiers = self.serve.prefix_host_bytes or self.serve.prefix_folder is not None
        if self.cache.tier_bits is not None and not has_tiers and self.policy["name"] != "prompt_cache":
            raise ValueError(
                f"cache.tier_bits={self.cache.tier_bits} has no effect without serve.prefix_host_bytes, "
                "serve.prefix_folder or policy=prompt_cache; leave it out"
            )

    @cached_property
    def setup(self) -> Setup:
        """Facts that the options give of the run. Its policies are made once."""
        options: dict[str, Any] = {
            "a server": True,
            "serve.decode_ranks": self.serve.decode_ranks,
            "serve.handover": self.serve.handover,
        }
        return replace(setup_of(self, options), prefixes=self.serve.prefixes)


def warnings(run: ServeRun) -> list[str]:
    """A sentence if other machines can use the server without a key, and for each option without effect."""
    sentences = ineffective_options(run.policy) + ineffective_engine_settings(run)
    if run.serve.api_key_file is None and run.serve.host not in LOCAL_HOSTS:
        sentences.append(
            f"serve.host={run.serve.host} without serve.api_key_file: whoever reaches this address can use the server"
        )
    return sentences
