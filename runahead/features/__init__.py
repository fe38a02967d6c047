"""Combinations that are refused, or slower: facts about a run, and the tables of those that hold together."""
