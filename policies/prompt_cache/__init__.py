"""Prompt Cache (Gim et al., MLSys 2024, arXiv 2311.04934): texts that are encoded once and reused in many prompts."""

from __future__ import annotations

from policies.prompt_cache.layout import Layout
from policies.prompt_cache.program import prompt_program
from policies.prompt_cache.prompt import Prompt
from policies.prompt_cache.prompt_cache import PromptCache
from policies.prompt_cache.schema import Schema
from policies.prompt_cache.xml_reader import PMLError

__all__ = ["Layout", "PMLError", "Prompt", "PromptCache", "Schema", "prompt_program"]
